/** Signing out of the chat page deletes everything, so that the next user of the computer finds nothing. Notifications are
 * those of the browser. */
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { connected, openDm, setUp, texts, write } from './support/people.js';

const { gateway, people } = setUp();

/** Returns everything that the browser stores for the page, as text. */
const stored = (page: Page) =>
  page.evaluate(async () => {
    const open = indexedDB.open('chat-gateway');
    await new Promise((resolve) => (open.onsuccess = resolve));
    const all = open.result.transaction('outbox').objectStore('outbox').getAll();
    await new Promise((resolve) => (all.onsuccess = resolve));
    open.result.close();
    return JSON.stringify([{ ...localStorage }, { ...sessionStorage }, all.result, location.href]);
  });

test('signing out asks before it deletes unsent messages, and clears this tab and the others', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const context = await people.person();
  const page = await people.signIn(context, a);
  await openDm(page, b);
  const { hash } = new URL(page.url());
  await write(page, 'sent');
  await page.locator('.message[data-state=sent]').waitFor();
  const other = await context.newPage();
  await other.goto(page.url());
  await connected(other);
  await other.getByLabel('Message', { exact: true }).fill('a draft of the other tab');
  await gateway.kill();
  await page.getByText('No connection. Trying again…').waitFor();
  await write(page, 'unsent one');
  await write(page, 'unsent two');
  await page.getByLabel('Message', { exact: true }).fill('a secret draft');
  await until(async () => /unsent two/.test(await stored(page)), 'stored');

  const signOut = page.getByRole('button', { name: 'Sign out' });
  await signOut.click();
  const question = page.getByRole('dialog', { name: 'Sign out?' });
  await question.getByText('2 messages are not sent yet. Sign out and delete them?').waitFor();
  await question.getByRole('button', { name: 'Cancel' }).click();
  expect(await texts(page)).toEqual(['sent', 'unsent one', 'unsent two']);
  expect(await stored(page)).toContain('unsent one');

  await signOut.click();
  await question.getByRole('button', { name: 'Sign out' }).click();
  for (const tab of [page, other]) {
    await tab.getByRole('heading', { name: 'Sign in to chat' }).waitFor();
    const left = await stored(tab);
    for (const trace of [a, b, 'unsent', 'draft', hash]) expect(left).not.toContain(trace);
  }
  // Nothing comes back and nothing is sent for the next user, not even if it is the same one.
  await gateway.start();
  await page.getByLabel('Name').fill(a);
  await page.getByRole('button', { name: 'Sign in' }).click();
  await connected(page);
  await page.getByRole('button', { name: new RegExp(b) }).click();
  await page.locator('.message').first().waitFor();
  expect(await texts(page)).toEqual(['sent']);
  expect(await page.getByLabel('Message', { exact: true }).inputValue()).toBe('');
});

test('changes that wait are counted apart from messages', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const page = await people.signIn(await people.person(), a);
  await openDm(page, b);
  await write(page, 'sent');
  await page.locator('.message[data-state=sent]').waitFor();
  await gateway.kill();
  try {
    await write(page, 'unsent');
    await page.getByRole('button', { name: 'Message menu' }).first().click();
    await page.getByRole('menuitem', { name: 'Delete' }).click();
    await page.getByRole('dialog').getByRole('button', { name: 'Delete' }).click();
    await page.getByText('You deleted this message').waitFor();
    // The list of conversations does not show it either, although the gateway does not know of it.
    await page.locator('.sidebar .preview', { hasText: 'a deleted message' }).waitFor();
    await until(async () => /"type":"delete"/.test(await stored(page)), 'stored');
    await page.getByRole('button', { name: 'Sign out' }).click();
    await page.getByText('1 message and 1 change are not sent yet. Sign out and delete them?').waitFor();
  } finally {
    await gateway.start();
  }
});

