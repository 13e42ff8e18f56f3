/** The keyboard shortcuts of the chat page, in a real Chromium against a real gateway. */
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { openDm, picture, setUp } from './support/people.js';

const { people } = setUp();

test('Ctrl+K finds a conversation, also where an open one hides the list; Ctrl+/ lists the keys', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const page = await people.signIn(await people.person({ viewport: { width: 1000, height: 700 } }), a);
  const focused = () => page.evaluate(() => document.activeElement?.getAttribute('aria-label') ?? document.activeElement?.textContent);
  await page.getByRole('button', { name: 'Keyboard shortcuts' }).click();
  await picture(page, 'keys-list');
  const list = page.getByRole('dialog', { name: 'Keyboard shortcuts' });
  await list.getByText('Find a conversation').waitFor();
  expect(await violations(page, 'keys')).toEqual([]);
  await page.keyboard.press('Control+k');
  expect(await list.count(), 'a window keeps the keys').toBe(1);
  await page.keyboard.press('Escape');
  await list.waitFor({ state: 'detached' });
  expect(await focused()).toBe('Keyboard shortcuts');

  await openDm(page, b);
  const field = page.getByLabel('Message', { exact: true });
  await field.fill('');
  await field.press('?');
  expect(await field.inputValue()).toBe('?');
  expect(await list.count()).toBe(0);
  await field.press('Control+/');
  await list.waitFor();
  await page.keyboard.press('Escape');
  await list.waitFor({ state: 'detached' });
  await field.press('Control+k');
  expect(await focused()).toBe('Find a conversation');
  await page.keyboard.type('bob');
  await page.keyboard.press('Control+k');
  await page.keyboard.type('x');
  expect(await page.getByLabel('Find a conversation').inputValue(), 'the text is selected').toBe('x');
  await page.getByRole('button', { name: 'Details' }).focus();
  await page.keyboard.press('?');
  expect(await list.count(), 'no key alone does something').toBe(0);
  await page.keyboard.press('Control+/');
  await list.waitFor();
  await page.keyboard.press('Escape');
  expect(await focused()).toBe('Details');

  await page.setViewportSize({ width: 500, height: 700 });
  await field.focus();
  await page.keyboard.press('Control+k');
  await until(async () => (await focused()) === 'Find a conversation');
});
