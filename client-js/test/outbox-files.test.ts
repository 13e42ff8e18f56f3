/** Files of waiting messages that the storage of the outbox keeps for a later client. */
import 'fake-indexeddb/auto';
import { afterAll, afterEach, beforeAll, expect, test, vi } from 'vitest';
import { type ChatClient, indexedDbStorage, type Message, type OutboxStorage } from '../src/index.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';
import { keeping } from './support/keeping.js';
import { noise } from './support/pictures.js';

let gateway: Gateway;
beforeAll(async () => {
  gateway = await new Gateway({ attachments__uploads_per_minute: '1000' }).start();
});
afterEach(() => {
  vi.restoreAllMocks();
  disconnectAll();
});
afterAll(() => gateway.close());

/** Returns a client that does not get a connection. */
function offline(name: string, storage: OutboxStorage): ChatClient {
  const client = gateway.client(name, { storage, user: name, token: () => Promise.reject(new Error('no network')) });
  client.connect().catch(() => {});
  return client;
}
/** Returns a client with the messages that it gets. */
async function listener(): Promise<[client: ChatClient, heard: Message[]]> {
  const heard: Message[] = [];
  const client = await gateway.connect(user('bob'));
  client.on('message', (message) => heard.push(message));
  return [client, heard];
}
const downloaded = async (client: ChatClient, id: string) =>
  new Uint8Array(await (await fetch((await client.attachment(id)).url)).arrayBuffer());

test('files for a direct chat that was opened without a connection are uploaded by the next client', async () => {
  const [bob, heard] = await listener();
  const [a, storage] = [user('alice'), keeping()];
  const first = offline(a, storage);
  const dm = await first.dm(bob.user!);
  dm.open();
  const files = [noise(1_000), noise(2_000)].map((data, i) => dm.attach(new Blob([data]), { name: `${i}.bin`, alt: `file ${i}` }));
  dm.send('all', { attachments: [files[0]!, { url: 'https://example.org/cat.png' }, files[1]!] }).catch(() => {});
  await until(async () => (await storage.entries(a)).length);
  first.disconnect();
  // It is shown before there is a connection.
  const again = gateway.client(a, { storage, user: a });
  const list = again.conversation(dm.id);
  list.open();
  const connected = again.connect();
  await until(() => list.messages.at(-1)?.body === 'all');
  expect(list.messages.at(-1)!.attachments!.map(({ name, size }) => [name, size])).toEqual([
    ['0.bin', 1_000],
    [undefined, undefined],
    ['1.bin', 2_000],
  ]);
  await connected;
  await until(() => heard.length);
  const [one, link, two] = heard[0]!.attachments!;
  expect([one!.name, link!.url, two!.alt]).toEqual(['0.bin', 'https://example.org/cat.png', 'file 1']);
  expect(await downloaded(bob, two!.id!)).toEqual(noise(2_000));
  await until(() => !storage.kept.size);
  expect(await storage.entries(a)).toEqual([]);
});

test('a message whose upload failed can be tried again by the next client, or discarded with its files', async () => {
  const [bob, heard] = await listener();
  const [a, storage] = [user('alice'), keeping()];
  const first = await gateway.connect(a, { storage });
  const dm = await first.dm(bob.user!);
  const real = fetch;
  vi.spyOn(globalThis, 'fetch').mockImplementation((url, init) =>
    String(url).endsWith('/v1/attachments')
      ? Promise.resolve(Response.json({ code: 'too_large', message: 'too large' }, { status: 413 }))
      : real(url, init),
  );
  for (const text of ['one', 'two']) {
    const sent = dm.send(text, { attachments: [dm.attach(new Blob([text]), { name: text })] });
    await expect(sent).rejects.toMatchObject({ code: 'too_large' });
  }
  await until(async () => (await storage.entries(a)).filter(({ failed }) => failed).length === 2);
  first.disconnect();
  vi.restoreAllMocks();
  const again = await gateway.connect(a, { storage });
  const list = again.conversation(dm.id);
  list.open();
  await until(() => list.messages.filter(({ state }) => state === 'failed').length === 2);
  const [one, two] = list.messages.filter(({ state }) => state === 'failed');
  list.discard(one!.key);
  list.retry(two!.key);
  await until(() => heard.length);
  expect(heard.map(({ body }) => body)).toEqual(['two']);
  await until(() => !storage.kept.size);
});

