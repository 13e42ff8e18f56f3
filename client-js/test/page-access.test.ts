/** The accessibility of the chat page: keyboard, touch, screen reader and dark colours; also the page behind a proxy. */
import { createServer, request, type Server } from 'node:http';
import { type AddressInfo, connect } from 'node:net';
import type { BrowserContextOptions } from 'playwright-core';
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { connected, openDm, setUp, texts, write } from './support/people.js';

const DESK = { width: 1280, height: 800 };
const PHONE: BrowserContextOptions = { viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true };

const { gateway, people } = setUp();

test('axe finds nothing in any view, light and dark, on a desk and on a phone', async () => {
  const [a, b, c] = [user('alice'), user('bob'), user('carol')];
  const carol = await gateway.connect(c);
  const group = await carol.createGroup({ name: 'Weekend plans', participants: [a, b], public: true });
  const found: string[] = [];
  for (const [device, options] of [
    ['desk', { viewport: DESK }],
    ['phone', PHONE],
  ] as const) {
    const context = await people.person(options);
    const first = await context.newPage();
    await first.goto(gateway.page);
    await first.getByLabel('Name').waitFor();
    found.push(...(await violations(first, `${device} sign-in`)));
    await first.close();
    const newcomer = await people.signIn(await people.person(options), user('nobody'));
    await newcomer.getByText('No conversations yet').waitFor();
    found.push(...(await violations(newcomer, `${device} empty`)));

    const page = await people.signIn(context, device === 'desk' ? a : b);
    await page.getByRole('button', { name: /Weekend plans/ }).waitFor();
    found.push(...(await violations(page, `${device} inbox`)));
    await page.getByRole('button', { name: /Weekend plans/ }).click();
    await page.getByLabel('Message', { exact: true }).fill('Nine at the station?');
    await page.getByRole('button', { name: 'Send' }).click();
    await page.locator('.body', { hasText: 'Nine at' }).last().waitFor();
    await group.send('Perfect: https://example.org/weather', { replyTo: 2 });
    await group.send('I bring the thermos', { attachments: [{ url: 'https://example.org/map', name: 'map.png', size: 5_000 }] });
    await page.locator('.attachment').last().waitFor();
    await page.getByLabel('Message', { exact: true }).fill('A draft');
    found.push(...(await violations(page, `${device} conversation`)));
    await page.getByRole('button', { name: 'Details' }).click();
    await page.locator('.members li').nth(2).waitFor();
    found.push(...(await violations(page, `${device} details`)));
    await page.getByRole('button', { name: 'Leave this group' }).click();
    await page.getByRole('dialog').waitFor();
    found.push(...(await violations(page, `${device} dialog`)));
    await page.keyboard.press('Escape');
    await page.keyboard.press('Escape');
    if (device === 'phone') await page.getByRole('button', { name: 'Back to the conversations' }).click();
    await page.getByRole('button', { name: 'New conversation' }).click();
    await page.getByText('Group', { exact: true }).click();
    found.push(...(await violations(page, `${device} new conversation`)));
    await page.keyboard.press('Escape');
    await page.getByRole('button', { name: 'Browse public conversations' }).click();
    await page.locator('.browse li').first().waitFor();
    found.push(...(await violations(page, `${device} browse`)));
  }
  expect(found).toEqual([]);
});

test('details take and restore the focus; Leave asks first, and a public group can be joined again', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  await bob.createGroup({ name: 'Open house', participants: [a], public: true });
  await bob.createGroup({ name: 'Closed circle', participants: [a] });
  const alice = await people.signIn(await people.person({ viewport: DESK }), a);
  const focused = () => alice.evaluate(() => document.activeElement?.getAttribute('aria-label') ?? document.activeElement?.textContent);
  const leave = async (name: RegExp) => {
    await alice.getByRole('button', { name }).click();
    await alice.getByRole('button', { name: 'Details' }).click();
    await alice.locator('.members li').first().waitFor();
    expect(await alice.locator('.details:focus').count()).toBe(1);
    await alice.getByRole('button', { name: 'Leave this group' }).click();
  };
  await leave(/Open house/);
  await until(async () => (await focused()) === 'Cancel');
  // Escape closes the dialog first, then the details. Each time the focus is restored.
  await alice.keyboard.press('Escape');
  expect(await focused()).toBe('Leave this group');
  await alice.keyboard.press('Escape');
  await until(async () => (await alice.locator('.details').count()) === 0);
  expect(await focused()).toBe('Details');

  await leave(/Open house/);
  await alice.getByRole('dialog').getByRole('button', { name: 'Leave' }).click();
  await alice.getByText('You are not in this conversation any more. Join').waitFor();
  await alice.locator('footer:focus', { hasText: 'not in this conversation' }).waitFor();
  await alice.getByRole('button', { name: 'Join' }).click();
  await write(alice, 'Back again');
  await until(async () => bob.inbox.items.some((item) => item.lastMessage?.preview === 'Back again'));

  // A private group that the user left causes no further request, and no error.
  await leave(/Closed circle/);
  await alice.getByRole('dialog').getByRole('button', { name: 'Leave' }).click();
  await alice.getByText('You are not in this conversation any more.', { exact: true }).waitFor();
  expect(await alice.locator('.details, .problem').count()).toBe(0);
  expect(await alice.getByRole('button', { name: 'Join' }).count()).toBe(0);
});

