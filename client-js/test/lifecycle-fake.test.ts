/** What must end with its cause: attempts on a bad network, listeners of uploads, timers after `disconnect()`. */
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { ChatClient, type ChatOptions, memoryStorage } from '../src/index.js';
import { Upload } from '../src/upload.js';
import { FakeServer } from './support/fake-server.js';
import { until } from './support/gateway.js';

let server: FakeServer;
let page: EventTarget;
const made: ChatClient[] = [];
const make = (options: Partial<ChatOptions> = {}) => {
  const client = new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket, storage: memoryStorage(), ...options });
  made.push(client);
  return client;
};

beforeEach(() => {
  server = new FakeServer();
  page = new EventTarget();
  vi.stubGlobal('addEventListener', page.addEventListener.bind(page));
});
afterEach(() => {
  for (const client of made.splice(0)) client.disconnect();
  vi.useRealTimers();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

describe('a network that comes and goes', () => {
  /** Causes events of the page for six seconds. */
  async function flap(types: string[]): Promise<void> {
    for (let ms = 0; ms < 6_000; ms += 90) {
      page.dispatchEvent(new Event(types[(ms / 90) % types.length]!));
      await vi.advanceTimersByTimeAsync(90);
    }
  }

  test('causes few attempts, and the back-off goes on', async () => {
    vi.useFakeTimers();
    vi.spyOn(Math, 'random').mockReturnValue(0.99);
    const attempts = vi.fn(() => Promise.reject(new Error('no network')));
    const client = make({ token: attempts });
    void client.connect();
    await flap(['offline', 'online', 'visibilitychange']);
    // At the beginning, after the back-off of about 0.5 s and 1 s, and every 2 s.
    expect(attempts.mock.calls.length).toBeLessThan(7);
    expect(client.state).toMatchObject({ at: 'waiting', attempt: attempts.mock.calls.length });
    // Without events the wait would last for up to 20 s.
    await vi.advanceTimersByTimeAsync(4_000);
    const before = attempts.mock.calls.length;
    page.dispatchEvent(new Event('online'));
    await vi.advanceTimersByTimeAsync(10);
    expect(attempts).toHaveBeenCalledTimes(before + 1);
    page.dispatchEvent(new Event('offline'));
    await vi.advanceTimersByTimeAsync(2_500);
    expect(attempts).toHaveBeenCalledTimes(before + 1);
  });

  test('causes one ping at a time', async () => {
    const client = make();
    await client.connect();
    server.answers.ping = () => undefined;
    for (let i = 0; i < 20; i++) page.dispatchEvent(new Event('online'));
    await until(() => server.received('ping').length);
    expect(server.received('ping')).toHaveLength(1);
    server.socket.say({ type: 'pong', time: Date.now() });
    page.dispatchEvent(new Event('online'));
    await until(() => server.received('ping').length === 2);
  });
});

test('connect() probes a connection that there is, as an app does that comes to the foreground', async () => {
  const client = make();
  await client.connect();
  expect(server.received('ping')).toEqual([]);
  vi.useFakeTimers();
  // With a short pause it would be connected again already.
  vi.spyOn(Math, 'random').mockReturnValue(0.99);
  server.answers.ping = () => undefined;
  void client.connect();
  expect(client.state.at).toBe('connected');
  await vi.advanceTimersByTimeAsync(5_900);
  expect(server.received('ping')).toHaveLength(1);
  expect(client.state.at).toBe('connected');
  await vi.advanceTimersByTimeAsync(200);
  expect(client.state.at).not.toBe('connected');
});

test('an upload listens to its signal only while it lasts', async () => {
  const over = new AbortController();
  const added = vi.spyOn(over.signal, 'addEventListener');
  const sender = { run: vi.fn(async () => 'file'), drop: vi.fn() };
  const upload = () => new Upload('c', new Blob(['x']), { signal: over.signal }, async () => sender);
  await upload().done;
  sender.run.mockRejectedValueOnce(new Error('no'));
  const failed = upload();
  await expect(failed.done).rejects.toThrow('no');
  failed.retry();
  await failed.done;
  // One listener for all uploads.
  expect(added).toHaveBeenCalledTimes(1);
  sender.run.mockReturnValueOnce(new Promise(() => {}));
  const aborted = upload();
  over.abort();
  await expect(aborted.done).rejects.toMatchObject({ code: 'closed' });
  // Those that had ended stay as they were.
  expect([failed.state, sender.drop.mock.calls.length]).toEqual(['ready', 0]);
});

describe('an error of the client itself', () => {
  test('closes the client, with what is missing', async () => {
    vi.stubGlobal('TextEncoder', undefined);
    await expect(make().connect()).rejects.toMatchObject({ code: 'bad_request', message: expect.stringContaining('TextEncoder') });
  });

  test('in a frame that it cannot read is named', async () => {
    const client = make();
    await client.connect();
    server.socket.onmessage!({ data: 'no frame' });
    expect(client.state).toMatchObject({
      at: 'waiting',
      error: { code: 'lost', message: expect.stringContaining('a frame cannot be read') },
    });
  });

  test('in a request is no timeout', async () => {
    const client = make();
    await client.connect();
    const request = {
      type: 'public' as const,
      get conversation(): string {
        throw new TypeError('a bug');
      },
    };
    await expect(client.request(request)).rejects.toThrow('a bug');
  });

  test('fails an upload where there is no fetch', async () => {
    vi.stubGlobal('fetch', undefined);
    Reflect.deleteProperty(globalThis, 'fetch');
    const client = make();
    await client.connect();
    const file = client.conversation('c').attach(new Blob(['x']));
    await expect(file.done).rejects.toMatchObject({ code: 'invalid', message: expect.stringContaining('fetch') });
  });
});

test('timers and the names of those who are typing end with disconnect()', async () => {
  vi.useFakeTimers();
  server.answers.history = () => ({ type: 'error', code: 'unavailable', message: 'later' });
  const client = make();
  await client.connect();
  const conversation = client.conversation('c');
  const close = conversation.open();
  conversation.sendTyping();
  server.socket.say({ type: 'typing', conversation: 'c', user: 'bob' });
  server.socket.say({
    type: 'message',
    conversation: 'd',
    seq: 1,
    message_id: 'm',
    client_id: 'x',
    sender: 'bob',
    kind: 'text',
    body: 'hi',
    at: 1,
  });
  await vi.advanceTimersByTimeAsync(16_000);
  server.socket.say({ type: 'typing', conversation: 'c', user: 'bob' });
  expect(conversation.typing).toEqual(['bob']);
  client.disconnect();
  expect(conversation.typing).toEqual([]);
  // A change is shown with the next frame.
  await vi.advanceTimersByTimeAsync(20);
  expect(vi.getTimerCount()).toBe(0);
  close();
});

describe('a clock that is an hour ahead', () => {
  const HOUR = 3_600_000;
  const gatewayNow = () => Date.now() - HOUR;

  test('changes neither what is muted nor the times of messages', async () => {
    server.changes = { time: gatewayNow(), expires_at: gatewayNow() + HOUR };
    const item = {
      conversation: 'c',
      kind: 'dm',
      name: 'bob',
      last_seq: 1,
      rev: 0,
      last_message: null,
      read_seq: 1,
      unread: 0,
      joined_seq: 1,
    };
    server.answers.inbox = () => ({ type: 'inbox', items: [{ ...item, muted_until: gatewayNow() + HOUR / 2 }] });
    server.answers.send = () => undefined;
    const client = make();
    await client.connect();
    await until(() => client.inbox.loaded);
    expect(Math.abs(client.now() - gatewayNow())).toBeLessThan(HOUR / 60);
    const conversation = client.conversation('c');
    expect(conversation.muted).toBe(true);
    void conversation.send('one');
    expect(Math.abs(conversation.messages[0]!.at - gatewayNow())).toBeLessThan(HOUR / 60);
  });

  test('changes no time of an edit or a deletion that waits, or was just acknowledged', async () => {
    server.changes = { time: gatewayNow(), expires_at: gatewayNow() + HOUR };
    server.answers.conversation = ({ conversation }) => ({ type: 'conversation', conversation, kind: 'group', participant_count: 1 });
    server.answers.participants = () => ({ type: 'participants', items: [] });
    const message = { type: 'message', conversation: 'c', sender: 'alice', kind: 'text', at: 1 };
    const messages = [1, 2].map((seq) => ({ ...message, seq, message_id: `m${seq}`, client_id: `c${seq}`, body: 'old' }));
    server.answers.history = () => ({ type: 'history', messages, rev: 0, head: 2 });
    server.answers.edit = server.answers.delete = () => undefined;
    const client = make();
    await client.connect();
    const list = client.conversation('c');
    const close = list.open();
    await list.whenLoaded();
    const isNow = (at: number | undefined) => expect(Math.abs(at! - gatewayNow())).toBeLessThan(HOUR / 60);
    const edited = list.edit(1, 'new');
    void list.delete(2);
    isNow(list.message(1)!.editedAt);
    isNow(list.message(2)!.deleted!.at);
    await until(() => server.received('edit').length);
    server.socket.say({ type: 'accepted', id: server.received('edit')[0]!.id, rev: 1 });
    await edited;
    expect(list.message(1)).not.toHaveProperty('pending');
    isNow(list.message(1)!.editedAt);
    close();
  });

  test('is noticed by a ping, if it was set while the connection lasts', async () => {
    const client = make();
    await client.connect();
    server.answers.ping = () => ({ type: 'pong', time: gatewayNow() });
    page.dispatchEvent(new Event('online'));
    await until(() => client.now() < Date.now() - HOUR / 2);
  });

  test('is not assumed because the device slept before the answer to a ping came', async () => {
    const client = make();
    await client.connect();
    server.answers.ping = () => undefined;
    page.dispatchEvent(new Event('online'));
    await until(() => server.received('ping').length);
    const asked = Date.now();
    vi.spyOn(Date, 'now').mockReturnValue(asked + HOUR);
    server.socket.say({ type: 'pong', id: server.received('ping')[0]!.id, time: asked });
    await client.request({ type: 'away', away: true });
    // The clock of the gateway was read when the client connected, which took a moment.
    expect(Math.abs(client.now() - asked - HOUR)).toBeLessThan(HOUR / 60);
  });
});
