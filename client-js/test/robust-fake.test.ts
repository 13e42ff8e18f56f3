/** Failures that would lock users out or stay silent, against a fake server. */
import 'fake-indexeddb/auto';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { Emitter } from '../src/emitter.js';
import { dmId } from '../src/ids.js';
import { ChatClient, type ChatError, type ChatOptions, indexedDbStorage, memoryStorage, type OutboxStorage } from '../src/index.js';
import { pages } from '../src/pages.js';
import { FakeServer } from './support/fake-server.js';
import { until } from './support/gateway.js';
import { expectNoRejections, noteRejections } from './support/rejections.js';

let server: FakeServer;
const made: ChatClient[] = [];
const make = (options: Partial<ChatOptions> = {}, url = 'ws://fake') => {
  const client = new ChatClient(url, { token: 't', WebSocket: server.WebSocket, storage: memoryStorage(), ...options });
  made.push(client);
  return client;
};
const store = () => {
  let seq = 0;
  server.answers.send = () => ({ type: 'sent', seq: ++seq, message_id: 'm', at: 1, duplicate: false });
};

beforeEach(() => {
  server = new FakeServer();
  noteRejections();
});
afterEach(async () => {
  for (const client of made.splice(0)) client.disconnect();
  await expectNoRejections();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

describe('frames that are too large', () => {
  test('fail alone, before they are sent', async () => {
    store();
    server.changes = { limits: { frame_bytes: 1_000 } };
    const client = make();
    await client.connect();
    const large = client.conversation('c').send('\u0001'.repeat(300));
    const after = client.conversation('c').send('small');
    await expect(large).rejects.toMatchObject({ code: 'too_large' });
    expect((await after).seq).toBe(1);
    await expect(client.createGroup({ name: 'é'.repeat(600) })).rejects.toMatchObject({ code: 'too_large' });
    expect(server.sockets).toHaveLength(1);
    expect(client.conversation('c').messages.map(({ state }) => state)).toContain('failed');
  });

  test('a message that closes the connection twice fails, and delays no other', async () => {
    const stored: string[] = [];
    server.answers.send = ({ body }) => {
      if (body === 'bad') return void server.socket.end(4500, 'not a frame');
      stored.push(body as string);
      return { type: 'sent', seq: stored.length, message_id: 'm', at: 1, duplicate: false };
    };
    vi.spyOn(Math, 'random').mockReturnValue(0);
    const storage = memoryStorage();
    const client = make({ storage });
    await client.connect();
    const bad = client.conversation('c').send('bad');
    const others = [client.conversation('c').send('after'), client.conversation('d').send('elsewhere')];
    await expect(bad).rejects.toMatchObject({ code: 'bad_request' });
    await Promise.all(others);
    expect(stored.sort()).toEqual(['after', 'elsewhere']);
    expect(server.received('send').filter(({ body }) => body === 'bad')).toHaveLength(2);
    expect(client.state.at).toBe('connected');
    await until(async () => (await storage.entries('alice')).length === 1);
    client.disconnect();
    const later = make({ storage });
    await later.connect();
    await until(() => later.conversation('c').messages.length === 1);
    expect(later.conversation('c').messages[0]).toMatchObject({ body: 'bad', state: 'failed', error: { code: 'bad_request' } });
    later.conversation('c').discard(later.conversation('c').messages[0]!.key);
    await until(async () => (await storage.entries('alice')).length === 0);
  });

  test('a request that closes the connection twice fails', async () => {
    vi.spyOn(Math, 'random').mockReturnValue(0);
    server.answers.public = () => void server.socket.end(4500);
    const client = make();
    await client.connect();
    await expect(client.request({ type: 'public' })).rejects.toMatchObject({ code: 'bad_request' });
    await client.connect();
    expect(client.state.at).toBe('connected');
  });
});

describe('an error', () => {
  const state = (client: ChatClient, at: string) =>
    until(() => client.state.at === at && (client.state as { error?: ChatError }).error) as Promise<ChatError>;

  test('names an invalid URL and a missing WebSocket', async () => {
    const { default: WebSocket } = await import('ws');
    const bad = make({ WebSocket }, 'nonsense');
    await expect(bad.connect()).rejects.toMatchObject({ code: 'invalid', message: expect.stringContaining('nonsense') });
    vi.stubGlobal('WebSocket', undefined);
    const none = new ChatClient('ws://fake', { token: 't' });
    await expect(none.connect()).rejects.toMatchObject({ code: 'invalid', message: expect.stringContaining('pass the option WebSocket') });
    // `connect()` is not awaited.
    void make({ WebSocket }, 'nonsense').connect();
  });

  test('names the reason of a failed token(), and of a closed connection', async () => {
    const logged: string[] = [];
    const logger = { warn: (message: string) => logged.push(message) };
    const thrown = make({
      logger,
      token: () => {
        throw new Error('the back end is down');
      },
    });
    void thrown.connect();
    expect((await state(thrown, 'waiting')).message).toContain('the back end is down');
    expect(logged[0]).toContain('the back end is down');
    const client = make();
    await client.connect();
    server.socket.end(4005, 'too many connections');
    expect(await state(client, 'waiting')).toMatchObject({ code: 'lost', closeCode: 4005, message: expect.stringContaining('too many') });
  });

  test('without a listener causes one warning', async () => {
    const warn = vi.spyOn(console, 'warn').mockImplementation(() => {});
    const [client, heard] = [make(), make()];
    await client.connect();
    for (let i = 0; i < 2; i++) server.socket.say({ type: 'error', code: 'internal', message: 'a bug' });
    expect(warn).toHaveBeenCalledTimes(1);
    expect(warn.mock.calls[0]![0]).toContain('a bug');
    heard.on('error', () => {});
    await heard.connect();
    server.socket.say({ type: 'error', code: 'internal', message: 'a bug' });
    expect(warn).toHaveBeenCalledTimes(1);
  });

  test('that closes the client for good settles send()', async () => {
    server.answers.send = () => undefined;
    const client = make();
    await client.connect();
    const sent = client.conversation('c').send('one');
    await until(() => server.received('send').length);
    server.socket.end(4502);
    await expect(sent).rejects.toMatchObject({ code: 'closed' });
    expect(client.conversation('c').messages).toHaveLength(1);
  });
});

describe('several tabs', () => {
  test('a refused message settles in the tab that wrote it, though another one sent it', async () => {
    // The first tab holds the lock, and the other waits until it is released.
    let held: Promise<unknown> = Promise.resolve();
    const request = (_: string, { signal }: { signal: AbortSignal }, turn: () => Promise<unknown>) => {
      const mine = held.then(() => (signal.aborted ? undefined : turn()));
      held = mine.catch(() => {});
      return mine;
    };
    vi.stubGlobal('navigator', { locks: { request } });
    server.answers.send = () => ({ type: 'error', code: 'forbidden', message: 'no' });
    const storage = indexedDbStorage('follower');
    const [leader, follower] = [make({ storage }), make({ storage })];
    await leader.connect();
    await follower.connect();
    await expect(follower.conversation('c').send('one')).rejects.toMatchObject({ code: 'forbidden', message: 'no' });
    await until(() => leader.conversation('c').messages.length === 1);
    // It was sent once, by the other tab.
    expect(server.received('send')).toHaveLength(1);
  });

  test.each([
    ['no Web Locks', () => vi.stubGlobal('navigator', {})],
    ['Web Locks that reject', () => vi.stubGlobal('navigator', { locks: { request: () => Promise.reject(new Error('no locks')) } })],
    [
      'a BroadcastChannel that throws',
      () =>
        vi.stubGlobal('BroadcastChannel', () => {
          throw new Error('no channel');
        }),
    ],
    ['no BroadcastChannel', () => vi.stubGlobal('BroadcastChannel', undefined)],
  ])('with %s the tab sends alone, and reports one error', async (name, spoil) => {
    spoil();
    store();
    const client = make({ storage: indexedDbStorage(`alone ${name}`) });
    const errors: string[] = [];
    client.on('error', ({ message }) => errors.push(message));
    await client.connect();
    await client.conversation('c').send('one');
    await client.conversation('c').send('two');
    expect(errors).toEqual([expect.stringContaining('Tabs cannot share the outbox')]);
  });
});

describe('a stored message', () => {
  test('is sent only to the gateway it was written for', async () => {
    store();
    const storage = memoryStorage();
    const offline = make({ storage, user: 'alice', token: () => Promise.reject(new Error('offline')) }, 'wss://one.example/v1/ws');
    void offline.connect();
    void offline.conversation('c').send('for one');
    await until(async () => (await storage.entries('alice')).length);
    offline.disconnect();
    const other = make({ storage }, 'wss://two.example/v1/ws');
    await other.connect();
    await other.conversation('c').send('for two');
    expect(other.conversation('c').messages.map(({ body }) => body)).not.toContain('for one');
    const right = make({ storage }, 'https://one.example/other');
    await right.connect();
    await until(() => server.received('send').length === 2);
    expect(server.received('send').map(({ body }) => body)).toEqual(['for two', 'for one']);
  });

  test('is deleted by logout()', async () => {
    server.answers.send = () => undefined;
    const storage = memoryStorage();
    const [client, other] = [make({ storage }), make({ storage }, 'ws://elsewhere')];
    const item = { conversation: 'c', kind: 'group', last_seq: 1, rev: 0, last_message: null, read_seq: 0, unread: 1, joined_seq: 1 };
    server.answers.inbox = () => ({ type: 'inbox', items: [item] });
    await Promise.all([client.connect(), other.connect()]);
    await until(() => client.inbox.items.length && Object.keys(client.cursors()).length);
    const sent = client.conversation('c').send('secret');
    void other.conversation('c').send('kept');
    await until(async () => (await storage.entries('alice')).length === 2);
    await client.logout();
    await expect(sent).rejects.toMatchObject({ code: 'closed' });
    expect((await storage.entries('alice')).map(({ body }) => body)).toEqual(['kept']);
    expect(client.state.at).toBe('idle');
    expect([client.inbox.items, Object.keys(client.cursors())]).toEqual([[], []]);
  });

  test.each([
    ['fails', () => Promise.reject(new Error('no disk'))],
    ['never answers', () => new Promise<never>(() => {})],
  ])('an IndexedDB that %s does not stop sending', async (_, answer) => {
    store();
    const storage: OutboxStorage = { shared: true, entries: answer, put: answer, remove: answer };
    const client = make({ storage });
    const errors: Error[] = [];
    client.on('error', (error) => errors.push(error));
    vi.useFakeTimers();
    try {
      await client.connect();
      const sent = client.conversation('c').send('one');
      await vi.advanceTimersByTimeAsync(10_000);
      await sent;
    } finally {
      vi.useRealTimers();
    }
    expect(errors.length).toBeGreaterThan(0);
  });

  test('if the code for IndexedDB cannot be loaded, messages are sent from memory with an error, and loading is retried', async () => {
    store();
    vi.doMock('../src/indexed-db.js', () => {
      throw new Error('not found');
    });
    const storage = indexedDbStorage('missing');
    const client = make({ storage });
    const errors: Error[] = [];
    client.on('error', (error) => errors.push(error));
    await client.connect();
    await client.conversation('c').send('one');
    expect(errors.some(({ cause }) => (cause as Error | undefined)?.message === 'not found')).toBe(true);
    // Nothing loads it while it is replaced.
    client.disconnect();
    await storage.entries('alice').catch(() => {});
    vi.doUnmock('../src/indexed-db.js');
    const entry = { clientId: 'a', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: 'two', at: 1 };
    const stored = () =>
      storage.put(entry).then(
        () => true,
        () => false,
      );
    await until(stored);
    expect(await storage.entries('alice')).toEqual([entry]);
  });

  test('an IndexedDB that is forbidden is replaced by memory, with an error', async () => {
    store();
    const descriptor = Object.getOwnPropertyDescriptor(globalThis, 'indexedDB')!;
    Object.defineProperty(globalThis, 'indexedDB', {
      configurable: true,
      get() {
        throw new Error('SecurityError');
      },
    });
    vi.stubGlobal('document', new EventTarget());
    try {
      const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket });
      made.push(client);
      const errors: string[] = [];
      client.on('error', ({ message }) => errors.push(message));
      await client.connect();
      await client.conversation('c').send('one');
      expect(errors).toEqual([expect.stringContaining('SecurityError')]);
    } finally {
      Object.defineProperty(globalThis, 'indexedDB', descriptor);
    }
  });
});

