/** The chat page where the browser stores nothing, in a real Chromium against a real gateway. */
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { openDm, setUp, texts, write } from './support/people.js';

const { people } = setUp();

/** Uses everything of the page that is stored. */
async function useAll(alice: Page): Promise<void> {
  const b = user('bob');
  await openDm(alice, b);
  await write(alice, 'hello');
  await alice.locator('.message[data-state=sent]').waitFor();
  await alice.getByLabel('Message', { exact: true }).fill('a draft');
  await alice.getByRole('button', { name: 'Conversation menu' }).click();
  await alice.getByRole('menuitemcheckbox', { name: 'Sound of new messages' }).click();
  await openDm(alice, user('carol'));
  await alice.getByRole('button', { name: new RegExp(b) }).click();
  await until(async () => (await texts(alice)).includes('hello'));
  expect(await alice.getByLabel('Message', { exact: true }).inputValue()).toBe('a draft');
  await alice.getByRole('button', { name: 'Sign out' }).click();
  await alice.getByRole('heading', { name: 'Sign in to chat' }).waitFor();
}

test('the page works where the browser blocks cookies and site data', async () => {
  const context = await people.person();
  await context.addInitScript(() => {
    for (const name of ['localStorage', 'sessionStorage', 'indexedDB', 'BroadcastChannel'])
      Object.defineProperty(globalThis, name, {
        get() {
          throw new DOMException('Access is denied for this document.', 'SecurityError');
        },
      });
  });
  await useAll(await people.signIn(context, user('alice')));
});

test('the page works where the storage is full', async () => {
  const context = await people.person();
  await context.addInitScript(() => {
    // An empty page has no storage.
    if (location.protocol !== 'http:') return;
    for (const storage of [localStorage, sessionStorage])
      for (let size = 4_194_304; size >= 1; size /= 2)
        try {
          // Each size fits in twice at most, until nothing fits.
          for (const half of ['a', 'b']) storage.setItem(`${half}${size}`, 'x'.repeat(size));
        } catch {
          // The next size is smaller.
        }
  });
  const alice = await people.signIn(context, user('alice'));
  expect(await alice.evaluate(() => localStorage.getItem('chat-session /'))).toBeNull();
  await useAll(alice);
});
