/** Holding and swiping messages with a finger, in a real Chromium against a real gateway. */
import type { CDPSession, Locator } from 'playwright-core';
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { openDm, setUp } from './support/people.js';

const { gateway, people } = setUp();

/** A finger on the middle of an element. */
async function touch(cdp: CDPSession, on: Locator) {
  const { x, y, width, height } = (await on.boundingBox())!;
  const at = { x: x + width / 2, y: y + height / 2 };
  const send = (type: 'touchStart' | 'touchMove' | 'touchEnd', ...touchPoints: { x: number; y: number }[]) =>
    cdp.send('Input.dispatchTouchEvent', { type, touchPoints });
  await send('touchStart', at);
  return {
    move: (right: number, down: number) => send('touchMove', { x: at.x + right, y: at.y + down }),
    leave: () => send('touchEnd'),
  };
}

test('holding a message opens its menu, and swiping it replies', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  await dm.send('a message to hold');
  await dm.send('https://example.org/');
  const context = await people.person({ viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true });
  const page = await people.signIn(context, a);
  await openDm(page, b);
  const cdp = await context.newCDPSession(page);
  const message = page.locator('.message', { hasText: 'a message to hold' });
  const text = message.locator('.body');
  const menu = page.getByRole('menu', { name: 'Message menu' });
  const answered = page.getByRole('button', { name: 'Do not reply' });

  // It opens when the finger leaves, and stays open.
  let finger = await touch(cdp, text);
  await page.locator('.message.held').waitFor();
  expect(await menu.count()).toBe(0);
  await finger.leave();
  await menu.waitFor();
  await menu.getByRole('menuitem', { name: 'Reply' }).tap();
  await answered.waitFor();
  await answered.tap();
  await answered.waitFor({ state: 'detached' });

  // A short way is no swipe, and neither is one up or down.
  for (const [right, down] of [
    [40, 0],
    [80, 60],
    [-80, 0],
  ] as const) {
    finger = await touch(cdp, text);
    await finger.move(right / 2, down / 2);
    await finger.move(right, down);
    await finger.leave();
    await until(() => message.evaluate((row: HTMLElement) => !row.style.translate), 'the message is back');
  }
  // A finger on a link is for the link.
  finger = await touch(cdp, page.locator('.message a'));
  await finger.move(80, 0);
  await finger.leave();
  expect(await answered.count()).toBe(0);
  expect(await menu.count()).toBe(0);

  finger = await touch(cdp, text);
  await finger.move(30, 2);
  await until(() => message.evaluate((row: HTMLElement) => row.style.translate === '30px'), 'the message follows the finger');
  await finger.move(90, 4);
  await finger.leave();
  await answered.waitFor();
  expect(await page.evaluate(() => getSelection()?.toString())).toBe('');
});
