/** Files in a bucket: the chat page in a real Chromium sends them to a real storage, and shows them from there. */
import { afterAll, expect, test } from 'vitest';
import { startBucket } from './support/bucket.js';
import { until, user } from './support/gateway.js';
import { openDm, picture, setUp } from './support/people.js';
import { noise, png } from './support/pictures.js';

const bucket = await startBucket();
afterAll(() => bucket.end());
const { people } = setUp(bucket.settings, undefined, bucket.origin);

test('a picture and a file in two parts go to the bucket and come from there, and go with their message', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const [alice, bob] = [await people.signIn(await people.person(), a), await people.signIn(await people.person(), b)];
  await openDm(alice, b);
  await openDm(bob, a);
  const sent: [string, string | undefined][] = [];
  const fetched: string[] = [];
  alice.on('request', (request) => {
    if (request.url().startsWith(bucket.origin)) sent.push([request.method(), request.headers().authorization]);
  });
  bob.on('response', (response) => void fetched.push(response.url()));
  const large = Buffer.from(noise(17 << 20));
  await alice.locator('input[type=file]').setInputFiles([
    { name: 'cat.png', mimeType: 'image/png', buffer: png(1200, 600) },
    { name: 'large.bin', mimeType: 'application/octet-stream', buffer: large },
  ]);
  await until(async () => (await alice.locator('.attached li[data-state="ready"]').count()) === 2, 'both are ready');
  expect(sent.filter(([method]) => method === 'PUT')).toEqual(Array(3).fill(['PUT', undefined]));
  await alice.getByLabel('Message', { exact: true }).fill('from the bucket');
  await alice.getByRole('button', { name: 'Send', exact: true }).click();
  const image = bob.locator('.picture img');
  await image.waitFor();
  await until(async () => (await image.evaluate((image) => (image as HTMLImageElement).naturalWidth)) === 640, 'the thumbnail');
  await picture(bob, 'files-s3');
  expect(fetched.some((url) => url.startsWith(bucket.origin))).toBe(true);
  const [download] = await Promise.all([bob.waitForEvent('download'), bob.getByRole('button', { name: /large\.bin/ }).click()]);
  expect(download.suggestedFilename()).toBe('large.bin');
  await bob.locator('.picture').click();
  const link = bob.getByRole('dialog').getByRole('link', { name: 'Download' });
  const [tab] = await Promise.all([bob.context().waitForEvent('page'), link.click()]);
  await tab.waitForURL(`${bucket.origin}/**`);
  await tab.close();
  // The browser shows it in another tab, and the chat stays.
  await bob.getByText('from the bucket').last().waitFor();
  expect(bucket.objects().sort()).toEqual(['original', 'original', 'thumbnail']);
  await alice.locator('.message', { hasText: 'from the bucket' }).hover();
  await alice.getByRole('button', { name: 'Message menu' }).last().click();
  await alice.getByRole('menuitem', { name: 'Delete' }).click();
  await alice.getByRole('dialog').getByRole('button', { name: 'Delete' }).click();
  await until(() => bucket.objects().length === 0, 'nothing is left in the bucket');
});
