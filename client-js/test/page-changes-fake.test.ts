/** Edits, deletions and reactions in the built page (`npm run page`) in Chromium, with a fake gateway. */
import type { BrowserContextOptions, Page } from 'playwright-core';
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from 'vitest';
import { violations } from './support/access.js';
import type { Gateway } from './support/gateway.js';
import { until } from './support/gateway.js';
import { PageServer } from './support/page-server.js';
import { People, picture, texts } from './support/people.js';

const DESK = { viewport: { width: 1100, height: 700 } };
const PHONE: BrowserContextOptions = { viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true };

let server: PageServer;
let people: People;
const target = { page: '' };
beforeAll(async () => {
  people = new People(target as Gateway);
  await people.launch();
});
beforeEach(async () => {
  server = await new PageServer().start();
  server.id = '0199c0de-0000-4000-8000-000000000001';
  server.changes = { limits: { reactions: 32, edit_window_s: 0, delete_seqs: 256 } };
  target.page = server.page;
  server.now = Date.now() - 600_000;
  server.write('bob', 'Nine at the station?');
  server.write('alice', 'Perfekt!');
  server.write('bob', 'I bring the thermos');
});
afterEach(async () => {
  await people.leave();
  server.close();
});
afterAll(() => people.close());

async function open(options: BrowserContextOptions = DESK): Promise<Page> {
  const page = await people.signIn(await people.person(options), 'alice');
  await page.getByRole('button', { name: /Group/ }).click();
  await page.locator('.message').first().waitFor();
  return page;
}
const row = (page: Page, seq: number) => page.locator(`[data-seq="${seq}"]`);
const focused = (page: Page) =>
  page.evaluate(() => document.activeElement?.getAttribute('aria-label') ?? document.activeElement?.textContent ?? '');
const menu = async (page: Page, seq: number, item: string) => {
  await row(page, seq).getByRole('button', { name: 'Message menu' }).click();
  await page.getByRole('menuitem', { name: item }).click();
};

test('the up arrow edits the last own message, and Escape cancels', async () => {
  const page = await open();
  const field = page.getByLabel('Message', { exact: true });
  await field.fill('a draft');
  await field.press('ArrowUp');
  expect(await page.getByLabel('Edited message').count(), 'not while the user writes').toBe(0);
  await field.fill('');
  await field.press('ArrowUp');
  const edited = page.getByLabel('Edited message');
  expect(await edited.inputValue()).toBe('Perfekt!');
  await edited.fill('something else');
  await edited.press('Escape');
  expect(await field.inputValue()).toBe('');
  expect(await texts(page)).toContain('Perfekt!');
  await field.press('ArrowUp');
  await edited.fill('Perfect!');
  await edited.press('Enter');
  await until(() => server.entries[1]!.body === 'Perfect!');
  await until(async () => (await texts(page)).includes('Perfect!'));
  expect(await row(page, 2).locator('.edited').getAttribute('title')).toMatch(/^edited .*\d/);
  expect(await focused(page)).toBe('Message');
  // A draft survives an edit from the menu.
  await field.fill('a draft');
  await menu(page, 2, 'Edit');
  expect(await edited.inputValue()).toBe('Perfect!');
  expect(await focused(page)).toBe('Edited message');
  await edited.press('Escape');
  expect(await field.inputValue()).toBe('a draft');
});

test('an edit on another device meanwhile is a conflict, and a deletion leaves the typed text as a draft', async () => {
  const page = await open();
  const field = page.getByLabel('Message', { exact: true });
  const edited = page.getByLabel('Edited message');
  await field.press('ArrowUp');
  await edited.fill('of the laptop');
  server.change('alice', { type: 'edit', seq: 2, body: 'of the phone' });
  await page.locator('.composer').getByText('Changed on another device meanwhile: of the phone').waitFor();
  expect(await edited.inputValue()).toBe('of the laptop');
  await edited.press('Enter');
  const failed = row(page, 2).locator('.failed');
  await failed.getByText('changed on another device').waitFor();
  expect(await failed.textContent()).toContain('of the laptop');
  expect(await row(page, 2).locator('.body').textContent()).toBe('of the phone');
  expect(server.entries[1]!.body).toBe('of the phone');
  await picture(page, 'changes-conflict');
  await failed.getByRole('button', { name: 'Try again' }).click();
  await until(() => server.entries[1]!.body === 'of the laptop');
  // Another device deletes the message.
  await field.fill('a draft');
  await menu(page, 2, 'Edit');
  await edited.fill('of the laptop, longer');
  server.change('alice', { type: 'delete', seqs: [2] });
  await page.getByText('The message was deleted. Your text is kept here as a draft.').waitFor();
  expect(await field.inputValue()).toBe('a draft\nof the laptop, longer');
  await picture(page, 'changes-deleted-meanwhile');
  await field.press('Enter');
  await until(() => server.entries[3]?.body === 'a draft\nof the laptop, longer');
  expect(await page.getByText('The message was deleted.').count()).toBe(0);
  // Without typed text the draft stays.
  await field.fill('a draft');
  await menu(page, 4, 'Edit');
  server.change('alice', { type: 'delete', seqs: [4] });
  await page.getByText('The message was deleted.').waitFor();
  expect(await field.inputValue()).toBe('a draft');
});

