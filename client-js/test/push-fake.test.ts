/** Pushes, `away` and the settings of conversations, with a fake gateway and parts of a browser. */
import { afterEach, expect, test, vi } from 'vitest';
import { ChatClient, type ChatOptions, memoryStorage, type OutboxStorage } from '../src/index.js';
import { FakeServer } from './support/fake-server.js';
import { until } from './support/gateway.js';

const SUBSCRIPTION = { endpoint: 'https://push.example.org/1', keys: { p256dh: 'BPubl', auth: 'c2Vj' } };
const refused = (code: string) => ({ type: 'error', code, message: code });
const item = (conversation: string, more: object = {}) => ({
  ...{ conversation, kind: 'group', name: 'Group', last_seq: 3, rev: 0, last_message: null, read_seq: 1, unread: 2, joined_seq: 1 },
  ...more,
});

const clients: ChatClient[] = [];
let server = new FakeServer();
async function connect(options: Partial<ChatOptions> = {}): Promise<ChatClient> {
  const chat = new ChatClient('ws://x/v1/ws', { token: 't', WebSocket: server.WebSocket, storage: memoryStorage(), ...options });
  clients.push(chat);
  await chat.connect();
  return chat;
}
afterEach(() => {
  for (const chat of clients.splice(0)) chat.disconnect();
  vi.unstubAllGlobals();
  server = new FakeServer();
});
const sent = (type: string) => server.received(type).map(({ id: _, type: __, ...fields }) => fields);

/** A page that can be hidden. */
function aPage(visibilityState: string) {
  const page = Object.assign(new EventTarget(), { visibilityState });
  vi.stubGlobal('document', page);
  vi.stubGlobal('addEventListener', page.addEventListener.bind(page));
  const show = (state: string) => {
    page.visibilityState = state;
    page.dispatchEvent(new Event('visibilitychange'));
  };
  return { show };
}

/** A browser with one service worker, which has a subscription and two notifications. */
function aWorker() {
  const closed: string[] = [];
  const posted: { type: string; conversations: string[]; badge: number }[] = [];
  const note = (name: string, data?: object) => ({ data, close: () => closed.push(name) });
  const subscription = { ...SUBSCRIPTION, unsubscribe: vi.fn(async () => true) };
  const registration = {
    active: { postMessage: (message: (typeof posted)[0]) => posted.push(message) },
    getNotifications: async () => [note('of a message', { conversation: 'c' }), note('of the app')],
    pushManager: { getSubscription: async () => subscription },
  };
  const serviceWorker = Object.assign(new EventTarget(), { getRegistrations: async () => [registration] });
  vi.stubGlobal('navigator', { serviceWorker });
  const answers: unknown[] = [];
  const port = { postMessage: (answer: unknown) => answers.push(answer) };
  const say = (data: unknown) => void serviceWorker.dispatchEvent(Object.assign(new Event('message'), { data, ports: [port] }));
  return { closed, posted, subscription, say, answers };
}

test('a browser registers its subscription, with the same device each time', async () => {
  const storage = memoryStorage();
  const chat = await connect({ storage });
  await chat.registerPush({ endpoint: 'of the object', toJSON: () => ({ ...SUBSCRIPTION, expirationTime: null }) }, { content: 'none' });
  const [{ device }] = sent('device_set') as [{ device: string }];
  expect(device).toMatch(/^[0-9a-f-]{36}$/);
  expect(sent('device_set')).toEqual([{ device, provider: 'web', subscription: SUBSCRIPTION, content: 'none' }]);
  chat.disconnect();
  const again = await connect({ storage });
  await again.registerPush(SUBSCRIPTION);
  expect(sent('device_set')[1]).toEqual({ device, provider: 'web', subscription: SUBSCRIPTION });
  // The device of another gateway is another one.
  const other = await connect({ storage, scope: 'other' });
  await other.registerPush(SUBSCRIPTION);
  expect(sent('device_set')[2]!.device).not.toBe(device);
});

test('an app registers its token, with an id of its own if it wants', async () => {
  const chat = await connect();
  await chat.registerPush({ provider: 'apns', token: 'A1' }, { device: 'phone' });
  expect(sent('device_set')).toEqual([{ device: 'phone', provider: 'apns', token: 'A1' }]);
  await chat.unregisterPush();
  expect(sent('device_remove')).toEqual([{ device: 'phone' }]);
  await expect(chat.registerPush({ endpoint: 'https://push.example.org/1' })).rejects.toMatchObject({ code: 'bad_request' });
});

