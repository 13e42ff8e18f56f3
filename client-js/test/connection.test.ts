/** States, tokens and signs of life, against a fake server and with a fake clock. */
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { next, type State } from '../src/connection.js';
import { ChatClient, ChatError, type ChatOptions, UnauthorizedError } from '../src/index.js';
import { FakeServer } from './support/fake-server.js';

const half = () => 0.5;
const lost = (code: number, fresh = false) => ({ on: 'lost', code, reason: '', fresh }) as const;
const connected: State = { at: 'connected', attempt: 3, since: 1000 };
const connecting: State = { at: 'connecting', attempt: 3, token: 'initial' };

describe('the steps between states', () => {
  test.each([
    ['a broken connection waits, longer each time', connected, lost(1006), 2000, { at: 'waiting', attempt: 4, until: 2000 + 4000 }],
    ['a connection that held resets the back-off', connected, lost(1006), 40_000, { at: 'waiting', attempt: 0, until: 40_250 }],
    ['the wait is bounded', { ...connecting, attempt: 90 }, lost(1006), 0, { at: 'waiting', attempt: 91, until: 10_000 }],
    ['a drain reconnects at once', connected, lost(1012), 40_000, { at: 'connecting', attempt: 0, token: 'initial' }],
    [
      'a second drain reconnects at once too',
      { ...connected, attempt: 0 },
      lost(1012),
      2000,
      { at: 'connecting', attempt: 1, token: 'initial' },
    ],
    ['a third drain in a row waits', { ...connected, attempt: 1 }, lost(1012), 2000, { at: 'waiting', attempt: 2, until: 3000 }],
    ['an expired token is replaced', connected, lost(4002), 2000, { at: 'connecting', attempt: 3, token: 'rejected' }],
    ['a refused token is replaced', connecting, lost(4501), 2000, { at: 'connecting', attempt: 3, token: 'rejected' }],
    ['a client that is too slow waits', connected, lost(4003), 2000, { at: 'waiting', attempt: 4, until: 6000 }],
    [
      'connect() ends the wait',
      { at: 'waiting', attempt: 5, until: 9000 },
      { on: 'connect' },
      1,
      { at: 'connecting', attempt: 0, token: 'initial' },
    ],
    [
      'the end of the time ends the wait',
      { at: 'waiting', attempt: 5, until: 9000 },
      { on: 'time' },
      9000,
      { at: 'connecting', attempt: 5, token: 'initial' },
    ],
    ['a missing token waits', connecting, { on: 'no_token', error: new Error('offline') }, 0, { at: 'waiting', attempt: 4, until: 4000 }],
    ['a late `opened` changes nothing', { at: 'idle' }, { on: 'opened' }, 0, { at: 'idle' }],
    ['a loss without a connection changes nothing', { at: 'idle' }, lost(1006), 0, { at: 'idle' }],
  ] as const)('%s', (_, state, step, now, expected) => {
    expect(next(state as State, step as never, now, half)).toMatchObject(expected);
  });

  test.each([
    ['a fresh token that is refused', lost(4501, true), 'unauthorized'],
    ['a fresh token that has expired', lost(4002, true), 'unauthorized'],
    ['a close by an administrator', lost(4502), 'closed'],
    ['a frame that the gateway does not know', lost(4500), 'closed'],
    ['UnauthorizedError from token()', { on: 'no_token', error: new UnauthorizedError() }, 'unauthorized'],
  ] as const)('%s closes for good', (_, step, code) => {
    const state = next(connecting, step as never, 0);
    expect(state).toMatchObject({ at: 'closed', error: { code } });
    expect(next(state, { on: 'time' }, 1)).toBe(state);
    expect(next(state, { on: 'connect' }, 1)).toMatchObject({ at: 'connecting' });
  });
});

