/** The days that the chat page shows, in a real Chromium against a real gateway. */
import { expect, test } from 'vitest';
import { user } from './support/gateway.js';
import { openDm, setUp, write } from './support/people.js';

const { people } = setUp();

test('at midnight "Today" becomes "Yesterday", in the list and in the inbox', async () => {
  const page = await people.signIn(await people.person({ timezoneId: 'Europe/Berlin' }), user('alice'));
  await page.clock.install();
  await page.reload();
  await openDm(page, user('bob'));
  await write(page, 'hello');
  await page.locator('.message[data-state=sent]').waitFor();
  expect(await page.locator('.day').textContent()).toBe('Today');
  const left = await page.evaluate(() => new Date().setHours(24, 0, 1, 0) - Date.now());
  await page.clock.fastForward(left);
  await page.locator('.day', { hasText: 'Yesterday' }).waitFor();
  await page.locator('.sidebar time', { hasText: 'Yesterday' }).waitFor();
});