test('the devices come with the key for browsers', async () => {
  server.answers.devices = () => ({ type: 'devices', items: [{ device: 'd', provider: 'web', content: 'full' }], web_key: 'BKey' });
  const chat = await connect();
  expect(await chat.devices()).toMatchObject({ items: [{ device: 'd', provider: 'web', content: 'full' }], webKey: 'BKey' });
});

test('signing out removes the device, ends the subscription and closes the notifications of messages', async () => {
  const { closed, subscription } = aWorker();
  const storage = memoryStorage();
  const before = await connect({ storage });
  await before.registerPush(SUBSCRIPTION);
  before.disconnect();
  // Another start, which registered nothing.
  const chat = await connect({ storage, user: 'alice' });
  await chat.logout();
  expect(sent('device_remove')).toEqual([{ device: sent('device_set')[0]!.device }]);
  expect(subscription.unsubscribe).toHaveBeenCalledOnce();
  expect(closed).toEqual(['of a message']);
  // The next user has another device.
  const next = await connect({ storage });
  await next.registerPush(SUBSCRIPTION);
  expect(sent('device_set')[1]!.device).not.toBe(sent('device_set')[0]!.device);
});

test('signing out without a registered device asks the gateway nothing', async () => {
  aWorker();
  const chat = await connect();
  await chat.logout();
  expect(sent('device_remove')).toEqual([]);
});

test('signing out without a connection ends the subscription, says that the gateway does not know, and does not wait for long', async () => {
  const { subscription } = aWorker();
  const storage = memoryStorage();
  const chat = await connect({ storage });
  await chat.registerPush(SUBSCRIPTION);
  server.socket.silent = true;
  const errors: Error[] = [];
  chat.on('error', (error) => errors.push(error));
  const began = Date.now();
  await chat.logout();
  expect(Date.now() - began).toBeLessThan(5_000);
  expect(subscription.unsubscribe).toHaveBeenCalledOnce();
  expect(errors).toHaveLength(1);
  expect(await storage.get!('push ws://x alice')).toBeUndefined();
  expect(chat.state.at).toBe('idle');
});

test('a storage that refuses, or keeps no texts, does not keep a device from being registered', async () => {
  const { get: _, set: __, ...poor } = memoryStorage();
  const refusing: OutboxStorage = {
    ...memoryStorage(),
    get: () => Promise.reject(new Error('no')),
    set: () => Promise.reject(new Error('no')),
  };
  for (const storage of [poor, refusing]) {
    const chat = await connect({ storage });
    await chat.registerPush(SUBSCRIPTION);
    await chat.logout();
    expect(sent('device_remove').at(-1)).toEqual({ device: sent('device_set').at(-1)!.device });
  }
  expect(sent('device_remove')).toHaveLength(2);
});

test('service workers are told once which conversations are read, with the badge', async () => {
  const { posted } = aWorker();
  const items = [
    item('read', { unread: 0 }),
    item('open'),
    item('muted', { muted_until: Date.now() + 60_000, settings_version: 1 }),
    item('over', { muted_until: 1, unread: 3, settings_version: 1 }),
    item('channel', { kind: 'channel', unread: 9 }),
  ];
  server.answers.inbox = () => ({ type: 'inbox', items });
  const chat = await connect();
  await until(() => chat.inbox.loaded);
  expect(posted).toEqual([]);
  await chat.registerPush(SUBSCRIPTION);
  await until(() => posted.length === 1);
  expect(posted[0]).toEqual({ type: 'chat-gateway:read', conversations: ['read'], badge: 5 });
  chat.conversation('open').read();
  await until(() => posted.length === 2);
  expect(posted[1]).toEqual({ type: 'chat-gateway:read', conversations: ['open'], badge: 3 });
  await chat.unregisterPush();
  chat.conversation('over').read();
  // What was registered would have been told before the gateway.
  await until(() => sent('read').some(({ conversation }) => conversation === 'over'));
  expect(posted).toHaveLength(2);
});

test('service workers learn which conversations are open, and have one opened', async () => {
  const { say, answers } = aWorker();
  const chat = await connect();
  const opened: string[] = [];
  chat.on('open', (id) => opened.push(id));
  await chat.registerPush(SUBSCRIPTION);
  const conversation = chat.conversation('c');
  const close = conversation.open();
  for (const id of ['c', 'd']) say({ type: 'chat-gateway:is-open', conversation: id });
  close();
  say({ type: 'chat-gateway:is-open', conversation: 'c' });
  say('of the app');
  expect(answers).toEqual([true, false, false]);
  say({ type: 'chat-gateway:open', conversation: 'c' });
  expect(opened).toEqual(['c']);
  await chat.unregisterPush();
  say({ type: 'chat-gateway:open', conversation: 'c' });
  expect(opened).toEqual(['c']);
});

