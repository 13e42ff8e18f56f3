/** Notifications, muting and the sound in the built page (`npm run page`) in Chromium, with a fake gateway. Chromium cannot reach
 * its push service here, so the subscription is a fake one; the service worker and its pushes are real. */
import type { BrowserContext, BrowserContextOptions, Page } from 'playwright-core';
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from 'vitest';
import { violations } from './support/access.js';
import type { Gateway } from './support/gateway.js';
import { until } from './support/gateway.js';
import { PageServer } from './support/page-server.js';
import { People, picture, write } from './support/people.js';

const DESK: BrowserContextOptions = { viewport: { width: 1100, height: 700 } };
const PHONE: BrowserContextOptions = { viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true };
const KEY = 'BNcRdreALRFXTkOOUHK1EtK2wtaz5Ry4YfYCA_0QTpQtUbVlUls0VJXg7A8u-Ts1XbjhazAkj7I99e8QcYP7DkM';

let server: PageServer;
let people: People;
const target = { page: '' };
/** What the fake gateway keeps for the conversation. */
let settings: { settings_version?: number; muted_until?: number; push?: 'on' | 'off' };
let key: string | undefined;

beforeAll(async () => {
  people = new People(target as Gateway);
  await people.launch();
});
beforeEach(async () => {
  server = await new PageServer().start();
  server.id = '0199c0de-0000-4000-8000-000000000001';
  target.page = server.page;
  server.now = Date.now() - 600_000;
  server.write('bob', 'Nine at the station?');
  settings = {};
  key = KEY;
  server.answers.inbox = () => ({ type: 'inbox', items: [{ ...server.item(), ...settings }] });
  server.answers.devices = () => ({ type: 'devices', items: [], ...(key && { web_key: key }) });
  server.answers.settings_set = ({ muted_until, push }) => {
    const version = (settings.settings_version ?? 0) + 1;
    settings = {
      ...settings,
      ...(muted_until !== undefined && { muted_until }),
      ...(push !== undefined && { push }),
      settings_version: version,
    } as never;
    return { type: 'ok', version };
  };
});
afterEach(async () => {
  await people.leave();
  server.close();
});
afterAll(() => people.close());

/** A browser whose push service is a fake, and whose notifications are as the user answers. */
async function browser(options: BrowserContextOptions = DESK): Promise<BrowserContext> {
  const context = await people.person(options);
  await context.addInitScript(() => {
    const state = { asked: 0, unsubscribed: 0, tones: 0 };
    const subscription = {
      endpoint: 'https://push.example.org/1',
      toJSON: () => ({ endpoint: 'https://push.example.org/1', keys: { p256dh: 'p', auth: 'a' } }),
      unsubscribe: async () => {
        localStorage.removeItem('fake-subscription');
        return state.unsubscribed++;
      },
    };
    Object.assign(PushManager.prototype, {
      subscribe: async ({ applicationServerKey }: { applicationServerKey: Uint8Array }) => {
        if (applicationServerKey.length !== 65) throw new Error('not a key');
        localStorage.setItem('fake-subscription', 'on');
        return subscription;
      },
      getSubscription: async () => localStorage.getItem('fake-subscription') && subscription,
    });
    const real = Notification.requestPermission;
    Notification.requestPermission = async () => {
      state.asked++;
      return real.call(Notification);
    };
    const start = OscillatorNode.prototype.start;
    OscillatorNode.prototype.start = function (when) {
      state.tones++;
      start.call(this, when);
    };
    Object.assign(globalThis, { state });
  });
  return context;
}
const noted = (page: Page) =>
  page.evaluate(() => (globalThis as unknown as { state: { asked: number; unsubscribed: number; tones: number } }).state);

async function allow(context: BrowserContext, page: Page): Promise<void> {
  const devtools = await context.newCDPSession(page);
  const { targetInfo } = await devtools.send('Target.getTargetInfo');
  const all = await context.browser()!.newBrowserCDPSession();
  const origin = new URL(server.page).origin;
  await all.send('Browser.grantPermissions', { origin, permissions: ['notifications'], browserContextId: targetInfo.browserContextId! });
}

async function openConversation(page: Page): Promise<void> {
  await page.getByRole('button', { name: /Group/ }).click();
  await page.locator('.message').first().waitFor();
}
const offer = (page: Page) => page.getByRole('region', { name: 'Notifications of new messages' });
const choose = async (page: Page, name: string | RegExp) => {
  await page.getByRole('button', { name: 'Conversation menu' }).click();
  await page.getByRole('menu').getByText(name).click();
};

test('notifications are offered after the first message, and a refusal is remembered', async () => {
  const context = await browser();
  const page = await people.signIn(context, 'alice');
  await until(() => server.received('devices').length > 0);
  await openConversation(page);
  expect(await offer(page).count(), 'not when the page is loaded').toBe(0);
  await write(page, 'Perfect!');
  await offer(page).waitFor();
  await picture(page, 'push-offer');
  expect(await violations(page, 'push offer')).toEqual([]);
  await offer(page).getByRole('button', { name: 'Not now' }).click();
  expect(await offer(page).count()).toBe(0);
  await page.reload();
  await page.locator('.message').first().waitFor();
  server.write('bob', 'Fine');
  await page.locator('.body', { hasText: 'Fine' }).waitFor();
  await page.waitForTimeout(200);
  expect(await offer(page).count()).toBe(0);
  expect((await noted(page)).asked).toBe(0);
});

