/** Several tabs of one browser: one holds the lock and sends, and the others wait for the result of their messages. */
import 'fake-indexeddb/auto';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import {
  ChatClient,
  type ChatOptions,
  type Conversation,
  indexedDbStorage,
  memoryStorage,
  type OutboxEntry,
  type OutboxStorage,
} from '../src/index.js';
import { ChangingServer } from './support/changing-server.js';
import { FakeServer } from './support/fake-server.js';
import { until } from './support/gateway.js';

let server: FakeServer;
const made: ChatClient[] = [];
const make = (storage: OutboxStorage, options: Partial<ChatOptions> = {}) => {
  const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket, storage, ...options });
  made.push(client);
  return client;
};
/** Stubs Web Locks: the first tab holds the lock until its signal is aborted, then the next one gets it. */
function locks(held: Promise<unknown> = Promise.resolve()): void {
  const request = (_: string, { signal }: { signal: AbortSignal }, turn: () => Promise<unknown>) => {
    const mine = held.then(() => (signal.aborted ? undefined : turn()));
    held = mine.catch(() => {});
    return mine;
  };
  vi.stubGlobal('navigator', { locks: { request } });
}
const sharedMemory = (more: Partial<OutboxStorage> = {}): OutboxStorage => ({ ...memoryStorage(), shared: true, ...more });
const sent = (seq: number, duplicate = false) => ({ type: 'sent', seq, message_id: 'm', at: 1, duplicate });

beforeEach(() => {
  server = new FakeServer();
});
afterEach(() => {
  for (const client of made.splice(0)) client.disconnect();
  vi.unstubAllGlobals();
});

test('outside of browsers, where there is no navigator, nothing is reported', async () => {
  vi.stubGlobal('navigator', undefined);
  server.answers.send = () => sent(1);
  const warn = vi.spyOn(console, 'warn').mockImplementation(() => {});
  // The default storage, where there is an IndexedDB.
  const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket });
  made.push(client);
  await client.connect();
  expect(await client.conversation('c').send('one')).toMatchObject({ seq: 1 });
  expect(warn).not.toHaveBeenCalled();
  warn.mockRestore();
});

test('logout() in one tab settles the sends of another, and none of them is sent', async () => {
  locks();
  server.answers.send = () => undefined;
  const storage = indexedDbStorage('logout');
  const [leader, follower] = [make(storage), make(storage)];
  await leader.connect();
  await follower.connect();
  const conversation = follower.conversation('c');
  const waiting = conversation.send('one');
  const settled = expect(waiting).rejects.toMatchObject({ code: 'closed', message: expect.stringContaining('another tab') });
  await until(() => server.received('send').length);
  await leader.logout();
  await settled;
  await until(() => !conversation.messages.length);
  // The follower holds the lock now, and has nothing to send.
  await new Promise((resolve) => setTimeout(resolve, 50));
  expect(server.received('send')).toHaveLength(1);
  expect(await storage.entries('alice')).toEqual([]);
});

test.each([
  ['is refused', () => Promise.reject(new Error('no disk'))],
  ['never answers', () => new Promise<never>(() => {})],
])('a message whose write to the storage %s is sent by its tab, though another tab holds the lock', async (_, put) => {
  locks(new Promise(() => {}));
  server.answers.send = () => sent(1);
  const logged: unknown[] = [];
  const client = make(sharedMemory({ put }), { logger: { error: (message) => logged.push(message) } });
  await client.connect();
  vi.useFakeTimers();
  try {
    const stored = client.conversation('c').send('one');
    await vi.advanceTimersByTimeAsync(6_000);
    expect((await stored).seq).toBe(1);
  } finally {
    vi.useRealTimers();
  }
  expect(logged).toHaveLength(1);
});

