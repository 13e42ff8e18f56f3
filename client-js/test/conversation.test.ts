/** Lists without gaps, the inbox and receipts, against a real gateway, and against a fake one where a test needs control. */
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import { ChatClient, type Conversation, type Message } from '../src/index.js';
import { BadNetwork } from './support/bad-network.js';
import { FakeServer } from './support/fake-server.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';

const LONG = '0199c0de-0000-4000-8000-000000000001';
let gateway: Gateway;

beforeAll(async () => {
  gateway = new Gateway();
  const lines = [
    { type: 'conversation', id: LONG, kind: 'channel', name: 'Long', participants: ['importer', 'reader'] },
    ...Array.from({ length: 2000 }, (_, i) => ({
      type: 'message',
      conversation: LONG,
      sender: 'importer',
      body: `message ${i}`,
      at: 1_700_000_000_000 + i,
    })),
  ];
  gateway.import(lines);
  await gateway.start();
});
afterEach(disconnectAll);
afterAll(() => gateway.close());

const seqs = (conversation: Conversation) => conversation.messages.map(({ seq }) => seq!);
/** Whether the list has no gap. */
const whole = (conversation: Conversation) => seqs(conversation).every((seq, i, all) => !i || seq === all[i - 1]! + 1);

describe('a list', () => {
  test('is live, in order, with system entries and own messages', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const [alice, bob] = [await gateway.connect(a), await gateway.connect(b)];
    const hers = await alice.createGroup({ name: 'Lunch', participants: [b] });
    hers.open();
    await hers.whenLoaded();
    const his = bob.conversation(hers.id);
    his.open();
    await his.whenLoaded();
    await hers.send('Hungry?');
    await his.send('Always');
    await until(() => hers.messages.length === 3 && his.messages.length === 3);
    for (const list of [hers, his]) {
      expect(seqs(list)).toEqual([1, 2, 3]);
      expect(list.messages.map(({ body }) => body)).toEqual(['', 'Hungry?', 'Always']);
      expect(list.messages[0]!.system).toMatchObject({ change: 'created', participants: [a, b] });
      expect(list.atStart && list.atEnd).toBe(true);
    }
    expect(hers.messages.map(({ state }) => state)).toEqual([undefined, expect.any(String), undefined]);
  });

  test('of a new direct chat has the name of the other user, also in a later client', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const alice = await gateway.connect(a);
    const dm = await alice.dm(b);
    expect(dm.name).toBe(b);
    const later = (await gateway.connect(a)).conversation(dm.id);
    expect([later.name, later.loaded]).toEqual(['', false]);
    let changes = 0;
    later.on('change', () => changes++);
    const close = later.open();
    await later.whenLoaded();
    expect(later.loaded).toBe(true);
    await until(() => later.name === b && changes > 0);
    close();
  });

  test('begins empty, and then has the first message', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const [alice, bob] = [await gateway.connect(a), await gateway.connect(b)];
    const dm = await alice.dm(b);
    dm.open();
    await dm.whenLoaded();
    expect(dm.messages).toEqual([]);
    expect(dm.atStart && dm.atEnd).toBe(true);
    await (await bob.dm(a)).send('hello');
    await until(() => dm.messages.length === 1);
    expect(dm.messages[0]!.seq).toBe(1);
  });

  test('of an empty dm has the first messages, which were sent while it was not connected', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const proxy = new BadNetwork(gateway.address);
    const [alice, bob] = [await gateway.connect(a, {}, await proxy.start()), await gateway.connect(b)];
    const dm = await alice.dm(b);
    dm.open();
    await dm.whenLoaded();
    proxy.mode = 'refused';
    await (await bob.dm(a)).send('one');
    await bob.conversation(dm.id).send('two');
    proxy.mode = 'open';
    await until(() => dm.messages.length === 2);
    expect(seqs(dm)).toEqual([1, 2]);
    await proxy.close();
  });

  test('pages through a long log in both directions, and drops distant messages', async () => {
    const reader = await gateway.connect('reader');
    const long = reader.conversation(LONG);
    long.open();
    await long.whenLoaded();
    expect(seqs(long).at(-1)).toBe(2001);
    expect(long.atEnd).toBe(true);
    while (!long.atStart) {
      await long.loadOlder(200);
      expect(whole(long)).toBe(true);
      expect(long.messages.length).toBeLessThanOrEqual(300);
    }
    expect(seqs(long)[0]).toBe(1);
    expect(long.atEnd).toBe(false);
    while (!long.atEnd) {
      await long.loadNewer(200);
      expect(whole(long)).toBe(true);
    }
    expect(seqs(long).at(-1)).toBe(2001);
    await long.jumpTo(1000);
    expect(seqs(long)).toContain(1000);
    expect(long.atStart || long.atEnd).toBe(false);
    await Promise.all([long.loadOlder(), long.loadNewer(), long.loadOlder()]);
    expect(whole(long)).toBe(true);
    await long.jumpTo();
    expect(long.atEnd).toBe(true);
  });

  test('is released some time after it was closed, and not while it is open', async () => {
    const reader = await gateway.connect('reader');
    const long = reader.conversation(LONG);
    const [one, two] = [long.open(), long.open()];
    await long.whenLoaded();
    one();
    one();
    await new Promise((resolve) => setTimeout(resolve, 2_800));
    expect(long.messages).not.toHaveLength(0);
    two();
    const again = long.open();
    await new Promise((resolve) => setTimeout(resolve, 2_800));
    expect(long.messages, 'opened again at once').not.toHaveLength(0);
    again();
    await until(() => long.messages.length === 0);
  });

  test('pages, forwards and backwards, as async iterators', async () => {
    const reader = await gateway.connect('reader');
    const found: number[] = [];
    for await (const page of reader.conversation(LONG).pages({ limit: 190 })) found.unshift(...page.map(({ seq }) => seq));
    expect(found).toEqual(Array.from({ length: 2001 }, (_, i) => i + 1));
    const stop = new AbortController();
    const some = async () => {
      for await (const _ of reader.conversation(LONG).pages({ limit: 10, signal: stop.signal })) stop.abort(new Error('enough'));
    };
    await expect(some()).rejects.toThrow('enough');
  });

  test('shows who is typing until they stop or send', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const [alice, bob] = [await gateway.connect(a), await gateway.connect(b)];
    const hers = await alice.dm(b);
    hers.open();
    const his = await bob.dm(a);
    his.sendTyping();
    his.sendTyping();
    await until(() => hers.typing.length);
    expect(hers.typing).toEqual([b]);
    await his.send('there');
    await until(() => !hers.typing.length);
  });

  test('a public channel can be subscribed to, also over new connections', async () => {
    const [alice, guest] = [await gateway.connect(user('alice')), await gateway.connect(user('guest'))];
    const channel = await alice.createChannel({ name: 'News', public: true });
    const looked = guest.conversation(channel.id);
    looked.open();
    await looked.whenLoaded();
    await looked.subscribe();
    await channel.send('one');
    await until(() => seqs(looked).at(-1) === 2);
    expect(guest.inbox.get(channel.id)).toBeUndefined();
    await gateway.stop();
    await gateway.start();
    await until(() => alice.state.at === 'connected' && guest.state.at === 'connected');
    await channel.send('two');
    await until(() => seqs(looked).at(-1) === 3);
    expect(whole(looked)).toBe(true);
    await looked.join();
    await until(() => guest.inbox.get(channel.id));
    const listed: string[] = [];
    for await (const page of guest.publicConversations()) listed.push(...page.map(({ conversation }) => conversation));
    expect(listed).toContain(channel.id);
  });
});