test('without a key for browsers nothing is offered, and an older gateway has no settings', async () => {
  key = undefined;
  const page = await people.signIn(await browser(), 'alice');
  await openConversation(page);
  await write(page, 'Perfect!');
  await page.locator('.body', { hasText: 'Perfect!' }).waitFor();
  await page.waitForTimeout(200);
  expect(await offer(page).count()).toBe(0);
  const items = async () => {
    await page.getByRole('button', { name: 'Conversation menu' }).click();
    const names = await page.getByRole('menu').getByRole('button').or(page.locator('.menu button')).allTextContents();
    await page.keyboard.press('Escape');
    return names;
  };
  expect(await items(), 'no device gets pushes').toEqual(['Mute for 1 hour', 'Mute for 8 hours', 'Mute for ever', 'Sound of new messages']);
  server.answers.devices = () => ({ type: 'error', code: 'bad_request', message: 'unknown type' });
  await page.reload();
  await page.locator('.message').first().waitFor();
  expect(await items()).toEqual(['Sound of new messages']);
});

test('the browser is registered, shows pushed messages, and is removed when the user signs out', async () => {
  const context = await browser();
  const page = await people.signIn(context, 'alice');
  await allow(context, page);
  await until(() => server.received('devices').length > 0);
  const bell = page.getByRole('button', { name: 'Notifications', exact: true });
  await bell.click();
  await until(() => server.received('device_set').length === 1, 'registered');
  const [{ device, provider, subscription } = {}] = server.received('device_set') as Record<string, unknown>[];
  expect({ provider, subscription }).toEqual({
    provider: 'web',
    subscription: { endpoint: 'https://push.example.org/1', keys: { p256dh: 'p', auth: 'a' } },
  });
  expect(await bell.getAttribute('aria-pressed')).toBe('true');

  // A real push to the real service worker, by the tools for developers.
  const devtools = await context.newCDPSession(page);
  const registered = new Promise<string>((resolve) => {
    devtools.on('ServiceWorker.workerRegistrationUpdated', ({ registrations: [first] }) => first && resolve(first.registrationId));
  });
  await devtools.send('ServiceWorker.enable');
  const registrationId = await registered;
  const push = (payload: object) =>
    devtools.send('ServiceWorker.deliverPushMessage', {
      origin: new URL(server.page).origin,
      registrationId,
      data: JSON.stringify(payload),
    });
  const notes = () =>
    page.evaluate(async () => {
      const notes = await (await navigator.serviceWorker.ready).getNotifications();
      return notes.map(({ title, body }) => `${title}: ${body}`);
    });
  const message = { conversation: server.id, kind: 'group', name: 'Group', sender: 'bob', badge: 1 };
  // A push to a worker that still activates is lost.
  await until(() => page.evaluate(async () => (await navigator.serviceWorker.ready).active?.state === 'activated'), 'an active worker');
  await push({ ...message, seq: 2, body: 'first' });
  await until(async () => (await notes()).join() === 'Group: bob: first', 'a notification');
  await push({ ...message, seq: 3, body: 'second' });
  await until(async () => (await notes()).join() === 'Group (2 new): bob: second', 'one for the conversation');
  // Reading it in the page closes it. While the page has it open, nothing is shown.
  await openConversation(page);
  await until(async () => (await notes()).length === 0, 'closed');
  await push({ ...message, seq: 4, body: 'third' });
  await page.waitForTimeout(1_000);
  expect(await notes()).toEqual([]);

  await page.getByRole('button', { name: 'Sign out' }).click();
  await page.getByRole('heading', { name: 'Sign in to chat' }).waitFor();
  expect(server.received('device_remove')).toMatchObject([{ device }]);
  expect((await noted(page)).unsubscribed).toBe(1);
});

test('the next user of a browser ends the pushes of one who did not sign out', async () => {
  const context = await browser();
  const page = await people.signIn(context, 'alice');
  await allow(context, page);
  await until(() => server.received('devices').length > 0);
  await page.getByRole('button', { name: 'Notifications', exact: true }).click();
  await until(() => server.received('device_set').length === 1, 'registered');
  const shown = (page: Page) => page.evaluate(async () => (await (await navigator.serviceWorker.ready).getNotifications()).length);
  await page.evaluate(async () => (await navigator.serviceWorker.ready).showNotification('bob', { body: 'for alice', tag: '1' }));
  await until(async () => (await shown(page)) === 1);
  // Another page of the same user ends nothing.
  const again = await context.newPage();
  await again.goto(server.page);
  await again.getByRole('button', { name: 'Sign in' }).click();
  await until(() => server.received('device_set').length === 2, 'registered again');
  expect([await shown(again), (await noted(again)).unsubscribed]).toEqual([1, 0]);
  // As if all of this were Carol's. The fake gateway knows only Alice.
  await again.evaluate(() => {
    for (const key of Object.keys(localStorage)) if (key.startsWith('pushed-to')) localStorage.setItem(key, 'carol');
  });
  const next = await context.newPage();
  await next.goto(server.page);
  await next.getByRole('button', { name: 'Sign in' }).click();
  await until(async () => (await shown(next)) === 0, 'closed');
  await until(() => server.received('device_set').length === 3, 'registered for the next user');
  expect((await noted(next)).unsubscribed).toBe(1);
});