describe('a tab that waits for a tab with the lock', () => {
  /** The channel of the tab. */
  let channel: { onmessage?: (event: { data: object }) => void };

  beforeEach(() => {
    locks(new Promise(() => {}));
    vi.stubGlobal(
      'BroadcastChannel',
      class {
        onmessage?: (event: { data: object }) => void;
        constructor() {
          channel = this;
        }
        postMessage() {}
        close() {}
      },
    );
    let seq = 0;
    server.answers.send = ({ retry }) => sent(++seq, retry as boolean);
    vi.useFakeTimers();
  });
  afterEach(() => {
    vi.useRealTimers();
  });
  const entry = () => ({ clientId: 'a', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: 'zero', at: Date.now() });
  const bodies = () => server.received('send').map(({ body, retry }) => [body, retry]);

  test('sends all messages if that one shows a dialog, in the order in which they were written', async () => {
    const storage = sharedMemory();
    // It was written in a tab that is closed.
    await storage.put(entry());
    const client = make(storage);
    await client.connect();
    const waiting = ['one', 'two'].map((body) => client.conversation('c').send(body));
    await vi.advanceTimersByTimeAsync(5_000);
    expect(bodies()).toEqual([]);
    await vi.advanceTimersByTimeAsync(5_000);
    await Promise.all(waiting);
    expect(bodies()).toEqual(['zero', 'one', 'two'].map((body) => [body, true]));
    expect(await storage.entries('alice')).toEqual([]);
  });

  test('leaves them to that one while it sends', async () => {
    const client = make(sharedMemory(), { user: 'alice' });
    await client.connect();
    const waiting = client.conversation('c').send('one');
    for (let ms = 0; ms < 20_000; ms += 2_000) {
      channel.onmessage?.({ data: { sent: [`other ${ms}`, { seq: 1, messageId: 'm', at: 1, duplicate: false }] } });
      await vi.advanceTimersByTimeAsync(2_000);
    }
    expect(bodies()).toEqual([]);
    await vi.advanceTimersByTimeAsync(6_000);
    await waiting;
  });
});

/** Sends a message from a tab while another tab is the leader. Resolves when the message is in the shared storage. */
async function sendBehindLeader() {
  let endLeader: (value?: unknown) => void = () => {};
  locks(new Promise((resolve) => (endLeader = resolve)));
  server.answers.send = ({ retry }) => sent(7, retry as boolean);
  const storage = sharedMemory();
  const client = make(storage);
  await client.connect();
  const waiting = client.conversation('c').send('one');
  await until(async () => (await storage.entries('alice')).length === 1);
  return { storage, waiting, endLeader };
}

test('a message that the other tab removed without a note is sent again when that tab ends', async () => {
  const { storage, waiting, endLeader } = await sendBehindLeader();
  // The leader sent and removed it, and ended before it could tell this tab.
  await storage.remove((await storage.entries('alice'))[0]!.clientId);
  endLeader();
  expect(await waiting).toMatchObject({ seq: 7, duplicate: true });
  await until(async () => !(await storage.entries('alice')).length);
});

test('a message that the other tab may have sent is marked as a retry', async () => {
  const { waiting, endLeader } = await sendBehindLeader();
  endLeader();
  expect(await waiting).toMatchObject({ seq: 7, duplicate: true });
});

test('a message that an earlier attempt stored leaves the outbox', async () => {
  server.answers.send = () => sent(3, true);
  const storage = memoryStorage();
  const client = make(storage);
  await client.connect();
  const conversation = client.conversation('c');
  expect((await conversation.send('one')).duplicate).toBe(true);
  expect(conversation.messages).toEqual([]);
  await until(async () => !(await storage.entries('alice')).length);
});

