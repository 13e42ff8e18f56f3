/** Texts that the chat page shortens, in a real Chromium against a real gateway: no character is cut as readers see it. */
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { openDm, setUp } from './support/people.js';

const { gateway, people } = setUp();

const FAMILY = '👨‍👩‍👧‍👦';
/** Returns a text with a family over the place after so many code points, and the part before it. */
const long = (points: number) => {
  const kept = 'x'.repeat(points - 3);
  return { body: `${kept}${FAMILY}${FAMILY}`, kept };
};

test('quotes, replies, edits and announcements are cut between whole characters', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const dm = await bob.dm(a);
  const [short, longer] = [long(100), long(200)];
  await dm.send(short.body);
  const quoted = await dm.send(longer.body);
  await dm.send('an answer', { replyTo: quoted.seq });
  const alice = await people.signIn(await people.person(), a);
  await openDm(alice, b);
  await alice.locator('.quote bdi', { hasText: 'xxx' }).waitFor();
  expect(await alice.locator('.quote bdi').last().textContent()).toBe(longer.kept);
  const row = alice.locator('.message', { hasText: `${FAMILY}${FAMILY}` }).first();
  await row.hover();
  await row.getByRole('button', { name: 'Reply' }).click();
  expect(await alice.locator('.replying bdi').last().textContent()).toBe(short.kept);
  await alice.getByRole('button', { name: 'Do not reply' }).click();
  await alice.getByLabel('Message', { exact: true }).fill(short.body);
  await alice.keyboard.press('Enter');
  await alice.locator('.message.own', { hasText: 'xxx' }).waitFor();
  await alice.getByLabel('Message', { exact: true }).press('ArrowUp');
  await alice.getByText('Edit: ').waitFor();
  expect(await alice.locator('.replying bdi').textContent()).toBe(short.kept);
  await alice.keyboard.press('Escape');
  await dm.send(longer.body);
  const live = alice.locator('[aria-live=polite]', { hasText: b });
  await live.waitFor({ state: 'attached' });
  expect(await live.textContent()).toBe(`${b}: ${longer.kept}`);
});

test('a notification has whole characters', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const dm = await bob.dm(a);
  await dm.send('first');
  const context = await people.person();
  // Headless browsers show no notifications, so this records them.
  await context.addInitScript(() => {
    const shown: string[] = [];
    class Recorded {
      static permission = 'granted';
      static requestPermission = async () => 'granted';
      constructor(_: string, { body }: { body: string }) {
        shown.push(body);
      }
      close() {}
    }
    Object.assign(globalThis, { Notification: Recorded, shown });
  });
  const alice = await people.signIn(context, a);
  await alice.getByRole('button', { name: 'Notifications' }).click();
  await alice.evaluate(() => Object.defineProperty(document, 'hidden', { value: true }));
  const { body, kept } = long(150);
  await dm.send(body);
  const shown = () => alice.evaluate(() => (globalThis as unknown as { shown: string[] }).shown);
  await until(async () => (await shown()).some((text) => text.startsWith('xxx')));
  expect((await shown()).at(-1)).toBe(kept);
});

test('a direction character does not show another ending than a link or a file has', async () => {
  const [a, b] = [user('alice'), user('bob')];
  await (await (await gateway.connect(b)).dm(a)).send('see https://example.com/\u202Egpj.exe');
  const alice = await people.signIn(await people.person(), a);
  await openDm(alice, b);
  expect(await alice.locator('.body a').textContent()).toBe('https://example.com/%E2%80%AEgpj.exe');
  await alice.locator('input[type=file]').setInputFiles({ name: 'photo\u202Egpj.exe', mimeType: '', buffer: Buffer.from('x') });
  expect(await alice.locator('.attached bdi').textContent()).toBe('photogpj.exe');
});

test('names are refused whole, and descriptions are cut between whole characters', async () => {
  const alice = await people.signIn(await people.person(), user('alice'));
  await openDm(alice, user('bob'));
  await alice.locator('input[type=file]').setInputFiles({ name: 'a.png', mimeType: 'image/png', buffer: Buffer.from('no picture') });
  const field = alice.getByLabel('Description of a.png');
  const { body, kept } = long(300);
  await field.fill(body);
  expect(await field.inputValue()).toBe(kept);
  await alice.getByRole('button', { name: 'New conversation' }).click();
  await alice.getByText('Group', { exact: true }).click();
  const name = alice.getByLabel('Name', { exact: true });
  await name.fill(FAMILY.repeat(20));
  await alice.getByRole('button', { name: 'Create' }).click();
  await alice.getByRole('dialog').getByRole('alert').waitFor();
  expect(await name.inputValue()).toBe(FAMILY.repeat(20));
});
