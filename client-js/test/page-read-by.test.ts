/** Who has read a message of a group, in a real Chromium against a real gateway. */
import type { Locator, Page, WebSocketRoute } from 'playwright-core';
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { setUp, write } from './support/people.js';

const { gateway, people } = setUp();

const menuOf = async (page: Page, text: string) => {
  await page
    .locator('.message', { has: page.locator('.body', { hasText: text }) })
    .getByRole('button', { name: 'Message menu' })
    .click();
  return page.getByRole('menuitem');
};

/** Returns what the dialog shows: the title of each list, and the names in it. */
const shown = (dialog: Locator) =>
  dialog
    .locator('section')
    .evaluateAll((sections) =>
      sections.map((s) => [s.querySelector('h3')!.textContent, ...[...s.querySelectorAll('bdi')].map((name) => name.textContent)]),
    );
const shows = (dialog: Locator, wanted: string[][], what: string) =>
  until(async () => JSON.stringify(await shown(dialog)) === JSON.stringify(wanted), what);

test('the info of a message of a group says who has read it, and whom it has reached', async () => {
  const [a, b, c, d, e] = ['alice', 'bob', 'carol', 'dave', 'erin'].map(user) as [string, string, string, string, string];
  const [bob, carol] = [await gateway.connect(b), await gateway.connect(c)];
  const { id } = await bob.createGroup({ name: 'Lunch', participants: [a, c, d] });
  const context = await people.person({ viewport: { width: 1000, height: 800 } });
  let isCut = false;
  const sockets: WebSocketRoute[] = [];
  await context.routeWebSocket(/v1\/ws/, (socket) => {
    if (isCut) return void socket.close();
    socket.connectToServer();
    sockets.push(socket);
  });
  const page = await people.signIn(context, a);
  await page.getByRole('button', { name: /Lunch/ }).click();
  await write(page, 'Who comes?');
  await page.locator('.message[data-state=sent] .body').waitFor();
  const dialog = page.getByRole('dialog', { name: 'Who has read it' });
  await (await menuOf(page, 'Who comes?')).filter({ hasText: 'Info' }).click();
  await until(() => carol.inbox.get(id)?.lastSeq === 2);
  const delivered = [
    ['Delivered to 2', b, c],
    ['Not delivered to 1', d],
  ];
  await shows(dialog, delivered, 'the deliveries to Bob and Carol');
  // It follows while it is open, also what does not change the state of the message.
  bob.conversation(id).read(2);
  const read = [
    ['Read by 1', b],
    ['Delivered to 1', c],
    ['Not delivered to 1', d],
  ];
  await shows(dialog, read, 'the receipt of Bob');
  expect(await violations(page, 'read by')).toEqual([]);

  // An answer counts as reading, also without a receipt.
  await (await gateway.connect(d)).conversation(id).send('Not me');
  const answered = [
    ['Read by 2', b, d],
    ['Delivered to 1', c],
  ];
  await shows(dialog, answered, 'the answer of Dave');

  // Members who join later, and those who left, are not in the lists.
  await bob.conversation(id).add(e);
  await bob.conversation(id).remove(d);
  await shows(dialog, read.slice(0, 2), 'the list without Dave and Erin');
  // On a new connection it shows what came meanwhile.
  isCut = true;
  for (const socket of sockets) await socket.close();
  const stored = new Promise((done) => bob.on('receipt', ({ user, readSeq }) => user === c && readSeq && done(undefined)));
  carol.conversation(id).read(2);
  await stored;
  expect(await shown(dialog)).toEqual(read.slice(0, 2));
  isCut = false;
  await shows(dialog, [['Read by 2', b, c]], 'the receipt of Carol');

  await page.keyboard.press('Escape');
  await dialog.waitFor({ state: 'detached' });
  expect(await page.evaluate(() => document.activeElement?.getAttribute('aria-label'))).toBe('Message menu');
  // Only the sender may want to know.
  await bob.conversation(id).send('I do');
  await page.locator('.body', { hasText: 'I do' }).waitFor();
  expect(await (await menuOf(page, 'I do')).allTextContents()).toEqual(['React', 'Reply', 'Copy text', 'Copy link']);
});

