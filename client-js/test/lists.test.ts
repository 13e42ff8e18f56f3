/** Live lists reach the newest message over any network, against a real gateway. */
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import type { Conversation } from '../src/index.js';
import { BadNetwork } from './support/bad-network.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';

let gateway: Gateway;
beforeAll(async () => {
  gateway = await new Gateway().start();
});
afterEach(disconnectAll);
afterAll(() => gateway.close());

test('a list follows a busy conversation behind a network that batches for 25 ms', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const proxy = new BadNetwork(gateway.address);
  proxy.batch = 25;
  const [alice, url] = [await gateway.connect(a), await proxy.start()];
  const group = await alice.createGroup({ name: 'Busy', participants: [b] });
  let busy = true;
  const writing = (async () => {
    for (let i = 0; busy; i++) await group.send(`${i}`);
  })();
  const lists: Conversation[] = [];
  for (let round = 0; round < 5; round++) {
    const list = (await gateway.connect(b, {}, url)).conversation(group.id);
    list.open();
    await list.whenLoaded();
    const { head } = list;
    await until(() => list.messages.at(-1)!.seq! > head + 20, 'the list follows');
    lists.push(list);
  }
  busy = false;
  await writing;
  const { seq } = await group.send('last');
  await until(() => lists.every((list) => list.messages.at(-1)?.seq === seq && list.atEnd), 'the last message');
  proxy.close();
});

test('a user who was removed and added again gets new messages, also their own', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const [alice, bob] = [await gateway.connect(a), await gateway.connect(b)];
  const hers = await alice.createGroup({ name: 'G', participants: [b] });
  const his = bob.conversation(hers.id);
  his.open();
  await his.whenLoaded();
  await hers.remove(b);
  await until(() => his.removed);
  for (let i = 0; i < 5; i++) await hers.send(`without ${i}`);
  await hers.add(b);
  await until(() => !his.removed && his.atEnd, 'the list continues');
  const mine = his.send('mine');
  expect(his.messages.at(-1)!.body).toBe('mine');
  const { seq } = await mine;
  // His own message is shown after the stored ones as soon as it is acknowledged, perhaps before those in between.
  await until(() => his.messages.length === seq, 'all messages');
  expect(his.messages.map((message) => message.seq)).toEqual(Array.from({ length: seq }, (_, i) => i + 1));
});