test('drafts belong to a user; Enter of an input method sends nothing; on a touch screen it begins a line', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const context = await people.person({ viewport: DESK });
  const page = await people.signIn(context, a);
  await openDm(page, b);
  const address = page.url();
  const field = page.getByLabel('Message', { exact: true });
  await field.fill('nihao');
  // Chromium reports the key during the composition, Safari after its end with the key code 229.
  for (const init of [{ isComposing: true }, { keyCode: 229 }]) {
    await field.evaluate(
      (element, init) =>
        element.dispatchEvent(
          new KeyboardEvent('keydown', { key: 'Enter', bubbles: true, cancelable: true, ...init } as KeyboardEventInit),
        ),
      init,
    );
  }
  expect(await field.inputValue()).toBe('nihao');
  await page.reload();
  await connected(page);
  await until(async () => (await field.inputValue()) === 'nihao', 'the draft after a reload');
  await page.getByRole('button', { name: 'Sign out' }).click();
  await page.getByLabel('Name').fill(b);
  await page.getByRole('button', { name: 'Sign in' }).click();
  await page.goto(address);
  await field.waitFor();
  expect(await field.inputValue()).toBe('');
  await write(page, 'mine');
  await until(async () => (await texts(page)).includes('mine'));
  // A sent message is no draft any more.
  await page.reload();
  await field.waitFor();
  expect(await field.inputValue()).toBe('');
  // Each message names its author for users who do not see its side.
  expect(await page.locator('.message', { hasText: 'mine' }).locator('.sr-only').first().textContent()).toBe('You');

  const phone = await people.signIn(await people.person(PHONE), a);
  await phone.getByRole('button', { name: new RegExp(b) }).tap();
  const touched = phone.getByLabel('Message', { exact: true });
  await touched.fill('first');
  await touched.press('Enter');
  await touched.pressSequentially('second');
  expect(await touched.inputValue()).toBe('first\nsecond');
  await phone.getByRole('button', { name: 'Send' }).tap();
  await until(async () => (await texts(phone)).includes('first\nsecond'));
  expect(await phone.locator('.message', { hasText: 'mine' }).locator('.sr-only').first().textContent()).toBe(b);
});

test('a failed load is shown and can be retried; a user who may not post sees no field', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const news = await bob.createChannel({ name: 'Only news', participants: [a], posting: 'admins' });
  const dm = await bob.dm(a);
  for (let i = 1; i <= 90; i++) await dm.send(`number ${i}`);
  const context = await people.person({ viewport: { width: 1100, height: 500 } });
  await context.addInitScript(() => {
    const seen: string[] = [];
    (globalThis as { seen?: string[] }).seen = seen;
    const look = () => document.querySelector('textarea') && seen.push('a field');
    new MutationObserver(look).observe(document, { childList: true, subtree: true });
  });
  let refuses = false;
  await context.routeWebSocket(/v1\/ws/, (socket) => {
    const server = socket.connectToServer();
    socket.onMessage((frame) => {
      const { type, id } = JSON.parse(String(frame));
      if (!refuses || type !== 'history') server.send(frame);
      else socket.send(JSON.stringify({ type: 'error', id, code: 'internal', message: 'out of order' }));
    });
  });
  const alice = await people.signIn(context, a);
  await alice.getByRole('button', { name: /Only news/ }).click();
  await alice.getByText('Only admins can post here.').waitFor();
  expect(await alice.evaluate(() => (globalThis as { seen?: string[] }).seen)).toEqual([]);
  expect(alice.url()).toContain(news.id);

  await alice.getByRole('button', { name: new RegExp(b) }).click();
  await alice.getByText('New messages').waitFor();
  const toEnd = alice.getByRole('button', { name: /^To the end/ });
  await toEnd.waitFor();
  refuses = true;
  await toEnd.click();
  await alice.locator('.float.problem', { hasText: 'out of order' }).waitFor();
  refuses = false;
  await alice.getByRole('button', { name: 'Try again' }).click();
  await alice.locator('.body', { hasText: /^number 90$/ }).waitFor();
  await until(async () => (await alice.locator('.float.problem').count()) === 0);
});

