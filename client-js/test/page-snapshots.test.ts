/** What was edited or deleted does not stay in sight on the chat page, in a real Chromium against a real gateway. */
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { openDm, setUp } from './support/people.js';
import { png } from './support/pictures.js';

const { gateway, people } = setUp();

test('the line of an answer follows edits and the deletion of the message', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  const { seq } = await dm.send('my password is 1234');
  const alice = await people.signIn(await people.person(), a);
  await openDm(alice, b);
  await alice.locator('.message').hover();
  await alice.getByRole('button', { name: 'Reply' }).click();
  const line = alice.locator('.replying');
  await line.getByText('my password is 1234').waitFor();
  await dm.edit(seq, 'my cat');
  await line.getByText('my cat').waitFor();
  await dm.delete(seq);
  await line.getByText('a deleted message').waitFor();
  expect(await line.textContent()).not.toMatch(/password|my cat/);
});

test('a picture in full is closed when its message is deleted', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  const file = dm.attach(new File([Buffer.from(png(300, 200))], 'cat.png', { type: 'image/png' }));
  const { seq } = await dm.send('look', { attachments: [file] });
  const alice = await people.signIn(await people.person(), a);
  await openDm(alice, b);
  await alice.getByRole('button', { name: 'Show cat.png' }).click();
  const full = alice.getByRole('dialog', { name: 'cat.png' });
  await full.waitFor();
  await dm.delete(seq);
  await full.waitFor({ state: 'detached' });
});

test('a notification shows what an edit made of its message', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  await dm.send('first');
  const context = await people.person();
  // Headless browsers show no notifications, so this records those that are open. One takes the place of another with its tag.
  await context.addInitScript(() => {
    const open = new Map<string, Recorded>();
    class Recorded {
      static permission = 'granted';
      static requestPermission = async () => 'granted';
      onclose?: () => void;
      constructor(
        _: string,
        readonly options: { body: string; tag: string },
      ) {
        open.set(options.tag, this);
      }
      close() {
        const { tag } = this.options;
        if (open.get(tag) === this) open.delete(tag);
        this.onclose?.();
      }
    }
    Object.assign(globalThis, { Notification: Recorded, open });
  });
  const alice = await people.signIn(context, a);
  await alice.getByRole('button', { name: 'Notifications' }).click();
  await alice.evaluate(() => Object.defineProperty(document, 'hidden', { value: true }));
  const open = () =>
    alice.evaluate(() => {
      const shown = (globalThis as unknown as { open: Map<string, { options: { body: string } }> }).open;
      return [...shown.values()].map(({ options }) => options.body);
    });
  const { seq } = await dm.send('a secret');
  await until(async () => (await open()).includes('a secret'));
  await dm.edit(seq, 'nothing');
  await until(async () => (await open()).includes('nothing'));
  expect(await open()).not.toContain('a secret');
  await dm.delete(seq);
  await until(async () => !(await open()).includes('nothing'));
});
