/** Names, numbers and titles on the chat page: a real Chromium against a real gateway. */
import { expect, test } from 'vitest';
import { sizeOf } from '../page/src/Files.js';
import { idOf, idsOf } from '../page/src/ids.js';
import { initialsOf } from '../page/src/words.js';
import { until, user } from './support/gateway.js';
import { connected, openDm, picture, setUp, write } from './support/people.js';

const { gateway, people } = setUp({ attachments__size_max_mib: '1' });

test('ids are made of names', () => {
  for (const [name, id] of [
    ['alice', 'alice'],
    [' Alice Müller ', 'Alice-Müller'],
    ['Alice  von\tA', 'Alice-von-A'],
    ['李 雷', '李-雷'],
    ['a\u200bb', 'a-b'],
    ['\u2800 \u202e', ''],
    // An id is compared byte by byte, so one that is allowed stays as it is.
    ['Mu\u0308ller', 'Mu\u0308ller'],
    ['👨‍👩‍👧', '👨-👩-👧'],
  ] as const)
    expect(idOf(name)).toBe(id);
  expect(idsOf('Anna Schmidt, Bob,, ;Carol、山田 太郎')).toEqual(['Anna-Schmidt', 'Bob', 'Carol', '山田-太郎']);
});

test('initials and sizes are what they are called', () => {
  expect(['alice (you)', '"Quoted" name', 'a', '(', '', '👩‍🚀 x', 'élan vital'].map(initialsOf)).toEqual([
    'AY',
    'QN',
    'A',
    '#',
    '#',
    '👩‍🚀X',
    'ÉV',
  ]);
  expect([1, 5, 1023, 1024, 3000, 1_048_575, 1_048_576, 5 * 1024 ** 3].map(sizeOf)).toEqual([
    '1 byte',
    '5 bytes',
    '1023 bytes',
    '1 KiB',
    '3 KiB',
    '1 MiB',
    '1 MiB',
    '5 GiB',
  ]);
});

test('any name will do, and a second window is for somebody else', async () => {
  const [name, other] = [`Alice Müller ${user('x')}`, user('bob')];
  const context = await people.person();
  const alice = await people.signIn(context, name);
  const heading = alice.locator('.sidebar h2');
  expect(await heading.textContent()).toBe(name);
  await openDm(alice, other);
  await write(alice, 'hello');
  await alice.locator('.message[data-state=sent]').waitFor();
  const bob = await context.newPage();
  await bob.goto(gateway.page);
  const field = bob.getByLabel('Name');
  expect(await field.inputValue()).toBe(name);
  await picture(bob, 'names-second-window');
  await field.fill(other);
  await bob.getByRole('button', { name: 'Sign in' }).click();
  await connected(bob);
  // The others see the id.
  await bob.getByRole('button', { name: new RegExp(idOf(name)) }).click();
  await bob.locator('.body', { hasText: 'hello' }).waitFor();
  for (const [page, who] of [
    [alice, name],
    [bob, other],
  ] as const) {
    await page.reload();
    await connected(page);
    expect(await page.locator('.sidebar h2').textContent()).toBe(who);
  }
});

test('people with spaces in their names, the first message, and what the last owner and one who left see', async () => {
  const a = user('alice');
  const page = await people.signIn(await people.person(), a);
  await page.getByRole('button', { name: 'New conversation' }).click();
  await page.getByText('Group', { exact: true }).click();
  await page.getByLabel('Name', { exact: true }).fill('Trip');
  await page.getByLabel('People').fill('Anna Schmidt, Bob');
  await page.getByRole('button', { name: 'Create' }).click();
  await page.locator('.names', { hasText: '3 members' }).waitFor();
  await page.getByRole('button', { name: 'Details' }).click();
  await page.locator('.members li', { hasText: 'Anna-Schmidt' }).waitFor();
  expect(await page.getByRole('button', { name: 'Go to the beginning' }).count()).toBe(0);
  await page.getByRole('button', { name: 'Leave this group' }).click();
  await page.getByRole('dialog', { name: 'You are the only owner' }).waitFor();
  await picture(page, 'names-last-owner');
  await page.keyboard.press('Escape');
  await page.getByLabel('Role of Bob').selectOption('owner');
  await page.getByText(/You made Bob an owner/).waitFor();
  await page.getByRole('button', { name: 'Go to the beginning' }).waitFor();
  await page.getByRole('button', { name: 'Leave this group' }).click();
  await page.getByRole('dialog').getByRole('button', { name: 'Leave', exact: true }).click();
  await page.getByText('You are not in this conversation any more.').waitFor();
  expect(await page.locator('.names').textContent()).not.toContain('members');
});

test('the only member of a group can leave it', async () => {
  const page = await people.signIn(await people.person(), user('alice'));
  await page.getByRole('button', { name: 'New conversation' }).click();
  await page.getByText('Group', { exact: true }).click();
  await page.getByLabel('Name', { exact: true }).fill('Alone');
  await page.getByRole('button', { name: 'Create' }).click();
  await page.locator('.names', { hasText: '1 member' }).waitFor();
  await page.getByRole('button', { name: 'Details' }).click();
  await page.locator('.members li').waitFor();
  await page.getByRole('button', { name: 'Leave this group' }).click();
  await page.getByRole('dialog').getByRole('button', { name: 'Leave', exact: true }).click();
  await page.getByText('You are not in this conversation any more.').waitFor();
});

test('a direct chat has a title and initials, also with oneself and before it is in the inbox', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const page = await people.signIn(await people.person(), a);
  await openDm(page, a);
  await write(page, 'a note');
  const item = page.locator('.sidebar li', { hasText: `${a} (you)` });
  await item.waitFor();
  const initials = await item.locator('.avatar').textContent();
  expect(initials).toBe(initialsOf(a));
  expect(await page.locator('.thread > header .avatar').textContent()).toBe(initials);
  await openDm(page, b);
  for (const again of [async () => {}, () => page.reload()]) {
    await again();
    await page.locator('.thread h2', { hasText: b }).waitFor();
    await until(async () => (await page.locator('.thread > header .avatar').textContent()) === initialsOf(b));
  }
});

test('files that are never taken say why, and have no button to try again', async () => {
  const page = await people.signIn(await people.person(), user('alice'));
  await openDm(page, user('bob'));
  const files = (name: string, size: number) => ({ name, mimeType: '', buffer: Buffer.alloc(size) });
  await page.locator('input[type=file]').setInputFiles([files('empty.txt', 0), files('five.txt', 5)]);
  await until(async () => (await page.locator('.attached li[data-state=ready]').count()) === 2);
  expect(await page.locator('.attached li').allTextContents()).toEqual(['empty.txt 0 bytes', 'five.txt 5 bytes']);
  await page.locator('input[type=file]').setInputFiles(files('large.bin', 1_048_577));
  await page.getByText('A file may have at most 1 MiB.').waitFor();
  expect(await page.getByRole('button', { name: 'Upload large.bin again' }).count()).toBe(0);
  await picture(page, 'names-files');
});
