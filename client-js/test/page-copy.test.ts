/** Copying a message or its address, and opening a message by its address, in a real Chromium against a real gateway. */
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { connected, openDm, setUp } from './support/people.js';

const { gateway, people } = setUp();

const choose = async (page: Page, text: RegExp, item: string) => {
  await page
    .locator('.message', { has: page.locator('.body', { hasText: text }) })
    .getByRole('button', { name: 'Message menu' })
    .click();
  await page.getByRole('menuitem', { name: item }).click();
};
const clipboard = (page: Page) => page.evaluate(() => navigator.clipboard.readText());
/** Waits until a message is in the middle of the list. */
const inSight = (page: Page, text: string) =>
  until(
    () =>
      page.evaluate((text) => {
        const box = document.querySelector('.messages')?.getBoundingClientRect();
        const row = [...document.querySelectorAll('.message')].find((row) => row.querySelector('.body')?.textContent === text);
        const { top, bottom } = row?.getBoundingClientRect() ?? { top: 0, bottom: 0 };
        return box && row && top >= box.top && bottom <= box.bottom;
      }, text),
    text,
  );

test('a message is copied as it was typed, and so is its address, which leads to it', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  const source = 'the **first** one:\n- `x`';
  await dm.send(source);
  for (let i = 2; i <= 150; i++) await dm.send(`number ${i}`);
  const context = await people.person({ viewport: { width: 900, height: 600 }, permissions: ['clipboard-read', 'clipboard-write'] });
  const page = await people.signIn(context, a);
  await openDm(page, b);
  const { id } = dm;
  const own = new URL(`#/${id}`, gateway.page).href;

  // An address that names a conversation only still works, and one with a message opens there.
  await page.goto(`${own}/1`);
  await page.locator('.body strong', { hasText: 'first' }).waitFor();
  expect(page.url()).toBe(own);
  await choose(page, /^the first one/, 'Copy text');
  await page.getByRole('status').filter({ hasText: 'Text copied' }).waitFor();
  expect(await clipboard(page)).toBe(source);
  // The message is highlighted for a moment.
  await until(
    () => page.evaluate(() => document.getAnimations().every(({ playState }) => playState !== 'running')),
    'the end of the highlight',
  );
  await choose(page, /^the first one/, 'Copy text');
  await page.getByRole('status').filter({ hasText: 'Text copied' }).waitFor();
  expect(await violations(page, 'copied')).toEqual([]);
  await choose(page, /^number 3$/, 'Copy link');
  await page.getByRole('status').filter({ hasText: 'Link copied' }).waitFor();
  const link = await clipboard(page);
  expect(link).toBe(`${own}/3`);

  // Another tab begins there, though there are unread messages below.
  const other = await context.newPage();
  await other.goto(`${own}/70`);
  await connected(other);
  await inSight(other, 'number 70');
  expect(other.url()).toBe(own);

  // In a message the link stays in this page, and works each time.
  await dm.send(`see ${link}`);
  for (const [index] of ['first', 'second'].entries()) {
    await page.getByRole('button', { name: /^To the end/ }).click();
    await page.locator('.body a').waitFor();
    await page.locator('.body a').click();
    await inSight(page, 'number 3');
    expect(context.pages()).toHaveLength(2);
    expect(page.url(), `time ${index}`).toBe(own);
  }
  // A message that does not exist leads to the newest ones.
  await other.goto(`${own}/999999`);
  await inSight(other, `see ${link}`);
});

test('a browser that refuses the clipboard is reported', async () => {
  const [a, b] = [user('alice'), user('bob')];
  await (await (await gateway.connect(b)).dm(a)).send('hello');
  const context = await people.person();
  // As in a page that is not served over HTTPS.
  await context.addInitScript(() => Object.defineProperty(navigator, 'clipboard', { value: undefined }));
  const page = await people.signIn(context, a);
  await openDm(page, b);
  await choose(page, /^hello$/, 'Copy text');
  await page.getByRole('alert').filter({ hasText: 'Not copied: the browser does not let this page use the clipboard.' }).waitFor();
  expect(await page.getByRole('status').filter({ hasText: 'copied' }).count()).toBe(0);
});