test('runs without AbortSignal.any and AbortSignal.timeout', async () => {
  store();
  vi.stubGlobal(
    'AbortSignal',
    new Proxy(AbortSignal, { get: (of, name) => (name === 'any' || name === 'timeout' ? undefined : Reflect.get(of, name)) }),
  );
  const client = make();
  await client.connect();
  await client.conversation('c').send('one');
  server.answers.public = () => undefined;
  const stop = new AbortController();
  const asked = client.request({ type: 'public' }, { signal: stop.signal });
  stop.abort(new Error('enough'));
  await expect(asked).rejects.toThrow('enough');
  await expect(client.request({ type: 'public' }, { timeoutMs: 20 })).rejects.toMatchObject({ code: 'timeout' });
});

test('connect(), disconnect() and connect() in a row cause no unhandled rejection', async () => {
  const client = make();
  void client.connect();
  client.disconnect();
  void client.connect();
  await until(() => client.state.at === 'connected');
});

test('if the code for watermarks cannot be loaded, loading is retried, and only the highest watermarks wait for it', async () => {
  vi.doMock('../src/marks.js', () => {
    throw new Error('not found');
  });
  const item = { kind: 'group', rev: 0, last_message: null, read_seq: 0, unread: 0, joined_seq: 1, last_seq: 0 };
  server.answers.inbox = () => ({ type: 'inbox', items: ['a', 'b', 'c'].map((conversation) => ({ ...item, conversation })) });
  const client = make();
  const errors: Error[] = [];
  client.on('error', (error) => errors.push(error));
  await client.connect();
  await client.inbox.whenLoaded();
  await until(() => errors.length === 1);
  const message = { type: 'message', sender: 'bob', kind: 'text', body: 'x', at: 1 };
  for (let seq = 1; seq <= 500; seq++)
    for (const conversation of ['a', 'b', 'c'])
      server.socket.say({ ...message, conversation, seq, message_id: `${conversation}${seq}`, client_id: `${conversation}${seq}` });
  client.conversation('a').read(400);
  client.conversation('a').read(500);
  server.socket.say({ type: 'conversation', conversation: 'c', change: 'removed' });
  const added: unknown[] = [];
  vi.doMock('../src/marks.js', async (actual) => {
    const { Marks } = await actual<typeof import('../src/marks.js')>();
    return {
      Marks: class extends Marks {
        override add(...mark: Parameters<InstanceType<typeof Marks>['add']>): void {
          added.push(mark);
          super.add(...mark);
        }
      },
    };
  });
  try {
    await until(() => server.received('read').length && server.received('delivered').length);
  } finally {
    vi.doUnmock('../src/marks.js');
  }
  expect(added).toEqual([
    ['delivered', 'a', 500, 1],
    ['delivered', 'b', 500, 1],
    ['read', 'a', 500],
  ]);
  expect(server.received('read')).toMatchObject([{ conversation: 'a', seq: 500 }]);
  expect(server.received('delivered')).toMatchObject([{ conversation: 'b', seq: 500 }]);
  expect([server.sockets.length, errors.length]).toEqual([1, 1]);
});

