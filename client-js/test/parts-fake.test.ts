/** Uploads in parts to a file storage, with the faults that a real one has. */
import { createHash } from 'node:crypto';
import { openAsBlob } from 'node:fs';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import type { ServerResponse } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { ChatClient, type Conversation, memoryStorage, type OutboxStorage, UnauthorizedError, type Upload } from '../src/index.js';
import { FakeServer } from './support/fake-server.js';
import { FileStorage } from './support/file-storage.js';
import { until } from './support/gateway.js';
import { keeping } from './support/keeping.js';
import { noise } from './support/pictures.js';

let storage: FileStorage;
let server: FakeServer;
let client: ChatClient;
let conversation: Conversation;
let url: string;
beforeEach(async () => {
  storage = new FileStorage();
  server = new FakeServer();
  server.answers.send = () => ({ type: 'sent', seq: 1, message_id: 'm', at: 1, duplicate: false });
  url = await storage.start();
  client = new ChatClient(url, { token: 'secret', WebSocket: server.WebSocket, storage: memoryStorage() });
  await client.connect();
  conversation = client.conversation('c');
});
afterEach(() => {
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
  client.disconnect();
  storage.close();
});

const digestOf = (data: Uint8Array) => createHash('sha256').update(data).digest('hex');
/** Uploads bytes. Returns the upload, with its states and how much was sent at each event. */
function attach(data = noise(4_500)): { file: Upload; data: Uint8Array; states: string[]; sent: number[] } {
  const file = conversation.attach(new Blob([data], { type: 'image/png' }), { name: 'x' });
  const states: string[] = [];
  const sent: number[] = [];
  file.on('state', (state) => states.push(state));
  file.on('progress', (progress) => sent.push(progress.sent));
  return { file, data, states, sent };
}
/** Returns what an upload says of its metadata as soon as it is ready. */
const metadataOf = (file: Upload) => new Promise((resolve) => file.on('state', (state) => state === 'ready' && resolve(file.metadata)));
/** Has retries wait for no time. */
const hurry = () => vi.spyOn(Math, 'random').mockReturnValue(0);

test('parts go to the storage without a token, and the message is sent when the file is complete', async () => {
  const { file, data, states, sent } = attach();
  const message = conversation.send('text', { attachments: [file] });
  await message;
  const id = await file.done;
  expect(digestOf(storage.bytes(id))).toBe(digestOf(data));
  expect(states).toEqual(['uploading', 'ready']);
  expect(sent).toEqual([0, 1_000, 2_000, 3_000, 4_000, 4_500, 4_500]);
  expect(storage.seen.map(({ method, path }) => `${method} ${path}`)).toEqual([
    'POST attachments',
    'POST parts',
    ...Array(5).fill('PUT part'),
    'POST parts',
    'POST complete',
  ]);
  for (const { path, headers } of storage.seen) {
    expect(headers.authorization).toBe(path === 'part' ? undefined : 'Bearer secret');
    if (path === 'part') expect([headers.cookie, headers['content-type']]).toEqual([undefined, undefined]);
  }
  expect(server.received('send')[0]).toMatchObject({ attachments: [{ id }] });
});

test('a file with more parts than a list has is sent in several lists', async () => {
  storage.partBytes = 10;
  const { file, data, sent } = attach(noise(2_345));
  expect(digestOf(storage.bytes(await file.done))).toBe(digestOf(data));
  expect(storage.count('POST', 'parts')).toBe(4);
  expect(storage.count('PUT', 'part')).toBe(235);
  expect(sent).toEqual([...sent].sort((a, b) => a - b));
});

test.each([
  ['an address that expired', 403],
  ['a storage that is busy', 503],
  ['a broken connection', 0],
])('%s is tried again with new addresses', async (_, status) => {
  hurry();
  storage.fail(/PUT part/, status);
  const { file, data, states } = attach();
  expect(digestOf(storage.bytes(await file.done))).toBe(digestOf(data));
  expect(states).toEqual(['uploading', 'waiting', 'uploading', 'ready']);
  expect(storage.count('POST', 'attachments')).toBe(1);
});

