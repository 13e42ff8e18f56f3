/** The example for React Native, without React Native: in a realm that has only the globals of React Native, over a real gateway. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from 'vitest';
import type { ChatClient, OutboxEntry, OutboxStorage, TokenSource } from '../src/index.js';
import { bundle, install } from './support/examples.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';
import { NATIVE, NativeApp, NativeStorage } from './support/react-native.js';

interface Example {
  createChat(url: string, user: string, token: TokenSource): ChatClient;
  start(chat: ChatClient): () => void;
  asyncStorage(): OutboxStorage;
}

const EXPORTS = `
  export { createChat, start } from './chat';
  export { asyncStorage } from './storage';`;
const work = mkdtempSync(join(tmpdir(), 'chat-react-native-'));
let gateway: Gateway;
const processes: NativeApp<Example>[] = [];
let script: string;

beforeAll(async () => {
  await install('react-native', work, '@noble/hashes');
  const options = { folder: work, instead: NATIVE, format: 'iife', globalName: 'app', target: 'es2022', write: false } as const;
  script = (await bundle('react-native', EXPORTS, options)).outputFiles![0]!.text;
});
beforeEach(async () => {
  gateway = await new Gateway().start();
});
afterEach(async () => {
  for (const process of processes.splice(0)) process.kill();
  disconnectAll();
  await gateway.close();
});
afterAll(() => rmSync(work, { recursive: true, force: true }));

/** Starts the app of a user. */
function launch(
  name: string,
  storage: NativeStorage,
  of = gateway,
  isOld = false,
): { process: NativeApp<Example>; chat: ChatClient; stop: () => void } {
  const process = new NativeApp<Example>(script, storage, isOld);
  processes.push(process);
  const chat = process.app.createChat(of.url, name, () => of.token(name));
  return { process, chat, stop: process.app.start(chat) };
}

const waiting = (storage: NativeStorage) => [...storage.items.keys()].filter((key) => key.includes('/entry/'));

test.each([
  ['0.83', true],
  ['0.84', false],
])('it sends, receives, uploads and downloads with the URL of React Native %s', async (_, isOld) => {
  const [a, b] = [user('alice'), user('bob')];
  const storage = new NativeStorage();
  const { chat, stop } = launch(a, storage, gateway, isOld);
  const bob = await gateway.connect(b);
  const dm = await chat.dm(b);
  dm.open();
  const file = dm.attach(new Blob(['Call the plumber.']), { name: 'notes.txt' });
  await dm.send('My notes', { attachments: [file] });
  const his = await bob.dm(a);
  his.open();
  await until(() => his.messages.some(({ body }) => body === 'My notes'), 'the message');
  await his.send('Thank you!');
  await until(() => dm.messages.at(-1)?.body === 'Thank you!', 'the answer');
  await until(() => chat.inbox.get(dm.id)?.unread === 1, 'one unread message');
  await until(() => dm.messages[0]?.state === 'read', 'read');
  const { url } = await chat.attachment(await file.done);
  expect(await (await fetch(url)).text()).toBe('Call the plumber.');
  await until(() => !waiting(storage).length, 'an empty outbox');
  stop();
  expect(chat.state.at).toBe('idle');
});

test('a message that was not sent survives the app, and arrives exactly once', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const storage = new NativeStorage();
  await gateway.kill();
  const first = launch(a, storage);
  // There is no such conversation yet. Its id is computed without WebCrypto.
  const dm = await first.chat.dm(b);
  const texts = ['one', 'two', 'three'];
  for (const text of texts) void dm.send(text);
  await until(() => waiting(storage).length === 3, 'the stored messages');
  first.process.kill();
  const kept = new Map(storage.items);

  const second = launch(a, storage);
  const again = second.chat.conversation(dm.id);
  again.open();
  const shown = () => again.messages.map(({ body, state }) => `${body} ${state}`);
  await until(() => again.messages.length === 3, 'the messages, before the first connection');
  expect(shown()).toEqual(['one sending', 'two sending', 'three sending']);
  await gateway.start();
  second.process.appState('active');
  await until(() => again.messages.every(({ seq }) => seq), 'sent');
  await until(() => !waiting(storage).length, 'an empty outbox');
  second.process.kill();

  // It ended before it noted that they were sent.
  for (const [key, text] of kept) storage.items.set(key, text);
  const third = launch(a, storage);
  await third.chat.connect();
  await until(() => !waiting(storage).length, 'an empty outbox again');
  const bob = await gateway.connect(b);
  const his = await bob.dm(a);
  expect(his.id).toBe(dm.id);
  expect((await his.history()).messages.filter(({ kind }) => kind === 'text').map(({ body }) => body)).toEqual(texts);
});

test('a message for one gateway is not sent to another', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const storage = new NativeStorage();
  const away = new Gateway();
  away.address = '127.0.0.1:9';
  const first = launch(a, storage, away);
  void (await first.chat.dm(b)).send('for the other gateway');
  await until(() => waiting(storage).length === 1, 'the stored message');
  first.process.kill();
  const { chat } = launch(a, storage);
  await chat.connect();
  const dm = await chat.dm(b);
  await dm.send('for this gateway');
  const { messages } = await dm.history();
  expect(messages.filter(({ kind }) => kind === 'text').map(({ body }) => body)).toEqual(['for this gateway']);
});

test('an app in the background is away, and comes back at once', async () => {
  const a = user('alice');
  const { chat, process, stop } = launch(a, new NativeStorage());
  await chat.connect();
  const told: boolean[] = [];
  const away = chat.away.bind(chat);
  chat.away = (isAway) => {
    told.push(isAway);
    away(isAway);
  };
  process.appState('background');
  await gateway.kill();
  await until(() => chat.state.at === 'waiting' && chat.state.attempt > 3, 'a long wait');
  await gateway.start();
  process.appState('active');
  expect(chat.state.at).toBe('connecting');
  await until(() => chat.state.at === 'connected', 'connected');
  // The new connection tells it again.
  expect(told).toEqual([true, false, false]);

  // A push may start it in the background.
  stop();
  process.appState('background');
  const again = process.app.start(chat);
  expect(told.slice(3)).toEqual([true]);
  again();
});

test('calls of the storage take effect in their order', async () => {
  const storage = new NativeStorage();
  const { asyncStorage } = new NativeApp<Example>(script, storage).app;
  const kept = asyncStorage();
  const entry = (clientId: string, body: string): OutboxEntry => ({ clientId, body, user: 'alice', gateway: '', conversation: 'c', at: 1 });
  for (let i = 0; i < 20; i++) {
    void kept.put(entry('gone', `${i}`));
    void kept.put(entry('stays', `${i}`));
    void kept.remove('gone');
  }
  void kept.put({ ...entry('other', ''), user: 'bob' });
  expect(await kept.entries('alice')).toEqual([entry('stays', '19')]);
  await kept.set!('name', 'text');
  expect(await kept.get!('name')).toBe('text');
  await kept.set!('name');
  expect(await kept.get!('name')).toBeUndefined();
});
