/** Edits, deletions and reactions against a fake gateway, which loses events, answers and connections. */
import 'fake-indexeddb/auto';
import { describe, expect, test, vi } from 'vitest';
import { GAP_SPREAD_MS } from '../src/change-feed.js';
import { type Changed, type ChatMessage, indexedDbStorage, type Message, memoryStorage } from '../src/index.js';
import { breakOnce, connect, expectSame, make, open, server, settled, setUpServer, show, until } from './support/changes-fake.js';

setUpServer();

/** Edits message 2 as often as there are texts. The client learns only that it missed something. */
function missed(...bodies: string[]): void {
  server.isDeaf = true;
  for (const body of bodies) server.change('bob', { type: 'edit', seq: 2, body: `${server.rev} ${body}` });
  server.isDeaf = false;
  server.push({ type: 'changed', conversation: 'c', after: server.rev, rev: server.rev, items: [] });
}

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
    await list.loaded();
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

  test('of one message that an earlier version stored are not refused with `conflict`', async () => {
    const storage = memoryStorage();
    const stored = { user: 'alice', gateway: 'ws://fake', conversation: 'c', body: '' };
    // That version did not note which edit was written over which.
    for (const [at, body] of ['a', 'b', 'c'].entries())
      await storage.put({ ...stored, clientId: body, at: Date.now() + at, change: { type: 'edit', seq: 1, baseRev: 0, body } });
    await storage.put({ ...stored, clientId: 'react', at: Date.now() + 8, change: { type: 'react', seq: 3, emoji: '👍' } });
    await storage.put({ ...stored, clientId: 'd', at: Date.now() + 9, change: { type: 'edit', seq: 3, baseRev: 0, body: 'd' } });
    server.change('alice', { type: 'edit', seq: 3, body: 'of the phone' });
    const client = await connect({ storage });
    const list = await open(client);
    await until(() => list.messages.every(({ pending }) => !pending));
    expect(list.message(1)).toMatchObject({ body: 'c' });
    expect(list.message(1)).not.toHaveProperty('failedChange');
    // Neither another message's edits nor a reaction hide an edit of another device.
    expect(list.message(3)).toMatchObject({ body: 'of the phone', failedChange: { error: { code: 'conflict' } } });
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

describe('the rules for a client', () => {
  test('[gap] a missed event is asked for, from the cursor', async () => {
    const client = await connect();
    await open(client);
    const told: Changed[] = [];
    client.on('changed', (changed) => told.push(changed));
    server.isDeaf = true;
    server.change('bob', { type: 'edit', seq: 2, body: 'missed' });
    server.change('bob', { type: 'react', seq: 1, emoji: '👍' });
    server.isDeaf = false;
    server.change('bob', { type: 'react', seq: 1, emoji: '🎉' });
    await until(() => client.cursors().c![1] === 3);
    expect(server.received('changes')).toMatchObject([{ after: 0 }]);
    expectSame(client);
    expect(told.flatMap(({ items }) => items.map(({ seq }) => seq)).sort()).toEqual([1, 2]);
    // An event without items is a gap too.
    server.isDeaf = true;
    server.change('bob', { type: 'edit', seq: 4, body: 'too large' });
    server.isDeaf = false;
    server.push({ type: 'changed', conversation: 'c', after: 4, rev: 4, items: [] });
    await until(() => client.cursors().c![1] === 4);
    expect(server.received('changes').at(-1)).toMatchObject({ after: 3 });
    expectSame(client);
  });

  test('[gap] clients do not all ask at the same moment after an event, but at once after a page', async () => {
    for (let i = 6; i <= 60; i++) server.write('bob', `${i}`);
    const client = await connect();
    const list = await open(client);
    vi.mocked(Math.random).mockReturnValue(0.3);
    server.push({ type: 'changed', conversation: 'c', after: 4, rev: 4, items: [] });
    await settled(150);
    // A second event neither hastens nor delays it.
    server.push({ type: 'changed', conversation: 'c', after: 5, rev: 5, items: [] });
    expect(server.received('changes')).toHaveLength(0);
    await settled(GAP_SPREAD_MS * 0.3 - 150 + 30);
    expect(server.received('changes')).toHaveLength(1);
    server.change('bob', { type: 'edit', seq: 30, body: 'newer than the page' });
    const page = server.answers.history!;
    server.answers.history = (request) => ({ ...page(request), rev: 0 });
    await list.loadOlder();
    expect(server.received('changes')).toHaveLength(2);
  });

  test('[gap] conversations that get no answer hold up no others, and have their own back-off', async () => {
    const stuck = ['p', 'q', 'r', 's', 't', 'u'];
    const client = await connect({ cursors: Object.fromEntries(stuck.map((id) => [id, [0, 0]])) });
    await open(client);
    const { changes } = server.answers;
    let isBroken = true;
    server.answers.changes = (request) => {
      if (request.conversation === 'c') return changes!(request);
      return isBroken
        ? { type: 'error', code: 'unavailable', message: 'never' }
        : { type: 'changes', after: request.after, rev: 9, items: [] };
    };
    vi.mocked(Math.random).mockReturnValue(0.05);
    for (const conversation of stuck) server.push({ type: 'changed', conversation, after: 9, rev: 9, items: [] });
    server.isDeaf = true;
    server.change('bob', { type: 'edit', seq: 2, body: 'missed' });
    server.isDeaf = false;
    server.push({ type: 'changed', conversation: 'c', after: 1, rev: 1, items: [] });
    await until(() => client.cursors().c![1] === 1);
    await settled(300);
    for (const id of stuck) {
      const tried = server.received('changes').filter(({ conversation }) => conversation === id).length;
      expect(tried).toBeGreaterThan(1);
      expect(tried).toBeLessThan(6);
      // Later events do not shorten the wait.
      for (let i = 0; i < 20; i++) server.push({ type: 'changed', conversation: id, after: 9, rev: 9, items: [] });
      expect(server.received('changes').filter(({ conversation }) => conversation === id)).toHaveLength(tried);
    }
    isBroken = false;
    await until(() => stuck.every((id) => client.cursors()[id]![1] === 9));
  });

  test('[gap] is asked for page by page, and over lost connections', async () => {
    server.pageRevs = 2;
    const client = await connect();
    await open(client);
    server.isDeaf = true;
    for (const body of ['a', 'b', 'c', 'd', 'e']) server.change('bob', { type: 'edit', seq: 2, body });
    server.isDeaf = false;
    breakOnce('changes', true);
    server.change('bob', { type: 'react', seq: 1, emoji: '🎉' });
    await until(() => client.cursors().c![1] === 6);
    expect(server.received('changes').map(({ after }) => after)).toEqual([0, 0, 2, 4]);
    expectSame(client);
  });

  test('[item-rev] an item that is not newer than the entry changes nothing, and does not hide a newer one', async () => {
    const client = await connect();
    const list = await open(client);
    server.isDeaf = true;
    server.change('bob', { type: 'edit', seq: 2, body: 'a' });
    const first = { type: 'changed', conversation: 'c', after: 0, rev: 1, items: server.items(0, 1) };
    server.change('bob', { type: 'edit', seq: 2, body: 'b' });
    const second = { type: 'changed', conversation: 'c', after: 1, rev: 2, items: server.items(1, 2) };
    server.isDeaf = false;
    server.push(first);
    server.push(second);
    server.push(first);
    expect(list.message(2)!.body).toBe('b');
    expect(client.cursors()).toEqual({ c: [5, 2] });
    // Events may overlap.
    server.isDeaf = true;
    server.change('bob', { type: 'react', seq: 2, emoji: '👍' });
    server.isDeaf = false;
    server.push({ type: 'changed', conversation: 'c', after: 0, rev: 3, items: server.items(0, 3) });
    expectSame(client);
  });

  test('[page-rev] a page that is older than the cursor sets it back, also over a lost connection', async () => {
    for (let i = 6; i <= 60; i++) server.write('bob', `${i}`);
    const client = await connect();
    const list = await open(client);
    expect(list.messages[0]!.seq).toBe(31);
    // The page was read before the change, and its answer comes after the event.
    const page = server.answers.history!;
    server.answers.history = (request) => {
      server.answers.history = page;
      const answer = page(request);
      server.change('bob', { type: 'edit', seq: 30, body: 'changed meanwhile' });
      breakOnce('changes', true);
      return answer;
    };
    await list.loadOlder();
    expect(client.cursors().c![1]).toBe(0);
    await until(() => client.cursors().c![1] === 1);
    expect(server.received('connect').at(-1)).toMatchObject({ cursors: { c: [60, 0] } });
    expect(list.message(30)!.body).toBe('changed meanwhile');
  });

  test('[reset] a list that was closed just before is loaded when it is opened again', async () => {
    const client = await connect();
    const list = client.conversation('c');
    const close = list.open();
    await list.loaded();
    close();
    server.isDeaf = true;
    for (const body of ['a', 'b']) server.change('bob', { type: 'edit', seq: 2, body });
    server.isDeaf = false;
    server.resetAfter = 1;
    server.push({ type: 'changed', conversation: 'c', after: 2, rev: 2, items: [] });
    await until(() => client.cursors().c![1] === 2);
    await open(client);
    server.change('bob', { type: 'react', seq: 2, emoji: '👍' });
    expect(list.messages).toHaveLength(5);
    expectSame(client);
  });

  test('[reset] a gateway whose inbox stays behind is asked with growing pauses', async () => {
    const client = await connect();
    await open(client);
    server.resetAfter = 1;
    // The rev of the inbox is written behind, and here never catches up.
    server.answers.inbox = () => ({ type: 'inbox', items: [{ ...server.item(), rev: 0 }] });
    server.isDeaf = true;
    for (const body of ['a', 'b', 'c']) server.change('bob', { type: 'edit', seq: 2, body });
    server.isDeaf = false;
    vi.mocked(Math.random).mockReturnValue(0.05);
    server.push({ type: 'changed', conversation: 'c', after: 3, rev: 3, items: [] });
    await settled(600);
    // Events do not shorten the pauses.
    for (let i = 0; i < 20; i++) server.push({ type: 'changed', conversation: 'c', after: 3, rev: 3, items: [] });
    await settled(200);
    const asked = server.received('changes').length;
    expect(asked).toBeGreaterThan(1);
    expect(asked).toBeLessThan(8);
    expect(server.received('inbox').length).toBeLessThan(10);
    // It catches up, and the client too.
    server.answers.inbox = () => ({ type: 'inbox', items: [server.item()] });
    await until(() => client.cursors().c![1] === 3 && client.inbox.get('c')!.rev === 3);
    expectSame(client);
    server.change('bob', { type: 'edit', seq: 2, body: 'd' });
    expectSame(client);
  });

  test('[reset] is no failure: one close with 4500 afterwards does not end asking', async () => {
    const client = await connect();
    await open(client);
    server.resetAfter = 1;
    server.answers.inbox = () => ({ type: 'inbox', items: [{ ...server.item(), rev: 0 }] });
    const { changes } = server.answers;
    // The page of the inbox sets the cursor back after the reset.
    server.answers.changes = (request) => {
      if (server.received('changes').length !== 2) return changes!(request);
      server.resetAfter = Infinity;
      return void server.socket.end(4500);
    };
    missed('a', 'b', 'c');
    await until(() => server.received('connect').length === 2);
    server.answers.inbox = () => ({ type: 'inbox', items: [server.item()] });
    await until(() => client.cursors().c![1] === 3);
    expectSame(client);
  });

  test('[reset] a reset does not delay what later pages ask for', async () => {
    for (let i = 6; i <= 90; i++) server.write('bob', `${i}`);
    const client = await connect();
    const list = await open(client);
    // Resets with good pages between are not in a row.
    for (let resets = 1; resets <= 5; resets++) {
      server.resetAfter = 1;
      missed('a', 'b', 'c');
      await until(() => client.cursors().c![1] === 3 * resets);
      await settled(60);
      server.resetAfter = Infinity;
      await list.loadOlder();
    }
    const asked = server.received('changes').length;
    vi.mocked(Math.random).mockReturnValue(0.99);
    // The page was read before a change, and its answer comes after the event.
    const page = server.answers.history!;
    server.answers.history = (request) => {
      server.answers.history = page;
      const answer = page(request);
      server.change('bob', { type: 'edit', seq: 2, body: 'changed meanwhile' });
      return answer;
    };
    await list.loadOlder();
    await settled();
    expect(server.received('changes')).toHaveLength(asked + 1);
    expect(client.cursors().c![1]).toBe(16);
    // The pause after the next reset is a short one.
    vi.mocked(Math.random).mockReturnValue(0.05);
    server.resetAfter = 1;
    server.answers.inbox = () => ({ type: 'inbox', items: [{ ...server.item(), rev: 16 }] });
    missed('a', 'b', 'c');
    await settled(190);
    expect(server.received('changes').length).toBeGreaterThan(asked + 2);
  });

  test('[gap] events do not put off a request that failed before', async () => {
    const client = await connect();
    await open(client);
    const { changes } = server.answers;
    server.answers.changes = () => {
      server.answers.changes = changes!;
      return { type: 'error', code: 'unavailable', message: 'not now' };
    };
    missed('a');
    await until(() => server.received('changes').length === 1);
    // Each event alone would be asked about later.
    vi.mocked(Math.random).mockReturnValue(0.5);
    for (let i = 0; i < 12 && server.received('changes').length < 2; i++) {
      server.push({ type: 'changed', conversation: 'c', after: 1, rev: 1, items: [] });
      await settled(30);
    }
    expect(server.received('changes')).toHaveLength(2);
  });

  test.each(['is lost', 'is closed by the application'])('[gap] a pause after a failure ends when the connection %s', async (how) => {
    const client = await connect();
    await open(client);
    const { changes } = server.answers;
    server.answers.changes = () => ({ type: 'error', code: 'unavailable', message: 'not now', retry_after_ms: 20_000 });
    missed('a');
    await until(() => server.received('changes').length === 1);
    await settled();
    server.answers.changes = changes!;
    if (how === 'is lost') server.socket.end(1006);
    else {
      client.disconnect();
      client.connect();
    }
    await until(() => client.state.at === 'connected' && server.received('connect').length === 2);
    server.push({ type: 'changed', conversation: 'c', after: 1, rev: 1, items: [] });
    await until(() => client.cursors().c![1] === 1);
    expectSame(client);
  });

  test('[reset] a pause after a reset stays over a new connection', async () => {
    const client = await connect();
    await open(client);
    server.resetAfter = 1;
    server.answers.inbox = () => ({ type: 'inbox', items: [{ ...server.item(), rev: 0 }] });
    missed('a', 'b', 'c');
    vi.mocked(Math.random).mockReturnValue(0.99);
    await until(() => server.received('changes').length === 1);
    await settled();
    vi.mocked(Math.random).mockReturnValue(0.01);
    client.disconnect();
    await client.connect();
    server.push({ type: 'changed', conversation: 'c', after: 3, rev: 3, items: [] });
    await settled(300);
    expect(server.received('changes')).toHaveLength(1);
  });

  test('[reset] good pages of the history do not shorten the pauses while the inbox stays behind', async () => {
    const client = await connect();
    await open(client);
    server.resetAfter = 1;
    const { history } = server.answers;
    const later = (ms: number, id: unknown, answer: object) => void setTimeout(() => server.socket.say({ ...answer, id }), ms);
    // Both pages come after the first pause.
    server.answers.history = (request) => later(60, request.id, history!(request)!) as undefined;
    server.answers.inbox = ({ id }) => later(80, id, { type: 'inbox', items: [{ ...server.item(), rev: 0 }] }) as undefined;
    vi.mocked(Math.random).mockReturnValue(0.05);
    missed('a', 'b', 'c');
    await settled(1_500);
    expect(server.received('changes').length).toBeGreaterThan(2);
    expect(server.received('changes').length).toBeLessThan(9);
    server.answers.inbox = () => ({ type: 'inbox', items: [server.item()] });
    await until(() => client.cursors().c![1] === 3 && client.inbox.get('c')!.rev === 3);
  });

  test('[reset] all states are dropped, and the list is read again where it is', async () => {
    const client = await connect();
    const list = await open(client);
    server.write('bob', '6');
    await until(() => list.messages.length === 6);
    const keys = list.messages.map(({ key }) => key);
    const told: Changed[] = [];
    client.on('changed', (changed) => told.push(changed));
    server.resetAfter = 3;
    server.isDeaf = true;
    server.change('bob', { type: 'edit', seq: 2, body: 'a' });
    server.change('bob', { type: 'delete', seqs: [4] });
    server.change('alice', { type: 'react', seq: 1, emoji: '👍' });
    server.change('bob', { type: 'delete', seqs: [6] });
    // While the page is read, an event comes that has only the newest change of entry 2.
    const page = server.answers.history!;
    server.answers.history = (request) => {
      server.answers.history = page;
      const answer = page(request);
      server.change('bob', { type: 'react', seq: 2, emoji: '🎉' });
      return answer;
    };
    server.isDeaf = false;
    server.push({ type: 'changed', conversation: 'c', after: 4, rev: 4, items: [] });
    await until(() => client.cursors().c![1] === 5);
    await until(() => list.message(2)!.reactions);
    expectSame(client);
    expect(list.messages.map(({ key }) => key)).toEqual(keys);
    expect(told[0]).toMatchObject({ reset: true, rev: 4 });
    await until(() => client.inbox.get('c')!.lastMessage!.deleted);
  });

  test('a new connection has the cursors [seq, rev], and a subscription too', async () => {
    const client = await connect();
    const list = await open(client);
    server.change('bob', { type: 'edit', seq: 2, body: 'a' });
    expect(client.cursors()).toEqual({ c: [5, 1] });
    server.socket.end(1006);
    await until(() => client.state.at === 'connected' && server.received('connect').length === 2);
    expect(server.received('connect').at(-1)).toMatchObject({ cursors: { c: [5, 1] } });
    await list.subscribe();
    expect(server.received('subscribe').at(-1)).toMatchObject({ after: 5, rev: 1 });
    const later = make({ cursors: client.cursors() });
    await later.connect();
    expect(server.received('connect').at(-1)).toMatchObject({ cursors: { c: [5, 1] } });
  });

  test('a change that overtakes its message is not lost', async () => {
    const client = await connect();
    const list = await open(client);
    server.isDeaf = true;
    const [six, seven] = ['6', '7'].map((body) => server.message(server.write('bob', body), false));
    server.change('bob', { type: 'edit', seq: 6, body: 'six' });
    server.change('bob', { type: 'delete', seqs: [7] });
    server.isDeaf = false;
    const bodies: string[] = [];
    list.on('message', ({ body }) => bodies.push(body));
    server.push({ type: 'changed', conversation: 'c', after: 0, rev: 2, items: server.items(0, 2) });
    server.push(six!);
    server.push(seven!);
    expect(bodies).toEqual(['six', '']);
    expectSame(client);
    expect(client.inbox.get('c')).toMatchObject({ unread: 1, lastMessage: { deleted: true, preview: '' } });
  });

  test('changes that overtook messages are kept for as long as these may come', async () => {
    const client = await connect();
    const early = (seq: number) => client.changeFeed.overtaken({ conversation: 'c', seq } as Message)[1].length;
    const change = (rev: number, ...seqs: number[]) => {
      const items = seqs.map((seq) => ({ seq, rev, body: 'x', attachments: [] }));
      server.push({ type: 'changed', conversation: 'c', after: rev - 1, rev, items });
    };
    change(1, 6, 8);
    server.push({ type: 'resync', conversation: 'c', head: 7 });
    expect([early(6), early(8)]).toEqual([0, 1]);
    change(2, 9);
    server.answers.changes = ({ after }) => {
      client.feed.skip('c', 9);
      return { type: 'changes', after, rev: 3, items: [], reset: true };
    };
    server.answers.inbox = () => ({ type: 'inbox', items: [{ ...server.item(), rev: 3 }] });
    server.push({ type: 'changed', conversation: 'c', after: 3, rev: 3, items: [] });
    await until(() => client.cursors().c![1] === 3);
    expect(early(9)).toBe(0);
    change(4, ...Array.from({ length: 3_000 }, (_, i) => 10 + i));
    expect([early(10), early(1_000), early(2_500)]).toEqual([1, 1, 0]);
  });
});