describe('watched users', () => {
  const watched = () => server.received('watch').flatMap(({ users }) => users as string[]);
  beforeEach(() => {
    server.answers.watch = ({ users }) => ({ type: 'presence', items: (users as string[]).map((user) => ({ user, online: true })) });
    server.answers.unwatch = () => ({ type: 'presence', items: [] });
    server.changes = { limits: { watched_users: 500 } };
  });

  test('are watched after the next connection, if the code for it could not be loaded', async () => {
    vi.doMock('../src/watcher.js', () => {
      throw new Error('not found');
    });
    const client = make();
    const errors: Error[] = [];
    client.on('error', (error) => errors.push(error));
    await client.connect();
    client.watch(['bob']);
    await until(() => errors.length === 1);
    vi.doUnmock('../src/watcher.js');
    server.socket.end(1012);
    await until(() => client.presence('bob')?.online);
    expect(errors).toHaveLength(1);
  });

  test('above the limit are refused, also after a reconnect, until there is room', async () => {
    const [many, more] = [400, 200].map((count, part) => Array.from({ length: count }, (_, i) => `u${part}-${i}`));
    const client = make();
    const errors: Error[] = [];
    client.on('error', (error) => errors.push(error));
    const off = client.watch(many!);
    client.watch(more!);
    await client.connect();
    await until(() => client.presence('u1-99')?.online);
    expect(client.presence('u1-100')).toBeUndefined();
    expect(new Set(watched()).size).toBe(500);
    for (const { users } of server.received('watch')) expect((users as string[]).length).toBeLessThanOrEqual(100);
    expect(errors).toMatchObject([{ code: 'too_large' }]);
    server.requests = [];
    server.socket.end(1012);
    await until(() => new Set(watched()).size === 500);
    off();
    await until(() => client.presence('u1-199')?.online);
    expect(client.presence('u0-0')).toBeUndefined();
  });

  test('are watched until each watch of a shared array has ended', async () => {
    const client = make();
    await client.connect();
    const users = ['bob'];
    const [one] = [client.watch(users), client.watch(users)];
    await until(() => client.presence('bob'));
    one!();
    one!();
    await client.request({ type: 'ping' });
    expect(client.presence('bob')).toMatchObject({ online: true });
    expect(server.received('unwatch')).toHaveLength(0);
  });
});