test('an edit of a tab that did not see the edit of another tab is refused with `conflict`', async () => {
  const changing = new ChangingServer();
  changing.write('alice', 'one');
  server = changing;
  locks();
  const storage = sharedMemory();
  const tabs = [make(storage, { user: 'alice' }), make(storage, { user: 'alice' })];
  const lists = [];
  for (const tab of tabs) {
    await tab.connect();
    const list = tab.conversation('c');
    list.open();
    await list.whenLoaded();
    lists.push(list);
  }
  const [first, second] = lists as [Conversation, Conversation];
  const from = second.message(1)!;
  for (const socket of changing.sockets) socket.end(1006);
  const pending = first.edit(1, 'of the first');
  await until(() => second.message(1)!.body === 'of the first');
  // The user of the second tab began before, and does not know it.
  const unseen = second.edit(1, 'of the second', undefined, { from });
  const refused = expect(unseen).rejects.toMatchObject({ code: 'conflict' });
  await pending;
  await refused;
  expect(changing.entries[0]!.body).toBe('of the first');
  expect(second.message(1)).toMatchObject({ body: 'of the first', failedChange: { body: 'of the second' } });
  // Trying again replaces the text that is shown. An edit of a text that waits replaces that one.
  for (const socket of changing.sockets) socket.end(1006);
  second.retry(second.message(1)!.failedChange!.key);
  await until(() => first.message(1)!.body === 'of the second');
  const seen = first.edit(1, 'of both', undefined, { from: first.message(1)! });
  expect((await seen).rev).toBe(3);
  expect(changing.entries[0]!.body).toBe('of both');
});

/** Tells the tabs that another one changed the storage, as that one does. */
function tellTabs(note: object = {}): void {
  const tabs = new BroadcastChannel('chat ws://fake alice');
  tabs.postMessage(note);
  setTimeout(() => tabs.close(), 100);
}

/** A tab that is not the leader, and a message of its user. */
async function behindLeader(storage = sharedMemory()) {
  const changing = new ChangingServer();
  changing.write('alice', 'one');
  server = changing;
  let endLeader: (value?: unknown) => void = () => {};
  locks(new Promise((resolve) => (endLeader = resolve)));
  const client = make(storage, { user: 'alice' });
  await client.connect();
  const list = client.conversation('c');
  list.open();
  await list.whenLoaded();
  const stored = (count: number) => until(async () => (await storage.entries('alice')).length === count);
  return { changing, storage, list, stored, endLeader };
}

/** Two tabs with a list each: the leader, whose edits are answered at `release`, and a follower, whose writes wait after `hold`. */
async function slowFollower() {
  const changing = Object.assign(new ChangingServer(), { release: () => {} });
  changing.write('alice', 'one');
  server = changing;
  locks();
  const storage = sharedMemory();
  let stored = Promise.resolve();
  const slow = { ...storage, put: (entry: OutboxEntry) => stored.then(() => storage.put(entry)) };
  const [leader, follower] = [make(storage, { user: 'alice' }), make(slow, { user: 'alice' })];
  await leader.connect();
  await follower.connect();
  const [first, second] = [leader.conversation('c'), follower.conversation('c')];
  for (const list of [first, second]) {
    list.open();
    await list.whenLoaded();
  }
  const edit = changing.answers.edit!;
  changing.answers.edit = (request) => {
    changing.release = () => changing.sockets[0]!.say({ ...edit(request), id: request.id });
    return undefined;
  };
  /** Returns a function that lets the writes go on. */
  const hold = () => {
    let write = () => {};
    stored = new Promise((resolve) => (write = resolve));
    return write;
  };
  return { changing, edit, storage, first, second, hold };
}

test('an edit over an edit that the leader is sending is no conflict, however late the leader learns of it', async () => {
  const { changing, edit, storage, first, second, hold } = await slowFollower();
  const before = first.edit(1, 'a');
  await until(() => second.message(1)!.body === 'a' && changing.received('edit').length);
  const write = hold();
  const over = second.edit(1, 'ab');
  changing.release();
  await before;
  changing.answers.edit = edit;
  await until(async () => !(await storage.entries('alice')).length);
  write();
  expect((await over).rev).toBe(2);
  expect(changing.received('edit').map(({ base_rev }) => base_rev)).toEqual([0, 1]);
});

