/** The story of two people and a phone: forty steps that people really take, on one page after the other, and then by the keyboard alone. */
import { setTimeout as sleep } from 'node:timers/promises';
import type { CDPSession, Locator, Page } from 'playwright-core';
import { afterAll, expect, test } from 'vitest';
import { violations } from './support/access.js';
import { BadNetwork } from './support/bad-network.js';
import { PATIENCE_MS, until, user } from './support/gateway.js';
import { connected, openDm, picture, setUp, texts, write } from './support/people.js';
import { png } from './support/pictures.js';

const DESK = { viewport: { width: 1100, height: 720 } };
const PHONE = { viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };
const { gateway, people } = setUp();
let network: BadNetwork | undefined;
afterAll(() => network?.close());

const message = (page: Page, text: string) => page.locator('.message', { hasText: text });
const field = (page: Page) => page.getByLabel('Message', { exact: true });
const item = (page: Page, name: string) => page.locator('.sidebar li button', { hasText: name });
const choose = async (page: Page, text: string, what: string) => {
  await message(page, text).hover();
  await message(page, text).getByRole('button', { name: 'Message menu' }).click();
  await page.getByRole('menuitem', { name: what, exact: true }).click();
};

/** Moves a finger over an element to the right. */
async function swipe(cdp: CDPSession, on: Locator): Promise<void> {
  const { x, y, width, height } = (await on.boundingBox())!;
  const at = (right: number) => ({ x: x + width / 2 + right, y: y + height / 2 });
  await cdp.send('Input.dispatchTouchEvent', { type: 'touchStart', touchPoints: [at(0)] });
  for (const right of [30, 60, 90]) await cdp.send('Input.dispatchTouchEvent', { type: 'touchMove', touchPoints: [at(right)] });
  // It rests. A fling would go on, and the browser takes the next touch to stop it.
  await sleep(100);
  await cdp.send('Input.dispatchTouchEvent', { type: 'touchMove', touchPoints: [at(91)] });
  await cdp.send('Input.dispatchTouchEvent', { type: 'touchEnd', touchPoints: [] });
}

