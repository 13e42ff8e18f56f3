/** The work that lists, the inbox and watermarks cause, counted with a fake gateway. */
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { afterEach, expect, test, vi } from 'vitest';
import { ChatClient, UnauthorizedError } from '../src/index.js';
import { Timeline } from '../src/timeline.js';
import { FakeServer } from './support/fake-server.js';
import { disconnectAll, until } from './support/gateway.js';

const message = (conversation: string, seq: number, sender = 'bob') => ({
  ...{ type: 'message', conversation, seq, message_id: `m${seq}`, client_id: `${conversation}${seq}`, sender },
  ...{ kind: 'text', body: `${seq}`, at: seq },
});
const item = (conversation: string, last_seq: number, more: object = {}) => ({
  ...{ conversation, kind: 'group', name: conversation, last_seq, rev: 0, last_message: null, read_seq: 0, unread: last_seq },
  ...{ joined_seq: 1, ...more },
});
const settled = () => new Promise((resolve) => setTimeout(resolve, 60));

const clients: ChatClient[] = [];
afterEach(() => {
  disconnectAll();
  for (const client of clients.splice(0)) client.disconnect();
});
async function connect(server: FakeServer, options = {}): Promise<ChatClient> {
  server.answers.conversation ??= ({ conversation }) => ({
    type: 'conversation',
    conversation,
    kind: 'group',
    participant_count: 2,
    role: 'member',
  });
  server.answers.participants ??= () => ({ type: 'participants', items: [] });
  const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket, ...options });
  clients.push(client);
  await client.connect();
  return client;
}
/** Makes the server answer `history` from a log of this length. */
function log(server: FakeServer, conversation: string, head: () => number): void {
  server.answers.history = ({ before, after, limit }) => {
    const from = after === undefined ? Math.max(1, ((before as number) ?? head() + 1) - (limit as number)) : (after as number) + 1;
    const to = Math.min(before === undefined ? head() : (before as number) - 1, from + (limit as number) - 1);
    const messages = Array.from({ length: Math.max(0, to - from + 1) }, (_, i) => message(conversation, from + i));
    return { type: 'history', messages, rev: 0, head: head() };
  };
}

test('a subscriber loads the inbox once or twice, however many messages come', async () => {
  const server = new FakeServer();
  await connect(server);
  await settled();
  const before = server.received('inbox').length;
  for (let seq = 1; seq <= 400; seq++) {
    server.socket.say(message('c', seq));
    if (seq % 100 === 0) await settled();
  }
  expect(server.received('inbox').length - before).toBeLessThanOrEqual(2);
});

test('read() in a `change` handler ends, and without a change there is no event', async () => {
  const server = new FakeServer();
  server.answers.inbox = () => ({ type: 'inbox', items: [item('c', 5)] });
  const client = await connect(server);
  await until(() => client.inbox.loaded);
  let changes = 0;
  client.inbox.on('change', (items) => {
    changes++;
    for (const { conversation } of items) client.conversation(conversation).read();
  });
  for (let seq = 6; seq <= 10; seq++) server.socket.say(message('c', seq));
  // On a busy machine the last change may be told late.
  for (let before = -1; changes !== before; await settled()) before = changes;
  expect(client.conversation('c').unread).toBe(0);
  expect(changes).toBeLessThanOrEqual(3);
  changes = 0;
  client.conversation('c').read();
  await client.inbox.refresh({ all: true });
  await settled();
  expect(changes).toBe(0);
});

test('a failed first load of the inbox is shown and retried', async () => {
  const server = new FakeServer();
  let failures = 2;
  server.answers.inbox = () =>
    failures-- > 0 ? { type: 'error', code: 'internal', message: 'broken' } : { type: 'inbox', items: [item('c', 1)] };
  const client = await connect(server);
  await until(() => client.inbox.error);
  expect(client.inbox.error).toMatchObject({ code: 'internal' });
  await until(() => client.inbox.loaded && !client.inbox.error);
  expect(client.inbox.items).toHaveLength(1);
});