test('what is being kept during `logout()` does not stay', async () => {
  const [a, storage] = [user('alice'), keeping()];
  const client = await gateway.connect(a, { storage });
  const dm = await client.dm(user('bob'));
  let go = () => {};
  const wait = new Promise<void>((resolve) => (go = resolve));
  const { keep } = storage;
  let kept: Promise<unknown> | undefined;
  storage.keep = (clientId, files) => {
    kept = wait.then(() => keep!(clientId, files));
    return kept;
  };
  const real = fetch;
  vi.spyOn(globalThis, 'fetch').mockImplementation((url, init) =>
    String(url).endsWith('/v1/attachments') ? new Promise(() => {}) : real(url, init),
  );
  dm.send('one', { attachments: [dm.attach(new Blob(['x']))] }).catch(() => {});
  await until(() => kept !== undefined);
  await client.logout();
  go();
  await kept;
  await until(() => !storage.kept.size);
  expect(await storage.entries(a)).toEqual([]);
});

test('a storage that cannot keep files, or has no room, loses no message of this client', async () => {
  const [bob, heard] = await listener();
  for (const keep of [undefined, () => Promise.reject(new Error('no room'))]) {
    const { keep: _, ...storage } = keeping();
    const alice = await gateway.connect(user('alice'), { storage: { ...storage, ...(keep && { keep }) } });
    const errors: string[] = [];
    alice.on('error', ({ message }) => errors.push(message));
    const dm = await alice.dm(bob.user!);
    await dm.send('text', { attachments: [dm.attach(new Blob(['x']))] });
    expect(errors).toEqual(keep ? ['no room'] : []);
  }
  await until(() => heard.length === 2);
});

test('IndexedDB keeps files in their order, at most 200 MiB, and forgets them with their message', async () => {
  const storage = indexedDbStorage('files');
  const entry = { user: 'alice', gateway: 'ws://fake', conversation: 'c', body: '', at: 1 };
  const blobs = Array.from({ length: 12 }, (_, i) => new Blob([`${i}`]));
  await storage.keep!('a', blobs.slice(0, 3));
  await storage.keep!('a', blobs);
  await storage.keep!('b', [new Blob(['b'])]);
  await storage.put({ ...entry, clientId: 'a' });
  const sizes = async (clientId: string) => (await storage.files!(clientId)).length;
  expect([await sizes('a'), await sizes('b'), await sizes('c')]).toEqual([12, 1, 0]);
  const huge = new Blob([new Uint8Array(200 << 20)]);
  await expect(storage.keep!('c', [huge])).rejects.toThrow('more than 200 MiB');
  await storage.remove('a');
  await until(async () => !(await sizes('a')));
  expect([await storage.entries('alice'), await sizes('b')]).toEqual([[], 1]);
});

test('files without a message are deleted later, because a tab may be about to store their message', async () => {
  const first = indexedDbStorage('left');
  await first.put({ clientId: 'waiting', user: 'alice', gateway: 'ws://fake', conversation: 'c', body: '', at: 1 });
  const now = vi.spyOn(Date, 'now').mockReturnValue(Date.now() - 3_600_000);
  for (const id of ['waiting', 'left']) await first.keep!(id, [new Blob(['x'])]);
  now.mockRestore();
  await first.keep!('new', [new Blob(['x'])]);
  const second = indexedDbStorage('left');
  await until(async () => !(await second.files!('left')).length);
  for (const id of ['waiting', 'new']) expect(await second.files!(id)).toHaveLength(1);
  // Their user did not come back.
  vi.spyOn(Date, 'now').mockReturnValue(Date.now() + 31 * 24 * 3_600_000);
  const later = indexedDbStorage('left');
  await until(async () => !(await later.files!('waiting')).length);
});
