/** Devices, `away` and the settings of conversations, with a real gateway. */
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';

const gateway = new Gateway();
beforeAll(() => gateway.start());
afterEach(disconnectAll);
afterAll(() => gateway.close());

test('what is set on one device is set on the other one, also after a restart', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const [phone, laptop] = [await gateway.connect(a), await gateway.connect(a)];
  const dm = await phone.dm(b);
  await dm.send('Hello!');
  await until(() => laptop.inbox.get(dm.id) !== undefined);
  const heard: unknown[] = [];
  laptop.on('settings', (settings) => heard.push(settings));
  await dm.mute(Infinity);
  await dm.setPush('off');
  await until(() => heard.length === 2);
  expect(laptop.inbox.get(dm.id)).toMatchObject({ mutedUntil: 8.64e15, push: 'off' });
  expect(laptop.conversation(dm.id).muted).toBe(true);
  expect(phone.inbox.get(dm.id)).toEqual(laptop.inbox.get(dm.id));
  await gateway.kill();
  await gateway.start();
  const later = await gateway.connect(a);
  await until(() => later.inbox.loaded);
  expect(later.inbox.get(dm.id)).toMatchObject({ mutedUntil: 8.64e15, push: 'off' });
  await later.conversation(dm.id).mute(null);
  await until(() => !dm.muted, 'not muted any more on the phone');
  expect(dm.item).toMatchObject({ push: 'off' });
});

test('the gateway lists the devices, and takes `away`', async () => {
  const chat = await gateway.connect(user('alice'));
  expect((await chat.devices()).items).toEqual([]);
  await chat.request({ type: 'away', away: true });
  await chat.request({ type: 'away', away: false });
});