test('two people and a phone', async () => {
  const [a, b] = [user('alice'), user('bob')];
  let step = 0;
  const found: string[] = [];
  /** Keeps a picture of the step, and has axe look at it. */
  const look = async (page: Page, view: string) =>
    found.push(...(await violations(page, `story-${String(++step).padStart(2, '0')}-${view}`)));

  // Two people sign in, one of them on a phone too, behind a network of its own.
  const alice = await people.signIn(await people.person(DESK), a);
  const bob = await people.signIn(await people.person(DESK), b);
  network = new BadNetwork(gateway.address);
  const mobile = (await network.start()).replace(/^ws(.*)v1\/ws$/, 'http$1');
  const context = await people.person(PHONE, mobile);
  const phone = await people.signIn(context, b, '', mobile);
  const cdp = await context.newCDPSession(phone);
  await alice.getByText('No conversations yet').waitFor();
  await look(alice, 'empty');

  // A group is created, and is on all devices.
  await alice.getByRole('button', { name: 'Start a conversation' }).click();
  await alice.getByLabel('Group').check();
  await alice.getByLabel('Name', { exact: true }).fill('Trip to the sea');
  await alice.getByLabel('People').fill(b);
  await look(alice, 'new group');
  await alice.getByRole('button', { name: 'Create' }).click();
  for (const page of [bob, phone]) await item(page, 'Trip to the sea').waitFor();

  // Messages, unread counts, and opening the group reads it everywhere.
  await write(alice, 'Shall we go on Saturday?');
  await write(alice, 'I can drive.');
  for (const page of [bob, phone]) await item(page, 'Trip to the sea').getByText('2 unread').waitFor();
  await until(async () => (await bob.title()).startsWith('(2)'), 'the title has the count');
  await look(phone, 'phone list');
  await item(bob, 'Trip to the sea').click();
  await message(bob, 'I can drive.').waitFor();
  await until(async () => (await item(phone, 'Trip to the sea').locator('.badge').count()) === 0, 'read on the phone too');
  await until(async () => (await message(alice, 'I can drive.').getAttribute('data-state')) === 'read', 'alice sees that he has read it');

  // A reply with a mouse, and one with a finger.
  await choose(bob, 'Shall we go', 'Reply');
  await write(bob, 'Yes!');
  await message(alice, 'Yes!').locator('.quote', { hasText: 'Shall we go' }).waitFor();
  await item(phone, 'Trip to the sea').tap();
  await message(phone, 'I can drive.').waitFor();
  await swipe(cdp, message(phone, 'I can drive.').locator('.body'));
  await phone.getByRole('button', { name: 'Do not reply' }).waitFor();
  await field(phone).fill('Great, thank you');
  await look(phone, 'phone reply');
  await phone.getByRole('button', { name: 'Send', exact: true }).tap();
  await message(bob, 'Great, thank you').locator('.quote', { hasText: 'I can drive.' }).waitFor();

  // Reactions of both.
  await choose(alice, 'Great, thank you', 'React');
  await alice.getByRole('menuitemcheckbox').first().click();
  await message(bob, 'Great, thank you').locator('.reactions button[aria-pressed]').first().click();
  await message(alice, 'Great, thank you')
    .getByRole('button', { name: /2 people, you too/ })
    .waitFor();

  // An edit by the up arrow, and a deletion that everybody sees.
  await field(alice).press('ArrowUp');
  await alice.getByLabel('Edited message').fill('I can drive, from nine on.');
  await alice.keyboard.press('Enter');
  for (const page of [bob, phone]) await message(page, 'from nine on').locator('.edited').waitFor();
  await write(alice, 'oops, not for you');
  await message(phone, 'oops').waitFor();
  await choose(alice, 'oops', 'Delete');
  await alice.getByRole('dialog').getByRole('button', { name: 'Delete' }).click();
  for (const page of [bob, phone]) await page.getByText('This message was deleted').waitFor();

  // A picture with a description, seen in full; code; a text from right to left.
  await alice.locator('input[type=file]').setInputFiles({ name: 'beach.png', mimeType: 'image/png', buffer: png(900, 600) });
  await alice.locator('.attached li[data-state="ready"]').waitFor();
  await alice.getByLabel('Description of beach.png').fill('the beach');
  await write(alice, 'From last year');
  for (const page of [bob, phone]) await page.getByRole('button', { name: 'Show the beach' }).waitFor();
  await phone.getByRole('button', { name: 'Show the beach' }).tap();
  await phone.getByRole('dialog', { name: 'beach.png' }).waitFor();
  await look(phone, 'phone picture');
  await phone.getByRole('dialog').getByRole('button', { name: 'Close' }).tap();
  await field(bob).fill(
    '```sh\nexport PLACE="sea"   # a long line of code that does not fit into the width of any phone at all\ngo --to "$PLACE"\n```',
  );
  await bob.keyboard.press('Enter');
  await phone.locator('.body pre', { hasText: 'export PLACE' }).waitFor();
  await write(bob, 'שלום, נתראה בשבת!');
  const rightToLeft = message(alice, 'נתראה').locator('.body');
  expect(await rightToLeft.evaluate((body) => getComputedStyle(body).direction)).toBe('rtl');
  // In the list, too: it is cut at its own end, so its beginning is in sight.
  const preview = alice.locator('.sidebar .preview', { hasText: 'נתראה' });
  expect(await preview.evaluate((line) => getComputedStyle(line.lastElementChild!).direction)).toBe('rtl');
  expect(await preview.evaluate((line) => line.scrollWidth - line.clientWidth)).toBe(0);
  await look(alice, 'group');
  await look(phone, 'phone group');

  // The phone loses its network and keeps what is written. Nothing is lost or doubled.
  network.mode = 'refused';
  await phone.getByText('No connection. Trying again…').waitFor();
  await field(phone).fill('Written in a tunnel');
  await phone.getByRole('button', { name: 'Send', exact: true }).tap();
  await phone.locator('.message[data-state=sending]', { hasText: 'tunnel' }).waitFor();
  await write(alice, 'Are you still there?');
  await look(phone, 'phone offline');
  network.mode = 'open';
  await phone.evaluate(() => dispatchEvent(new Event('online')));
  await connected(phone);
  for (const page of [alice, bob]) await message(page, 'tunnel').waitFor();
  await message(phone, 'Are you still there?').waitFor();
  const log = await texts(alice);
  for (const page of [bob, phone])
    await until(async () => JSON.stringify(await texts(page)) === JSON.stringify(log), 'the same list everywhere');
  expect(log.filter((text) => text.includes('tunnel'))).toHaveLength(1);

  // A direct chat while the group is open, found by Ctrl+K and the filter.
  await openDm(bob, a);
  await write(bob, 'A secret about her birthday');
  await item(alice, b).getByText('1 unread').waitFor();
  await alice.keyboard.press('Control+k');
  await alice.keyboard.type('bob');
  expect(await alice.locator('.sidebar li').count()).toBe(1);
  await look(alice, 'filter');
  await item(alice, b).click();
  await message(alice, 'birthday').waitFor();
  await alice.getByLabel('Find a conversation').fill('');

  // With 200 % zoom everything is still there.
  await bob.setViewportSize({ width: 550, height: 360 });
  await look(bob, 'zoom');
  await bob.getByRole('button', { name: 'Back to the conversations' }).click();
  await item(bob, 'Trip to the sea').waitFor();
  await look(bob, 'zoom list');
  await bob.setViewportSize(DESK.viewport);

  // Bob leaves on the phone: his desk has the group no more, and alice is told.
  await phone.getByRole('button', { name: 'Details' }).tap();
  await phone.getByRole('button', { name: 'Leave this group' }).waitFor();
  await look(phone, 'phone details');
  await phone.getByRole('button', { name: 'Leave this group' }).tap();
  await phone.getByRole('dialog').getByRole('button', { name: 'Leave', exact: true }).tap();
  await until(async () => (await item(bob, 'Trip to the sea').count()) === 0, 'gone from the desk');
  await item(alice, 'Trip to the sea').click();
  await alice.locator('.system', { hasText: /left/ }).waitFor();
  await look(alice, 'end');
  await alice.getByRole('button', { name: 'Sign out' }).click();
  await alice.getByLabel('Name').waitFor();
  await look(alice, 'signed out');
  expect(found).toEqual([]);
});