test('what the user writes stays when the list jumps away from the edited message', async () => {
  const page = await open();
  const edited = page.getByLabel('Edited message');
  await page.getByLabel('Message', { exact: true }).press('ArrowUp');
  await edited.fill('written before the jump');
  const jump = async (to: number) => {
    server.isDeaf = true;
    while (server.entries.length < to) server.write('bob', `message ${server.entries.length + 1}`);
    server.isDeaf = false;
    server.push({ type: 'resync', conversation: server.id, head: to });
    await row(page, to).waitFor();
    await until(async () => (await row(page, 2).count()) === 0);
  };
  await jump(200);
  expect(await edited.inputValue()).toBe('written before the jump');
  await edited.press('Enter');
  await until(() => server.entries[1]!.body === 'written before the jump');
  // A deletion of a message that is not in the list is noticed too.
  await page.getByLabel('Message', { exact: true }).fill('mine');
  await page.keyboard.press('Enter');
  await row(page, 201).waitFor();
  await page.getByLabel('Message', { exact: true }).press('ArrowUp');
  await edited.fill('mine, longer');
  server.isDeaf = true;
  while (server.entries.length < 400) server.write('bob', `message ${server.entries.length + 1}`);
  server.isDeaf = false;
  server.push({ type: 'resync', conversation: server.id, head: 400 });
  await row(page, 400).waitFor();
  await until(() => server.received('history').some(({ around }) => around === 201));
  server.change('alice', { type: 'delete', seqs: [201] });
  await page.getByText('The message was deleted. Your text is kept here as a draft.').waitFor();
  expect(await page.getByLabel('Message', { exact: true }).inputValue()).toBe('mine, longer');
});

test('a notification is closed when its message is deleted', async () => {
  const person = await people.person(DESK);
  await person.addInitScript(() => {
    const closed: string[] = [];
    class Noted {
      static permission = 'granted';
      static requestPermission = async () => 'granted';
      onclose = () => {};
      constructor(
        _: string,
        public options: { body: string },
      ) {
        shown.push(options.body);
      }
      close() {
        closed.push(this.options.body);
        this.onclose();
      }
    }
    const shown: string[] = [];
    Object.assign(globalThis, { Notification: Noted, noted: { shown, closed } });
  });
  const page = await people.signIn(person, 'alice');
  await page.getByRole('button', { name: 'Notifications' }).click();
  await page.evaluate(() => Object.defineProperty(document, 'hidden', { value: true, configurable: true }));
  const noted = () => page.evaluate(() => (globalThis as never as { noted: { shown: string[]; closed: string[] } }).noted);
  server.write('bob', 'a secret');
  await until(async () => (await noted()).shown.includes('a secret'));
  server.change('bob', { type: 'react', seq: 4, emoji: '👍' });
  server.change('bob', { type: 'delete', seqs: [3] });
  // A new text takes the place of the old one silently.
  server.change('bob', { type: 'edit', seq: 4, body: 'less secret' });
  await until(async () => (await noted()).shown.includes('less secret'));
  expect((await noted()).closed).not.toContain('a secret');
  server.change('bob', { type: 'delete', seqs: [4] });
  await until(async () => (await noted()).closed.includes('less secret'));
});

test('a deletion is confirmed, leaves a stub, and quotes and the inbox follow', async () => {
  server.entries[2]!.body = 'the last';
  const page = await open();
  const quoting = server.write('bob', 'an answer');
  Object.assign(quoting, { reply_to: 2 });
  server.push(server.message({ ...server.write('bob', 'quoting'), reply_to: 2 } as never, false));
  await page.reload();
  await page.locator('.quote').first().waitFor();
  expect(await page.locator('.quote').first().textContent()).toContain('Perfekt!');
  server.change('alice', { type: 'edit', seq: 2, body: 'edited' });
  await until(async () => (await page.locator('.quote').first().textContent())!.includes('edited'));
  // Only own messages can be deleted or edited by a member.
  await row(page, 1).getByRole('button', { name: 'Message menu' }).click();
  expect(await page.getByRole('menuitem').allTextContents()).toEqual(['React', 'Reply', 'Copy text', 'Copy link']);
  await page.keyboard.press('Escape');
  expect(await focused(page)).toBe('Message menu');
  await menu(page, 2, 'Delete');
  await page.getByRole('dialog').getByRole('button', { name: 'Cancel' }).click();
  expect(server.rev).toBe(1);
  await menu(page, 2, 'Delete');
  await page.getByRole('dialog').getByRole('button', { name: 'Delete' }).click();
  await row(page, 2).getByText('You deleted this message').waitFor();
  await until(() => server.entries[1]!.deleted);
  await until(async () => (await page.locator('.quote').first().textContent())!.includes('a deleted message'));
  expect(await row(page, 2).getByRole('button', { name: 'Message menu' }).count()).toBe(0);
  expect(await page.evaluate(() => document.activeElement !== document.body)).toBe(true);
  server.change('bob', { type: 'delete', seqs: [5] });
  await row(page, 5).getByText('This message was deleted').waitFor();
  await page.locator('.sidebar .preview', { hasText: 'a deleted message' }).waitFor();
  await picture(page, 'changes-deleted');
});