describe('states of messages', () => {
  test('sent, delivered, read', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const [alice, bob] = [await gateway.connect(a), await gateway.connect(b)];
    const hers = await alice.dm(b);
    hers.open();
    await hers.whenLoaded();
    const stateOf = () => hers.messages.at(-1)?.state;
    bob.disconnect();
    await hers.send('Are you there?');
    await until(() => hers.messages.at(-1)?.seq === 1);
    expect(stateOf()).toBe('sent');
    await bob.connect();
    const his = bob.conversation(hers.id);
    // Bob's client did not know the conversation, so it opens it now.
    his.open();
    await his.whenLoaded();
    await hers.send('Hello?');
    await until(() => stateOf() === 'delivered');
    his.read();
    await until(() => stateOf() === 'read');
    expect(hers.messages.map(({ state }) => state)).toEqual(['read', 'read']);
    expect(bob.inbox.get(hers.id)!.unread).toBe(0);
  });

  test('by who answers without reading', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const [alice, bob] = await Promise.all([a, b].map((name) => gateway.connect(name)));
    const hers = await alice!.dm(b);
    hers.open();
    const { seq } = await hers.send('Hello?');
    await until(() => hers.messages.at(-1)?.state === 'delivered');
    await (await bob!.dm(a)).send('Hello!');
    await until(() => hers.messages.find((message) => message.seq === seq)?.state === 'read');
  });

  test('in a group by everyone, with members who join and leave', async () => {
    const names = [user('alice'), user('bob'), user('carol')] as const;
    const [alice, bob, carol] = await Promise.all(names.map((name) => gateway.connect(name)));
    const hers = await alice!.createGroup({ name: 'G', participants: names.slice(1) });
    hers.open();
    await hers.whenLoaded();
    await until(() => hers.details?.participantCount === 3);
    await hers.send('all');
    bob!.conversation(hers.id).read(2);
    await until(() => hers.messages.at(-1)?.state === 'delivered');
    carol!.conversation(hers.id).read(2);
    await until(() => hers.messages.at(-1)?.state === 'read');
    await hers.remove(names[2]);
    await hers.send('without carol');
    bob!.conversation(hers.id).read(4);
    await until(() => hers.messages.at(-1)?.state === 'read');
  });
});

