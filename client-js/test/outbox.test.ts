/** Messages that are written without a network or in a tab that is then closed are stored once and in order. */
import 'fake-indexeddb/auto';
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import { ChatClient, indexedDbStorage, memoryStorage, type OutboxStorage } from '../src/index.js';
import { BadNetwork } from './support/bad-network.js';
import { FakeServer } from './support/fake-server.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';

let gateway: Gateway;
beforeAll(async () => {
  gateway = await new Gateway().start();
});
afterEach(disconnectAll);
afterAll(() => gateway.close());

const texts = async (client: ChatClient, id: string) => {
  const found: string[] = [];
  for await (const page of client.conversation(id).pages())
    found.unshift(...page.filter(({ kind }) => kind === 'text').map(({ body }) => body));
  return found;
};

describe.each([
  ['in memory', memoryStorage],
  ['in IndexedDB', () => indexedDbStorage('test')],
])('%s', (_, make) => {
  test('a message written without a connection is shown at once and sent later', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const proxy = new BadNetwork(gateway.address);
    const alice = await gateway.connect(a, { storage: make() }, await proxy.start());
    const dm = await alice.dm(b);
    dm.open();
    await dm.whenLoaded();
    proxy.mode = 'refused';
    await until(() => alice.state.at === 'waiting');
    const sent = [dm.send('one'), dm.send('two'), dm.send('three')];
    expect(dm.messages.map(({ body, state }) => [body, state])).toEqual([
      ['one', 'sending'],
      ['two', 'sending'],
      ['three', 'sending'],
    ]);
    const keys = dm.messages.map(({ key }) => key);
    proxy.mode = 'open';
    expect((await Promise.all(sent)).map(({ seq }) => seq)).toEqual([1, 2, 3]);
    await until(() => dm.messages.every(({ seq }) => seq));
    expect(dm.messages.map(({ key }) => key)).toEqual(keys);
    expect(await texts(alice, dm.id)).toEqual(['one', 'two', 'three']);
    proxy.close();
  });

  test('messages survive the client', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const storage = make();
    const first = await gateway.connect(a, { storage });
    const { id } = await first.dm(b);
    await first.conversation(id).send('zero');
    first.disconnect();
    // This client writes before its first connection, and is closed without one.
    const offline = gateway.client(a, { storage, user: a, token: () => Promise.reject(new Error('no network')) });
    offline.connect().catch(() => {});
    const lost = ['one', 'two'].map((body) => offline.conversation(id).send(body));
    await until(async () => (await storage.entries(a)).length === 2);
    offline.disconnect();
    await expect(lost[0]).rejects.toMatchObject({ code: 'closed' });

    const again = gateway.client(a, { storage, user: a });
    await again.connect();
    await again.conversation(id).send('three');
    expect(await texts(again, id)).toEqual(['zero', 'one', 'two', 'three']);
    await until(async () => (await storage.entries(a)).length === 0);
  });
});

test('a message whose answer was lost is sent again and stored once', async () => {
  const server = new FakeServer();
  const stored = new Map<string, number>();
  const calls: boolean[] = [];
  server.answers.send = ({ client_id, retry }) => {
    calls.push(retry === true);
    const duplicate = stored.has(client_id as string);
    if (!duplicate) stored.set(client_id as string, stored.size + 1);
    // The message is stored, and the connection breaks before the answer.
    if (!duplicate && stored.size % 2) return void server.socket.end(1006);
    return { type: 'sent', seq: stored.get(client_id as string), message_id: 'm', at: 1, duplicate };
  };
  const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket, storage: memoryStorage() });
  await client.connect();
  const conversation = client.conversation('c');
  const all = await Promise.all(['a', 'b', 'c', 'd'].map((body) => conversation.send(body)));
  expect(all.map(({ seq, duplicate }) => [seq, duplicate])).toEqual([
    [1, true],
    [2, false],
    [3, true],
    [4, false],
  ]);
  expect(calls).toEqual([false, true, false, false, true, false]);
  client.disconnect();
});

test('`unavailable` and `rate_limited` are retried, and no message overtakes another', async () => {
  const server = new FakeServer();
  const order: string[] = [];
  let refusals = 0;
  server.answers.send = ({ body }) => {
    if (refusals++ < 3)
      return { type: 'error', code: refusals === 2 ? 'rate_limited' : 'unavailable', message: 'not now', retry_after_ms: 5 };
    order.push(body as string);
    return { type: 'sent', seq: order.length, message_id: 'm', at: 1, duplicate: false };
  };
  const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket, storage: memoryStorage() });
  await client.connect();
  await Promise.all(['a', 'b', 'c'].map((body) => client.conversation('c').send(body)));
  expect(order).toEqual(['a', 'b', 'c']);
  expect(
    server
      .received('send')
      .slice(0, 4)
      .every(({ body }) => body === 'a'),
  ).toBe(true);
  client.disconnect();
});