/** Presses Tab until the focus is on a control of this name. */
async function tabTo(page: Page, name: string | RegExp, key = 'Tab'): Promise<void> {
  const seen: string[] = [];
  for (let i = 0; i < 40; i++) {
    await page.keyboard.press(key);
    const at = await page.evaluate(() => {
      const element = document.activeElement as HTMLInputElement;
      const label = element.getAttribute('aria-label') ?? element.labels?.[0]?.textContent ?? element.textContent ?? '';
      return label.trim();
    });
    if (typeof name === 'string' ? at === name : name.test(at)) return;
    seen.push(at);
  }
  throw new Error(`Tab does not lead to ${name}, but to ${seen.join(' | ')}`);
}

test('the same by the keyboard alone', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const heard: string[] = [];
  bob.on('message', ({ body }) => heard.push(body));
  const page = await (await people.person(DESK)).newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  const press = async (...keys: string[]) => {
    for (const key of keys) await page.keyboard.press(key);
  };
  const type = (text: string) => page.keyboard.type(text);
  await page.goto(gateway.page);
  await page.getByLabel('Name').waitFor();
  await type(a);
  await press('Enter');
  await connected(page);

  await tabTo(page, 'New conversation');
  await press('Enter');
  await page.getByRole('dialog', { name: 'New conversation' }).waitFor();
  await tabTo(page, 'Direct chat', 'Shift+Tab');
  await press('ArrowRight');
  await tabTo(page, 'Name');
  await type('Keys');
  await tabTo(page, 'People');
  await type(b);
  await press('Enter');
  await field(page).waitFor();
  await until(() => page.evaluate(() => document.activeElement?.tagName === 'TEXTAREA'), 'the field has the focus');
  await type('Hello');
  await press('Enter');
  await until(() => heard.includes('Hello'), 'the message');
  const group = bob.conversation(bob.inbox.items.find(({ name }) => name === 'Keys')!.conversation);
  await group.send('Hello from Bob');
  await message(page, 'Hello from Bob').waitFor();

  // To the messages, to the menu of one, and a reply.
  const isAt = (name: string) => page.evaluate((name) => document.activeElement?.getAttribute('aria-label') === name, name);
  const openMenu = async (text: RegExp) => {
    await tabTo(page, text, 'Shift+Tab');
    await press('ArrowRight');
    for (let i = 0; i < 5 && !(await isAt('Message menu')); i++) await press('ArrowRight');
    await press('Enter');
    await page.getByRole('menu', { name: 'Message menu' }).waitFor();
  };
  await openMenu(/Hello from Bob/);
  await press('ArrowDown', 'Enter');
  await page.getByRole('button', { name: 'Do not reply' }).waitFor();
  await type('I am well');
  await press('Enter');
  await until(() => heard.includes('I am well'), 'the reply');
  await message(page, 'I am well').locator('.quote').waitFor();

  // A reaction, an edit, a deletion.
  await openMenu(/I am well/);
  await press('Enter', 'Enter');
  await message(page, 'I am well')
    .getByRole('button', { name: /1 person, you too/ })
    .waitFor();
  await tabTo(page, 'Message');
  await press('ArrowUp', 'Control+a');
  await type('I am very well');
  await press('Enter');
  await message(page, 'I am very well').locator('.edited').waitFor();
  await picture(page, 'story-keys');
  await openMenu(/I am very well/);
  await press('End', 'Enter');
  await page.getByRole('dialog', { name: 'Delete this message?' }).waitFor();
  await tabTo(page, 'Delete');
  await press('Enter');
  await page.getByText('You deleted this message').waitFor();
  await tabTo(page, 'Message');

  // A file.
  const chooser = page.waitForEvent('filechooser');
  await tabTo(page, 'Attach files', 'Shift+Tab');
  await press('Enter');
  await (await chooser).setFiles({ name: 'key.png', mimeType: 'image/png', buffer: png(60, 40) });
  await page.locator('.attached li[data-state="ready"]').waitFor();
  await until(() => page.evaluate(() => document.activeElement?.tagName === 'TEXTAREA'), 'the field has the focus again');
  await type('A key');
  await press('Enter');
  await until(() => heard.includes('A key'), 'the picture');

  // Another conversation, there and back.
  const dm = await bob.dm(a);
  await dm.send('Psst');
  await item(page, b).waitFor();
  await press('Control+k');
  await type('bob');
  await tabTo(page, /Psst/);
  await press('Enter');
  await message(page, 'Psst').waitFor();
  await until(() => page.evaluate(() => document.activeElement?.tagName === 'TEXTAREA'), 'the field of the other conversation');
  await press('Control+k', 'Delete', 'Escape');

  // A group of the other one, and leaving it.
  const second = await bob.createGroup({ name: 'Second', participants: [a] });
  await second.send('Come in');
  await item(page, 'Second').waitFor();
  await press('Control+k');
  await type('Second');
  await tabTo(page, /Come in/);
  await press('Enter');
  await message(page, 'Come in').waitFor();
  await tabTo(page, 'Details', 'Shift+Tab');
  await press('Enter');
  await tabTo(page, 'Leave this group');
  await press('Enter');
  await page.getByRole('dialog', { name: 'Leave this group?' }).waitFor();
  await tabTo(page, 'Leave');
  await press('Enter');
  await page.getByText('You are not in this conversation any more.').waitFor();
  await tabTo(page, 'Sign out', 'Shift+Tab');
  await press('Enter');
  await page.getByLabel('Name').waitFor();
});