describe('the inbox', () => {
  test('is in order and exact on all devices', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const [phone, laptop, bob] = [await gateway.connect(a), await gateway.connect(a), await gateway.connect(b)];
    const dm = await bob.dm(a);
    const group = await bob.createGroup({ name: 'G', participants: [a] });
    for (let i = 0; i < 5; i++) await dm.send(`message ${i}`);
    for (const device of [phone, laptop]) {
      await until(() => device.inbox.get(dm.id)?.unread === 5 && device.inbox.get(group.id));
      expect(device.inbox.items[0]).toMatchObject({ conversation: dm.id, name: b, lastMessage: { preview: 'message 4' } });
    }
    phone.conversation(dm.id).read(3);
    await until(() => laptop.inbox.get(dm.id)?.unread === 2);
    await phone.conversation(dm.id).send('mine');
    await until(() => laptop.inbox.get(dm.id)?.unread === 0);
    await group.update({ name: 'Renamed' });
    await until(() => laptop.inbox.get(group.id)?.name === 'Renamed');
    await group.remove(a);
    await until(() => !laptop.inbox.get(group.id));
  });

  test('has missed messages after a reconnect', async () => {
    const [a, b] = [user('alice'), user('bob')];
    const [alice, bob] = [await gateway.connect(a), await gateway.connect(b)];
    const old = await bob.createGroup({ name: 'old', participants: [a] });
    await until(() => alice.inbox.get(old.id));
    const seen: string[] = [];
    alice.on('message', ({ body }) => seen.push(body));
    alice.disconnect();
    await old.send('missed');
    const fresh = await bob.createGroup({ name: 'fresh', participants: [a] });
    await fresh.send('new');
    await alice.connect();
    await until(() => alice.inbox.get(fresh.id)?.unread === 1 && alice.inbox.get(old.id)?.unread === 1);
    expect(seen).toEqual(['missed']);
  });

  test('has more than a page', async () => {
    const alice = await gateway.connect(user('alice'));
    const made = new Set<string>();
    for (let i = 0; i < 60; i++)
      made.add((await alice.request({ type: 'create', kind: 'group', name: `g${i}`, conversation: crypto.randomUUID() })).conversation);
    await alice.inbox.refresh({ all: true });
    expect(new Set(alice.inbox.items.map(({ conversation }) => conversation))).toEqual(made);
    const paged: string[] = [];
    for await (const page of alice.inbox.pages({ limit: 7 })) paged.push(...page.map(({ conversation }) => conversation));
    expect(new Set(paged)).toEqual(made);
  });
});

