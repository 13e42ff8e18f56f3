/** Uploaded files, against a real gateway. */
import { createHash } from 'node:crypto';
import { afterAll, afterEach, beforeAll, expect, test, vi } from 'vitest';
import { httpUrl } from '../src/http-url.js';
import type { ChatClient, Conversation, Message, Upload } from '../src/index.js';
import { BadNetwork } from './support/bad-network.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';
import { noise, png } from './support/pictures.js';

const MIB = 1 << 20;
let gateway: Gateway;
beforeAll(async () => {
  gateway = await new Gateway({ attachments__uploads_per_minute: '1000' }).start();
});
afterEach(() => {
  vi.restoreAllMocks();
  disconnectAll();
});
afterAll(() => gateway.close());

interface Pair {
  alice: ChatClient;
  bob: ChatClient;
  hers: Conversation;
  heard: Message[];
}
/** Returns two users with a direct chat, and the messages that Bob gets. */
async function pair(url = gateway.url): Promise<Pair> {
  const [a, b] = [user('alice'), user('bob')];
  const [alice, bob] = [await gateway.connect(a, {}, url), await gateway.connect(b)];
  const heard: Message[] = [];
  bob.on('message', (message) => heard.push(message));
  return { alice, bob, hers: await alice.dm(b), heard };
}

/** Notes the requests of uploads: method, and the bytes of the body. */
function watchRequests(): [method: string, bytes: number][] {
  const seen: [string, number][] = [];
  const real = fetch;
  vi.spyOn(globalThis, 'fetch').mockImplementation((url, init) => {
    if (String(url).includes('/v1/attachments')) seen.push([init!.method!, (init!.body as Blob | null)?.size ?? 0]);
    return real(url, init);
  });
  return seen;
}
/** Returns a digest, because comparing large arrays one by one takes minutes. */
const digestOf = (data: Uint8Array) => createHash('sha256').update(data).digest('hex');
const downloaded = async (url: string) => digestOf(new Uint8Array(await (await fetch(url)).arrayBuffer()));
const follow = (upload: Upload) => {
  const states: string[] = [upload.state];
  upload.on('state', (state) => states.push(state));
  return states;
};

test('an upload says whether the gateway could remove the metadata', async () => {
  const { hers } = await pair();
  const heic = Buffer.from('\0\0\0\x18ftypheic\0\0\0\0mif1heic', 'latin1');
  const [photo, picture] = [hers.attach(new Blob([heic]), { name: 'a.heic' }), hers.attach(new Blob([png(8, 8)]), { name: 'a.png' })];
  await Promise.all([photo.done, picture.done]);
  expect([photo.metadata, picture.metadata]).toEqual(['kept', undefined]);
});