test('a message that is refused for good can be retried or discarded, and delays no other', async () => {
  const [alice, bob] = [await gateway.connect(user('alice')), await gateway.connect(user('bob'))];
  const group = await bob.createGroup({ name: 'G', participants: [alice.user!] });
  const hers = alice.conversation(group.id);
  hers.open();
  await hers.whenLoaded();
  await group.remove(alice.user!);
  await until(() => hers.removed);
  const [first, second] = [hers.send('one'), hers.send('two')];
  await expect(first).rejects.toMatchObject({ code: 'forbidden' });
  await expect(second).rejects.toMatchObject({ code: 'forbidden' });
  const failed = hers.messages.filter(({ state }) => state === 'failed');
  expect(failed.map(({ body, error }) => [body, error!.code])).toEqual([
    ['one', 'forbidden'],
    ['two', 'forbidden'],
  ]);
  await group.add(alice.user!);
  hers.discard(failed[0]!.key);
  hers.retry(failed[1]!.key);
  await until(() => hers.messages.some(({ body, seq }) => body === 'two' && seq));
  expect(await texts(bob, group.id)).toEqual(['two']);
  const tooLong = hers.send('x'.repeat(20_000));
  await expect(tooLong).rejects.toMatchObject({ code: 'too_large' });
  await hers.send('three');
});

test('two clients with one storage send each message once', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const storage = indexedDbStorage('tabs');
  const tabs = [await gateway.connect(a, { storage }), await gateway.connect(a, { storage })] as const;
  const { id } = await tabs[0].dm(b);
  const sent: Promise<unknown>[] = [];
  for (let i = 0; i < 20; i++) for (const tab of tabs) sent.push(tab.conversation(id).send(`${i}`));
  await Promise.all(sent);
  const found = await texts(tabs[0], id);
  expect(found).toHaveLength(40);
  await until(async () => (await storage.entries(a)).length === 0);
});

test('a message that is acknowledged while the storage is being read is not sent again', async () => {
  const server = new FakeServer();
  server.answers.send = () => undefined;
  const memory = memoryStorage();
  const reads: (() => void)[] = [];
  let slow = false;
  const storage: OutboxStorage = {
    ...memory,
    shared: true,
    entries: async (name) => {
      const entries = await memory.entries(name);
      if (slow) await new Promise<void>((end) => reads.push(end));
      return entries;
    },
  };
  const options = { user: 'alice', WebSocket: server.WebSocket, storage };
  const client = new ChatClient('ws://fake', { ...options, token: 't' });
  await client.connect();
  const otherTab = new ChatClient('ws://fake', { ...options, token: () => Promise.reject(new Error('no network')) });
  otherTab.connect().catch(() => {});
  void client.conversation('c').send('one');
  await until(() => server.received('send').length);

  slow = true;
  void otherTab.conversation('d').send('of the other tab');
  await until(() => reads.length);
  const { id, client_id } = server.received('send')[0]!;
  const stored = { seq: 1, message_id: 'm', at: 1 };
  server.socket.say({ type: 'sent', id, ...stored, duplicate: false });
  server.socket.say({ type: 'message', conversation: 'c', sender: 'alice', client_id, kind: 'text', body: 'one', ...stored });
  await until(async () => (await memory.entries('alice')).length === 1);
  slow = false;
  for (const end of reads) end();
  await until(() => server.received('send').some(({ conversation }) => conversation === 'd'));
  expect(server.received('send').map(({ body }) => body)).toEqual(['one', 'of the other tab']);
  client.disconnect();
  otherTab.disconnect();
});

test('the outbox is bounded', async () => {
  const client = new ChatClient('ws://fake', { token: 't', WebSocket: new FakeServer().WebSocket, storage: memoryStorage() });
  const conversation = client.conversation('c');
  for (let i = 0; i < 1000; i++) void conversation.send(`${i}`);
  await expect(conversation.send('one more')).rejects.toMatchObject({ code: 'too_large' });
  client.disconnect();
});

test('a storage that fails loses nothing of this tab', async () => {
  const broken: OutboxStorage = {
    shared: false,
    entries: () => Promise.reject(new Error('no disk')),
    put: () => Promise.reject(new Error('no disk')),
    remove: () => Promise.reject(new Error('no disk')),
  };
  const alice = await gateway.connect(user('alice'), { storage: broken });
  const errors: Error[] = [];
  alice.on('error', (error) => errors.push(error));
  const dm = await alice.dm(user('bob'));
  expect((await dm.send('still sent')).seq).toBe(1);
  await until(() => errors.length);
});
