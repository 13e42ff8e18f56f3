/** Edits, deletions and reactions against a fake gateway, which loses events, answers and connections. */
import 'fake-indexeddb/auto';
import { describe, expect, test } from 'vitest';
import { type ChatMessage, indexedDbStorage, memoryStorage } from '../src/index.js';
import { breakOnce, connect, expectSame, make, open, server, settled, setUpServer, show, until } from './support/changes-fake.js';

setUpServer();

describe('one own change', () => {
  test('is shown at once, and stays after the acknowledgement and the event', async () => {
    const client = await connect();
    const list = await open(client);
    const seen: object[] = [];
    list.on('change', () => seen.push(list.messages.map(show)));
    const all = [list.edit(1, 'new'), list.delete(3), list.react(2, '👍')];
    expect(list.message(1)).toMatchObject({ body: 'new', pending: ['edit'] });
    expect(list.message(1)!.editedAt).toBeGreaterThan(0);
    expect(list.message(3)).toMatchObject({ body: '', deleted: { by: 'alice' }, pending: ['delete'] });
    expect(list.message(2)).toMatchObject({ reactions: { '👍': 1 }, mine: ['👍'], pending: ['react'] });
    expect((await Promise.all(all)).map(({ rev }) => rev)).toEqual([1, 2, 3]);
    await settled();
    expect(list.messages.every(({ pending }) => !pending)).toBe(true);
    expectSame(client);
    await list.unreact(2, '👍');
    expectSame(client);
    for (const state of seen as { body: string }[][]) expect(state[0]!.body).toBe('new');
  });

  test('stays shown between the acknowledgement and a late event', async () => {
    const client = await connect();
    const list = await open(client);
    server.isDeaf = true;
    await Promise.all([list.edit(1, 'new'), list.react(2, '👍'), list.delete(3)]);
    await settled();
    expectSame2(list.messages);
    server.isDeaf = false;
    server.push({ type: 'changed', conversation: 'c', after: 0, rev: 3, items: server.items(0, 3) });
    await settled();
    expectSame(client);
    function expectSame2(messages: readonly ChatMessage[]) {
      expect(messages.slice(0, 3).map(show)).toEqual([
        { body: 'new', edited: true },
        { body: '2', reactions: { '👍': 1 }, mine: ['👍'] },
        { body: '', deleted: 'alice' },
      ]);
    }
  });

  test('that is refused is undone, and can be retried or discarded', async () => {
    const client = await connect();
    const list = await open(client);
    const [edit, remove] = [list.edit(2, 'of bob'), list.delete(4)];
    await expect(edit).rejects.toMatchObject({ code: 'forbidden' });
    await expect(remove).rejects.toMatchObject({ code: 'forbidden' });
    expect(list.message(2)).toMatchObject({ body: '2', failedChange: { type: 'edit', body: 'of bob', error: { code: 'forbidden' } } });
    expect(list.message(2)).not.toHaveProperty('editedAt');
    expect(list.message(4)).toMatchObject({ body: '4', failedChange: { type: 'delete' } });
    server.entries[1]!.sender = 'alice';
    list.retry(list.message(2)!.failedChange!.key);
    list.discard(list.message(4)!.failedChange!.key);
    await until(() => !list.message(2)!.failedChange && !list.message(2)!.pending);
    expect(list.message(4)).not.toHaveProperty('failedChange');
    expectSame(client);
  });

  test('is refused cleanly by a gateway without changes', async () => {
    server.isOld = true;
    const client = await connect();
    const list = await open(client);
    for (const change of [list.edit(1, 'x'), list.delete(1), list.react(1, '👍')])
      await expect(change).rejects.toMatchObject({ code: 'bad_request' });
    expect(list.message(1)).toMatchObject({ body: '1' });
    expect((await list.send('still works')).seq).toBe(6);
    expect(client.cursors()).toEqual({ c: [6, 0] });
    expect(server.received('changes')).toEqual([]);
  });

  test('is retried after `unavailable`, and delays neither messages nor changes of others', async () => {
    const client = await connect();
    const list = await open(client);
    let isUpgraded = false;
    const react = server.answers.react!;
    server.answers.react = (request) =>
      isUpgraded || request.seq !== 1 ? react(request) : { type: 'error', code: 'unavailable', message: 'not yet', retry_after_ms: 5 };
    const waiting = list.react(1, '👍');
    await Promise.all([list.send('a message'), list.react(2, '🎉')]);
    expect(list.message(1)).toMatchObject({ reactions: { '👍': 1 }, pending: ['react'] });
    isUpgraded = true;
    await waiting;
    expectSame(client);
  });

  test('whose answer is lost is sent again and applied once', async () => {
    const client = await connect();
    const list = await open(client);
    for (const type of ['edit', 'react', 'delete']) {
      breakOnce(type);
      const change = type === 'edit' ? list.edit(1, 'new') : type === 'react' ? list.react(1, '👍') : list.delete(1);
      await change;
      expect(server.received(type)).toHaveLength(2);
    }
    expect(server.rev).toBe(3);
    expectSame(client);
  });

  test('never undoes a newer edit of another device when it is sent again', async () => {
    const client = await connect();
    const list = await open(client);
    const edit = server.answers.edit!;
    server.answers.edit = (request) => {
      server.answers.edit = edit;
      edit(request);
      server.isDeaf = true;
      server.change('alice', { type: 'edit', seq: 1, body: 'of the phone' });
      server.isDeaf = false;
      return void server.socket.end(1006);
    };
    await expect(list.edit(1, 'of this one')).rejects.toMatchObject({ code: 'conflict' });
    expect(server.received('edit').map(({ base_rev }) => base_rev)).toEqual([0, 0]);
    expect(server.entries[0]!.body).toBe('of the phone');
    server.push({ type: 'changed', conversation: 'c', after: 0, rev: 2, items: server.items(0, 2) });
    expect(list.message(1)).toMatchObject({ body: 'of the phone', failedChange: { body: 'of this one' } });
    // Now the user saw the other text, and insists.
    list.retry(list.message(1)!.failedChange!.key);
    await until(() => server.entries[0]!.body === 'of this one');
    expect(server.received('edit').at(-1)).toMatchObject({ base_rev: 2 });
  });
});