test.each([
  ['disconnected', 'closed', (client: ChatClient) => client.disconnect()],
  ['refused', 'unauthorized', (_: ChatClient, server: FakeServer) => server.socket.end(4501)],
])('a client that is %s does not wait for the inbox, and does not ask for it again', async (_, code, end) => {
  const server = new FakeServer();
  server.answers.inbox = () => undefined;
  const token = ({ reason }: { reason: string }) => (reason === 'initial' ? 't' : Promise.reject(new UnauthorizedError()));
  const client = await connect(server, { token });
  const early = client.inbox.whenLoaded();
  const shown: unknown[] = [];
  client.inbox.on('change', () => shown.push(client.inbox.error?.code));
  vi.spyOn(Math, 'random').mockReturnValue(0);
  try {
    end(client, server);
    await expect(early).rejects.toMatchObject({ code });
    await expect(client.inbox.whenLoaded()).rejects.toMatchObject({ code });
    const list = client.conversation('c');
    list.open();
    await expect(list.whenLoaded()).rejects.toMatchObject({ code });
    await settled();
    // Each attempt would show its error.
    expect(shown.length).toBeLessThanOrEqual(1);
  } finally {
    vi.restoreAllMocks();
  }
  // It can connect again.
  server.answers.inbox = () => ({ type: 'inbox', items: [item('c', 1)] });
  await client.connect();
  expect((await client.inbox.whenLoaded()).items).toHaveLength(1);
});

test('a new name of a conversation is taken from a page of the inbox that a message overtook', async () => {
  const server = new FakeServer();
  let items = [item('c', 5)];
  server.answers.inbox = () => ({ type: 'inbox', items });
  const client = await connect(server);
  await until(() => client.inbox.loaded);
  items = [item('c', 6, { name: 'renamed' })];
  for (const seq of [6, 7]) server.socket.say(message('c', seq));
  await client.inbox.refresh();
  expect(client.inbox.get('c')).toMatchObject({ name: 'renamed', lastSeq: 7, lastMessage: { seq: 7 }, unread: 7 });
});

test('watermarks are sent one at a time, and a failed one is retried without a flood', async () => {
  const server = new FakeServer();
  const ids = Array.from({ length: 150 }, (_, i) => `c${i}`);
  server.answers.inbox = () => ({ type: 'inbox', items: ids.map((id) => item(id, 3)) });
  let refusals = 3;
  const told: string[] = [];
  server.answers.delivered = ({ conversation }) => {
    if (refusals-- > 0) return { type: 'error', code: 'rate_limited', message: 'slow down', retry_after_ms: 5 };
    told.push(conversation as string);
    return { type: 'ok' };
  };
  await connect(server);
  await until(() => told.length >= 150);
  await settled();
  expect(told.sort()).toEqual(ids.sort());
  expect(server.received('delivered')).toHaveLength(153);
});

test('of many watermarks those of the newest messages are sent first, and one that is refused delays no other', async () => {
  const server = new FakeServer();
  const last = (at: number) => ({ last_message: { seq: 3, message_id: 'm', at, sender: 'bob', kind: 'text', preview: 'x' } });
  server.answers.inbox = () => ({ type: 'inbox', items: [10, 30, 20].map((at) => item(`c${at}`, 3, last(at))) });
  const told: string[] = [];
  server.answers.delivered = ({ conversation }) => {
    if (conversation === 'c20') return { type: 'error', code: 'unavailable', message: 'no owner', retry_after_ms: 600_000 };
    // Messages come while others wait.
    if (!told.length) server.socket.say({ ...message('c10', 4), at: 40 });
    told.push(conversation as string);
    return { type: 'ok' };
  };
  await connect(server);
  await until(() => told.length >= 2);
  await until(() => server.received('delivered').length >= 3);
  expect(server.received('delivered').map(({ conversation }) => conversation)).toEqual(['c30', 'c10', 'c20']);
});

test('an acknowledged message has the time of the gateway and no field of the outbox', async () => {
  const server = new FakeServer();
  log(server, 'c', () => 0);
  server.answers.send = () => ({ type: 'sent', seq: 1, message_id: 'm', at: 42, duplicate: false });
  const client = await connect(server);
  const list = client.conversation('c');
  list.open();
  await list.whenLoaded();
  await list.send('hello');
  const [shown] = list.messages;
  expect(shown).toMatchObject({ body: 'hello', at: 42, seq: 1, state: 'sent', sender: 'alice' });
  for (const name of ['tried', 'unsaved', 'waiting', 'sent', 'failed', 'user']) expect(shown).not.toHaveProperty(name);
});

test('10,000 messages cause few changes of a list, and little work each', async () => {
  const server = new FakeServer();
  let head = 300;
  log(server, 'c', () => head);
  const client = await connect(server);
  const list = client.conversation('c');
  list.open();
  await list.whenLoaded();
  let changes = 0;
  list.on('change', () => changes++);
  await settled();
  changes = 0;
  while (head < 10_300) server.socket.say(message('c', ++head));
  expect(changes).toBe(0);
  const before = list.messages;
  server.socket.say(message('c', ++head));
  expect(list.messages.slice(0, -1).every((shown, i) => shown === before[i + 1 - (list.messages.length - before.length)])).toBe(true);
  await settled();
  expect(changes).toBeLessThanOrEqual(3);
  expect(list.messages.at(-1)?.seq).toBe(10_301);
  expect(list.messages).toHaveLength(300);

  let looks = 0;
  const timeline = new Timeline(300);
  for (let seq = 1; seq <= 10_000; seq++) {
    const entry = {
      get seq() {
        looks++;
        return seq;
      },
    };
    timeline.append([entry]);
  }
  expect(looks).toBeLessThan(10 * 10_000);
});