test('messages go before watermarks, within the rate limit', async () => {
  store();
  server.changes = { limits: { requests_per_second: 100, requests_burst: 20 } };
  const client = make();
  await client.connect();
  const begun = performance.now();
  for (let i = 0; i < 50; i++) client.mark('delivered', `c${i}`, 1);
  await until(() => server.received('delivered').length);
  await client.conversation('c').send('now');
  expect(server.received('delivered').length).toBeLessThan(50);
  await until(() => server.received('delivered').length === 50);
  // Watermarks use half of the rate.
  expect(performance.now() - begun).toBeGreaterThan(900);
});

test('watermarks of one conversation are coalesced', async () => {
  const client = make();
  await client.connect();
  for (let seq = 1; seq <= 100; seq++) {
    client.mark('delivered', 'c', seq);
    if (seq % 10 === 0) await new Promise((resolve) => setTimeout(resolve, 2));
  }
  await until(() => server.received('delivered').some(({ seq }) => seq === 100));
  expect(server.received('delivered').length).toBeLessThanOrEqual(2);
});

test('a burst of requests is spread as the rate limit allows', async () => {
  server.changes = { limits: { requests_per_second: 100, requests_burst: 20 } };
  const client = make();
  await client.connect();
  const begun = performance.now();
  await Promise.all(Array.from({ length: 40 }, () => client.request({ type: 'public' })));
  // 10 are sent at once, then 80 per second.
  expect(performance.now() - begun).toBeGreaterThan(300);
});

