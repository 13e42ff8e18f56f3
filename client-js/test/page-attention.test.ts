/** What the chat page does while nobody looks, and for those who do not see it: a real Chromium against a real gateway. */
import type { BrowserContext, Locator, Page, WebSocketRoute } from 'playwright-core';
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { openDm, setUp, texts, write } from './support/people.js';

const { gateway, people } = setUp();

/** Lets a test take the focus from the window, or hide it. */
async function watched(width = 1100): Promise<BrowserContext> {
  const context = await people.person({ viewport: { width, height: 600 } });
  await context.addInitScript(() => {
    const state = { focused: true, hidden: false };
    document.hasFocus = () => state.focused;
    Object.defineProperty(document, 'hidden', { get: () => state.hidden });
    Object.defineProperty(document, 'visibilityState', { get: () => (state.hidden ? 'hidden' : 'visible') });
    Object.assign(globalThis, { state });
  });
  return context;
}
const turn = (page: Page, change: { focused?: boolean; hidden?: boolean }) =>
  page.evaluate((change) => {
    Object.assign((globalThis as unknown as { state: object }).state, change);
    if ('hidden' in change) document.dispatchEvent(new Event('visibilitychange'));
    else dispatchEvent(new Event(change.focused ? 'focus' : 'blur'));
  }, change);

/** Signs in where a direct chat with twenty old messages is read to its end. */
async function readToEnd(context: BrowserContext) {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  for (let i = 1; i <= 20; i++) await dm.send(`old ${i}`);
  const page = await people.signIn(context, a);
  await openDm(page, b);
  await page.getByRole('button', { name: /^To the end/ }).click();
  await until(async () => (await page.title()) === 'Chat');
  const sendNew = async () => {
    for (let i = 1; i <= 30; i++) await dm.send(`new ${i}`);
  };
  return { a, dm, page, sendNew };
}
/** Returns the line, which is above the first of the new messages. */
async function lineOf(page: Page): Promise<Locator> {
  const line = page.getByText('New messages');
  await line.waitFor();
  expect(await line.evaluate((element) => element.nextElementSibling!.querySelector('.body')!.textContent)).toBe('new 1');
  return line;
}
/** Waits until some of the thirty new messages are read, those in sight, and the others are not. */
const someAreRead = (page: Page) => until(async () => /^\(\d\d\) Chat$/.test(await page.title()) && (await page.title()) !== '(30) Chat');

test('a window in sight without the focus reads nothing', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  await dm.send('first');
  const page = await people.signIn(await watched(), a);
  await openDm(page, b);
  await until(async () => (await page.title()) === 'Chat');
  await turn(page, { focused: false });
  await dm.send('one');
  await dm.send('two');
  await page.locator('.body', { hasText: 'two' }).waitFor();
  await until(async () => (await page.title()) === '(2) Chat');
  await turn(page, { focused: true });
  await until(async () => (await page.title()) === 'Chat');
});

test('messages that come in a hidden tab are below a line, where reading goes on', async () => {
  const { page, sendNew } = await readToEnd(await watched());
  await turn(page, { hidden: true });
  await sendNew();
  await until(async () => (await texts(page)).includes('new 30'));
  const line = await lineOf(page);
  const isInSight = () =>
    line.evaluate((element) => {
      const { top } = element.getBoundingClientRect();
      return top > 0 && top < innerHeight / 2;
    });
  await until(isInSight, 'the line in sight');
  await turn(page, { hidden: false });
  await someAreRead(page);
  expect(await isInSight()).toBe(true);
});

test('an address opens its conversation at the first unread message', async () => {
  const { a, dm, page, sendNew } = await readToEnd(await watched());
  // The mark has arrived, too.
  const other = await gateway.connect(a);
  await until(() => other.inbox.get(dm.id)?.unread === 0);
  const address = page.url();
  await page.goto('about:blank');
  await sendNew();
  await page.goto(address);
  await lineOf(page);
  await someAreRead(page);
});

test.each([
  ['in time', 0],
  ['after a page of the history', 700],
])('what was missed without a connection is below a line, if its events come %s', async (_, late) => {
  const context = await watched();
  let isAway = false;
  const sockets: WebSocketRoute[] = [];
  await context.routeWebSocket(/\/v1\/ws/, (socket) => {
    if (isAway) return void socket.close();
    const server = socket.connectToServer();
    server.onMessage((frame) => {
      if (late && sockets.length > 1 && `${frame}`.includes('"type":"message"')) setTimeout(() => socket.send(frame), late);
      else socket.send(frame);
    });
    sockets.push(socket);
  });
  const { page, sendNew } = await readToEnd(context);
  isAway = true;
  for (const socket of sockets) await socket.close();
  await page.getByText(/^No connection/).waitFor();
  await sendNew();
  isAway = false;
  await lineOf(page);
  await someAreRead(page);
});

test('a list at its end stays there when it becomes smaller, also if a scroll event comes first', async () => {
  const { dm, page } = await readToEnd(await watched());
  await page.locator('.messages').evaluate((box) => {
    document.querySelector<HTMLElement>('main header')!.style.paddingBottom = '150px';
    box.dispatchEvent(new Event('scroll', { bubbles: true }));
  });
  await dm.send('after');
  await page.locator('.body', { hasText: 'after' }).waitFor();
  const isInSight = (body: Element) => body.getBoundingClientRect().bottom <= body.closest('.messages')!.getBoundingClientRect().bottom;
  await until(() => page.locator('.body', { hasText: 'after' }).evaluate(isInSight), 'in sight');
});