test('an admin may delete messages of others', async () => {
  server.answers.conversation = () => ({
    type: 'conversation',
    conversation: server.id,
    kind: 'group',
    participant_count: 2,
    role: 'admin',
  });
  const page = await open();
  await until(async () => {
    await row(page, 1).getByRole('button', { name: 'Message menu' }).click();
    const items = await page.getByRole('menuitem').allTextContents();
    await page.keyboard.press('Escape');
    return items.join() === 'React,Reply,Copy text,Copy link,Delete';
  });
});

test('reactions: a bar that toggles, who reacted, and a picker for the keyboard', async () => {
  const page = await open();
  server.change('bob', { type: 'react', seq: 2, emoji: '🎉' });
  const bar = row(page, 2).getByRole('group', { name: 'Reactions' });
  const party = bar.getByRole('button', { name: /^party/ });
  await party.waitFor();
  expect(await party.getAttribute('aria-pressed')).toBe('false');
  expect(await party.locator('bdi').textContent(), 'an emoji may change the text direction').toBe('🎉');
  await party.click();
  await until(async () => (await party.getAttribute('aria-pressed')) === 'true');
  expect(await party.getAttribute('aria-label')).toBe('party, 2 people, you too');
  await until(() => server.entries[1]!.who.get('🎉')!.size === 2);
  await party.hover();
  await page.getByRole('tooltip', { name: '' }).filter({ hasText: 'You, bob' }).waitFor();
  await picture(page, 'changes-who');
  await party.click();
  await until(() => server.entries[1]!.who.get('🎉')!.size === 1);
  await page.mouse.move(0, 0);
  await until(async () => (await page.getByRole('tooltip').count()) === 0);

  // The picker, with the keyboard only.
  const more = row(page, 3).getByRole('button', { name: 'Message menu' });
  await more.focus();
  await page.keyboard.press('Enter');
  await until(async () => (await focused(page)) === 'React');
  await page.keyboard.press('ArrowDown');
  expect(await focused(page)).toBe('Reply');
  await page.keyboard.press('ArrowUp');
  await page.keyboard.press('Enter');
  await until(async () => (await focused(page)) === 'thumbs up');
  await picture(page, 'changes-picker');
  await page.keyboard.press('ArrowRight');
  expect(await focused(page)).toBe('heart');
  await page.keyboard.press('ArrowDown');
  expect(await focused(page)).toBe('grinning');
  await page.keyboard.press('ArrowLeft');
  await page.keyboard.press('End');
  expect(await focused(page)).toBe('idea');
  await page.keyboard.press('Enter');
  await row(page, 3).getByRole('button', { name: 'idea, 1 person, you too' }).waitFor();
  expect(await focused(page)).toBe('Message menu');
  await page.keyboard.press('Enter');
  await page.keyboard.press('Enter');
  await until(async () => (await focused(page)) === 'thumbs up');
  await page.keyboard.press('Escape');
  await until(async () => (await page.getByRole('menu').count()) === 0);
  expect(await focused(page)).toBe('Message menu');
  // Focus shows who reacted too.
  await page.keyboard.press('ArrowLeft');
  await page.keyboard.press('ArrowLeft');
  await until(async () => (await focused(page)) === 'idea, 1 person, you too');
  await page.getByRole('tooltip').filter({ hasText: 'You' }).waitFor();
  await page.keyboard.press('Escape');
  await until(async () => (await page.getByRole('tooltip').count()) === 0);
});