test('signing out does not ask when all is sent, and another user in another tab stays', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const context = await people.person();
  const alice = await people.signIn(context, a);
  await openDm(alice, b);
  await write(alice, 'hello');
  await alice.locator('.message[data-state=sent]').waitFor();
  const bob = await context.newPage();
  // A new tab would open the session of Alice.
  await bob.addInitScript(() => localStorage.removeItem('chat-session /'));
  await bob.goto(gateway.page);
  await bob.getByLabel('Name').fill(b);
  await bob.getByRole('button', { name: 'Sign in' }).click();
  await connected(bob);
  await until(async () => !(await stored(alice)).includes('"body":"hello"'), 'sent, and no longer stored');
  await alice.getByRole('button', { name: 'Sign out' }).click();
  await alice.getByRole('heading', { name: 'Sign in to chat' }).waitFor();
  expect(await alice.getByRole('dialog').count()).toBe(0);
  await bob.getByRole('button', { name: new RegExp(a) }).click();
  await bob.locator('.body', { hasText: 'hello' }).waitFor();
  // A new tab opens the session of the user who is still signed in; not only the tab of Bob has it.
  expect(await stored(alice)).toContain(`chat-session /":"{\\"user\\":\\"${b}`);
});

test('a tab that a notification opened stays the tab of its user after a reload', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const context = await people.person();
  await people.signIn(context, a);
  const opened = await context.newPage();
  await opened.goto(`${gateway.page}#/${crypto.randomUUID()}`);
  await connected(opened);
  await people.signIn(context, b);
  await opened.reload();
  await connected(opened);
  expect(await opened.evaluate(() => sessionStorage.getItem('chat-session /'))).toContain(a);
});

test("the browser's notifications come from hidden pages, and are closed when the user looks or signs out", async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const dm = await bob.dm(a);
  await dm.send('first');
  const context = await people.person();
  await context.addInitScript(() => {
    // Records real notifications with their events.
    const noted: { title: string; body: string; events: string[] }[] = [];
    class Noted extends Notification {
      constructor(title: string, options?: NotificationOptions) {
        super(title, options);
        const events: string[] = [];
        noted.push({ title, body: options?.body ?? '', events });
        for (const type of ['show', 'close', 'error']) this.addEventListener(type, () => events.push(type));
      }
    }
    const state = { hidden: false, noted };
    Object.assign(globalThis, { state, Notification: Noted });
    Object.defineProperty(document, 'hidden', { get: () => state.hidden });
    Object.defineProperty(document, 'visibilityState', { get: () => (state.hidden ? 'hidden' : 'visible') });
  });
  const alice = await people.signIn(context, a);
  const devtools = await context.newCDPSession(alice);
  const { targetInfo } = await devtools.send('Target.getTargetInfo');
  const browser = await context.browser()!.newBrowserCDPSession();
  await browser.send('Browser.grantPermissions', {
    origin: new URL(gateway.page).origin,
    permissions: ['notifications'],
    browserContextId: targetInfo.browserContextId!,
  });
  const noted = () =>
    alice.evaluate(() => (globalThis as unknown as { state: { noted: { title: string; body: string; events: string[] }[] } }).state.noted);
  const hide = (hidden: boolean) =>
    alice.evaluate((hidden) => {
      (globalThis as unknown as { state: { hidden: boolean } }).state.hidden = hidden;
      document.dispatchEvent(new Event('visibilitychange'));
    }, hidden);
  const bell = alice.getByRole('button', { name: 'Notifications' });
  await bell.click();
  await until(async () => (await bell.getAttribute('aria-pressed')) === 'true');
  await until(async () => (await noted())[0]?.events.includes('show'), 'shown by the browser');

  await hide(true);
  await dm.send('while it is hidden');
  await until(async () => (await alice.title()) === '(2) Chat', 'the number in the title');
  await until(async () => (await noted())[1]?.events.includes('show'), 'shown by the browser');
  expect((await noted())[1]).toMatchObject({ title: b, body: 'while it is hidden' });
  await hide(false);
  await until(async () => (await noted())[1]!.events.includes('close'), 'closed, since the page is seen');

  await hide(true);
  await dm.send('before signing out');
  await until(async () => (await noted())[2]?.events.includes('show'), 'shown by the browser');
  await alice.getByRole('button', { name: 'Sign out' }).click();
  await alice.getByRole('heading', { name: 'Sign in to chat' }).waitFor();
  await until(async () => (await noted()).every(({ events }) => events.includes('close')), 'all of them closed');
  expect(await alice.title()).toBe('Chat');
  expect(await stored(alice)).not.toContain(a);
});