test('addresses that are about to expire are replaced before they are used', async () => {
  storage.faults.push({
    on: /PUT part/,
    times: 1,
    // The first part takes longer than the addresses are valid.
    fault: (response) => {
      storage.uploads.get('file-1')!.parts.set(1, Buffer.from(data.subarray(0, 1_000)));
      setTimeout(() => response.writeHead(200).end(), 300);
    },
  });
  storage.validMs = 200;
  const { file, data, states } = attach();
  expect(digestOf(storage.bytes(await file.done))).toBe(digestOf(data));
  expect(states).toEqual(['uploading', 'ready']);
});

test('the gateway fails for a while, and no part is sent twice', async () => {
  hurry();
  for (const path of ['attachments', 'parts', 'complete']) storage.fail(new RegExp(`POST ${path}`), 503, 2, { code: 'unavailable' });
  for (const path of ['parts', 'complete']) storage.fail(new RegExp(`POST ${path}`), 0, 1);
  const { file, data } = attach();
  expect(digestOf(storage.bytes(await file.done))).toBe(digestOf(data));
  expect(storage.count('PUT', 'part')).toBe(5);
});

test('a part that the storage lost is sent again, a bounded number of times', async () => {
  hurry();
  let losses = 1;
  const lose = (response: { writeHead(status: number): { end(): void } }) => {
    // It is missing when the gateway looks for it.
    if (losses-- > 0) [...storage.uploads.values()].at(-1)!.parts.delete(2);
    response.writeHead(409).end();
  };
  storage.faults.push({ on: /POST complete/, times: 1, fault: lose });
  const { file, data } = attach();
  expect(digestOf(storage.bytes(await file.done))).toBe(digestOf(data));
  expect(storage.count('PUT', 'part')).toBe(6);
  losses = Infinity;
  storage.faults.push({ on: /POST complete/, times: Infinity, fault: lose });
  const before = storage.count('POST', 'complete');
  await expect(attach().file.done).rejects.toMatchObject({ code: 'bad_request' });
  expect(storage.count('POST', 'complete') - before).toBe(9);
});

test('a part that the storage takes and loses each time fails the upload', async () => {
  hurry();
  storage.faults.push({ on: /PUT part/, times: Infinity, fault: (response) => response.writeHead(200).end() });
  await expect(attach().file.done).rejects.toMatchObject({ code: 'unavailable', message: 'the file storage lost a part' });
  expect(storage.count('POST', 'parts')).toBe(18);
});

test('a storage that takes a part and does not answer ends the request, and the part is sent again', async () => {
  hurry();
  let isSilent = false;
  storage.faults.push({ on: /PUT part/, times: 1, fault: () => (isSilent = true) });
  const real = setTimeout;
  vi.spyOn(globalThis, 'setTimeout').mockImplementation(((work: () => void, ms?: number, ...more: []) =>
    real(work, ms === 3_600_000 ? 300 : ms, ...more)) as typeof setTimeout);
  const { file, data } = attach();
  expect(digestOf(storage.bytes(await file.done))).toBe(digestOf(data));
  expect(isSilent).toBe(true);
});

test('a direct chat that cannot be created for a while does not fail its files', async () => {
  hurry();
  let times = 0;
  server.answers.create = () => (times++ < 2 ? { type: 'error', code: 'unavailable', message: 'later' } : { type: 'ok' });
  client.outbox.dms.set('c', 'bob');
  const { file } = attach();
  await file.done;
  expect(times).toBeGreaterThan(2);
});

test('an upload that is aborted without a connection ends at once', async () => {
  const offline = new ChatClient(url, { token: () => new Promise(() => {}), WebSocket: server.WebSocket, storage: memoryStorage() });
  offline.connect().catch(() => {});
  const file = offline.conversation('c').attach(new Blob(['x']), { name: 'x' });
  const { done } = file;
  file.abort();
  await expect(done).rejects.toMatchObject({ code: 'closed' });
  offline.disconnect();
});

