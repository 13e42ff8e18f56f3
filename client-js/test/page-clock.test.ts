/** The chat page on a device whose clock is wrong. */
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { openDm, setUp, write } from './support/people.js';

const { gateway, people } = setUp({ messages__edit_window_s: '600' });

test('with a clock an hour ahead a new message can be edited, and a mute for an hour lasts an hour', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const context = await people.person();
  await context.addInitScript(() => {
    const real = Date.now;
    Date.now = () => real() + 3_600_000;
  });
  const page = await people.signIn(context, a);
  await openDm(page, b);
  await write(page, 'Perfekt!');
  const row = page.locator('.message', { hasText: 'Perfekt!' });
  await row.getByRole('button', { name: 'Message menu' }).click();
  await page.getByRole('menuitem', { name: 'Edit' }).click();
  await page.getByLabel('Edited message').fill('Perfect!');
  await page.keyboard.press('Enter');
  await page.locator('.message', { hasText: 'Perfect!' }).waitFor();
  await page.getByRole('button', { name: 'Conversation menu' }).click();
  await page.getByRole('menuitem', { name: 'Mute for 1 hour' }).click();
  const alice = await gateway.connect(a);
  const mutedUntil = await until(() => alice.inbox.items[0]?.mutedUntil);
  expect(mutedUntil! - Date.now()).toBeLessThanOrEqual(3_600_000);
});