test('an edit over an acknowledged edit is no conflict in a later tab that knows neither', async () => {
  const { changing, edit, storage, first, second, hold } = await slowFollower();
  const before = first.edit(1, 'a');
  await until(() => second.message(1)!.body === 'a' && changing.received('edit').length);
  const write = hold();
  second.edit(1, 'ab').catch(() => {});
  changing.release();
  await before;
  await until(async () => !(await storage.entries('alice')).length);
  await until(() => second.message(1)!.pending?.length === 1);
  // Neither tab sends it.
  for (const socket of changing.sockets) socket.silent = true;
  write();
  await until(async () => (await storage.entries('alice')).length);
  for (const client of made) client.disconnect();
  changing.answers.edit = edit;
  await make(storage, { user: 'alice' }).connect();
  await until(() => changing.entries[0]!.body === 'ab');
  expect(changing.received('edit').at(-1)).toMatchObject({ base_rev: 1 });
  await until(async () => !(await storage.entries('alice')).length);
});

test('a change waits for the one before it, which another tab removed without a note', async () => {
  const { changing, storage, list, stored, endLeader } = await behindLeader();
  const all = [list.edit(1, 'a'), list.edit(1, 'ab'), list.react(1, '👍'), list.unreact(1, '👍')];
  await stored(4);
  // The leader sent an edit and the reaction, and ended before it could tell this tab.
  changing.change('alice', { type: 'edit', seq: 1, body: 'a' });
  changing.change('alice', { type: 'react', seq: 1, emoji: '👍' });
  const entries = await storage.entries('alice');
  for (const i of [0, 2]) await storage.remove(entries[i]!.clientId);
  endLeader();
  await Promise.all(all);
  expect(changing.entries[0]!.body).toBe('ab');
  expect(changing.entries[0]!.who.get('👍')!.size).toBe(0);
  await stored(0);
});

/** An edit of this tab over the waiting edit `other` of another tab, which this tab knows from the storage. */
async function editOverOther() {
  const tab = await behindLeader();
  const { storage, list, stored } = tab;
  const change = { type: 'edit', seq: 1, baseRev: 0, body: 'a' } as const;
  const other = { clientId: 'other', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: '', at: Date.now(), over: '', change };
  await storage.put(other);
  tellTabs();
  await until(() => list.message(1)!.body === 'a');
  const over = list.edit(1, 'ab');
  await stored(2);
  // The leader sends the other one.
  tab.changing.isDeaf = true;
  tab.changing.change('alice', { type: 'edit', seq: 1, body: 'a' });
  tab.changing.isDeaf = false;
  return { ...tab, over };
}

test("an edit over another tab's edit, which is gone from the storage, waits for the note about it", async () => {
  const { changing, storage, over, stored, endLeader } = await editOverOther();
  await storage.remove('other');
  endLeader();
  setTimeout(() => tellTabs({ accepted: ['other', 1] }), 50);
  expect((await over).rev).toBe(2);
  expect(changing.received('edit').map(({ body, base_rev }) => [body, base_rev])).toEqual([['ab', 1]]);
  await stored(0);
});

test("another tab's edit, which is gone from the storage without a note, is sent again before an edit over it", async () => {
  const { changing, storage, over, stored, endLeader } = await editOverOther();
  await storage.remove('other');
  endLeader();
  expect((await over).rev).toBe(2);
  expect(changing.received('edit').map(({ body }) => body)).toEqual(['a', 'ab']);
  await stored(0);
});

test("another tab's edit, whose note came before it left the storage, is not sent again", async () => {
  const { list, storage, stored } = await editOverOther();
  tellTabs({ accepted: ['other', 1] });
  await until(() => list.message(1)!.pending?.length === 1);
  tellTabs();
  await stored(1);
  tellTabs();
  await new Promise((resolve) => setTimeout(resolve, 1_100));
  expect(await storage.entries('alice')).toHaveLength(1);
});

