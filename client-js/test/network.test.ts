/** Over bad networks and killed gateways, no message is lost, duplicated or out of order. */
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import type { ChatClient, Conversation, Message } from '../src/index.js';
import { BadNetwork } from './support/bad-network.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';

let gateway: Gateway;
const proxies: BadNetwork[] = [];

beforeAll(async () => {
  gateway = await new Gateway({ session__ping_interval_ms: '500' }).start();
});
afterEach(() => {
  disconnectAll();
  for (const proxy of proxies.splice(0)) proxy.close();
});
afterAll(() => gateway.close());

async function behind(): Promise<{ proxy: BadNetwork; url: string }> {
  const proxy = new BadNetwork(gateway.address);
  proxies.push(proxy);
  return { proxy, url: await proxy.start() };
}

/** Records the `message` events of a client. */
function record(client: ChatClient): Message[] {
  const seen: Message[] = [];
  client.on('message', (message) => seen.push(message));
  return seen;
}

async function pair(): Promise<{ hers: Conversation; his: Conversation; seen: Message[][]; bob: ChatClient; proxy: BadNetwork }> {
  const [a, b] = [user('alice'), user('bob')];
  const { proxy, url } = await behind();
  const [alice, bob] = [await gateway.connect(a), await gateway.connect(b, {}, url)];
  const seen = [record(alice), record(bob)];
  const hers = await alice.createGroup({ name: 'G', participants: [b] });
  await until(() => bob.inbox.get(hers.id));
  const his = bob.conversation(hers.id);
  for (const conversation of [hers, his]) {
    conversation.open();
    await conversation.whenLoaded();
  }
  return { hers, his, seen, bob, proxy };
}

/** Checks that the events and the lists of both clients equal the log. */
async function agree(hers: Conversation, his: Conversation, seen: Message[][], bodies: number): Promise<void> {
  const log: Message[] = [];
  for await (const page of hers.pages({ limit: 200 })) log.unshift(...page);
  expect(log.map(({ seq }) => seq)).toEqual(log.map((_, i) => i + 1));
  const texts = log.filter(({ kind }) => kind === 'text').map(({ body }) => body);
  expect(new Set(texts).size, 'no duplicates').toBe(texts.length);
  expect(texts).toHaveLength(bodies);
  for (const messages of seen) {
    await until(() => messages.at(-1)?.seq === log.length);
    const first = messages[0]!.seq;
    expect(messages.map(({ seq }) => seq)).toEqual(log.slice(first - 1).map(({ seq }) => seq));
    expect(first).toBeLessThanOrEqual(2);
  }
  for (const list of [hers, his]) {
    await until(() => list.messages.at(-1)?.seq === log.length && list.messages.every(({ seq }) => seq));
    expect(list.messages.map(({ key }) => key)).toEqual(log.slice(-list.messages.length).map(({ clientId }) => clientId));
  }
}

test('nothing is lost through cuts, stalls, delays and half-open connections', async () => {
  const { hers, his, seen, bob, proxy } = await pair();
  let sent = 0;
  const trouble = [
    async () => proxy.cut(),
    async () => {
      proxy.mode = 'stalled';
      // Long enough for the client to notice that nothing comes.
      await until(() => bob.state.at !== 'connected');
      proxy.mode = 'open';
      proxy.cut();
    },
    async () => {
      proxy.delay = 30;
    },
    async () => {
      proxy.delay = 0;
      proxy.halfOpen();
      await until(() => bob.state.at !== 'connected');
    },
    async () => {
      proxy.mode = 'refused';
      await until(() => bob.state.at === 'waiting');
      proxy.mode = 'open';
    },
  ];
  for (let round = 0; round < 2; round++) {
    for (const make of trouble) {
      const under: Promise<unknown>[] = [];
      for (let i = 0; i < 10; i++) {
        under.push(hers.send(`hers ${sent++}`), his.send(`his ${sent++}`));
        if (i === 4) await make();
      }
      await Promise.all(under);
    }
  }
  await agree(hers, his, seen, sent);
  // Each sender's messages keep their order.
  const own = his.messages.filter(({ body }) => body.startsWith('his')).map(({ body }) => Number(body.slice(4)));
  expect(own).toEqual([...own].sort((a, b) => a - b));
});

test('nothing is lost through kill -9 of the gateway under load', async () => {
  const { hers, his, seen } = await pair();
  let sent = 0;
  for (let round = 0; round < 4; round++) {
    const under: Promise<unknown>[] = [];
    for (let i = 0; i < 20; i++) under.push(hers.send(`${sent++}`), his.send(`${sent++}`));
    if (round % 2) await under[10];
    await gateway.kill();
    await gateway.start();
    await Promise.all(under);
  }
  await agree(hers, his, seen, sent);
});

test('a drain causes only a reconnect', async () => {
  const { hers, his, seen } = await pair();
  const under: Promise<unknown>[] = [];
  for (let i = 0; i < 20; i++) under.push(hers.send(`a${i}`), his.send(`b${i}`));
  await gateway.stop();
  await gateway.start();
  await Promise.all(under);
  await agree(hers, his, seen, 40);
});

test('a slow network loses nothing, in MessagePack too', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const { proxy, url } = await behind();
  proxy.delay = 20;
  const [alice, bob] = [await gateway.connect(a, { codec: 'msgpack' }, url), await gateway.connect(b)];
  const dm = await alice.dm(b);
  const heard = record(bob);
  await Promise.all(Array.from({ length: 20 }, (_, i) => dm.send(`${i} ✓`)));
  await until(() => heard.length === 20);
  expect(heard.map(({ body }) => body)).toEqual(Array.from({ length: 20 }, (_, i) => `${i} ✓`));
  expect(heard[0]!.conversation).toBe(dm.id);
});