describe('a repeated reaction', () => {
  test('never undoes a later removal on the same device: changes of one message keep their order', async () => {
    const client = await connect();
    const list = await open(client);
    // The gateway adds the reaction, its answer is lost, and it refuses the first repetition.
    const react = server.answers.react!;
    let attempts = 0;
    server.answers.react = (request) => {
      attempts++;
      if (attempts === 2) return { type: 'error', code: 'unavailable', message: 'not now', retry_after_ms: 30 };
      const answer = react(request);
      return attempts === 1 ? void server.socket.end(1006) : answer;
    };
    const added = list.react(1, '👍');
    await until(() => attempts === 1);
    const removed = list.unreact(1, '👍');
    expect(list.message(1)).not.toHaveProperty('reactions');
    await Promise.all([added, removed]);
    expect(server.requests.map(({ type }) => type).filter((type) => /react/.test(type))).toEqual(['react', 'react', 'react', 'unreact']);
    expect(server.entries[0]!.who.get('👍')!.size).toBe(0);
    await settled();
    expectSame(client);
  });
});

describe('an edit that began before the text changed', () => {
  test('is refused, and keeps what the user wrote', async () => {
    const client = await connect();
    const list = await open(client);
    const from = list.message(1)!;
    server.change('alice', { type: 'edit', seq: 1, body: 'of the phone' });
    expect(list.message(1)!.body).toBe('of the phone');
    await expect(list.edit(1, 'of the laptop', undefined, { from })).rejects.toMatchObject({ code: 'conflict' });
    expect(server.entries[0]!.body).toBe('of the phone');
    expect(list.message(1)).toMatchObject({ body: 'of the phone', failedChange: { error: { code: 'conflict' }, body: 'of the laptop' } });
    // Reactions are no reason to refuse it.
    const now = list.message(1)!;
    server.change('bob', { type: 'react', seq: 1, emoji: '👍' });
    await list.edit(1, 'seen', undefined, { from: now });
    expectSame(client);
  });

  test('counts an own edit as seen that was acknowledged meanwhile', async () => {
    const client = await connect();
    const list = await open(client);
    const first = list.edit(1, 'a');
    const from = list.message(1)!;
    expect(from.pending).toEqual(['edit']);
    await first;
    await list.edit(1, 'ab', undefined, { from });
    expect(server.received('edit').map(({ base_rev }) => base_rev)).toEqual([0, 1]);
    expectSame(client);
  });

  test('counts an own edit as seen that was acknowledged after the list jumped away', async () => {
    for (let i = 6; i <= 200; i++) server.write('bob', `${i}`);
    const client = await connect();
    const list = client.conversation('c');
    list.open({ at: 5 });
    await list.whenLoaded();
    const { edit } = server.answers;
    let release = () => {};
    server.answers.edit = (request) => {
      release = () => server.socket.say({ ...edit!(request), id: request.id });
      return undefined;
    };
    const first = list.edit(5, 'a');
    const from = list.message(5)!;
    expect(from).toMatchObject({ body: 'a', pending: ['edit'] });
    await list.jumpTo(150);
    await list.loadMessage(5);
    expect(list.messages.some(({ seq }) => seq === 5)).toBe(false);
    release();
    await first;
    server.answers.edit = edit!;
    await list.edit(5, 'ab', undefined, { from });
    expect(server.received('edit').map(({ base_rev }) => base_rev)).toEqual([0, 1]);
    expect(list.message(5)).toMatchObject({ body: 'ab' });
    // An edit of another device is not.
    const seen = list.message(5)!;
    server.change('alice', { type: 'edit', seq: 5, body: 'of the phone' });
    await expect(list.edit(5, 'abc', undefined, { from: seen })).rejects.toMatchObject({ code: 'conflict' });
  });
});

