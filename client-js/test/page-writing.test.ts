/** What one writes on the chat page, in a real Chromium against a real gateway. */
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { connected, give, openDm, setUp, texts, write } from './support/people.js';

const { gateway, people } = setUp();

const field = (page: Page) => page.getByLabel('Message', { exact: true });
const edited = (page: Page) => page.getByLabel('Edited message');

/** Signs in, with a conversation that has more messages than the list. */
async function withLongDm(): Promise<{ page: Page; bob: string }> {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(a)).dm(b);
  await dm.send('my first');
  for (let i = 0; i < 80; i++) await dm.send(`message ${i}`);
  await dm.send('my last');
  const page = await people.signIn(await people.person(), a);
  await openDm(page, b);
  await until(async () => (await texts(page)).includes('my last'));
  return { page, bob: b };
}

async function toFirst(page: Page): Promise<void> {
  await page.getByRole('button', { name: 'Details' }).click();
  await page.getByRole('button', { name: 'Go to the beginning' }).click();
  await page.locator('.body', { hasText: 'my first' }).waitFor();
  await page.getByLabel('Details').getByRole('button', { name: 'Close' }).click();
  expect(await texts(page)).not.toContain('my last');
}

test('Arrow Up edits the last message, also after a jump to old ones', async () => {
  const { page } = await withLongDm();
  await toFirst(page);
  await field(page).press('ArrowUp');
  await edited(page).waitFor();
  expect(await edited(page).inputValue()).toBe('my last');
  expect(await texts(page)).toContain('my last');
});

test('an answer and an edit outlive a look at another conversation and a reload', async () => {
  const [a, b, c] = [user('alice'), user('bob'), user('carol')];
  const dm = await (await gateway.connect(b)).dm(a);
  await dm.send('a question');
  const page = await people.signIn(await people.person(), a);
  await openDm(page, b);
  await write(page, 'hello');
  await page.locator('.message[data-state=sent], .message[data-state=delivered]').waitFor();
  const away = async () => {
    await openDm(page, c);
    await page.getByRole('button', { name: new RegExp(b) }).click();
    await field(page).or(edited(page)).waitFor();
  };
  await page.getByRole('button', { name: 'Message menu' }).first().click();
  await page.getByRole('menuitem', { name: 'Reply' }).click();
  await field(page).fill('an answer');
  for (const leave of [away, () => page.reload()]) {
    await leave();
    await page.locator('.replying', { hasText: 'a question' }).waitFor();
    expect(await field(page).inputValue()).toBe('an answer');
  }
  await page.getByRole('button', { name: 'Do not reply' }).click();
  await page.getByRole('button', { name: 'Message menu' }).last().click();
  await page.getByRole('menuitem', { name: 'Edit' }).click();
  await edited(page).fill('hello there');
  for (const leave of [away, () => page.reload()]) {
    await leave();
    await edited(page).waitFor();
    expect(await edited(page).inputValue()).toBe('hello there');
  }
  await edited(page).press('Enter');
  await page.locator('.body', { hasText: 'hello there' }).waitFor();
  // The draft was there all the time, and what is done does not come back.
  await page.reload();
  await field(page).waitFor();
  expect(await field(page).inputValue()).toBe('an answer');
  await connected(page);
  expect(await page.locator('.replying').count()).toBe(0);
});

test('an edit that a reply or another edit takes the place of is kept as a draft', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const page = await people.signIn(await people.person(), a);
  await openDm(page, b);
  for (const body of ['one', 'two']) await write(page, body);
  await page.locator('.message[data-state=sent]').nth(1).waitFor();
  const choose = async (at: number, what: string) => {
    await page.getByRole('button', { name: 'Message menu' }).nth(at).click();
    await page.getByRole('menuitem', { name: what }).click();
  };
  await choose(0, 'Edit');
  await edited(page).fill('one, and a long thought');
  await choose(1, 'Edit');
  await until(async () => (await edited(page).inputValue()) === 'two');
  await page.getByText('The message was not changed. Your text is kept here as a draft.').waitFor();
  await edited(page).fill('two, and more');
  await choose(0, 'Reply');
  await field(page).waitFor();
  expect(await field(page).inputValue()).toBe('one, and a long thought\ntwo, and more');
  // What the user ends is gone, and an edit without changes leaves nothing.
  await page.getByRole('button', { name: 'Do not reply' }).click();
  await choose(0, 'Edit');
  await edited(page).fill('not wanted');
  await edited(page).press('Escape');
  await choose(0, 'Edit');
  await choose(1, 'Reply');
  await field(page).waitFor();
  expect(await field(page).inputValue()).toBe('one, and a long thought\ntwo, and more');
  expect(await texts(page)).toEqual(['one', 'two']);
});