test('a dm that is opened without a connection is created by its first message', async () => {
  store();
  const id = await dmId('bob', 'alice');
  server.answers.create = () => ({ type: 'created', conversation: id, existed: false });
  const storage = memoryStorage();
  const client = make({ storage, user: 'alice', token: () => Promise.reject(new Error('offline')) });
  void client.connect();
  const dm = await client.dm('bob');
  expect(dm.id).toBe(id);
  void dm.send('hello');
  await until(async () => (await storage.entries('alice')).length);
  client.disconnect();
  // A later client creates it too.
  const later = make({ storage });
  await later.connect();
  await until(() => server.received('send').length);
  const kinds = server.requests.map(({ type }) => type).filter((type) => type === 'create' || type === 'send');
  expect(kinds).toEqual(['create', 'send']);
});

test('pages() continues after a failed request', async () => {
  let calls = 0;
  const asked: unknown[] = [];
  const all = pages(async (from: number | undefined) => {
    asked.push(from);
    if (++calls === 2) throw new Error('not now');
    return { items: [from ?? 0], next: calls < 4 ? calls : undefined };
  });
  expect((await all.next()).value).toEqual([0]);
  await expect(all.next()).rejects.toThrow('not now');
  const rest: number[][] = [];
  for await (const page of all) rest.push(page);
  expect(rest).toEqual([[1], [3]]);
  expect(asked).toEqual([undefined, 1, 1, 3]);
  expect((await all.next()).done).toBe(true);
});

test('once() calls a handler once, and off() removes it', () => {
  const emitter = new Emitter<{ a: number }>();
  const seen: number[] = [];
  const handler = (n: number) => seen.push(n);
  emitter.once('a', handler);
  emitter.emit('a', 1);
  emitter.emit('a', 2);
  emitter.on('a', handler);
  emitter.emit('a', 3);
  emitter.off('a', handler);
  emitter.once('a', handler);
  emitter.off('a', handler);
  emitter.emit('a', 4);
  expect(seen).toEqual([1, 3]);
});
