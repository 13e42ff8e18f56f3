/** Every wait has a time limit, and a client that ended leaves no work behind. The tests move a fake clock. */
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { Connection } from '../src/connection.js';
import { ChatClient, type ChatOptions, memoryStorage } from '../src/index.js';
import { FakeServer } from './support/fake-server.js';

let server: FakeServer;
const made: ChatClient[] = [];
const make = (options: Partial<ChatOptions> = {}, url: string | (() => Promise<string>) = 'ws://fake') => {
  const client = new ChatClient(url, { token: 't', WebSocket: server.WebSocket, storage: memoryStorage(), ...options });
  made.push(client);
  return client;
};
const never = () => new Promise<never>(() => {});

beforeEach(() => {
  vi.useFakeTimers();
  vi.spyOn(Math, 'random').mockReturnValue(1);
  server = new FakeServer();
});
afterEach(() => {
  for (const client of made.splice(0)) client.disconnect();
  vi.useRealTimers();
  vi.restoreAllMocks();
});

test('a gateway that repeatedly closes with 1012 at once is not reconnected to without a pause', async () => {
  const client = make();
  client.on('state', ({ at }) => at === 'connected' && server.sockets.length < 100 && server.socket.end(1012));
  void client.connect();
  await vi.advanceTimersByTimeAsync(10_000);
  expect(server.sockets.length).toBeLessThan(8);
  expect(server.sockets.length).toBeGreaterThan(3);
});

test('a frame that cannot be read is no reason to reconnect without a pause', async () => {
  const client = make();
  client.on('state', ({ at }) => at === 'connected' && server.sockets.length < 100 && server.socket.onmessage!({ data: '{' }));
  void client.connect();
  await vi.advanceTimersByTimeAsync(10_000);
  expect(server.sockets.length).toBeLessThan(8);
  expect(server.sockets.length).toBeGreaterThan(3);
});

test('logout() discards the result of a running token()', async () => {
  const give: ((token: string) => void)[] = [];
  const client = make({ token: () => new Promise<string>((resolve) => give.push(resolve)) });
  void client.connect();
  await vi.advanceTimersByTimeAsync(0);
  await client.logout();
  give[0]!('of the user who left');
  await vi.advanceTimersByTimeAsync(0);
  const connected = client.connect();
  await vi.advanceTimersByTimeAsync(0);
  give[1]!('another');
  await connected;
  expect(server.received('connect')).toMatchObject([{ token: 'another' }]);
});

test('url() has a time limit', async () => {
  const client = make({}, never);
  void client.connect();
  await vi.advanceTimersByTimeAsync(30_100);
  expect(client.state).toMatchObject({ at: 'waiting', error: { code: 'unreachable' } });
});

test('url() has a time limit for uploads, too', async () => {
  const give = vi.fn<() => Promise<string> | string>(() => 'ws://fake');
  await make({}, async () => give()).connect();
  vi.stubGlobal('fetch', () => Promise.resolve(new Response(null, { status: 400 })));
  give.mockImplementation(never);
  const file = made[0]!.conversation('c').attach(new Blob(['x']));
  const refused = expect(file.done).rejects.toMatchObject({ code: 'bad_request' });
  await vi.waitFor(() => expect(give).toHaveBeenCalledTimes(2));
  give.mockImplementation(() => 'ws://fake');
  // Another attempt follows.
  await vi.advanceTimersByTimeAsync(32_000);
  await refused;
  vi.unstubAllGlobals();
});

test('loading the codec has a time limit', async () => {
  const connection = new Connection({
    url: () => 'ws://fake',
    codec: never,
    token: () => 't',
    WebSocket: server.WebSocket as typeof WebSocket,
    device: undefined,
    cursors: () => ({}),
    connected: () => undefined,
    changed: () => {},
    event: () => {},
  });
  connection.step({ on: 'connect' });
  await vi.advanceTimersByTimeAsync(30_100);
  expect(connection.state).toMatchObject({ at: 'waiting', error: { code: 'unreachable' } });
  connection.step({ on: 'disconnect' });
});

test('logout() has a time limit, and closes the outbox even then', async () => {
  const client = make({ storage: { ...memoryStorage(), put: never, entries: never } });
  void client.connect();
  await vi.advanceTimersByTimeAsync(6_000);
  const sent = expect(client.conversation('c').send('one')).rejects.toMatchObject({ code: 'closed' });
  const left = expect(client.logout()).rejects.toThrow('no answer');
  await vi.advanceTimersByTimeAsync(6_000);
  await left;
  await sent;
});

test('the rate limit uses a monotonic clock', async () => {
  server.changes = { limits: { requests_per_second: 100, requests_burst: 20 } };
  const client = make();
  await client.connect();
  const all = () => Promise.all(Array.from({ length: 30 }, () => client.request({ type: 'public' })));
  const before = all();
  await vi.advanceTimersByTimeAsync(1_000);
  await before;
  vi.setSystemTime(Date.now() - 3_600_000);
  const after = all();
  await vi.advanceTimersByTimeAsync(1_000);
  await after;
});

test('a failed load of the inbox is not retried after disconnect()', async () => {
  server.answers.inbox = () => ({ type: 'error', code: 'internal', message: 'broken' });
  const client = make();
  await client.connect();
  await vi.advanceTimersByTimeAsync(0);
  expect(client.inbox.error).toBeDefined();
  client.disconnect();
  expect(vi.getTimerCount()).toBe(0);
});

const message = (seq: number) => ({
  seq,
  message_id: `m${seq}`,
  client_id: `c${seq}`,
  sender: 'bob',
  kind: 'text',
  body: `${seq}`,
  at: seq,
});
const page = (...seqs: number[]) => ({
  type: 'history',
  messages: seqs.map((seq) => ({ conversation: 'c', ...message(seq) })),
  rev: 0,
  head: seqs.at(-1),
});

test('a list that could not restart after a resync is retried', async () => {
  server.answers.history = () => page(1, 2);
  const client = make();
  await client.connect();
  const list = client.conversation('c');
  list.open();
  await list.whenLoaded();
  server.answers.history = () => undefined;
  server.socket.say({ type: 'resync', conversation: 'c', head: 5_000 });
  await vi.advanceTimersByTimeAsync(15_500);
  expect(list.error).toMatchObject({ code: 'timeout' });
  server.answers.history = () => page(4_999, 5_000);
  await vi.advanceTimersByTimeAsync(30_000);
  expect(list.messages.map(({ seq }) => seq)).toEqual([4_999, 5_000]);
  expect([list.atEnd, list.error]).toEqual([true, undefined]);
});

test('a list that is not open any more is not retried', async () => {
  server.answers.history = () => undefined;
  const client = make();
  await client.connect();
  const list = client.conversation('c');
  const close = list.open();
  // Five attempts: the next one would come after 8 s.
  for (let i = 0; i < 5; i++) await vi.advanceTimersByTimeAsync(15_000 + 500 * 2 ** i - 10);
  const tried = server.received('history').length;
  close();
  await vi.advanceTimersByTimeAsync(60_000);
  expect(server.received('history').length).toBeLessThanOrEqual(tried + 1);
});