test('Escape in an input method keeps the edit', async () => {
  const page = await people.signIn(await people.person(), user('alice'));
  await openDm(page, user('bob'));
  await write(page, 'hello');
  await page.locator('.message[data-state=sent]').waitFor();
  await field(page).press('ArrowUp');
  const press = (isComposing: boolean) =>
    edited(page).evaluate((element, isComposing) => {
      element.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true, isComposing }));
    }, isComposing);
  await press(true);
  expect(await edited(page).inputValue()).toBe('hello');
  await press(false);
  await field(page).waitFor();
});

test('files from a file manager are attached, pictures of copied text are not, and folders say why', async () => {
  const page = await people.signIn(await people.person(), user('alice'));
  await openDm(page, user('bob'));
  const names = () => page.locator('.attached bdi').allTextContents();
  await give(field(page), 'paste', 'cat.txt', { text: 'cat.txt' });
  await give(field(page), 'paste', 'dog.txt', { text: '/home/alice/dog.txt' });
  await until(async () => (await names()).length === 2);
  await give(field(page), 'paste', 'image.png', { text: 'a copied sentence' });
  await page.evaluate(() => {
    DataTransferItem.prototype.webkitGetAsEntry = () => ({ isDirectory: true }) as FileSystemEntry;
  });
  await give(field(page), 'drop', 'folder');
  await page.getByText('A folder cannot be attached. Choose the files in it.').waitFor();
  expect(await names()).toEqual(['cat.txt', 'dog.txt']);
  // They are lost when the user signs out, so the page asks.
  await page.getByRole('button', { name: 'Sign out' }).click();
  await page.getByText('2 files are not sent yet. Sign out and delete them?').waitFor();
  await page.getByRole('dialog').getByRole('button', { name: 'Cancel' }).click();
  // They are lost with the page, so the browser asks.
  const asked = page.waitForEvent('dialog');
  await page.close({ runBeforeUnload: true });
  const dialog = await asked;
  expect(dialog.type()).toBe('beforeunload');
  await dialog.dismiss();
  for (const name of await names()) await page.getByRole('button', { name: `Remove ${name}` }).click();
  const closed = page.waitForEvent('close');
  await page.close({ runBeforeUnload: true });
  await closed;
});

test('files for a group that the user is no longer in are given up', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const page = await people.signIn(await people.person(), a);
  const bob = await gateway.connect(b);
  const group = await bob.createGroup({ name: 'Trip', participants: [a] });
  await page.getByRole('button', { name: /Trip/ }).click();
  await give(field(page), 'paste', 'cat.txt', { size: 10, mime: 'text/plain' });
  await page.locator('.attached li[data-state="ready"]').waitFor();
  await group.remove(a);
  await page.getByText('You are not in this conversation any more.').waitFor();
  const asked: string[] = [];
  page.on('dialog', (dialog) => {
    asked.push(dialog.type());
    void dialog.accept();
  });
  const closed = page.waitForEvent('close');
  await page.close({ runBeforeUnload: true });
  await closed;
  expect(asked).toEqual([]);
});

test('a message keeps the indentation of its first line', async () => {
  const page = await people.signIn(await people.person(), user('alice'));
  await openDm(page, user('bob'));
  await field(page).fill('\n  \n    if a:\n        b()\n\n');
  await page.getByRole('button', { name: 'Send', exact: true }).click();
  await until(async () => (await texts(page)).length === 1);
  expect(await texts(page)).toEqual(['    if a:\n        b()']);
});

test('what is written offline at an old place stays in sight, and is in the list when it is sent', async () => {
  const { page } = await withLongDm();
  await toFirst(page);
  await gateway.kill();
  await page.getByText('No connection. Trying again…').waitFor();
  await write(page, 'written offline');
  await page.locator('.unseen', { hasText: 'Waiting to be sent: written offline' }).waitFor();
  await gateway.start();
  await page.locator('.message[data-state=sent] .body', { hasText: 'written offline' }).waitFor();
  await page.locator('.unseen').waitFor({ state: 'detached' });
});
