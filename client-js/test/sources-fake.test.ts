/** Functions of an application that return what they should not. */
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { ChatClient, type ChatError, type ChatOptions, memoryStorage, type OutboxStorage } from '../src/index.js';
import { FakeServer } from './support/fake-server.js';
import { until } from './support/gateway.js';
import { expectNoRejections, noteRejections } from './support/rejections.js';

let server: FakeServer;
const made: ChatClient[] = [];
const make = (options: Partial<ChatOptions> = {}, url: ConstructorParameters<typeof ChatClient>[0] = 'ws://fake') => {
  const client = new ChatClient(url, { token: 't', WebSocket: server.WebSocket, storage: memoryStorage(), ...options });
  made.push(client);
  return client;
};
const waiting = async (client: ChatClient) =>
  (await until(() => client.state.at === 'waiting' && (client.state.error as ChatError))) as ChatError;

beforeEach(() => {
  server = new FakeServer();
  noteRejections();
  // The client tries again at once.
  vi.spyOn(Math, 'random').mockReturnValue(0.2);
});
afterEach(async () => {
  for (const client of made.splice(0)) client.disconnect();
  await expectNoRejections();
  vi.restoreAllMocks();
});

test.each([
  ['undefined', undefined],
  ['null', null],
  ['an object', { error: 'unavailable' }],
  ['an empty text', ''],
])('a token that is %s is asked for again, with a reason', async (_, bad) => {
  const given: unknown[] = [bad, 't'];
  const client = make({ token: () => given.shift() as string });
  const connected = client.connect();
  expect(await waiting(client)).toMatchObject({ code: 'unreachable', message: expect.stringMatching(/^token\(\) gave no text: /) });
  await connected;
  expect(server.received('connect').map(({ token }) => token)).toEqual(['t']);
});

test.each([
  ['undefined', undefined],
  ['no URL', 'http://'],
])('a URL that is %s is asked for again, with a reason', async (_, bad) => {
  const given: unknown[] = [bad, 'ws://fake'];
  const client = make({}, () => given.shift() as string);
  const connected = client.connect();
  expect(await waiting(client)).toMatchObject({ code: 'unreachable', message: expect.stringMatching(/url\(\) gave|Invalid URL/) });
  await connected;
});

test('a storage whose methods return no promises works, and entries that are none are left out', async () => {
  server.answers.send = ({ body }) => ({ type: 'sent', seq: body === 'kept' ? 1 : 2, message_id: 'm', at: 1, duplicate: false });
  const entries = new Map<string, unknown>([['null', null]]);
  entries.set('a', { clientId: 'a', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: 'kept', at: Date.now() });
  const storage = {
    shared: false,
    entries: () => [...entries.values()],
    put: (entry: { clientId: string }) => void entries.set(entry.clientId, entry),
    remove: (clientId: string) => void entries.delete(clientId),
    get: () => null,
    set: () => {},
  } as unknown as OutboxStorage;
  const errors: Error[] = [];
  const client = make({ storage });
  client.on('error', (error) => errors.push(error));
  await client.connect();
  await client.conversation('c').send('new');
  await until(() => entries.size === 1);
  expect(server.received('send').map(({ body }) => body)).toEqual(['kept', 'new']);
  await client.registerPush({ provider: 'fcm', token: 't' });
  await client.logout();
  expect(errors).toEqual([]);
});

test('a logger that fails, at once or later, stops nothing', async () => {
  const fail = () => {
    throw new Error('no log');
  };
  await make({ logger: { debug: fail } }).connect();
  await make({ logger: { debug: async () => fail() } }).connect();
});