test('files that are attached before the user is known are uploaded under the lock that other tabs wait for', async () => {
  const names: string[] = [];
  const request = (name: string, _: object, work: () => Promise<unknown>) => {
    names.push(name);
    return work();
  };
  vi.stubGlobal('navigator', { locks: { request } });
  let signIn = (_: string) => {};
  const token = () => new Promise<string>((resolve) => (signIn = resolve));
  const kept = { ...keeping(), shared: true };
  const next = new ChatClient(url, { token, WebSocket: server.WebSocket, storage: kept });
  const connected = next.connect();
  const list = next.conversation('c');
  const sent = list.send('text', { attachments: [list.attach(new Blob(['x']), { name: 'x' })] });
  // The code for files is loaded meanwhile.
  await new Promise((resolve) => setTimeout(resolve, 100));
  signIn('secret');
  await connected;
  await until(() => storage.count('POST', 'attachments'));
  signIn('secret');
  await sent;
  const [{ client_id: id }] = server.received('send') as unknown as [{ client_id: string }];
  expect(names).toContainEqual(expect.stringContaining(` ${id}`));
  next.disconnect();
});

test('a storage that cannot be reached while the gateway can fails the upload, and a retry continues it', async () => {
  hurry();
  const { file, data } = attach();
  let parts = 0;
  storage.faults.push({
    on: /PUT part/,
    times: Infinity,
    fault: (response) => (parts++ ? response.destroy() : response.writeHead(500).end()),
  });
  await expect(file.done).rejects.toMatchObject({ code: 'unreachable', message: expect.stringContaining('the file storage') });
  expect(file.state).toBe('failed');
  storage.faults = [];
  file.retry();
  expect(digestOf(storage.bytes(await file.done))).toBe(digestOf(data));
  expect(storage.count('POST', 'attachments')).toBe(1);
});

test('an upload continues on the next connection with the missing parts', async () => {
  hurry();
  storage.faults.push({
    on: /PUT part/,
    times: 1,
    // It never answers: only the end of the connection ends the request.
    fault: () => server.socket.end(1006),
  });
  const { file, data, sent } = attach();
  expect(digestOf(storage.bytes(await file.done))).toBe(digestOf(data));
  expect(sent[0]).toBe(0);
  expect(storage.count('HEAD', 'upload')).toBe(1);
  expect(storage.count('PUT', 'part')).toBe(6);
});

test('an upload continues in the next client with the missing parts', async () => {
  const kept = keeping();
  const make = async () => {
    const next = new ChatClient(url, { token: 'secret', user: 'alice', WebSocket: server.WebSocket, storage: kept });
    await next.connect();
    return next;
  };
  const first = await make();
  const data = noise(4_500);
  const file = first.conversation('c').attach(new Blob([data]), { name: 'x' });
  first
    .conversation('c')
    .send('text', { attachments: [file] })
    .catch(() => {});
  file.on('progress', ({ sent }) => sent === 2_000 && first.disconnect());
  await expect(file.done).rejects.toMatchObject({ code: 'closed' });
  const before = storage.count('PUT', 'part');
  expect(before).toBeLessThan(5);
  const second = await make();
  await until(() => server.received('send').length);
  expect(digestOf(storage.bytes('file-1'))).toBe(digestOf(data));
  expect(storage.count('POST', 'attachments')).toBe(1);
  expect(storage.count('HEAD', 'upload')).toBe(1);
  second.disconnect();
});

test('a message whose upload ends with the sign-in waits for the next one', async () => {
  const kept = keeping();
  let token = 'old';
  const next = new ChatClient(url, {
    token: ({ reason }) => (reason === 'initial' ? token : Promise.reject(new UnauthorizedError())),
    user: 'alice',
    WebSocket: server.WebSocket,
    storage: kept,
  });
  await next.connect();
  storage.fail(/POST parts/, 401);
  const list = next.conversation('c');
  list.open();
  const file = list.attach(new Blob(['x']), { name: 'x' });
  list.send('text', { attachments: [file] }).catch(() => {});
  await until(() => kept.kept.size);
  await expect(file.done).rejects.toMatchObject({ code: 'unauthorized' });
  expect(list.messages.at(-1)!.state).toBe('sending');
  token = 'new';
  next.disconnect();
  await next.connect();
  await until(() => server.received('send').length);
  expect(storage.count('POST', 'attachments')).toBe(1);
  next.disconnect();
});