test('a picture is uploaded and sent, and the other user downloads the same bytes', async () => {
  const { alice, bob, hers, heard } = await pair();
  hers.open();
  const data = png(800, 600);
  const file = hers.attach(new Blob([data], { type: 'image/png' }), { name: 'cat.png' });
  const progress: number[] = [];
  const states = follow(file);
  file.on('progress', ({ sent, size }) => progress.push(sent / size));
  file.alt = 'a cat';
  const sent = hers.send('', { attachments: [file] });
  // It is shown at once.
  expect(hers.messages.at(-1)).toMatchObject({
    state: 'sending',
    attachments: [{ name: 'cat.png', size: data.length, mime: 'image/png' }],
  });
  const { seq } = await sent;
  expect(states).toEqual(['waiting', 'uploading', 'ready']);
  expect(progress).toEqual([0, 1]);
  await until(() => heard.length);
  const id = await file.done;
  const wanted = { id, name: 'cat.png', mime: 'image/png', size: data.length, alt: 'a cat', width: 800, height: 600 };
  expect(heard[0]!.attachments).toEqual([wanted]);
  await until(() => bob.inbox.get(hers.id)?.lastMessage?.preview === 'cat.png');
  const { url, thumb, expiresAt } = await bob.attachment(id);
  expect(url.startsWith(gateway.page)).toBe(true);
  expect(expiresAt).toBeGreaterThan(Date.now() + 200_000);
  expect(await downloaded(url)).toBe(digestOf(data));
  expect((await fetch(thumb!)).headers.get('content-type')).toMatch(/^image\//);

  // An edit keeps the file, with all fields that the list shows.
  await until(() => hers.messages.at(-1)?.seq === seq);
  await hers.edit(seq, 'with a text', hers.messages.at(-1)!.attachments);
  expect((await hers.history()).messages.at(-1)).toMatchObject({ body: 'with a text', attachments: [wanted] });
  await hers.delete(seq);
  await until(async () => (await fetch(url)).status === 404, 'erased');
  const other = await gateway.connect(bob.user!);
  await expect(other.attachment(id)).rejects.toMatchObject({ code: 'not_found' });
  alice.disconnect();
});

test('addresses are requested together, and kept', async () => {
  const { bob, hers, heard } = await pair();
  const files = [1, 2, 3].map((size) => hers.attach(new Blob([noise(size)])));
  await hers.send('three', { attachments: files });
  await until(() => heard.length);
  const ids = heard[0]!.attachments!.map(({ id }) => id!);
  expect(heard[0]!.attachments!.map(({ size }) => size)).toEqual([1, 2, 3]);
  const requests = vi.spyOn(bob, 'request');
  const asked = () => requests.mock.calls.map(([request]) => request).filter(({ type }) => type === 'attachment_urls');
  const all = await Promise.all([...ids, ids[0]!].map((id) => bob.attachment(id)));
  expect(all.map(({ id }) => id)).toEqual([...ids, ids[0]]);
  expect(await bob.attachment(ids[1]!)).toBe(all[1]);
  expect(asked()).toEqual([{ type: 'attachment_urls', ids }]);
  const none = crypto.randomUUID();
  await expect(bob.attachment(none)).rejects.toMatchObject({ code: 'not_found' });
  await expect(bob.attachment(none)).rejects.toMatchObject({ code: 'not_found' });
  expect(asked()).toHaveLength(3);
  // More than one request may have.
  const many = Array.from({ length: 120 }, () => crypto.randomUUID());
  await Promise.allSettled(many.map((id) => bob.attachment(id)));
  expect(asked()).toHaveLength(6);
});

test.each([
  ['wss://chat.example.org/v1/ws', 'https://chat.example.org/v1/files/x'],
  ['ws://localhost:8080/v1/ws?a=b', 'http://localhost:8080/v1/files/x'],
  ['https://example.org/chat/v1/ws', 'https://example.org/chat/v1/files/x'],
  ['wss://example.org/a~/b/v1/ws?to=/c/d#/e', 'https://example.org/a~/b/v1/files/x'],
  ['ws://[::1]:8080', 'http://[::1]:8080/v1/files/x'],
  ['ws://host', 'http://host/v1/files/x'],
  ['ws://host/', 'http://host/v1/files/x'],
  ['wss://host?x=/a', 'https://host/v1/files/x'],
  ['WS://host/a/v1/ws#/b', 'http://host/a/v1/files/x'],
])('the files of %s are at %s', async (socket, wanted) => {
  expect(await httpUrl({ url: () => socket }, '/v1/files/x')).toBe(wanted);
});

test('with MessagePack, ids are the same', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const alice = await gateway.connect(a, { codec: 'msgpack' });
  const hers = await alice.dm(b);
  const file = hers.attach(new Blob(['text']), { name: 'a.txt' });
  const { seq } = await hers.send('', { attachments: [file] });
  const { messages } = await hers.history({ around: seq });
  const [{ id }] = messages.at(-1)!.attachments as [{ id: string }];
  expect(id).toBe(await file.done);
  expect(await downloaded((await alice.attachment(id)).url)).toBe(digestOf(Buffer.from('text')));
});

test('an upload continues where the connection broke, and messages overtake it', async () => {
  const proxy = new BadNetwork(gateway.address);
  const url = await proxy.start();
  const { alice, hers, heard, bob } = await pair(url);
  hers.open();
  const requests = watchRequests();
  const data = noise(11 * MIB);
  const file = hers.attach(new Blob([data]), { name: 'large.bin' });
  const sent = hers.send('with a file', { attachments: [file] });
  let cuts = 0;
  file.on('progress', ({ sent }) => {
    if (sent < 4 * MIB * (cuts + 1) || sent === data.length) return;
    cuts++;
    proxy.cut();
  });
  await hers.send('overtakes it');
  await sent;
  expect(cuts).toBeGreaterThan(0);
  await until(() => heard.length === 2);
  expect(heard.map(({ body }) => body)).toEqual(['overtakes it', 'with a file']);
  expect(requests.filter(([method]) => method === 'POST')).toHaveLength(1);
  expect(requests.filter(([method]) => method === 'HEAD').length).toBeGreaterThan(0);
  expect(Math.max(...requests.map(([, bytes]) => bytes))).toBe(4 * MIB);
  const [{ id }] = heard[1]!.attachments as [{ id: string }];
  expect(await downloaded((await bob.attachment(id)).url)).toBe(digestOf(data));
  alice.disconnect();
  proxy.close();
});