test('a receipt that comes while the participants are loaded counts, whatever page names its user', async () => {
  const server = new FakeServer();
  server.answers.history = () => ({ type: 'history', messages: [message('c', 1, 'alice')], rev: 0, head: 1 });
  const client = await connect(server);
  const list = client.conversation('c');
  const receipt = (user: string, seqs: object) => server.socket.say({ type: 'receipt', conversation: 'c', user, ...seqs });
  // Both pages were read before the receipts, and come after them. The second time the participants are known.
  server.answers.participants = ({ after }) => {
    if (after) receipt('bob', { delivered_seq: 1, read_seq: 1 });
    else receipt('carol', { delivered_seq: 1 });
    const items = [{ user: after ? 'carol' : 'bob', role: 'member', delivered_seq: 0, read_seq: 0 }];
    return { type: 'participants', items, ...(!after && { next: 'bob' }) };
  };
  list.open();
  await list.whenLoaded();
  await until(() => server.received('participants').length === 2);
  await settled();
  expect(list.messages[0]).toMatchObject({ seq: 1, state: 'delivered' });
  server.answers.participants = () => {
    receipt('carol', { read_seq: 1 });
    return { type: 'participants', items: ['bob', 'carol'].map((user) => ({ user, role: 'member', delivered_seq: 1, read_seq: 0 })) };
  };
  server.socket.say({ type: 'conversation', conversation: 'c', change: 'added' });
  await until(() => server.received('participants').length === 3);
  await settled();
  expect(list.messages[0]).toMatchObject({ seq: 1, state: 'read' });
});

test('the window is an option, and a reader of its older half keeps their messages', async () => {
  const server = new FakeServer();
  let head = 200;
  log(server, 'c', () => head);
  const client = await connect(server, { window: 50 });
  const list = client.conversation('c');
  list.open();
  await list.whenLoaded();
  await list.loadOlder(20);
  const first = list.messages[0]!.seq;
  expect(list.messages).toHaveLength(50);
  for (let i = 0; i < 10; i++) server.socket.say(message('c', ++head));
  expect(list.messages[0]!.seq).toBe(first);
  expect(list.atEnd).toBe(false);
  while (!list.atEnd) await list.loadNewer();
  server.socket.say(message('c', ++head));
  expect(list.messages.at(-1)!.seq).toBe(head);
  expect(list.messages).toHaveLength(50);
});

test('a message that comes while the first page is loaded is in the list', async () => {
  const server = new FakeServer();
  log(server, 'c', () => 100);
  const page = server.answers.history!;
  server.answers.history = (request) => {
    // The page was read before these were stored, and its answer comes after them.
    const answer = page(request);
    if (request.after === undefined) for (let seq = 101; seq <= 110; seq++) server.socket.say(message('c', seq));
    return answer;
  };
  const client = await connect(server);
  const list = client.conversation('c');
  list.open();
  await list.whenLoaded();
  expect(list.messages.at(-1)!.seq).toBe(110);
  expect(list.atEnd).toBe(true);
});

/** Makes the server answer `history` around a seq, too. */
function logAround(server: FakeServer, head: () => number): void {
  log(server, 'c', head);
  const page = server.answers.history!;
  server.answers.history = (request) => {
    const { around, limit } = request as unknown as { around?: number; limit: number };
    return page(around === undefined ? request : { ...request, after: Math.max(0, around - limit / 2) });
  };
}

test('a list that is open or still loaded jumps to where it is opened', async () => {
  const server = new FakeServer();
  logAround(server, () => 200);
  const client = await connect(server);
  const list = client.conversation('c');
  // Before the first page came, too.
  const ends = [list.open(), list.open({ at: 50 })];
  await list.whenLoaded();
  expect(list.messages.some(({ seq }) => seq === 50)).toBe(true);
  ends.push(list.open({ at: 100 }));
  await list.whenLoaded();
  expect(list.messages.some(({ seq }) => seq === 100)).toBe(true);
  for (const end of ends) end();
  const asked = server.received('history').length;
  const end = list.open({ at: 20 });
  await list.whenLoaded();
  expect(list.messages.some(({ seq }) => seq === 20)).toBe(true);
  expect(server.received('history')).toHaveLength(asked + 1);
  end();
});

