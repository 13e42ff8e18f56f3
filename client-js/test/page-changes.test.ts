/** Edits, deletions and reactions on the chat page, with a real gateway. */
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { openDm, setUp, texts, write } from './support/people.js';

const DESK = { viewport: { width: 1100, height: 700 } };
const { gateway, people } = setUp();

test('two users see the edits, deletions and reactions of each other', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const alice = await people.signIn(await people.person(DESK), a);
  await openDm(alice, b);
  await write(alice, 'Perfekt!');
  await alice.locator('.message[data-state=sent]').waitFor();
  const bob = await people.signIn(await people.person(DESK), b);
  await bob.getByRole('button', { name: new RegExp(a) }).click();
  await bob.locator('.body', { hasText: 'Perfekt!' }).waitFor();
  await bob.getByRole('button', { name: 'Reply' }).last().click();
  await write(bob, 'what?');
  const quote = alice.locator('.quote');
  await quote.waitFor();

  // The up arrow edits one's own last message.
  await alice.getByLabel('Message', { exact: true }).press('ArrowUp');
  await alice.getByLabel('Edited message').fill('Perfect!');
  await alice.keyboard.press('Enter');
  for (const page of [alice, bob]) {
    await page.locator('.body', { hasText: 'Perfect!' }).waitFor();
    await page.locator('.edited').waitFor();
    await page.locator('.quote', { hasText: 'Perfect!' }).waitFor();
  }

  // A reaction from the picker, and a click on it by the other one.
  await bob.getByRole('button', { name: 'Message menu' }).first().click();
  await bob.getByRole('menuitem', { name: 'React' }).click();
  await bob.getByRole('menuitemcheckbox', { name: 'party', exact: true }).click();
  await alice.getByRole('button', { name: 'party, 1 person' }).click();
  for (const page of [alice, bob]) await page.getByRole('button', { name: 'party, 2 people, you too' }).waitFor();
  await alice.getByRole('button', { name: /^party/ }).hover();
  await alice
    .getByRole('tooltip')
    .filter({ hasText: `You, ${b}` })
    .waitFor();
  await alice.reload();
  await alice.getByRole('button', { name: 'party, 2 people, you too' }).click();
  await bob.getByRole('button', { name: 'party, 1 person, you too' }).waitFor();

  // A deletion.
  await alice.getByRole('button', { name: 'Message menu' }).first().click();
  await alice.getByRole('menuitem', { name: 'Delete' }).click();
  await alice.getByRole('dialog').getByRole('button', { name: 'Delete' }).click();
  await alice.getByText('You deleted this message').waitFor();
  await bob.getByText('This message was deleted').waitFor();
  for (const page of [alice, bob]) await page.locator('.quote', { hasText: 'a deleted message' }).waitFor();
  expect(await texts(bob)).toEqual(['what?']);
  expect(await bob.getByRole('button', { name: /^party/ }).count()).toBe(0);
});

test('changes that are made while the gateway is down are made when it is back', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const alice = await people.signIn(await people.person(DESK), a);
  await openDm(alice, b);
  for (const text of ['one', 'two', 'three']) await write(alice, text);
  await until(async () => (await alice.locator('.message[data-state=sent]').count()) === 3);
  await gateway.kill();
  await alice.getByLabel('Message', { exact: true }).press('ArrowUp');
  await alice.getByLabel('Edited message').fill('drei');
  await alice.keyboard.press('Enter');
  await alice.getByRole('button', { name: 'Message menu' }).first().click();
  await alice.getByRole('menuitem', { name: 'Delete' }).click();
  await alice.getByRole('dialog').getByRole('button', { name: 'Delete' }).click();
  await alice.getByText('You deleted this message').waitFor();
  expect(await alice.getByTitle('waiting to be changed').count()).toBe(2);
  await gateway.start();
  await until(async () => (await alice.getByTitle('waiting to be changed').count()) === 0);
  const bob = await gateway.connect(b);
  const log: string[] = [];
  for await (const page of (await bob.dm(a)).pages()) log.unshift(...page.map(({ body }) => body));
  expect(log).toEqual(['', 'two', 'drei']);
});