test('a conversation is muted and unmuted in its menu, and looks muted', async () => {
  const page = await people.signIn(await browser(), 'alice');
  await openConversation(page);
  const item = page.getByRole('button', { name: /Group/ });
  await page.getByRole('button', { name: 'Conversation menu' }).click();
  await picture(page, 'push-menu');
  expect(await violations(page, 'push menu')).toEqual([]);
  await page.getByText('Mute for 8 hours').click();
  await until(async () => (await item.getAttribute('class')) === 'muted');
  const [{ muted_until }] = server.received('settings_set') as unknown as [{ muted_until: number }];
  expect(Math.abs(muted_until - Date.now() - 8 * 3_600_000)).toBeLessThan(60_000);
  // The count stays, and does not call.
  await page.goto(`${server.page}#/`);
  server.write('bob', 'Are you there?');
  await item.locator('.badge').waitFor();
  expect(await item.locator('.badge').textContent()).toBe('1 unread');
  expect(await page.title()).toBe('Chat');
  await picture(page, 'push-muted');
  expect(await violations(page, 'push muted')).toEqual([]);
  await openConversation(page);
  await choose(page, /Unmute \(muted until/);
  await until(async () => !(await item.getAttribute('class')));
  expect(server.received('settings_set')[1]).toMatchObject({ conversation: server.id, muted_until: 0 });
  await choose(page, 'Mute for ever');
  await until(() => settings.muted_until === 8.64e15);
  await page.getByRole('button', { name: 'Conversation menu' }).click();
  await page.getByText('Unmute (muted for ever)').waitFor();
  await page.keyboard.press('Escape');
  // Another device.
  server.push({ type: 'settings', conversation: server.id, version: 9, muted_until: Date.now() + 3_600_000, push: 'on' });
  await page.getByRole('button', { name: 'Conversation menu' }).click();
  await page.getByText(/Unmute \(muted until/).waitFor();
  await page.keyboard.press('Escape');
  expect(await item.getAttribute('class')).toBe('muted');
  server.push({ type: 'settings', conversation: server.id, version: 10, muted_until: Date.now() + 1_500, push: 'on' });
  await until(async () => !(await item.getAttribute('class')), 'over by itself');
});

test('pushes of a conversation are turned off and on', async () => {
  const page = await people.signIn(await browser(PHONE), 'alice');
  await until(() => server.received('devices').length > 0);
  await openConversation(page);
  const option = page.getByRole('menuitemcheckbox', { name: 'Push to my devices' });
  await page.getByRole('button', { name: 'Conversation menu' }).click();
  expect(await option.getAttribute('aria-checked')).toBe('true');
  await picture(page, 'push-menu-phone');
  await option.click();
  await until(() => settings.push === 'off');
  await page.getByRole('button', { name: 'Conversation menu' }).click();
  await until(async () => (await option.getAttribute('aria-checked')) === 'false');
  await option.click();
  await until(() => settings.push === 'on');
});

test('a message is heard if the user wants it, does not look, and did not mute', async () => {
  const page = await people.signIn(await browser(), 'alice');
  await openConversation(page);
  expect((await noted(page)).tones).toBe(0);
  await choose(page, 'Sound of new messages');
  expect((await noted(page)).tones, 'an example').toBe(1);
  server.write('bob', 'seen');
  await page.locator('.body', { hasText: 'seen' }).waitFor();
  expect((await noted(page)).tones).toBe(1);
  await page.goto(`${server.page}#/`);
  server.write('bob', 'heard');
  await until(async () => (await noted(page)).tones === 2);
  await openConversation(page);
  await choose(page, 'Mute for 1 hour');
  await page.goto(`${server.page}#/`);
  await page.waitForTimeout(1_600);
  server.write('bob', 'muted');
  await page.getByText('bob: muted').waitFor();
  expect((await noted(page)).tones).toBe(2);
});

test('a phone in the dark', async () => {
  const page = await people.signIn(await browser({ ...PHONE, colorScheme: 'dark' }), 'alice');
  await until(() => server.received('devices').length > 0);
  await openConversation(page);
  server.write('bob', 'Fine');
  await offer(page).waitFor();
  await picture(page, 'push-offer-phone-dark');
  expect(await violations(page, 'push offer phone')).toEqual([]);
  await choose(page, 'Mute for ever');
  await page.getByRole('button', { name: 'Back to the conversations' }).click();
  server.write('bob', 'Are you there?');
  await page.locator('.muted .badge').waitFor();
  await picture(page, 'push-muted-phone-dark');
  expect(await violations(page, 'push muted phone')).toEqual([]);
});