test('messages that come while the page is hidden are in its title and cause notifications', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const dm = await bob.dm(a);
  await dm.send('first');
  const context = await people.person({ viewport: DESK });
  // Headless browsers show no notifications, so this records them.
  await context.addInitScript(() => {
    const state = { shown: [] as { title: string; body?: string; closed?: boolean; onclick?: () => void }[], asked: 0, hidden: false };
    class Notification {
      static permission = 'default';
      static async requestPermission() {
        state.asked++;
        return (Notification.permission = 'granted');
      }
      title: string;
      body: string | undefined;
      closed = false;
      constructor(title: string, options: { body?: string }) {
        this.title = title;
        this.body = options.body;
        state.shown.push(this);
      }
      close() {
        this.closed = true;
      }
    }
    Object.assign(globalThis, { Notification, state });
    Object.defineProperty(document, 'hidden', { get: () => state.hidden });
    Object.defineProperty(document, 'visibilityState', { get: () => (state.hidden ? 'hidden' : 'visible') });
  });
  const alice = await people.signIn(context, a);
  type Noted = { shown: { title: string; body?: string; closed?: boolean; onclick?: () => void }[]; asked: number; hidden: boolean };
  const noted = () => alice.evaluate(() => (globalThis as unknown as { state: Noted }).state);
  const hide = (hidden: boolean) =>
    alice.evaluate((hidden) => {
      (globalThis as unknown as { state: Noted }).state.hidden = hidden;
      document.dispatchEvent(new Event('visibilitychange'));
    }, hidden);
  await until(async () => (await alice.title()) === '(1) Chat');
  expect((await noted()).asked, 'nobody is asked unless they press the button').toBe(0);
  const bell = alice.getByRole('button', { name: 'Notifications' });
  await bell.click();
  await until(async () => (await bell.getAttribute('aria-pressed')) === 'true');
  expect(await noted()).toMatchObject({ asked: 1, shown: [{ body: 'Notifications are on.' }] });
  await alice.getByRole('button', { name: new RegExp(b) }).click();
  await until(async () => (await alice.title()) === 'Chat', 'read');
  await dm.send('seen');
  await alice.locator('.body', { hasText: 'seen' }).waitFor();
  // Longer than messages are gathered.
  await alice.waitForTimeout(1_500);
  expect((await noted()).shown, 'no notification of what is seen').toHaveLength(1);
  await hide(true);
  await dm.send('hidden one');
  await dm.send('hidden two');
  await until(async () => (await alice.title()) === '(2) Chat', 'the number in the title');
  await until(async () => (await noted()).shown.length === 2, 'a notification');
  expect((await noted()).shown[1]).toMatchObject({ title: b, body: 'hidden two' });
  await hide(false);
  await until(async () => (await noted()).shown[1]!.closed, 'closed, since the page is seen');
  await until(async () => (await alice.title()) === 'Chat', 'read');
});

test('the page works under the path of a proxy', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const [host, port] = gateway.address.split(':');
  // The proxy strips `/team/chat`.
  const proxy: Server = createServer((asked, answer) => {
    const path = asked.url!.replace(/^\/team\/chat\//, '/');
    if (path === asked.url) return void answer.writeHead(404).end();
    const forward = request({ host, port, path, method: asked.method, headers: asked.headers }, (got) => {
      answer.writeHead(got.statusCode!, got.headers);
      got.pipe(answer);
    });
    asked.pipe(forward);
  });
  proxy.on('upgrade', (asked, socket, head) => {
    if (!asked.url!.startsWith('/team/chat/')) return void socket.destroy();
    const upstream = connect(Number(port), host, () => {
      const lines = [`GET ${asked.url!.replace(/^\/team\/chat\//, '/')} HTTP/1.1`];
      for (let i = 0; i < asked.rawHeaders.length; i += 2) lines.push(`${asked.rawHeaders[i]}: ${asked.rawHeaders[i + 1]}`);
      upstream.write(`${lines.join('\r\n')}\r\n\r\n`);
      upstream.write(head);
      socket.pipe(upstream).pipe(socket);
    });
    for (const end of [upstream, socket]) end.on('error', () => [upstream, socket].map((end) => end.destroy()));
  });
  await new Promise<void>((ready) => proxy.listen(0, '127.0.0.1', ready));
  try {
    const address = `http://127.0.0.1:${(proxy.address() as AddressInfo).port}/team/chat/`;
    const page = await people.signIn(await people.person({ viewport: DESK }, address), a, '?codec=msgpack', address);
    await openDm(page, b);
    await write(page, 'by way of a path');
    await page.locator('.message[data-state=sent]').waitFor();
    expect(
      await page.locator('img, link').evaluateAll((all) => all.map((one) => one.getAttribute('src') ?? one.getAttribute('href'))),
    ).toEqual(expect.not.arrayContaining([expect.stringMatching(/^\//)]));
    await page.close();
  } finally {
    proxy.closeAllConnections();
    proxy.close();
  }
});
