/** Uploads that a reload or a closed tab interrupts, in the chat page in a real Chromium against a real gateway. */
import type { BrowserContext, Page, Route, WebSocketRoute } from 'playwright-core';
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { connected, openDm, picture, setUp } from './support/people.js';
import { noise, png } from './support/pictures.js';

const { gateway, people } = setUp();

/** The network of a browser context, which a test can take away. Pages still load. */
class Network {
  isUp = true;
  /** The requests of uploads that went through: method and the last part of the path. */
  requests: string[] = [];
  /** Called after each of them. */
  seen: (request: string) => void = () => {};
  #sockets = new Set<WebSocketRoute>();

  static async of(context: BrowserContext): Promise<Network> {
    const network = new Network();
    await context.routeWebSocket(/v1\/ws/, (socket) => network.#connect(socket));
    await context.route(/\/v1\/attachments/, async (route) => {
      if (!network.isUp) return route.abort('connectionrefused');
      const request = `${route.request().method()} ${new URL(route.request().url()).pathname.split('/').at(-1)}`;
      network.requests.push(request);
      await route.continue();
      network.seen(request);
    });
    return network;
  }

  down(): void {
    this.isUp = false;
    for (const socket of this.#sockets) void socket.close();
    this.#sockets.clear();
  }

  /** Brings the network back, which the pages notice. */
  async up(...pages: Page[]): Promise<void> {
    this.isUp = true;
    for (const page of pages) await page.evaluate(() => dispatchEvent(new Event('online')));
  }

  #connect(socket: WebSocketRoute): void {
    if (!this.isUp) return void socket.close();
    this.#sockets.add(socket);
    socket.connectToServer();
  }
}

/** Returns how many messages and files the browser keeps, or empties the store of files. */
const kept = (page: Page, clear = false) =>
  page.evaluate(
    (clear) =>
      new Promise<number[]>((resolve, reject) => {
        const request = indexedDB.open('chat-gateway');
        request.onerror = () => reject(request.error);
        request.onsuccess = () => {
          const transaction = request.result.transaction(['outbox', 'files'], 'readwrite');
          const counts = ['outbox', 'files'].map((name) => transaction.objectStore(name).count());
          if (clear) transaction.objectStore('files').clear();
          transaction.oncomplete = () => {
            request.result.close();
            resolve(counts.map(({ result }) => result));
          };
        };
      }),
    clear,
  );
const keeps = (page: Page, messages: number, files: number) =>
  until(async () => `${await kept(page)}` === `${[messages, files]}`, `${messages} messages and ${files} files`);

interface Two {
  alice: Page;
  bob: Page;
  network: Network;
  context: BrowserContext;
  /** The lines on Alice's console. */
  said: string[];
}
/** Signs two users in, whose direct chat is open. */
async function two(): Promise<Two> {
  const [a, b] = [user('alice'), user('bob')];
  const context = await people.person();
  const network = await Network.of(context);
  const alice = await people.signIn(context, a);
  const said: string[] = [];
  alice.on('console', (message) => said.push(message.text()));
  const bob = await people.signIn(await people.person(), b);
  await openDm(alice, b);
  await openDm(bob, a);
  return { alice, bob, network, context, said };
}

const cat = { name: 'cat.png', mimeType: 'image/png', buffer: png(600, 300) };
const large = { name: 'large.bin', mimeType: '', buffer: Buffer.from(noise(20 << 20)) };
async function write(page: Page, file: typeof cat, text = ''): Promise<void> {
  await page.locator('input[type=file]').setInputFiles(file);
  await page.locator('.attached li').waitFor();
  if (text) await page.getByLabel('Message', { exact: true }).fill(text);
  await page.getByRole('button', { name: 'Send', exact: true }).click();
}
/** Sends a message with a file, which takes a while. */
async function send(page: Page, file: typeof cat, text = ''): Promise<void> {
  await write(page, file, text);
  await page.locator('.message[data-state="sending"]', { hasText: text || file.name }).waitFor();
}
/** Waits until a page shows the picture, and checks that there is one message with it. */
async function showsCat(page: Page): Promise<void> {
  const image = page.locator('.picture img');
  await until(async () => (await image.evaluate((image) => (image as HTMLImageElement).naturalWidth)) > 0, 'the picture');
  expect(await image.count()).toBe(1);
}

test('a picture that was chosen offline is sent after a reload', async () => {
  const { alice, bob, network } = await two();
  network.down();
  await send(alice, cat, 'Look!');
  await keeps(alice, 1, 1);
  await alice.reload();
  await alice.locator('.message[data-state="sending"]', { hasText: 'Look!' }).waitFor();
  await picture(alice, 'files-reload-offline');
  await network.up(alice);
  await showsCat(bob);
  await showsCat(alice);
  await picture(bob, 'files-reload-arrived');
  await keeps(alice, 0, 0);
  expect(network.requests).toEqual(['POST attachments', 'PATCH upload']);
});

test('a large upload continues after a reload where it broke off', async () => {
  const { alice, bob, network } = await two();
  // The network goes with the third part.
  network.seen = () => network.requests.filter((request) => request === 'PATCH upload').length === 3 && network.down();
  await send(alice, large);
  await until(() => !network.isUp);
  await keeps(alice, 1, 1);
  await alice.reload();
  network.seen = () => {};
  const before = network.requests.splice(0);
  await network.up(alice);
  await bob.getByRole('button', { name: /large\.bin 20 MiB/ }).waitFor();
  expect(before.filter((request) => request === 'POST attachments')).toHaveLength(1);
  expect(network.requests[0]).toBe('HEAD upload');
  expect(network.requests.slice(1).every((request) => request === 'PATCH upload')).toBe(true);
  expect(network.requests.length).toBeLessThan(5);
  await keeps(alice, 0, 0);
});

test('an upload that expired meanwhile begins anew, and the message is stored once', async () => {
  const { alice, bob, network } = await two();
  let file = '';
  alice.on('request', (request) => {
    file = request.url().match(/attachments\/(.*)\/upload/)?.[1] ?? file;
  });
  network.seen = (request) => request === 'PATCH upload' && network.down();
  await send(alice, large);
  await until(() => !network.isUp);
  // Its id is stored.
  await keeps(alice, 1, 1);
  await alice.reload();
  const name = await alice.evaluate(() => JSON.parse(sessionStorage.getItem('chat-session /')!).user as string);
  const authorization = `Bearer ${await gateway.token(name)}`;
  const place = `${gateway.page}v1/attachments/${file}/upload`;
  const status = async (method: string) => (await fetch(place, { method, headers: { authorization, 'tus-resumable': '1.0.0' } })).status;
  expect(await status('DELETE')).toBe(204);
  await until(async () => (await status('HEAD')) === 404);
  network.seen = () => {};
  network.requests = [];
  await network.up(alice);
  await bob.getByRole('button', { name: /large\.bin 20 MiB/ }).waitFor();
  expect(network.requests.slice(0, 2)).toEqual(['HEAD upload', 'POST attachments']);
  expect(await bob.locator('.attachment').count()).toBe(1);
  await keeps(alice, 0, 0);
});

test.each([
  ['the tab that sends for all', 0],
  ['another tab', 1],
])('while %s uploads, no other tab does, and one continues when that is closed', async (_, which) => {
  const { alice, bob, context, network } = await two();
  const second = await context.newPage();
  await second.goto(alice.url());
  await connected(second);
  const [first, other] = which ? [second, alice] : [alice, second];
  await first!.route(/\/v1\/attachments/, (route) => route.abort('connectionrefused'));
  await send(first!, cat, 'Look!');
  await other!.locator('.message[data-state="sending"]', { hasText: 'Look!' }).waitFor();
  await keeps(other!, 1, 1);
  // The other tab would have begun by now.
  await other!.waitForTimeout(1_000);
  expect(network.requests).toEqual([]);
  await first!.close();
  for (const page of [bob, other!]) await showsCat(page);
  expect(network.requests).toEqual(['POST attachments', 'PATCH upload']);
  await keeps(other!, 0, 0);
});

test('a message whose upload failed in one tab is tried again, or discarded, in another', async () => {
  const { alice, bob, context } = await two();
  const other = await context.newPage();
  await other.goto(alice.url());
  await connected(other);
  const refusal = { status: 413, json: { code: 'too_large', message: 'a file has 1 to 9 bytes' } };
  const asked: Route[] = [];
  await context.route('**/v1/attachments', (route) => void asked.push(route), { times: 2 });
  for (const text of ['one', 'two']) {
    await send(alice, cat, text);
    await until(() => asked.length);
    await asked.pop()!.fulfill(refusal);
    for (const page of [alice, other]) await page.locator('.message[data-state="failed"]', { hasText: text }).waitFor();
  }
  await keeps(alice, 2, 2);
  const of = (page: Page, text: string) => page.locator('.message', { hasText: text });
  await of(other, 'one').getByRole('button', { name: 'Discard' }).click();
  await of(other, 'two').getByRole('button', { name: 'Try again' }).click();
  for (const page of [alice, other, bob]) await showsCat(page);
  expect(await of(alice, 'one').count()).toBe(0);
  await keeps(alice, 0, 0);
});

test('a message whose file the browser lost fails, and can be discarded', async () => {
  const { alice, network } = await two();
  network.down();
  await send(alice, cat, 'Look!');
  await keeps(alice, 1, 1);
  await kept(alice, true);
  await alice.reload();
  await alice.locator('.message[data-state="sending"]', { hasText: 'Look!' }).waitFor();
  await network.up(alice);
  await alice.getByText('the browser lost its files').waitFor();
  await picture(alice, 'files-reload-lost');
  await alice.getByRole('button', { name: 'Discard' }).click();
  await keeps(alice, 0, 0);
});

test('above 200 MiB, files are in memory only, and the console says so', async () => {
  const { alice, network, said } = await two();
  network.down();
  await alice.locator('.messages').evaluate((element) => {
    const data = new DataTransfer();
    for (let i = 0; i < 3; i++) data.items.add(new File([new Uint8Array(70 << 20)], `${i}.bin`));
    element.dispatchEvent(new DragEvent('drop', { bubbles: true, cancelable: true, dataTransfer: data }));
  });
  await alice.getByRole('button', { name: 'Send', exact: true }).click();
  await until(() => said.some((line) => line.includes('more than 200 MiB of files wait')), 'the warning');
  await keeps(alice, 0, 0);
  // A smaller message still has room.
  await send(alice, cat);
  await keeps(alice, 1, 1);
});

test('above the quota of the browser, files are in memory only', async () => {
  const { alice, bob, network, said } = await two();
  network.down();
  const session = await alice.context().newCDPSession(alice);
  await session.send('Storage.overrideQuotaForOrigin', { origin: new URL(alice.url()).origin, quotaSize: 1 });
  await send(alice, cat, 'Look!');
  await until(() => said.some((line) => line.startsWith('chat: ')), 'the warning');
  await keeps(alice, 0, 0);
  await network.up(alice);
  await showsCat(bob);
});

test('without IndexedDB, a picture is sent from memory', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const context = await people.person();
  await context.addInitScript(() => Object.defineProperty(window, 'indexedDB', { value: undefined }));
  const alice = await people.signIn(context, a);
  await openDm(alice, b);
  await write(alice, cat);
  await showsCat(alice);
});