test('messages behind the details of a narrow window are not read', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  await dm.send('first');
  const page = await people.signIn(await watched(400), a);
  await openDm(page, b);
  await until(async () => (await page.title()) === 'Chat');
  await page.getByRole('button', { name: 'Details' }).click();
  await page.getByLabel('Details').getByRole('button', { name: 'Close' }).waitFor();
  await dm.send('second');
  await until(async () => (await page.title()) === '(1) Chat');
  await page.getByLabel('Details').getByRole('button', { name: 'Close' }).click();
  await until(async () => (await page.title()) === 'Chat');
  await page.getByText('New messages').waitFor();
});

test('text that is selected beyond the edge of a dialog does not close it', async () => {
  const page = await people.signIn(await watched(), user('alice'));
  await page.getByRole('button', { name: 'New conversation' }).click();
  const dialog = page.getByRole('dialog');
  const field = dialog.getByRole('textbox').first();
  await field.fill('somebody');
  const { x, y } = (await field.boundingBox())!;
  await page.mouse.move(x + 40, y + 5);
  await page.mouse.down();
  await page.mouse.move(5, 5);
  await page.mouse.up();
  expect(await field.inputValue()).toBe('somebody');
  await page.mouse.click(5, 5);
  await dialog.waitFor({ state: 'detached' });
});

test('the list and the inbox are one stop of the Tab key each, and arrows move inside', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  for (let i = 0; i < 3; i++) await bob.createGroup({ name: `Group ${i}`, participants: [a] });
  const dm = await bob.dm(a);
  for (let i = 1; i <= 80; i++) await dm.send(`number ${i} https://example.com/${i}`);
  const page = await people.signIn(await people.person({ viewport: { width: 1100, height: 600 } }), a);
  await openDm(page, b);
  await page.getByRole('button', { name: /^To the end/ }).click();
  await page.locator('.body', { hasText: 'number 80 ' }).waitFor();
  const stops = async (end: string) => {
    for (let count = 1; count < 200; count++) {
      await page.keyboard.press('Tab');
      if (await page.evaluate((end) => document.activeElement!.matches(end), end)) return count;
    }
    throw new Error('no end');
  };
  await page.getByRole('button', { name: 'Details' }).focus();
  // The list, the buttons for files and emoji, and the field.
  expect(await stops('textarea')).toBe(4);
  await page.getByLabel('Find a conversation').focus();
  // The inbox, the three buttons of the header of the conversation.
  expect(await stops('[aria-label=Details]')).toBeLessThanOrEqual(4);
  await page.keyboard.press('Tab');
  const focused = () => page.evaluate(() => document.activeElement!.textContent);
  expect(await focused()).toContain('number 80 ');
  await page.keyboard.press('ArrowUp');
  expect(await focused()).toContain('number 79 ');
  await page.keyboard.press('ArrowRight');
  expect(await focused()).toBe('https://example.com/79');
  await page.keyboard.press('ArrowRight');
  expect(await page.evaluate(() => document.activeElement!.getAttribute('aria-label'))).toBe('Message menu');
  await page.keyboard.press('Enter');
  await page.getByRole('menuitem', { name: 'Reply' }).waitFor();
  await page.keyboard.press('ArrowDown');
  expect(await focused()).toBe('Reply');
  await page.keyboard.press('Escape');
  await page.keyboard.press('ArrowDown');
  expect(await focused()).toContain('number 80 ');
});

test('messages are announced when they come, and not again when others are deleted', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  await dm.send('before');
  const page = await people.signIn(await people.person(), a);
  await openDm(page, b);
  await page.locator('.body', { hasText: 'before' }).waitFor();
  const live = page.locator('.messages-frame [aria-live=polite]');
  await live.evaluate((region) => {
    const said: string[] = [];
    const note = (records: MutationRecord[]) => {
      for (const { addedNodes, target, type } of records)
        for (const node of type === 'characterData' ? [target] : addedNodes) if (node.textContent) said.push(node.textContent);
    };
    new MutationObserver(note).observe(region, { childList: true, subtree: true, characterData: true });
    Object.assign(globalThis, { said });
  });
  await dm.send('one');
  await dm.send('one');
  const { seq } = await dm.send('two');
  await live.getByText('two').waitFor({ state: 'attached' });
  await dm.delete(seq);
  await live.getByText('two').waitFor({ state: 'detached' });
  const said = await page.evaluate(() => (globalThis as unknown as { said: string[] }).said);
  expect(said).toEqual([`${b}: one`, `${b}: one`, `${b}: two`]);
});

test('a conversation that the address names is shown while the connection hangs', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const page = await people.signIn(await people.person(), a);
  await openDm(page, b);
  await write(page, 'hello');
  await page.locator('.message[data-state=sent]').waitFor();
  // It opens, and nobody answers.
  await page.routeWebSocket(/./, () => {});
  await page.clock.install();
  await page.reload();
  await page.locator('main[aria-busy=true]').waitFor({ state: 'attached' });
  await page.clock.fastForward(3_000);
  await page.locator('main header').waitFor();
});
