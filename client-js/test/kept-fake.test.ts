/** What a user wrote stays, whatever the application, the storage and the connection do: against a fake server. */
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { ChatClient, type ChatOptions, memoryStorage } from '../src/index.js';
import { merged } from '../src/outbox-rules.js';
import { FakeServer } from './support/fake-server.js';
import { until } from './support/gateway.js';
import { expectNoRejections, noteRejections } from './support/rejections.js';

let server: FakeServer;
let isOffline: boolean;
const made: ChatClient[] = [];
const make = (options: Partial<ChatOptions> = {}) => {
  const token = () => (isOffline ? Promise.reject(new Error('offline')) : 't');
  const client = new ChatClient('ws://fake', { token, WebSocket: server.WebSocket, storage: memoryStorage(), ...options });
  made.push(client);
  return client;
};
const refusing = () => ({ ...memoryStorage(), put: () => Promise.reject(new Error('no disk')) });
const bodies = () => server.received('send').map(({ body }) => body);

beforeEach(() => {
  server = new FakeServer();
  let seq = 0;
  server.answers.send = () => ({ type: 'sent', seq: ++seq, message_id: 'm', at: 1, duplicate: false });
  isOffline = true;
  noteRejections();
});
afterEach(async () => {
  vi.useRealTimers();
  for (const client of made.splice(0)) client.disconnect();
  await expectNoRejections();
});

test.each([
  ['was written before the user is known', {}],
  ['the storage refused', { user: 'alice', storage: refusing() }],
])('a message that %s outlives disconnect()', async (_, options) => {
  const client = make(options);
  client.on('error', () => {});
  void client.connect();
  const sent = client.conversation('c').send('kept');
  await until(() => client.conversation('c').messages.length === 1);
  client.disconnect();
  await expect(sent).rejects.toMatchObject({ code: 'closed' });
  expect(client.conversation('c').messages.map(({ body }) => body)).toEqual(['kept']);
  isOffline = false;
  await client.connect();
  await until(() => bodies().length === 1);
  expect(bodies()).toEqual(['kept']);
});

test('a direct chat that is still to be created outlives disconnect()', async () => {
  const client = make({ user: 'alice' });
  void client.connect();
  const dm = await client.dm('bob');
  client.disconnect();
  server.answers.create = () => ({ type: 'created', conversation: dm.id, existed: false });
  isOffline = false;
  await client.connect();
  await dm.send('hi');
  const kinds = server.requests.map(({ type }) => type).filter((type) => type === 'create' || type === 'send');
  expect(kinds).toEqual(['create', 'send']);
});

test('what an application does later with its array of files changes no message', async () => {
  const client = make({ user: 'alice' });
  void client.connect();
  const conversation = client.conversation('c');
  const files = [conversation.attach(new Blob(['data']), { name: 'a.txt' })];
  void conversation.send('with a file', { attachments: files });
  files.length = 0;
  const kept = [{ url: 'https://example.org/cat.png' }];
  void conversation.edit(1, 'edited', kept);
  kept.length = 0;
  isOffline = false;
  await client.connect();
  await client.conversation('d').send('after');
  await until(() => server.received('edit').length);
  expect(server.received('edit')[0]).toMatchObject({ attachments: [{ url: 'https://example.org/cat.png' }] });
  // The file cannot be uploaded here, and the message does not go without it.
  expect(bodies()).toEqual(['after']);
});

test('an earlier copy in a storage that refuses writes does not undo a refusal', () => {
  const entry = { clientId: 'a', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: 'x', at: 1 };
  const failed = { code: 'forbidden' as const, message: 'no' };
  expect(merged({ ...entry, failed, unsaved: true }, entry, false)).toMatchObject({ failed });
  expect(merged({ ...entry, failed }, entry, false).failed).toBeUndefined();
});

test('as many quoted messages are kept as a list can show', async () => {
  isOffline = false;
  const message = (seq: number) => ({
    conversation: 'c',
    seq,
    message_id: `m${seq}`,
    sender: 'bob',
    kind: 'text',
    body: `${seq}`,
    at: seq,
  });
  server.answers.history = ({ around }) => ({ type: 'history', messages: [message(around as number)], head: 1_000, rev: 0 });
  const client = make();
  await client.connect();
  const conversation = client.conversation('c');
  for (let seq = 1; seq <= 300; seq++) await conversation.loadMessage(seq);
  expect(conversation.message(1)).toMatchObject({ body: '1' });
});