describe('several own changes', () => {
  test('that name no attachments keep those of the message', async () => {
    const client = await connect();
    const list = await open(client);
    const link = { url: 'https://example.org/a.png' };
    await list.edit(1, 'with a link', [link]);
    const first = list.edit(1, 'again');
    expect(list.message(1)).toMatchObject({ body: 'again', attachments: [link] });
    const second = list.edit(1, 'and again', undefined, { from: list.message(1)! });
    expect(list.message(1)).toMatchObject({ body: 'and again', attachments: [link] });
    await Promise.all([first, second]);
    expect(server.entries[0]).toMatchObject({ body: 'and again', attachments: [link] });
    expect(list.message(1)).toMatchObject({ body: 'and again', attachments: [link] });
    await list.edit(1, 'bare', []);
    expect(list.message(1)!.attachments).toBeUndefined();
    expectSame(client);
  });

  test('are kept while the list jumps, also those of a message that is not in the list any more', async () => {
    const client = await connect();
    const list = await open(client);
    const sent = list.send('mine');
    const { key } = list.messages.at(-1)!;
    await sent;
    const from = list.message(6)!;
    server.socket.end(1006);
    const [early, first] = [list.edit(1, 'offline'), list.edit(key, 'mine, edited', undefined, { from })];
    server.isDeaf = true;
    for (let i = 7; i <= 200; i++) server.write('bob', `${i}`);
    server.isDeaf = false;
    await until(() => client.state.at === 'connected');
    server.push({ type: 'resync', conversation: 'c', head: 200 });
    await until(() => list.messages.at(-1)?.seq === 200 && !list.message(6));
    // The page may still have the message as it was.
    const later = list.edit(key, 'mine, edited again');
    expect(await Promise.race([Promise.all([early, first, later]), settled(1_500)])).toHaveLength(3);
    expect(server.entries[0]!.body).toBe('offline');
    expect(server.entries[5]!.body).toBe('mine, edited again');
  });

  test('of one message are sent in order, and an edit after an edit has the rev of the first', async () => {
    const client = await connect();
    const list = await open(client);
    const all = [list.react(1, '👍'), list.edit(1, 'a'), list.edit(1, 'b'), list.unreact(1, '👍'), list.edit(1, 'c')];
    expect(show(list.message(1)!)).toEqual({ body: 'c', edited: true });
    await Promise.all(all);
    const sent = server.requests.filter(({ type }) => /edit|react/.test(type)).map(({ type, body, base_rev }) => [type, body, base_rev]);
    expect(sent).toEqual([
      ['react', undefined, undefined],
      ['edit', 'a', 0],
      ['edit', 'b', 2],
      ['unreact', undefined, undefined],
      ['edit', 'c', 3],
    ]);
    expectSame(client);
  });

  test('wait without a network, survive a reload, and wait for the seq of their message', async () => {
    const storage = indexedDbStorage('changes');
    const first = make({ storage, token: () => Promise.reject(new Error('no network')) });
    first.connect().catch(() => {});
    const offline = first.conversation('c');
    offline.send('written offline').catch(() => {});
    const { key } = offline.messages.at(-1)!;
    offline.edit(key, 'edited offline').catch(() => {});
    offline.react(key, '🎉').catch(() => {});
    offline.edit(1, 'also offline').catch(() => {});
    offline.delete([3, 5]).catch(() => {});
    expect(offline.messages.at(-1)).toMatchObject({ body: 'edited offline', reactions: { '🎉': 1 }, pending: ['edit', 'react'] });
    await until(async () => (await storage.entries('alice')).length === 5);
    first.disconnect();
    const again = await connect({ storage });
    const list = await open(again);
    await until(async () => !(await storage.entries('alice')).length);
    await until(() => server.rev === 4);
    expect(server.entries.map(({ body }) => body)).toEqual(['also offline', '2', '', '4', '', 'edited offline']);
    expect(server.received('send')).toHaveLength(1);
    await settled();
    expect(list.messages.every(({ pending, failedChange }) => !pending && !failedChange)).toBe(true);
    expectSame(again);
  });

  test('are not sent again because their removal from the storage failed', async () => {
    const storage = memoryStorage();
    let isBroken = true;
    const remove = (id: string) => (isBroken ? Promise.reject(new Error('no disk')) : storage.remove(id));
    const client = await connect({ storage: { ...storage, remove } });
    const list = await open(client);
    await list.react(1, '👍');
    await settled();
    isBroken = false;
    await list.unreact(1, '👍');
    await until(async () => (await storage.entries('alice')).length === 1);
    server.socket.end(1006);
    await until(async () => !(await storage.entries('alice')).length);
    await settled();
    expect(server.received('react')).toHaveLength(1);
    expect(server.entries[0]!.who.get('👍')!.size).toBe(0);
    expectSame(client);
  });

  test('keep a refusal over a reload, and end with the deletion of their message', async () => {
    const storage = memoryStorage();
    const first = await connect({ storage });
    const list = await open(first);
    await expect(list.edit(2, 'of bob')).rejects.toMatchObject({ code: 'forbidden' });
    first.disconnect();
    const again = await connect({ storage });
    const reloaded = await open(again);
    await until(() => reloaded.message(2)!.failedChange);
    server.change('bob', { type: 'delete', seqs: [2] });
    await until(async () => !(await storage.entries('alice')).length);
    expect(reloaded.message(2)).toMatchObject({ body: '', deleted: { by: 'bob' } });
    expect(reloaded.message(2)).not.toHaveProperty('failedChange');
  });

  test('of a message that is discarded are discarded with it', async () => {
    server.answers.send = () => ({ type: 'error', code: 'forbidden', message: 'no' });
    const client = await connect();
    const list = await open(client);
    const sent = list.send('refused');
    const { key } = list.messages.at(-1)!;
    const edit = list.edit(key, 'better');
    await expect(sent).rejects.toMatchObject({ code: 'forbidden' });
    list.discard(key);
    await expect(edit).rejects.toMatchObject({ code: 'closed' });
    expect(list.messages).toHaveLength(5);
  });
});
