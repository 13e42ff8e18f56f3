/** Texts of all languages on the chat page: a real Chromium against a real gateway. */
import { expect, test } from 'vitest';
import { has } from '../page/src/search.js';
import { user } from './support/gateway.js';
import { openDm, setUp } from './support/people.js';

const { gateway, people } = setUp();

test('what is looked for is found as people see it', () => {
  for (const [text, wanted] of [
    ['Straße', 'strasse'],
    ['Strasse', 'straße'],
    ['Zürich', 'zurich'],
    // One character, written as two code points.
    ['Zu\u0308rich', 'Zürich'],
    ['Zürich', 'u\u0308r'],
    ['ÉCOLE', 'école'],
    ['فَاطِمَة', 'فاطمة'],
    ['ﬁle', 'file'],
    ['Ελλάδα', 'ελλαδα'],
  ] as const)
    expect([text, wanted, has(text, wanted)]).toEqual([text, wanted, true]);
  for (const [text, wanted] of [
    ['Zürich', 'zurch'],
    ['👨‍👩‍👧', '👩'],
    ['abc', 'abcd'],
    ['', 'a'],
  ] as const)
    expect([text, wanted, has(text, wanted)]).toEqual([text, wanted, false]);
});

test('each line of a message has its own direction', async () => {
  const [a, b] = [user('alice'), user('bob')];
  await (await (await gateway.connect(b)).dm(a)).send('a first line that is the longest of all\nשלום\nhello');
  const page = await people.signIn(await people.person(), a);
  await openDm(page, b);
  const lines = await page.locator('.body').evaluate((body) => {
    const text = body.firstChild!;
    const box = body.getBoundingClientRect();
    return body.textContent!.split('\n').map((line) => {
      const range = document.createRange();
      const start = body.textContent!.indexOf(line);
      range.setStart(text, start);
      range.setEnd(text, start + line.length);
      const { left, right } = range.getBoundingClientRect();
      return left - box.left < 2 ? 'left' : box.right - right < 2 ? 'right' : 'between';
    });
  });
  expect(lines).toEqual(['left', 'right', 'left']);
});

test('the filter of the inbox finds names without their accents', async () => {
  const a = user('alice');
  const bob = await gateway.connect(user('bob'));
  for (const name of ['Zu\u0308rich', 'Genf']) await bob.createGroup({ name, participants: [a] });
  const page = await people.signIn(await people.person(), a);
  await page.locator('.sidebar li', { hasText: 'Genf' }).waitFor();
  await page.getByLabel('Find a conversation').fill('zurich');
  await page.locator('.sidebar li', { hasText: 'Genf' }).waitFor({ state: 'detached' });
  expect(await page.locator('.sidebar li .title').count()).toBe(1);
});