test('a list is where it was opened last, also if that was in one tick', async () => {
  const server = new FakeServer();
  logAround(server, () => 200);
  const client = await connect(server);
  const list = client.conversation('c');
  list.open({ at: 20 })();
  list.open({ at: 100 })();
  await list.whenLoaded();
  await until(() => list.messages.some(({ seq }) => seq === 100));
  const other = client.conversation('d');
  other.open({ at: 20 })();
  other.open();
  await until(() => other.atEnd);
});

test('a list goes on the next connection to where it was opened, if its page failed', async () => {
  const server = new FakeServer();
  logAround(server, () => 200);
  const client = await connect(server);
  const list = client.conversation('c');
  list.open();
  await list.whenLoaded();
  const { history } = server.answers;
  let failures = 0;
  server.answers.history = (request) => (failures++ ? history!(request) : { type: 'error', code: 'internal', message: 'broken' });
  list.open({ at: 50 });
  await until(() => list.error);
  server.socket.end(1006);
  await until(() => list.messages.some(({ seq }) => seq === 50));
  expect(list.error).toBeUndefined();
});

test('a list that is opened again at the message that just came keeps those before it', async () => {
  const server = new FakeServer();
  let head = 200;
  logAround(server, () => head);
  const client = await connect(server);
  const list = client.conversation('c');
  const close = list.open();
  await list.whenLoaded();
  await list.loadOlder(100);
  const [first] = list.messages;
  close();
  head = 201;
  server.socket.say(message('c', 201));
  list.open({ at: 201 });
  await until(() => list.messages.at(-1)?.seq === 201);
  expect(list.messages[0]).toBe(first);
});

test('two components that open a list at one place load it once', async () => {
  const server = new FakeServer();
  log(server, 'c', () => 20);
  const client = await connect(server);
  const list = client.conversation('c');
  list.open({ at: 7 })();
  const ends = [list.open({ at: 7 }), list.open({ at: 7 })];
  await list.whenLoaded();
  await settled();
  expect(server.received('history')).toHaveLength(1);
  for (const end of ends) end();
});

test('a list that is opened again has the messages that came in between', async () => {
  const server = new FakeServer();
  let head = 30;
  log(server, 'c', () => head);
  const client = await connect(server);
  const list = client.conversation('c');
  const close = list.open();
  await list.whenLoaded();
  close();
  server.socket.say(message('c', ++head));
  list.open();
  await list.whenLoaded();
  expect(list.messages.at(-1)!.seq).toBe(31);
  expect(list.atEnd).toBe(true);
});

test('a list that is far behind catches up to the newest message', async () => {
  const server = new FakeServer();
  let head = 30;
  log(server, 'c', () => head);
  const client = await connect(server);
  const list = client.conversation('c');
  list.open();
  await list.whenLoaded();
  server.socket.say({ type: 'conversation', conversation: 'c', change: 'removed' });
  server.socket.say({ type: 'conversation', conversation: 'c', change: 'added' });
  head = 1_000;
  server.socket.say(message('c', head));
  await until(() => list.messages.at(-1)?.seq === 1_000);
  expect(list.messages.map(({ seq }) => seq)).toEqual(Array.from({ length: 300 }, (_, i) => 701 + i));
  expect(list.atEnd).toBe(true);
});

test('a conversation is one object while it is held, and has its properties', async () => {
  const server = new FakeServer();
  server.answers.inbox = () => ({ type: 'inbox', items: [item('c', 2)] });
  const client = await connect(server);
  expect(await client.inbox.whenLoaded()).toBe(client.inbox);
  expect([client.inbox.loaded, client.inbox.items.length]).toEqual([true, 1]);
  const held = client.conversation('c');
  expect(client.conversation('c')).toBe(held);
  expect([held.name, held.kind, held.unread, held.canSend]).toEqual(['c', 'group', 2, true]);
  server.socket.say({ type: 'conversation', conversation: 'c', change: 'removed' });
  expect(held.canSend).toBe(false);
});

