/** Failures that would lock users out or stay silent, against a real gateway. */
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import WebSocket from 'ws';
import { dmId } from '../src/ids.js';
import { type ChatClient, type ChatError, memoryStorage } from '../src/index.js';
import { BadNetwork } from './support/bad-network.js';
import { disconnectAll, freePort, Gateway, until, user } from './support/gateway.js';

let gateway: Gateway;
beforeAll(async () => {
  gateway = await new Gateway().start();
});
afterEach(disconnectAll);
afterAll(() => gateway.close());

const offline = () => Promise.reject(new Error('offline'));
const reason = (client: ChatClient) => until(() => client.state.at === 'waiting' && client.state.error) as Promise<ChatError>;

test('a request larger than a frame fails alone', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const storage = memoryStorage();
  const alice = await gateway.connect(a, { storage });
  const dm = await alice.dm(b);
  const [session, states] = [alice.session, [] as string[]];
  alice.on('state', ({ at }) => states.push(at));
  const large = [
    dm.send('x'.repeat(70_000)),
    dm.send('\u0001'.repeat(16_000)),
    dm.send('link', { attachments: [{ url: `https://example.org/${'x'.repeat(70_000)}` }] }),
    alice.createGroup({ name: 'x'.repeat(70_000) }),
  ];
  for (const failed of large) await expect(failed).rejects.toMatchObject({ code: 'too_large' });
  expect((await dm.send('small')).seq).toBe(1);
  expect(states).toEqual([]);
  expect(alice.session).toBe(session);
  alice.disconnect();
  // One is written without a connection and sent by a later client.
  const before = gateway.client(a, { storage, user: a, token: offline });
  void before.connect();
  void before.conversation(dm.id).send('y'.repeat(70_000));
  await until(async () => (await storage.entries(a)).some(({ body }) => body[0] === 'y'));
  before.disconnect();
  const after = await gateway.connect(a, { storage });
  expect((await after.conversation(dm.id).send('still')).seq).toBe(2);
  await until(() => after.conversation(dm.id).messages.length >= 4);
  expect(after.conversation(dm.id).messages.every(({ state }) => state === 'failed' || state === 'sent')).toBe(true);
});

test.each([2_000, 5_000])('%i cursors: messages come again after a reconnect', async (count) => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const group = await bob.createGroup({ name: 'G', participants: [a] });
  const made = Array.from({ length: count - 1 }, (_, i) => [`0199c0de-0000-4000-8000-${String(i).padStart(12, '0')}`, [1, 0]]);
  const proxy = new BadNetwork(gateway.address);
  const cursors = Object.fromEntries([...made, [group.id, [1, 0]]]);
  const alice = await gateway.connect(a, { cursors }, await proxy.start());
  expect(Object.keys(alice.cursors()).length).toBeGreaterThan(1_000);
  const heard: string[] = [];
  alice.on('message', ({ body }) => heard.push(body));
  await group.send('one');
  await until(() => heard.includes('one'));
  proxy.mode = 'refused';
  await group.send('two');
  proxy.mode = 'open';
  await until(() => heard.includes('two'));
  expect(alice.state.at).toBe('connected');
  proxy.close();
});

test('the state says why there is no connection', async () => {
  const nobody = gateway.client(user('alice'), {}, `ws://127.0.0.1:${await freePort()}/v1/ws`);
  void nobody.connect();
  expect(await reason(nobody)).toMatchObject({ code: 'unreachable', message: expect.stringContaining('ECONNREFUSED') });
  class FromElsewhere extends WebSocket {
    constructor(url: string, protocol: string) {
      super(url, protocol, { origin: 'https://elsewhere.example' });
    }
  }
  const refused = gateway.client(user('alice'), { WebSocket: FromElsewhere });
  void refused.connect();
  expect(await reason(refused)).toMatchObject({ code: 'unreachable', message: expect.stringMatching(/403.*origin/) });
});

test('a dm can be opened without a connection', async () => {
  for (const [a, b] of [
    [user('alice'), user('bob')],
    [user('zoë'), user('\u{1F600}')],
    [user('\uFF21'), user('\u{1F600}')],
  ] as const) {
    const client = await gateway.connect(a);
    expect(await dmId(a, b)).toBe((await client.dm(b)).id);
  }
  const [a, b] = [user('alice'), user('bob')];
  const alice = gateway.client(a, { user: a });
  const dm = await alice.dm(b);
  const sent = dm.send('hello');
  dm.open();
  await alice.connect();
  expect((await sent).seq).toBe(1);
  await dm.whenLoaded();
});

test('300 dms with unread messages at 50 requests per second: no refusal, no close', async () => {
  const a = user('alice');
  const bobs = Array.from({ length: 300 }, () => user('bob'));
  // Each message is from another user, over one connection after the other.
  for (let i = 0; i < bobs.length; i += 50)
    await Promise.all(
      bobs.slice(i, i + 50).map(async (name) => {
        const bob = await gateway.connect(name);
        await (await bob.dm(a)).send('unread');
        bob.disconnect();
      }),
    );
  await gateway.stop();
  gateway.set({ limits__requests_per_second: '50', limits__requests_burst: '100' });
  await gateway.start();
  const refused: unknown[] = [];
  let delivered = 0;
  class Watching extends WebSocket {
    constructor(url: string, protocol: string) {
      super(url, protocol);
      this.on('message', (data) => String(data).includes('rate_limited') && refused.push(String(data)));
      this.on('close', (code) => code === 4004 && refused.push(code));
    }
    override send(data: never): void {
      if (String(data).includes('"delivered"')) delivered++;
      super.send(data);
    }
  }
  const alice = await gateway.connect(a, { WebSocket: Watching });
  await until(() => delivered > 20);
  const own = await alice.conversation(alice.inbox.items[0]!.conversation).send('mine');
  expect(own.seq).toBe(2);
  expect(delivered, 'own messages go first').toBeLessThan(300);
  await until(() => delivered >= 299);
  await alice.request({ type: 'ping' });
  expect(refused).toEqual([]);
});
