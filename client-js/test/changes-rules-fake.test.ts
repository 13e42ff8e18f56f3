/** The rules of the protocol for clients, tagged in brackets, against a fake gateway that loses events, answers and connections. */
import 'fake-indexeddb/auto';
import { describe, expect, test, vi } from 'vitest';
import { GAP_SPREAD_MS } from '../src/change-feed.js';
import { FILL_SPREAD_MS } from '../src/feed.js';
import type { Changed, Message } from '../src/index.js';
import { breakOnce, connect, expectSame, make, open, server, settled, setUpServer, until } from './support/changes-fake.js';

setUpServer();

/** Edits message 2 as often as there are texts. The client learns only that it missed something. */
function missed(...bodies: string[]): void {
  server.isDeaf = true;
  for (const body of bodies) server.change('bob', { type: 'edit', seq: 2, body: `${server.rev} ${body}` });
  server.isDeaf = false;
  server.push({ type: 'changed', conversation: 'c', after: server.rev, rev: server.rev, items: [] });
}

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
    const triedOf = (id: string) => server.received('changes').filter(({ conversation }) => conversation === id).length;
    await until(() => stuck.every((id) => triedOf(id) > 1));
    for (const id of stuck) {
      const tried = triedOf(id);
      expect(tried).toBeLessThan(6);
      // Later events do not shorten the wait.
      for (let i = 0; i < 20; i++) server.push({ type: 'changed', conversation: id, after: 9, rev: 9, items: [] });
      expect(triedOf(id)).toBe(tried);
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
    await list.whenLoaded();
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
    await until(() => server.received('changes').length > 1);
    expect(server.received('changes').length).toBeLessThan(8);
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
    await until(() => client.cursors().c![1] === 16);
    expect(server.received('changes')).toHaveLength(asked + 1);
    // The pause after the next reset is a short one: of half a second at most, and not of twenty.
    vi.mocked(Math.random).mockReturnValue(0.9);
    server.resetAfter = 1;
    server.answers.inbox = () => ({ type: 'inbox', items: [{ ...server.item(), rev: 16 }] });
    missed('a', 'b', 'c');
    await until(() => server.received('changes').length > asked + 2);
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

  test('messages that come late are not asked for, and those that do not come are', async () => {
    const client = await connect();
    const list = await open(client);
    const asked = server.received('history').length;
    vi.mocked(Math.random).mockReturnValue(0.5);
    server.isDeaf = true;
    const [late, next] = ['late', 'next'].map((body) => server.message(server.write('bob', body), false));
    server.isDeaf = false;
    server.push(next!);
    server.push(late!);
    await until(() => list.messages.at(-1)?.body === 'next');
    await settled(FILL_SPREAD_MS);
    expect(server.received('history')).toHaveLength(asked);
    server.isDeaf = true;
    server.write('bob', 'lost');
    server.isDeaf = false;
    server.write('bob', 'newest');
    await until(() => list.messages.at(-1)?.body === 'newest');
    expect(server.received('history').at(-1)).toMatchObject({ after: (late!.seq as number) + 1 });
    expectSame(client);
  });
});