/** Returns a client of Alice whose storage keeps files, and her conversation. */
async function keeper(
  more: Partial<OutboxStorage> = {},
): Promise<[next: ChatClient, list: Conversation, kept: ReturnType<typeof keeping>]> {
  const kept = { ...keeping(), ...more };
  const next = new ChatClient(url, { token: 'secret', user: 'alice', WebSocket: server.WebSocket, storage: kept });
  await next.connect();
  const list = next.conversation('c');
  list.open();
  return [next, list, kept];
}

test('a message whose upload ends with the connection for good waits for the next one', async () => {
  const [next, list, kept] = await keeper();
  storage.faults.push({ on: /PUT part/, times: 1, fault: () => server.socket.end(4502) });
  const file = list.attach(new Blob(['x']), { name: 'x' });
  list.send('text', { attachments: [file] }).catch(() => {});
  await until(() => kept.kept.size);
  await expect(file.done).rejects.toMatchObject({ closeCode: 4502 });
  expect(list.messages.at(-1)!.state).toBe('sending');
  expect((await kept.entries('alice'))[0]!.failed).toBeUndefined();
  await next.connect();
  await until(() => server.received('send').length);
  next.disconnect();
});

test('`logout()` in another tab ends an upload, which does not bring its message back', async () => {
  const [next, list, kept] = await keeper({ shared: true });
  let begin = () => {};
  const say = (response: ServerResponse) => {
    begin = () => response.writeHead(201).end(JSON.stringify({ id: 'file-1', upload: { parts: '/v1/attachments/file-1/parts' } }));
  };
  storage.faults.push({ on: /POST attachments/, times: 1, fault: say });
  const file = list.attach(new Blob(['x']), { name: 'x' });
  list.send('text', { attachments: [file] }).catch(() => {});
  await until(async () => (await kept.entries('alice')).length);
  const other = new ChatClient(url, { token: 'secret', user: 'alice', WebSocket: server.WebSocket, storage: kept });
  // Node.js may have no locks.
  for (const tab of [next, other]) tab.on('error', () => {});
  await other.connect();
  await other.logout();
  await until(() => list.messages.length === 0);
  begin();
  await expect(file.done).rejects.toMatchObject({ code: 'closed', message: 'the upload was aborted' });
  await new Promise((resolve) => setTimeout(resolve, 100));
  expect([kept.kept.size, await kept.entries('alice')]).toEqual([0, []]);
  next.disconnect();
});

test('a message whose files expired before it was sent is failed, and a retry uploads them anew', async () => {
  const [next, list] = await keeper();
  const { send } = server.answers;
  server.answers.send = () => ({ type: 'error', code: 'conflict', message: 'the file is gone' });
  const file = list.attach(new Blob(['x']), { name: 'x' });
  await expect(list.send('text', { attachments: [file] })).rejects.toMatchObject({ code: 'conflict' });
  server.answers.send = send!;
  list.retry(list.messages.at(-1)!.key);
  await until(() => server.received('send').length === 2);
  expect(server.received('send').map(({ attachments }) => attachments)).toEqual([[{ id: 'file-1' }], [{ id: 'file-2' }]]);
  next.disconnect();
});

test('an upload that the gateway gave up begins anew', async () => {
  hurry();
  storage.faults.push({
    on: /PUT part/,
    times: 1,
    fault: (response) => {
      storage.uploads.clear();
      response.writeHead(404).end();
    },
  });
  const { file, data } = attach();
  expect(await file.done).toBe('file-2');
  expect(digestOf(storage.bytes('file-2'))).toBe(digestOf(data));
});