test('the info of a message of a large group is in pages, with a request for each 200 members', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const others = Array.from({ length: 299 }, (_, i) => `m${String(i).padStart(3, '0')}-${b}`);
  const bob = await gateway.connect(b);
  const { id } = await bob.createGroup({ name: 'All', participants: [a, ...others] });
  const context = await people.person({ viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true });
  let requests = 0;
  context.on('page', (page) => {
    page.on('websocket', (socket) => {
      socket.on('framesent', ({ payload }) => {
        if (String(payload).includes('"participants"')) requests++;
      });
    });
  });
  const page = await people.signIn(context, a);
  await page.getByRole('button', { name: /All/ }).click();
  await write(page, 'Hello all');
  await page.locator('.composer').getByRole('button', { name: 'Send' }).click();
  await page.locator('.message[data-state=sent] .body').waitFor();
  await until(() => bob.inbox.get(id)?.lastSeq === 2);
  bob.conversation(id).read(2);
  const before = requests;
  await (await menuOf(page, 'Hello all')).filter({ hasText: 'Info' }).click();
  const dialog = page.getByRole('dialog', { name: 'Who has read it' });
  await dialog.getByRole('heading', { name: 'Read by 1' }).waitFor();
  await dialog.getByRole('heading', { name: 'Not delivered to 299' }).waitFor();
  const names = dialog.locator('section', { hasText: 'Not delivered' }).locator('li');
  expect(requests - before).toBe(2);
  expect(await names.count()).toBe(50);
  expect(await violations(page, 'read by, large group')).toEqual([]);
  await dialog.getByRole('button', { name: 'More' }).click();
  expect(await names.count()).toBe(100);
  await dialog.getByRole('button', { name: 'Close' }).click();
  await dialog.waitFor({ state: 'detached' });
});

test('the info of a message does not come back after a removal', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const group = await bob.createGroup({ name: 'Lunch', participants: [a] });
  const page = await people.signIn(await people.person({ viewport: { width: 1000, height: 800 } }), a);
  await page.getByRole('button', { name: /Lunch/ }).click();
  await write(page, 'Who comes?');
  await page.locator('.message[data-state=delivered] .body').waitFor();
  await (await menuOf(page, 'Who comes?')).filter({ hasText: 'Info' }).click();
  const dialog = page.getByRole('dialog', { name: 'Who has read it' });
  await dialog.waitFor();
  await group.remove(a);
  await dialog.waitFor({ state: 'detached' });
  await group.add(a);
  await page.getByLabel('Message', { exact: true }).waitFor();
  expect(await dialog.count()).toBe(0);
});

test('the info of a message is loaded while members come all the time', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const others = Array.from({ length: 250 }, (_, i) => `m${i}-${b}`);
  const group = await bob.createGroup({ name: 'Busy', participants: [a, ...others] });
  const context = await people.person({ viewport: { width: 1000, height: 800 } });
  // Each of the two answers takes longer than the time after which a change loads the list again.
  await context.routeWebSocket(/v1\/ws/, (socket) => {
    const server = socket.connectToServer();
    socket.onMessage((frame) => void setTimeout(() => server.send(frame), String(frame).includes('"participants"') ? 1_500 : 0));
  });
  const page = await people.signIn(context, a);
  await page.getByRole('button', { name: /Busy/ }).click();
  await write(page, 'Hello all');
  await page.locator('.message[data-state=sent] .body').waitFor();
  let isOver = false;
  let came = 0;
  const coming = (async () => {
    for (; !isOver; came++) {
      await group.add(`n${came}-${b}`);
      await new Promise((resolve) => setTimeout(resolve, 300));
    }
  })();
  await (await menuOf(page, 'Hello all')).filter({ hasText: 'Info' }).click();
  await page.getByRole('heading', { name: 'Not delivered to 250' }).waitFor({ timeout: 12_000 });
  isOver = true;
  await coming;
  expect(came).toBeGreaterThan(5);
});