test('an entry that is gone, comes back and is gone again is waited for anew', async () => {
  const { storage, list, stored } = await behindLeader();
  list.react(1, '👍').catch(() => {});
  await stored(1);
  const [entry] = await storage.entries('alice');
  const start = Date.now();
  const after = (ms: number) => new Promise((resolve) => setTimeout(resolve, start + ms - Date.now()));
  await storage.remove(entry!.clientId);
  tellTabs();
  await after(600);
  await storage.put(entry!);
  tellTabs();
  await after(750);
  await storage.remove(entry!.clientId);
  tellTabs();
  // The first wait would be over.
  await after(1_300);
  expect(await storage.entries('alice')).toEqual([]);
  await stored(1);
  expect(Date.now() - start).toBeGreaterThan(1_700);
});

/** Two tabs, of which the first holds the lock. The notes with a field arrive `ms` after the storage shows what they tell. */
async function tabsWithLateNotes(ms: number, changing = server) {
  locks();
  vi.stubGlobal(
    'BroadcastChannel',
    class extends BroadcastChannel {
      override postMessage(note: object): void {
        const post = () => this.onmessage && super.postMessage(note);
        if (Object.keys(note).length) setTimeout(post, ms);
        else post();
      }
      override close(): void {
        this.onmessage = null;
        super.close();
      }
    },
  );
  server = changing;
  const storage = sharedMemory();
  const [leader, follower] = [make(storage, { user: 'alice' }), make(storage, { user: 'alice' })];
  await leader.connect();
  await follower.connect();
  return { storage, leader, follower };
}

test('a message that another tab sent is not sent again because the note about it is late', async () => {
  server.answers.send = ({ retry }) => sent(7, retry as boolean);
  const { follower, storage } = await tabsWithLateNotes(150);
  expect(await follower.conversation('c').send('one')).toMatchObject({ seq: 7 });
  await new Promise((resolve) => setTimeout(resolve, 100));
  expect(server.received('send')).toHaveLength(1);
  expect(await storage.entries('alice')).toEqual([]);
});

test('a reaction that another tab added does not come back after its removal because the note about it is late', async () => {
  const changing = new ChangingServer();
  changing.write('bob', 'one');
  const { follower, storage } = await tabsWithLateNotes(150, changing);
  const list = follower.conversation('c');
  const all = [list.react(1, '👍'), list.unreact(1, '👍')];
  await Promise.all(all);
  await new Promise((resolve) => setTimeout(resolve, 100));
  expect(changing.requests.map(({ type }) => type).filter((type) => /react/.test(type))).toEqual(['react', 'unreact']);
  expect(changing.entries[0]!.who.get('👍')!.size).toBe(0);
  expect(await storage.entries('alice')).toEqual([]);
});

test('edits of a message that another tab discards are rejected', async () => {
  const changing = new ChangingServer();
  changing.answers.send = () => ({ type: 'error', code: 'forbidden', message: 'no' });
  server = changing;
  locks();
  const storage = sharedMemory();
  const tabs = [make(storage, { user: 'alice' }), make(storage, { user: 'alice' })];
  for (const tab of tabs) await tab.connect();
  const [first, second] = tabs.map((tab) => tab.conversation('c')) as [Conversation, Conversation];
  const stored = (count: number) => until(async () => (await storage.entries('alice')).length === count);
  const sending = first.send('refused');
  const { key } = first.messages.at(-1)!;
  await expect(sending).rejects.toMatchObject({ code: 'forbidden' });
  await until(() => second.messages.at(-1)?.key === key);
  const edits = [second.edit(key, 'a'), second.edit(key, 'ab')];
  const rejected = edits.map((edit) => expect(edit).rejects.toMatchObject({ code: 'closed', message: 'discarded' }));
  await stored(3);
  await until(() => first.messages.at(-1)!.body === 'ab');
  first.discard(key);
  await Promise.all(rejected);
  await stored(0);
  expect(second.messages).toEqual([]);
});