test('the inbox is in the order of the ids of its newest entries, not of their times', async () => {
  const server = new FakeServer();
  // The times in these ids rise by 100 ns each, beyond the first and the second part of the id.
  const ids = ['fffffffe-ffff-11f0-8000-000000000001', 'ffffffff-ffff-11f0-8000-000000000000', '00000000-0000-11f1-8000-000000000000'];
  const last = (n: number, at: number) => ({ last_message: { seq: 1, message_id: ids[n], at, sender: 'bob', kind: 'text', preview: 'x' } });
  const fast = 9_000_000_000_000;
  server.answers.inbox = () => ({ type: 'inbox', items: [item('b', 1, last(1, 5)), item('a', 1, last(0, fast))] });
  const client = await connect(server);
  await until(() => client.inbox.loaded);
  const order = () => client.inbox.items.map(({ conversation }) => conversation);
  expect(order()).toEqual(['b', 'a']);
  server.socket.say({ ...message('a', 2), message_id: ids[2], at: 4 });
  await until(() => order()[0] === 'a');
  expect(order()).toEqual(['a', 'b']);
});

test('conversations without a holder are collected', async () => {
  const server = new FakeServer();
  log(server, 'c', () => 30);
  const client = await connect(server);
  setFlagsFromString('--expose-gc');
  const gc: () => void = runInNewContext('gc');
  const COUNT = 2_000;
  const refs: WeakRef<object>[] = [];
  const visit = async (id: string) => {
    const conversation = client.conversation(id);
    refs.push(new WeakRef(conversation));
    const [close, off] = [conversation.open(), conversation.on('change', () => {})];
    await conversation.whenLoaded();
    off();
    return close;
  };
  const closing = [await visit('warm')];
  gc();
  const before = process.memoryUsage().heapUsed;
  for (let i = 0; i < COUNT; i++) closing.push(await visit(`visited ${i}`));
  server.requests.length = 0;
  // A separate function, because a suspended one would keep the last conversation alive.
  const closeAll = () => {
    for (const close of closing.splice(0)) close();
  };
  closeAll();
  await until(() => {
    gc();
    return refs.every((ref) => !ref.deref());
  }, 'all are dropped');
  await settled();
  gc();
  const bytes = (process.memoryUsage().heapUsed - before) / COUNT;
  console.log(`${bytes.toFixed(0)} bytes are kept for each conversation that was opened and closed`);
  const heard = client.conversation('heard').on('message', () => {});
  const ref = new WeakRef(client.conversation('heard'));
  await settled();
  gc();
  expect(ref.deref(), 'somebody listens').toBeDefined();
  heard();
});

test('messages that a page has before their events come are told once, in order', async () => {
  const server = new FakeServer();
  server.answers.inbox = () => ({ type: 'inbox', items: [item('new', 3)] });
  log(server, 'opened', () => 2);
  const chat = await connect(server, { cursors: { known: [2, 0] } });
  const heard: string[] = [];
  chat.on('message', ({ conversation, seq }) => heard.push(`${conversation} ${seq}`));
  await chat.inbox.whenLoaded();
  const opened = chat.conversation('opened');
  opened.open();
  await opened.whenLoaded();
  // An owner that takes over says again what was not settled.
  for (const seq of [2, 3, 2, 3, 4, 3]) server.socket.say(message('new', seq));
  for (const seq of [2, 1, 2]) server.socket.say(message('opened', seq));
  for (const seq of [1, 2, 3]) server.socket.say(message('known', seq));
  expect(heard).toEqual(['new 2', 'new 3', 'new 4', 'opened 2', 'known 3']);
  expect(chat.cursors()).toMatchObject({ new: [4, 0], opened: [2, 0], known: [3, 0] });
  expect(chat.inbox.get('new')).toMatchObject({ lastSeq: 4, unread: 4 });
  expect(opened.messages.map(({ seq }) => seq)).toEqual([1, 2]);
});

test('a message of a page that is said again later is not told', async () => {
  const server = new FakeServer();
  server.answers.inbox = () => ({ type: 'inbox', items: [item('old', 3)] });
  const chat = await connect(server);
  const heard: number[] = [];
  chat.on('message', ({ seq }) => heard.push(seq));
  await chat.inbox.whenLoaded();
  vi.spyOn(performance, 'now').mockReturnValue(performance.now() + 6_000);
  // As by a gateway that repairs what a dead one left.
  for (const seq of [3, 4]) server.socket.say(message('old', seq));
  expect(heard).toEqual([4]);
});

test('a message that is missing between late ones is loaded', async () => {
  const server = new FakeServer();
  server.answers.inbox = () => ({ type: 'inbox', items: [item('new', 4)] });
  log(server, 'new', () => 4);
  const chat = await connect(server);
  const heard: number[] = [];
  chat.on('message', ({ seq }) => heard.push(seq));
  await chat.inbox.whenLoaded();
  for (const seq of [2, 4]) server.socket.say(message('new', seq));
  await until(() => heard.length === 3);
  expect(heard).toEqual([2, 3, 4]);
});