describe('a client', () => {
  let server: FakeServer;
  let client: ChatClient;
  const make = (options: Partial<ChatOptions> = {}) => {
    client = new ChatClient('ws://fake', { token: 'a token', WebSocket: server.WebSocket, ...options });
    return client;
  };
  /** Lets pending promises settle without moving the clock. */
  const settle = () => vi.advanceTimersByTimeAsync(0);

  beforeEach(() => {
    vi.useFakeTimers();
    vi.spyOn(Math, 'random').mockReturnValue(0.5);
    server = new FakeServer();
  });
  afterEach(async () => {
    client.disconnect();
    await settle();
    expect(vi.getTimerCount(), 'no timer is left').toBeLessThanOrEqual(0);
    vi.useRealTimers();
    vi.restoreAllMocks();
  });

  test('asks for a token once, and not again after a broken connection', async () => {
    const token = vi.fn(async () => 'a token');
    await make({ token }).connect();
    for (let i = 0; i < 3; i++) {
      server.socket.end(1006);
      await vi.advanceTimersByTimeAsync(30_000);
      expect(client.state.at).toBe('connected');
    }
    expect(server.sockets).toHaveLength(4);
    expect(token).toHaveBeenCalledTimes(1);
  });

  test('keeps its token while the gateway is away', async () => {
    const token = vi.fn(async () => 'a token');
    make({ token })
      .connect()
      .catch(() => {});
    await settle();
    const answer = server.answers.connect!;
    server.answers.connect = () => undefined;
    for (let i = 0; i < 5; i++) await vi.advanceTimersByTimeAsync(30_000);
    server.answers.connect = answer;
    server.socket.end(1006);
    await vi.advanceTimersByTimeAsync(30_000);
    expect(token).toHaveBeenCalledTimes(1);
  });

  test('asks for another token after a refusal, and then gives up', async () => {
    const token = vi.fn(async () => 'a token');
    await make({ token }).connect();
    const answer = server.answers.connect!;
    server.answers.connect = () => undefined;
    server.socket.end(4002);
    await settle();
    expect(token).toHaveBeenLastCalledWith(expect.objectContaining({ reason: 'rejected' }));
    server.answers.connect = answer;
    server.socket.end(4501);
    await settle();
    expect(client.state).toMatchObject({ at: 'closed', error: { code: 'unauthorized' } });
    await vi.advanceTimersByTimeAsync(600_000);
    expect(token).toHaveBeenCalledTimes(2);
    await expect(client.request({ type: 'ping' })).rejects.toMatchObject({ code: 'unauthorized' });
  });

  test('is closed when a static token expires', async () => {
    await make().connect();
    server.socket.end(4002);
    await settle();
    expect(client.state).toMatchObject({ at: 'closed', error: { code: 'unauthorized' } });
  });

  test.each([undefined, ''])('a token that is %j ends it at once', async (token) => {
    const client = make({ token: token as unknown as string });
    await expect(client.connect()).rejects.toBeInstanceOf(UnauthorizedError);
    expect(client.state.at).toBe('closed');
  });

  test('retries a failed token(), and stops at UnauthorizedError', async () => {
    let error: Error = new Error('no network');
    const token = vi.fn(async () => {
      throw error;
    });
    const first = make({ token }).connect();
    const failed = expect(first).rejects.toBeInstanceOf(UnauthorizedError);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(token.mock.calls.length).toBeGreaterThan(4);
    error = new UnauthorizedError();
    await vi.advanceTimersByTimeAsync(20_000);
    await failed;
  });

  test('renews a token before it expires, on the same connection', async () => {
    let tokens = 0;
    server.changes = { expires_at: Date.now() + 3_600_000 };
    await make({ token: async () => `token ${++tokens}` }).connect();
    await vi.advanceTimersByTimeAsync(3_569_000);
    expect(server.received('refresh')).toHaveLength(0);
    await vi.advanceTimersByTimeAsync(2_000);
    expect(server.received('refresh')).toMatchObject([{ token: 'token 2' }]);
    await vi.advanceTimersByTimeAsync(3_600_000);
    expect(server.received('refresh')).toHaveLength(2);
    expect(server.sockets).toHaveLength(1);
  });

  test('notices a dead connection', async () => {
    await make().connect();
    server.socket.silent = true;
    await vi.advanceTimersByTimeAsync(51_000);
    expect(server.received('ping')).toHaveLength(1);
    expect(server.sockets).toHaveLength(1);
    await vi.advanceTimersByTimeAsync(20_000);
    expect(server.sockets).toHaveLength(2);
    expect(client.state.at).toBe('connected');
  });

  test('pings only if no other frame comes', async () => {
    await make().connect();
    for (let i = 0; i < 20; i++) {
      await vi.advanceTimersByTimeAsync(10_000);
      server.socket.say({ type: 'typing', conversation: 'c', user: 'bob' });
    }
    expect(server.received('ping')).toHaveLength(0);
  });

  test('drops a socket that does not open in time', async () => {
    make()
      .connect()
      .catch(() => {});
    await settle();
    server.answers.connect = () => undefined;
    server.socket.end(1006);
    await vi.advanceTimersByTimeAsync(1000);
    const tried = server.sockets.length;
    await vi.advanceTimersByTimeAsync(15_000);
    expect(server.sockets.length).toBeGreaterThan(tried);
  });

  test('probes at once when the page is back', async () => {
    const page = new EventTarget() as EventTarget & { visibilityState: string };
    page.visibilityState = 'visible';
    vi.stubGlobal('document', page);
    const listeners = new EventTarget();
    vi.stubGlobal('addEventListener', listeners.addEventListener.bind(listeners));
    vi.stubGlobal('removeEventListener', listeners.removeEventListener.bind(listeners));
    await make().connect();
    // The connection is dead and was not closed, as after sleep.
    server.socket.silent = true;
    listeners.dispatchEvent(new Event('visibilitychange'));
    await vi.advanceTimersByTimeAsync(5_900);
    expect(client.state.at).toBe('connected');
    await vi.advanceTimersByTimeAsync(200);
    expect(client.state.at).toBe('waiting');
    // When the network is back, the client connects at once.
    listeners.dispatchEvent(new Event('online'));
    await settle();
    expect(client.state.at).toBe('connected');
    client.disconnect();
    listeners.dispatchEvent(new Event('online'));
    await settle();
    expect(client.state.at).toBe('idle');
    vi.unstubAllGlobals();
  });

  test('does not reconnect after disconnect()', async () => {
    await make().connect();
    client.disconnect();
    await vi.advanceTimersByTimeAsync(600_000);
    expect(server.sockets).toHaveLength(1);
    await expect(client.request({ type: 'ping' })).rejects.toMatchObject({ code: 'closed' });
    await client.connect();
    expect(client.state.at).toBe('connected');
  });

  test('refuses a token of another user', async () => {
    make({ user: 'bob' });
    await expect(client.connect()).rejects.toBeInstanceOf(UnauthorizedError);
    expect(client.state.at).toBe('closed');
  });

  test('retries requests after a loss and when told to wait, until the time limit', async () => {
    await make().connect();
    let tries = 0;
    server.answers.public = () => {
      tries++;
      if (tries === 1) server.socket.end(1006);
      if (tries === 2) return { type: 'error', code: 'rate_limited', message: 'slowly', retry_after_ms: 700 };
      if (tries === 3) return { type: 'error', code: 'unavailable', message: 'no owner' };
      return tries === 4 ? { type: 'public', items: [] } : undefined;
    };
    const found = client.request({ type: 'public' });
    await vi.advanceTimersByTimeAsync(10_000);
    await expect(found).resolves.toMatchObject({ items: [] });
    expect(tries).toBe(4);

    server.answers.public = () => ({ type: 'error', code: 'unavailable', message: 'no owner' });
    const never = client.request({ type: 'public' }, { timeoutMs: 2_000 });
    const failed = expect(never).rejects.toMatchObject({ code: 'unavailable' });
    await vi.advanceTimersByTimeAsync(2_100);
    await failed;

    server.answers.public = () => ({ type: 'error', code: 'forbidden', message: 'no' });
    await expect(client.request({ type: 'public' })).rejects.toMatchObject({ code: 'forbidden', temporary: false });
  });

  test('ends a request when its signal is aborted', async () => {
    await make().connect();
    server.answers.public = () => undefined;
    const stop = new AbortController();
    const asked = client.request({ type: 'public' }, { signal: stop.signal });
    const failed = expect(asked).rejects.toThrow('enough');
    stop.abort(new Error('enough'));
    await failed;
  });

  test('an invalid frame ends the connection, not the client', async () => {
    await make().connect();
    server.socket.onmessage!({ data: '{' });
    await vi.advanceTimersByTimeAsync(1_000);
    expect(server.sockets).toHaveLength(2);
    expect(client.state.at).toBe('connected');
  });

  test('a handler that throws does not stop the others', async () => {
    await make().connect();
    const errors: unknown[] = [];
    const caught = (error: unknown) => errors.push(error);
    process.on('uncaughtException', caught);
    const seen: string[] = [];
    client.on('typing', () => {
      throw new ChatError('internal', 'a bug in the application');
    });
    const off = client.on('typing', ({ user }) => seen.push(user));
    server.socket.say({ type: 'typing', conversation: 'c', user: 'bob' });
    off();
    server.socket.say({ type: 'typing', conversation: 'c', user: 'carol' });
    await vi.advanceTimersByTimeAsync(10);
    expect(seen).toEqual(['bob']);
    expect(client.state.at).toBe('connected');
    vi.useRealTimers();
    await new Promise((resolve) => setTimeout(resolve, 10));
    process.off('uncaughtException', caught);
    vi.useFakeTimers();
    expect(errors).toHaveLength(2);
  });
});
