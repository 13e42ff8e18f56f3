/** Who is typing, in the list of conversations, in a real Chromium against a real gateway. */
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { picture, setUp } from './support/people.js';

const { gateway, people } = setUp();

test('the list says who is typing in place of the preview, until the message comes', async () => {
  const [a, b, c] = [user('alice'), user('bob'), user('carol')];
  const [bob, carol] = [await gateway.connect(b), await gateway.connect(c)];
  const dm = await bob.dm(a);
  await dm.send('the first message');
  const group = await carol.createGroup({ name: 'Weekend plans', participants: [a, b] });
  await group.send('Who comes?');
  const page = await people.signIn(await people.person({ viewport: { width: 900, height: 600 } }), a);
  const preview = (name: string) => page.locator('.sidebar li', { has: page.locator('.title', { hasText: name }) }).locator('.preview');
  await until(async () => (await preview(b).textContent()) === 'the first message');
  dm.sendTyping();
  bob.conversation(group.id).sendTyping();
  group.sendTyping();
  await until(async () => (await preview(b).textContent()) === `${b} is typing…`);
  await until(async () => /^\S+ and \S+ are typing…$/.test((await preview('Weekend plans').textContent()) ?? ''));
  expect(await violations(page, 'typing')).toEqual([]);
  await picture(page, 'typing');
  // Nothing of the messages is loaded for that.
  expect(await page.locator('.message').count()).toBe(0);
  await dm.send('the second message');
  await until(async () => (await preview(b).textContent()) === 'the second message');
  // Carol sends nothing: after some seconds she counts as not typing.
  await until(async () => /Who comes\?$/.test((await preview('Weekend plans').textContent()) ?? ''));
});
