/** Storages that fail, or die without saying so. */
import 'fake-indexeddb/auto';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { ChatClient, type ChatOptions, indexedDbStorage, memoryStorage, type OutboxStorage } from '../src/index.js';
import { FakeServer } from './support/fake-server.js';
import { until } from './support/gateway.js';

let server: FakeServer;
const made: ChatClient[] = [];
/** Returns a client of alice that has no connection yet. */
const make = (storage: OutboxStorage, options: Partial<ChatOptions> = {}) => {
  const client = new ChatClient('ws://fake', { token: 't', user: 'alice', WebSocket: server.WebSocket, storage, ...options });
  made.push(client);
  return client;
};
const offline = () => Promise.reject(new Error('offline'));

beforeEach(() => {
  server = new FakeServer();
  let seq = 0;
  server.answers.send = () => ({ type: 'sent', seq: ++seq, message_id: 'm', at: 1, duplicate: false });
});
afterEach(() => {
  for (const client of made.splice(0)) client.disconnect();
  vi.useRealTimers();
  vi.restoreAllMocks();
});

/** Returns the databases that were opened since. */
function databases(): IDBDatabase[] {
  const opened: IDBDatabase[] = [];
  const open = indexedDB.open.bind(indexedDB);
  vi.spyOn(indexedDB, 'open').mockImplementation((name, version) => {
    const request = open(name, version);
    request.addEventListener('success', () => opened.push(request.result));
    return request;
  });
  return opened;
}

test('messages written after the browser dropped the database without an event are sent after a reload', async () => {
  const opened = databases();
  const before = make(indexedDbStorage('dropped'), { token: offline });
  void before.connect();
  void before.conversation('c').send('before');
  const stored = async () => (await indexedDbStorage('dropped').entries('alice')).map(({ body }) => body);
  await until(async () => (await stored()).length === 1);
  // `transaction()` throws from now on, and no `close` event comes.
  opened[0]!.close();
  for (const body of ['one', 'two']) void before.conversation('c').send(body);
  await until(async () => (await stored()).length === 3);
  before.disconnect();
  await make(indexedDbStorage('dropped')).connect();
  await until(() => server.received('send').length === 3);
  expect(server.received('send').map(({ body }) => body)).toEqual(['before', 'one', 'two']);
});

test('a database that never opens is opened again', async () => {
  const open = indexedDB.open.bind(indexedDB);
  vi.spyOn(indexedDB, 'open')
    .mockImplementationOnce(() => ({}) as IDBOpenDBRequest)
    .mockImplementation(open);
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
  const storage = indexedDbStorage('hangs');
  const entry = { clientId: 'a', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: 'one', at: 1 };
  const put = storage.put(entry);
  const refused = expect(put).rejects.toMatchObject({ code: 'timeout' });
  await vi.waitFor(() => expect(indexedDB.open).toHaveBeenCalled());
  await vi.advanceTimersByTimeAsync(4_000);
  await refused;
  vi.useRealTimers();
  await storage.put(entry);
  expect(await storage.entries('alice')).toEqual([entry]);
});

test('a database that opens too late is closed', async () => {
  const request = { result: { close: vi.fn() } } as unknown as IDBOpenDBRequest;
  vi.spyOn(indexedDB, 'open').mockReturnValue(request);
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
  const refused = expect(indexedDbStorage('late').entries('alice')).rejects.toMatchObject({ code: 'timeout' });
  await vi.waitFor(() => expect(indexedDB.open).toHaveBeenCalled());
  await vi.advanceTimersByTimeAsync(4_000);
  await refused;
  request.onsuccess!({} as Event);
  expect(request.result.close).toHaveBeenCalledOnce();
});

test('a connection that WebKit lost is made anew', async () => {
  const storage = indexedDbStorage('webkit');
  expect(await storage.entries('alice')).toEqual([]);
  const lost = () => {
    throw new DOMException('Connection to Indexed Database server lost. Refresh the page to try again', 'UnknownError');
  };
  vi.spyOn(IDBDatabase.prototype, 'transaction').mockImplementationOnce(lost);
  const entry = { clientId: 'a', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: 'one', at: 1 };
  await storage.put(entry);
  expect(await storage.entries('alice')).toEqual([entry]);
});

test('what was stored before is sent on the same connection, once the storage answers', async () => {
  const memory = memoryStorage();
  await memory.put({ clientId: 'a', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: 'before', at: Date.now() });
  let isAway = true;
  const client = make({ ...memory, entries: (user) => (isAway ? Promise.reject(new Error('no database')) : memory.entries(user)) });
  const errors: string[] = [];
  client.on('error', ({ message }) => errors.push(message));
  await client.connect();
  await until(() => errors.length);
  isAway = false;
  await until(() => server.received('send').length);
  expect(server.received('send')[0]).toMatchObject({ body: 'before' });
  expect(server.sockets).toHaveLength(1);
});

test('a message that the storage refused is stored as soon as it accepts one, and one error is reported', async () => {
  const memory = memoryStorage();
  let isFull = true;
  const put: OutboxStorage['put'] = async (entry) => (isFull ? Promise.reject(new Error('no disk')) : memory.put(entry));
  const errors: string[] = [];
  const client = make({ ...memory, put }, { token: offline });
  client.on('error', ({ message }) => errors.push(message));
  void client.connect();
  for (const body of ['one', 'two']) void client.conversation('c').send(body);
  await until(() => errors.length);
  isFull = false;
  await until(async () => (await memory.entries('alice')).length === 2);
  expect(errors).toEqual(['no disk']);
});

test('a direct chat that was written to without a connection has its name after a reload', async () => {
  const storage = memoryStorage();
  const before = make(storage, { token: offline });
  void before.connect();
  const dm = await before.dm('bob');
  expect(dm.name).toBe('bob');
  void dm.send('one');
  await until(async () => (await storage.entries('alice')).length);
  before.disconnect();
  const later = make(storage, { token: offline });
  void later.connect();
  await until(() => later.conversation(dm.id).messages.length === 1);
  expect(later.conversation(dm.id).name).toBe('bob');
});