test('a browser says whether its page is hidden, again on each connection', async () => {
  const { show } = aPage('visible');
  const chat = await connect();
  expect(sent('away')).toEqual([]);
  show('hidden');
  show('hidden');
  await until(() => sent('away').length === 1);
  server.socket.end(1012);
  await until(() => sent('connect').length === 2 && sent('away').length === 2);
  show('visible');
  await until(() => sent('away').length === 3);
  expect(sent('away')).toEqual([{ away: true }, { away: true }, { away: false }]);
  server.socket.end(1012);
  await until(() => sent('connect').length === 3 && chat.state.at === 'connected');
  expect(sent('away')).toHaveLength(3);
});

test('a page that begins hidden is away; an app says it by itself', async () => {
  aPage('hidden');
  await connect();
  await until(() => sent('away').length === 1);
  vi.unstubAllGlobals();
  server = new FakeServer();
  const app = await connect();
  expect(sent('away')).toEqual([]);
  app.away(true);
  app.away(true);
  app.away(false);
  await until(() => sent('away').length === 2);
  expect(sent('away')).toEqual([{ away: true }, { away: false }]);
});

test('conversations are muted, for a time or for ever, and their pushes turned off', async () => {
  let version = 0;
  server.answers.inbox = () => ({ type: 'inbox', items: [item('c')] });
  server.answers.settings_set = () => ({ type: 'ok', version: ++version });
  const chat = await connect();
  await until(() => chat.inbox.loaded);
  const conversation = chat.conversation('c');
  const until_ = Date.now() + 3_600_000;
  await conversation.mute(until_);
  expect(conversation.muted).toBe(true);
  await conversation.mute(new Date(until_ + 1));
  await conversation.mute(Infinity);
  expect(conversation.item).toMatchObject({ mutedUntil: 8.64e15, unread: 2 });
  await conversation.setPush('off');
  expect(conversation.item).toMatchObject({ mutedUntil: 8.64e15, push: 'off' });
  await conversation.mute(null);
  expect(conversation.muted).toBe(false);
  expect(sent('settings_set')).toEqual([
    ...[until_, until_ + 1, 8.64e15].map((muted_until) => ({ conversation: 'c', muted_until })),
    { conversation: 'c', push: 'off' },
    { conversation: 'c', muted_until: 0 },
  ]);
});

test('what another device set is shown, and an older event or page does not undo it', async () => {
  const settings = { type: 'settings', conversation: 'c', muted_until: null, push: 'on' };
  let items = [item('c', { muted_until: 5, push: 'on', settings_version: 2 })];
  server.answers.inbox = () => ({ type: 'inbox', items });
  const chat = await connect();
  await until(() => chat.inbox.loaded);
  const told: unknown[] = [];
  chat.on('settings', (event) => told.push(event));
  server.socket.say({ ...settings, version: 4, muted_until: 9e12, push: 'off' });
  expect(chat.inbox.get('c')).toMatchObject({ mutedUntil: 9e12, push: 'off' });
  server.socket.say({ ...settings, version: 3 });
  await chat.inbox.refresh();
  expect(chat.inbox.get('c')).toMatchObject({ mutedUntil: 9e12, push: 'off', settingsVersion: 4 });
  items = [item('c', { push: 'on', settings_version: 5 })];
  await chat.inbox.refresh();
  expect(chat.inbox.get('c')).toMatchObject({ push: 'on' });
  expect(chat.conversation('c').muted).toBe(false);
  server.socket.say({ ...settings, version: 6, muted_until: 9e12 });
  server.socket.say({ ...settings, version: 7, muted_until: null });
  expect(chat.conversation('c').muted).toBe(false);
  expect(told).toHaveLength(4);
});

test.each(['bad_request', 'unavailable'])('an older gateway that answers %s breaks nothing', async (code) => {
  for (const type of ['away', 'device_set', 'device_remove', 'devices', 'settings_set']) server.answers[type] = () => refused(code);
  const { show } = aPage('visible');
  const chat = await connect();
  const errors: Error[] = [];
  chat.on('error', (error) => errors.push(error));
  show('hidden');
  await until(() => sent('away').length === 1);
  const options = { timeoutMs: 50 };
  await expect(chat.request({ type: 'devices' }, options)).rejects.toMatchObject({ code });
  await expect(chat.request({ type: 'settings_set', conversation: 'c', push: 'on' }, options)).rejects.toMatchObject({ code });
  expect(errors).toEqual([]);
  expect(chat.state.at).toBe('connected');
});