test('an aborted upload is erased at the gateway', async () => {
  storage.faults.push({ on: /PUT part/, times: 1, fault: () => file.abort() });
  const { file } = attach();
  await expect(file.done).rejects.toMatchObject({ code: 'closed' });
  await until(() => storage.count('DELETE', 'upload') === 1);
  expect(storage.uploads.get('file-1')!.state).toBe('erasing');
  file.retry();
  expect(await file.done).toBe('file-2');
});

test('an event says when a file was scanned', async () => {
  storage.completeState = 'scanning';
  const heard: unknown[] = [];
  client.on('attachment', (event) => heard.push(event));
  const scanned = [attach(), attach(), attach()].map(({ file }) => file);
  // After the first question, the next one would be two seconds later.
  await until(() => storage.count('HEAD', 'upload') === 3);
  const ready = { type: 'attachment', file: scanned[0]!.id, state: 'ready', mime: 'image/png', width: 2, height: 3 };
  server.sockets.at(-1)!.say(ready);
  expect(await scanned[0]!.done).toBe(ready.file);
  server.sockets.at(-1)!.say({ type: 'attachment', file: scanned[1]!.id, state: 'blocked' });
  await expect(scanned[1]!.done).rejects.toMatchObject({ code: 'forbidden' });
  expect(heard).toEqual([ready, { type: 'attachment', file: expect.any(String), state: 'blocked' }]);
  expect(scanned[2]!.state).toBe('uploading');
  expect(storage.count('HEAD', 'upload')).toBe(3);
});

test('the answer, the event or a later question says that a file has its metadata', async () => {
  expect(await metadataOf(attach().file)).toBeUndefined();
  storage.metadata = 'kept';
  expect(await metadataOf(attach().file)).toBe('kept');
  storage.completeState = 'scanning';
  const [told, asked] = [attach().file, attach().file];
  await until(() => storage.count('HEAD', 'upload') === 2);
  server.sockets.at(-1)!.say({ type: 'attachment', file: told.id, state: 'ready', metadata: 'kept' });
  storage.uploads.get(asked.id!)!.state = 'ready';
  expect(await Promise.all([told, asked].map(metadataOf))).toEqual(['kept', 'kept']);
});

test('a file that is being scanned is asked for until it is ready, and holds up no other', async () => {
  storage.completeState = 'scanning';
  const scanned = [attach(), attach(), attach(), attach()];
  await until(() => storage.count('HEAD', 'upload') >= 8);
  expect(scanned.map(({ file }) => file.state)).toEqual(Array(4).fill('uploading'));
  // The gateway may be away for longer than an upload bears refusals in a row.
  storage.completeState = 'ready';
  const { file } = attach();
  await file.done;
  for (const upload of storage.uploads.values()) upload.state = 'ready';
  await Promise.all(scanned.map(({ file }) => file.done));
});

test('a file that the scanner blocks fails', async () => {
  storage.completeState = 'scanning';
  const { file } = attach();
  await until(() => storage.count('POST', 'complete'));
  storage.uploads.get('file-1')!.state = 'blocked';
  await expect(file.done).rejects.toMatchObject({ code: 'forbidden', message: expect.stringContaining('blocked') });
  storage.completeState = 'blocked';
  await expect(attach().file.done).rejects.toMatchObject({ code: 'forbidden' });
});

test('a file that was changed meanwhile fails, and is not tried for ever', async () => {
  hurry();
  const folder = await mkdtemp(join(tmpdir(), 'chat-parts-'));
  try {
    const path = join(folder, 'x');
    await writeFile(path, noise(4_500));
    const blob = await openAsBlob(path);
    await writeFile(path, noise(9_000));
    const file = conversation.attach(blob, { name: 'x' });
    await expect(file.done).rejects.toMatchObject({ code: 'not_found', message: expect.stringContaining('cannot be read') });
  } finally {
    await rm(folder, { recursive: true });
  }
});