test('two forms of an emoji are one chip', async () => {
  server.change('bob', { type: 'react', seq: 1, emoji: '❤' });
  server.change('carol', { type: 'react', seq: 1, emoji: '❤\ufe0f' });
  const page = await open();
  const chip = row(page, 1).locator('.chip:not(.add)');
  await page.getByRole('button', { name: 'heart, 2 people' }).hover();
  expect(await chip.count()).toBe(1);
  await page.getByRole('tooltip').filter({ hasText: 'bob, carol' }).waitFor();
  // A click adds the own one, and another removes it.
  await chip.click();
  await page.getByRole('button', { name: 'heart, 3 people, you too' }).waitFor();
  await chip.click();
  await page.getByRole('button', { name: 'heart, 2 people', exact: true }).waitFor();
  // So does the picker, which has only one form.
  await chip.click();
  await page.getByRole('button', { name: 'heart, 3 people, you too' }).waitFor();
  await row(page, 1).getByRole('button', { name: 'Add a reaction' }).click();
  const heart = page.getByRole('menuitemcheckbox', { name: 'heart', exact: true });
  expect(await heart.getAttribute('aria-checked')).toBe('true');
  await heart.click();
  await page.getByRole('button', { name: 'heart, 2 people', exact: true }).waitFor();
});

test('a refused change is undone, and can be tried again or discarded; offline changes wait', async () => {
  const page = await open();
  const edit = server.answers.edit!;
  server.answers.edit = () => ({ type: 'error', code: 'forbidden', message: 'too late' });
  const field = page.getByLabel('Message', { exact: true });
  await field.press('ArrowUp');
  await page.getByLabel('Edited message').fill('my new text');
  await page.keyboard.press('Enter');
  const failed = row(page, 2).locator('.failed');
  await failed.getByText('Not changed: too late').waitFor();
  expect(await failed.textContent()).toContain('my new text');
  expect(await row(page, 2).locator('.body').textContent()).toBe('Perfekt!');
  await picture(page, 'changes-refused');
  server.answers.edit = edit;
  await failed.getByRole('button', { name: 'Try again' }).click();
  await until(() => server.entries[1]!.body === 'my new text');
  await until(async () => (await failed.count()) === 0);
  // Without an answer the change is shown and waits, also over a reload.
  server.answers.react = () => undefined;
  server.change('bob', { type: 'react', seq: 2, emoji: '🔥' });
  await row(page, 2).getByRole('button', { name: /^fire/ }).click();
  await row(page, 2).getByTitle('waiting to be changed').waitFor();
  await page.reload();
  await row(page, 2).getByRole('button', { name: 'fire, 2 people, you too' }).waitFor();
});

test('an older gateway: no menu and no reactions, and replying still works', async () => {
  server.isOld = true;
  server.changes = { limits: {} };
  const page = await open();
  await until(async () => (await page.getByRole('button', { name: 'Message menu' }).count()) === 0);
  await page.getByLabel('Message', { exact: true }).press('ArrowUp');
  expect(await page.getByLabel('Edited message').count()).toBe(0);
  await page.getByRole('button', { name: 'Reply' }).last().click();
  await page.getByText('Reply to bob').waitFor();
});

test('axe finds nothing, light and dark, on a desk and on a phone', async () => {
  const found: string[] = [];
  server.change('alice', { type: 'edit', seq: 2, body: 'Perfect! '.repeat(12) });
  const long = `:${'party_parrot_'.repeat(4)}:`;
  for (const emoji of ['👍', '🎉', '❤️', '🚀', ':party_parrot:', long, '😂', '👀', '🔥'])
    server.change('bob', { type: 'react', seq: 1, emoji });
  server.change('alice', { type: 'react', seq: 1, emoji: '👍' });
  server.change('alice', { type: 'react', seq: 2, emoji: '👍' });
  server.change('bob', { type: 'delete', seqs: [3] });
  for (const [device, options] of [
    ['desk', DESK],
    ['phone', PHONE],
  ] as const) {
    const page = await open(options);
    await row(page, 1).getByRole('group').waitFor();
    found.push(...(await violations(page, `${device} changes`)));
    const more = row(page, 2).getByRole('button', { name: 'Message menu' });
    await (device === 'phone' ? more.tap() : more.click());
    await page.getByRole('menu').waitFor();
    found.push(...(await violations(page, `${device} changes menu`)));
    const react = page.getByRole('menuitem', { name: 'React' });
    await (device === 'phone' ? react.tap() : react.click());
    await page.getByRole('menuitemcheckbox').first().waitFor();
    found.push(...(await violations(page, `${device} changes picker`)));
    await page.keyboard.press('Escape');
    if (device === 'phone') {
      await row(page, 1)
        .getByRole('button', { name: /^thumbs up/ })
        .tap();
      await page.getByRole('tooltip').waitFor();
      await picture(page, 'phone-changes-who');
    }
    await menu(page, 2, 'Edit');
    found.push(...(await violations(page, `${device} changes edit`)));
    await page.keyboard.press('Escape');
    await menu(page, 2, 'Delete');
    found.push(...(await violations(page, `${device} changes delete`)));
  }
  expect(found).toEqual([]);
});
