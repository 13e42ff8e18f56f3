/** A tab of the chat page that shows a dialog, and so runs no script. */
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { connected, openDm, setUp, texts, write } from './support/people.js';

const { gateway, people } = setUp();

test('while a tab shows a dialog, another tab sends its messages', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const heard: string[] = [];
  bob.on('message', ({ body }) => heard.push(body));
  const context = await people.person();
  // It connects first, and holds the lock.
  const first = await people.signIn(context, a);
  await openDm(first, b);
  await write(first, 'before');
  await until(() => heard.length === 1);
  const second = await context.newPage();
  await second.goto(gateway.page);
  await second.getByRole('button', { name: 'Sign in' }).click();
  await connected(second);
  await openDm(second, b);
  const shown = first.waitForEvent('dialog');
  const answered = first.evaluate(() => alert('a dialog'));
  const dialog = await shown;
  const holders = () =>
    second.evaluate(async () => (await navigator.locks.query()).held!.map(({ name, clientId }) => `${name} ${clientId}`).sort());
  const before = await holders();
  for (const text of ['one', 'two']) await write(second, text);
  await until(() => heard.length === 3);
  // The first tab has the lock still.
  expect(before).toHaveLength(1);
  expect(await holders()).toEqual(before);
  await dialog.dismiss();
  await answered;
  // The first tab sends nothing once more.
  await write(first, 'after');
  await until(() => heard.includes('after'));
  expect(heard).toEqual(['before', 'one', 'two', 'after']);
  await until(async () => (await texts(second)).length === 4);
  expect(await second.locator('.message', { hasText: 'Sending' }).count()).toBe(0);
});
