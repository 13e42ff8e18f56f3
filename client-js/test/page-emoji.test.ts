/** The picker of emoji beside the field, in a real Chromium against a real gateway. */
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { openDm, setUp, texts } from './support/people.js';

const { people } = setUp();

const PHONE = { viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true };

const partsOf = (page: Page) => {
  const picker = page.getByRole('dialog', { name: 'Emoji' });
  return {
    field: page.getByLabel('Message', { exact: true }),
    button: page.getByRole('button', { name: 'Emoji', exact: true }),
    picker,
    search: picker.getByRole('searchbox', { name: 'Find an emoji' }),
    emoji: (name: string) => picker.getByRole('gridcell', { name, exact: true }),
  };
};
/** Whether the picker has the focus inside, and the field. */
const focused = (page: Page) =>
  page.evaluate(() => (document.activeElement?.closest('[role=dialog]') ? 'picker' : document.activeElement?.getAttribute('aria-label')));

test('an emoji is found by keys, and inserted where the caret is', async () => {
  const page = await people.signIn(await people.person({ viewport: { width: 1000, height: 800 } }), user('alice'));
  await openDm(page, user('bob'));
  const asked: string[] = [];
  page.on('request', (request) => asked.push(new URL(request.url()).pathname));
  const { field, button, picker, search, emoji } = partsOf(page);
  await field.fill('ab');
  await field.press('ArrowLeft');
  await button.click();
  await emoji('grinning face').waitFor();
  // All of it is one file, which is loaded now.
  expect(asked).toEqual(['/emoji.js']);
  expect(await focused(page)).toBe('picker');
  expect(await violations(page, 'emoji')).toEqual([]);
  await search.fill('tada');
  await until(async () => (await picker.getByRole('gridcell').count()) < 5, 'the emoji that are found');
  await page.keyboard.press('ArrowDown');
  await picker.getByText('party popper').first().waitFor();
  await page.keyboard.press('Enter');
  await picker.waitFor({ state: 'detached' });
  expect(await field.inputValue()).toBe('a🎉b');
  expect(await focused(page)).toBe('Message');
  await page.keyboard.type('!');
  expect(await field.inputValue()).toBe('a🎉!b');
  await page.keyboard.press('Control+z');
  expect(await field.inputValue()).toBe('ab');

  // Enter in the search does not send the message, and Escape leads back to the caret.
  await button.press('Enter');
  await search.fill('no such emoji');
  await picker.getByText('No emoji found').waitFor();
  await page.keyboard.press('Enter');
  await page.keyboard.press('Escape');
  await picker.waitFor({ state: 'detached' });
  await until(async () => (await focused(page)) === 'Message', 'the focus of the field');
  expect(await texts(page)).toEqual([]);
  await page.keyboard.type('c');
  expect(await field.inputValue()).toBe('acb');
});

test('a skin tone is kept until the user signs out, and a click beside the picker closes it', async () => {
  const context = await people.person({ viewport: { width: 1000, height: 800 } });
  const [a, b] = [user('alice'), user('bob')];
  const page = await people.signIn(context, a);
  await openDm(page, b);
  let { field, button, picker, search, emoji } = partsOf(page);
  await button.click();
  await picker.getByRole('button', { name: 'Skin tone: none' }).click();
  await search.fill('waving hand');
  await picker.getByRole('gridcell', { name: 'waving hand' }).first().click();
  expect(await field.inputValue()).toBe('👋🏻');
  await page.reload();
  ({ field, button, picker, search, emoji } = partsOf(page));
  await button.click();
  await picker.getByRole('button', { name: 'Skin tone: light' }).waitFor();
  await emoji('grinning face').waitFor();
  await page.locator('.messages').click({ position: { x: 300, y: 20 } });
  await picker.waitFor({ state: 'detached' });
  expect(await page.evaluate(() => Object.keys(localStorage).some((key) => key.includes('tone')))).toBe(true);
  await field.fill('');
  await page.getByRole('button', { name: 'Sign out' }).click();
  await page.getByLabel('Name').waitFor();
  expect(await page.evaluate(() => Object.keys(localStorage).some((key) => key.includes('tone')))).toBe(false);
});

test('on a phone the picker opens no keyboard, and stays in sight above one', async () => {
  const context = await people.person(PHONE);
  const page = await people.signIn(context, user('alice'));
  await openDm(page, user('bob'));
  const { field, button, picker, search, emoji } = partsOf(page);
  const isInSight = async () => {
    const { x, y, width, height } = (await picker.boundingBox())!;
    const view = page.viewportSize()!;
    return x >= 0 && y >= 0 && x + width <= view.width && y + height <= view.height;
  };
  await field.fill('Hi ');
  await button.tap();
  await emoji('grinning face').waitFor();
  expect(await search.evaluate((element) => element === document.activeElement)).toBe(false);
  expect(await focused(page)).toBe('picker');
  expect(await isInSight()).toBe(true);
  expect(await violations(page, 'emoji on a phone')).toEqual([]);
  // It fits into the narrowest phones, too.
  await page.setViewportSize({ width: 320, height: 640 });
  const isCut = () => picker.evaluate((box) => [box, box.querySelector('.emoji-list')!].some((e) => e.scrollWidth > e.clientWidth));
  await until(async () => (await isInSight()) && !(await isCut()), 'the picker fits');
  // A keyboard takes half of the window.
  await search.tap();
  await page.setViewportSize({ width: 390, height: 380 });
  await until(isInSight, 'the picker is above the keyboard');
  await search.fill('grinning face');
  await until(async () => (await picker.getByRole('gridcell').count()) < 40, 'the emoji that are found');
  expect(await violations(page, 'emoji above a keyboard')).toEqual([]);
  await emoji('grinning face').tap();
  expect(await field.inputValue()).toBe('Hi 😀');
  // After a reload the field has a text and no caret.
  await page.reload();
  await button.tap();
  await emoji('grinning face').tap();
  expect(await field.inputValue()).toBe('Hi 😀😀');
});

test('a picker that cannot be loaded says so, and is loaded later', async () => {
  const context = await people.person();
  const page = await people.signIn(context, user('alice'));
  await openDm(page, user('bob'));
  const { button, emoji } = partsOf(page);
  await page.route(/emoji\.js/, (route) => route.abort('connectionreset'), { times: 1 });
  await button.click();
  await page.getByText('The emoji could not be loaded. Try again.').waitFor();
  await button.click();
  await emoji('grinning face').waitFor();
});

test('a picker that cannot be loaded twice asks for a reload', async () => {
  const page = await people.signIn(await people.person(), user('alice'));
  await openDm(page, user('bob'));
  const { button } = partsOf(page);
  await page.route(/emoji\.js/, (route) => route.abort('connectionreset'));
  await button.click();
  await page.getByText('The emoji could not be loaded. Try again.').waitFor();
  await button.click();
  await page.getByText('The emoji could not be loaded. Reload the page.').waitFor();
});

test('the picker closes when Tab leaves it', async () => {
  const page = await people.signIn(await people.person(), user('alice'));
  await openDm(page, user('bob'));
  const { button, picker, emoji } = partsOf(page);
  await button.click();
  await emoji('grinning face').waitFor();
  for (let i = 0; i < 6 && (await picker.count()); i++) await page.keyboard.press('Tab');
  await picker.waitFor({ state: 'detached' });
  // The focus is where Tab has led, and the button opens it again.
  expect(await page.evaluate(() => document.activeElement !== document.body)).toBe(true);
  await button.click();
  await emoji('grinning face').waitFor();
});