test('presence is watched until the last watch ends', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const alice = await gateway.connect(a);
  const [one, two] = [alice.watch([b]), alice.watch([b])];
  const bob = await gateway.connect(b);
  await until(() => alice.presence(b)?.online);
  one();
  bob.disconnect();
  await until(() => alice.presence(b)?.online === false);
  two();
  expect(alice.presence(b)).toBeUndefined();
});

test('a presence event is newer than an answer that comes after it', async () => {
  const server = new FakeServer();
  server.answers.watch = () => {
    server.socket.say({ type: 'presence', user: 'bob', online: true });
    return { type: 'presence', items: ['bob', 'carol'].map((user) => ({ user, online: false })) };
  };
  const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket });
  await client.connect();
  client.watch(['bob', 'carol']);
  await until(() => client.presence('carol'));
  expect(client.presence('bob')?.online).toBe(true);
  client.disconnect();
});

describe('messages that come out of order', () => {
  const message = (seq: number): object => ({
    type: 'message',
    conversation: 'c',
    seq,
    messageId: `m${seq}`,
    clientId: `c${seq}`,
    sender: 'bob',
    kind: 'text',
    body: `${seq}`,
    at: seq,
  });
  const setUp = async (server: FakeServer) => {
    const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket });
    const seen: number[] = [];
    client.on('message', ({ seq }: Message) => seen.push(seq));
    await client.connect();
    return { client, seen, say: (...list: number[]) => list.forEach((seq) => server.socket.say(message(seq))) };
  };

  test('are put in order, once, and missing ones are loaded', async () => {
    const server = new FakeServer();
    let asked = 0;
    server.answers.history = (request) => {
      asked++;
      const after = request.after as number;
      return { type: 'history', messages: [after + 1, after + 2].filter((seq) => seq <= 9).map(message), rev: 0, head: 9 };
    };
    const { client, seen, say } = await setUp(server);
    say(3, 3, 4, 2, 8, 9, 8);
    await until(() => seen.at(-1) === 9);
    expect(seen).toEqual([3, 4, 5, 6, 7, 8, 9]);
    expect(asked).toBeGreaterThan(0);
    say(10, 9);
    expect(seen.at(-1)).toBe(10);
    expect(client.cursors()).toEqual({ c: [10, 0] });
    server.socket.end(1006);
    await until(() => server.sockets.length === 2 && client.state.at === 'connected');
    expect(server.received('connect').at(-1)).toMatchObject({ cursors: { c: [10, 0] } });
    client.disconnect();
  });

  test('are skipped up to a resync, and continue after it', async () => {
    const server = new FakeServer();
    const { client, seen, say } = await setUp(server);
    say(1);
    server.socket.say({ type: 'resync', conversation: 'c', head: 5000 });
    say(4999, 5000, 5001);
    expect(seen).toEqual([1, 5001]);
    client.disconnect();
  });

  test('are held in bounded number', async () => {
    const server = new FakeServer();
    const history: ((page: object) => void)[] = [];
    server.answers.history = (request) => {
      history.push((page) => server.socket.say({ ...page, id: request.id }));
      return undefined;
    };
    const { client, seen, say } = await setUp(server);
    say(1);
    for (let seq = 3; seq < 3000; seq++) say(seq);
    const range = (from: number, to: number) => Array.from({ length: to - from }, (_, i) => message(from + i));
    for (let from = 2; from < 3000; ) {
      await until(() => history.length);
      history.shift()!({ type: 'history', messages: range(from, Math.min(from + 200, 3000)), rev: 0, head: 2999 });
      await until(() => seen.at(-1)! >= from);
      from = seen.at(-1)! + 1;
      if (from < 3000) say(2999);
    }
    expect(seen).toEqual(Array.from({ length: 2999 }, (_, i) => i + 1));
    client.disconnect();
  });
});