test('an upload that is aborted can be begun again, and the message with it fails until then', async () => {
  const { bob, hers, heard } = await pair();
  hers.open();
  const over = new AbortController();
  const data = noise(9 * MIB);
  const file = hers.attach(new Blob([data]), { name: 'x', signal: over.signal });
  const states = follow(file);
  const sent = hers.send('text', { attachments: [file] });
  file.once('progress', () => over.abort());
  await expect(sent).rejects.toMatchObject({ code: 'closed' });
  await expect(file.done).rejects.toMatchObject({ code: 'closed' });
  expect(file.state).toBe('failed');
  const { key, state, error } = hers.messages.at(-1)!;
  expect([state, error!.code]).toEqual(['failed', 'closed']);
  hers.retry(key);
  expect(hers.messages.at(-1)!.state).toBe('sending');
  await until(() => heard.length);
  expect(states.at(-1)).toBe('ready');
  const { url } = await bob.attachment(await file.done);
  expect(await downloaded(url)).toBe(digestOf(data));
  // A file that no message has is given up.
  const unused = hers.attach(new Blob(['unused']));
  await unused.done;
  unused.abort();
  expect(unused.state).toBe('failed');
  // A discarded message gives up its files.
  const refused = hers.attach(new Blob(['x']), { alt: 'a'.repeat(3000) });
  await expect(hers.send('', { attachments: [refused] })).rejects.toMatchObject({ code: 'too_large' });
  hers.discard(hers.messages.at(-1)!.key);
  expect(hers.messages.every(({ state }) => state !== 'failed')).toBe(true);
});

test('refusals end an upload, and a token that expired is replaced', async () => {
  const { alice, bob } = await pair();
  const group = await alice.createGroup({ name: 'G' });
  const stranger = bob.conversation(group.id).attach(new Blob(['x']));
  await expect(stranger.done).rejects.toMatchObject({ code: expect.stringMatching(/forbidden|not_found/) });
  expect(stranger.error!.message).not.toBe('');
  const real = fetch;
  let refused = 0;
  vi.spyOn(globalThis, 'fetch').mockImplementation((url, init) => {
    const isFirst = String(url).endsWith('/v1/attachments') && refused++ === 0;
    return isFirst ? Promise.resolve(new Response('{}', { status: 401 })) : real(url, init);
  });
  await group.attach(new Blob(['x'])).done;
  expect(refused).toBe(2);
  alice.disconnect();
  await expect(group.attach(new Blob(['x'])).done).rejects.toMatchObject({ code: 'closed' });
});

test('many uploads wait for their turn', async () => {
  const { hers } = await pair();
  const files = Array.from({ length: 12 }, (_, i) => hers.attach(new Blob([noise(100_000 + i)])));
  let most = 0;
  for (const file of files) file.on('state', () => (most = Math.max(most, files.filter(({ state }) => state === 'uploading').length)));
  expect(new Set(await Promise.all(files.map(({ done }) => done))).size).toBe(12);
  expect(most).toBe(3);
});

test('an upload outlasts any number of broken connections, but not as many refusals', async () => {
  const { hers } = await pair();
  // Without any time between attempts.
  vi.spyOn(Math, 'random').mockReturnValue(0);
  const real = fetch;
  let fails = 30;
  let fail: () => Promise<Response> = () => Promise.reject(new TypeError('fetch failed'));
  let asked = 0;
  vi.spyOn(globalThis, 'fetch').mockImplementation((url, init) => {
    if (!String(url).includes('/v1/attachments')) return real(url, init);
    asked++;
    return fails-- > 0 ? fail() : real(url, init);
  });
  await hers.attach(new Blob(['x'])).done;
  expect(fails).toBeLessThan(0);
  fails = 3;
  fail = async () => new Response('a page of a proxy', { status: 502 });
  await hers.attach(new Blob(['x'])).done;
  [fails, asked] = [1_000, 0];
  fail = async () => Response.json({ code: 'unavailable', message: 'the disk is almost full' }, { status: 503 });
  const file = hers.attach(new Blob(['x']));
  await expect(file.done).rejects.toMatchObject({ code: 'unavailable', message: 'the disk is almost full' });
  expect(asked).toBe(9);
  fails = 0;
  file.retry();
  await file.done;
  expect(file.error).toBeUndefined();
});

test('a file can be sent that was uploaded before, and a link with it', async () => {
  const { hers, heard, alice } = await pair();
  const file = hers.attach(new File(['text'], 'named.txt', { type: 'text/plain' }));
  const id = await file.done;
  // Its uploader may download it before a message has it.
  expect(await downloaded((await alice.attachment(id)).url)).toBe(digestOf(Buffer.from('text')));
  await hers.send('both', {
    attachments: [
      { id, alt: 'a text' },
      { url: 'https://example.org/cat.png', name: 'cat.png' },
    ],
  });
  await until(() => heard.length);
  const [own, link] = heard[0]!.attachments!;
  expect(own).toMatchObject({ id, alt: 'a text', name: 'named.txt', size: 4 });
  expect(link).toEqual({ url: 'https://example.org/cat.png', name: 'cat.png' });
});
