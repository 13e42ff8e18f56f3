/** Videos and sounds of messages, played in the chat page: a real Chromium against a real gateway. */
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { openDm, picture, setUp } from './support/people.js';

const { people } = setUp();

/** Returns a video of a second, which the browser records. */
const video = async (page: Page): Promise<Buffer> => {
  const base64 = await page.evaluate(async () => {
    const canvas = Object.assign(document.createElement('canvas'), { width: 320, height: 180 });
    const context = canvas.getContext('2d')!;
    const recorder = new MediaRecorder(canvas.captureStream(25), { mimeType: 'video/webm' });
    const chunks: Blob[] = [];
    recorder.ondataavailable = ({ data }) => chunks.push(data);
    const ended = new Promise((resolve) => (recorder.onstop = resolve));
    recorder.start();
    for (let i = 0; i < 25; i++) {
      context.fillStyle = `hsl(${i * 14} 80% 50%)`;
      context.fillRect(0, 0, 320, 180);
      await new Promise((next) => setTimeout(next, 40));
    }
    recorder.stop();
    await ended;
    const bytes = new Uint8Array(await new Blob(chunks).arrayBuffer());
    return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(''));
  });
  return Buffer.from(base64, 'base64');
};
/** Two seconds of silence in MP3: frames of 417 bytes at 128 kbit/s. */
const sound = Buffer.concat(Array.from({ length: 80 }, () => Buffer.concat([Buffer.from([0xff, 0xfb, 0x90, 0x00]), Buffer.alloc(413)])));

async function send(page: Page, files: { name: string; mimeType: string; buffer: Buffer }[]): Promise<void> {
  await page.locator('input[type=file]').setInputFiles(files);
  await until(async () => (await page.locator('.attached li[data-state="ready"]').count()) === files.length);
  await page.getByRole('button', { name: 'Send', exact: true }).click();
}
const isPlayed = (page: Page, selector: string) =>
  page.locator(selector).evaluate(async (element) => {
    const media = element as HTMLMediaElement;
    media.muted = true;
    await media.play();
    return media.currentTime > 0;
  });

test('a video and a sound are played in place, and can be downloaded', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const alice = await people.signIn(await people.person(), a);
  const bob = await people.signIn(await people.person({ viewport: { width: 390, height: 780 } }), b);
  await openDm(alice, b);
  await openDm(bob, a);
  await send(alice, [
    { name: 'trip.webm', mimeType: 'video/webm', buffer: await video(alice) },
    { name: 'song.mp3', mimeType: 'audio/mpeg', buffer: sound },
    { name: 'broken.mp3', mimeType: 'audio/mpeg', buffer: Buffer.concat([Buffer.from([0xff, 0xfb, 0x90, 0x00]), Buffer.from('no sound')]) },
  ]);
  const shown = bob.locator('video[aria-label="trip.webm"]');
  await shown.waitFor();
  await until(() => shown.evaluate((element) => (element as HTMLVideoElement).videoWidth === 320), 'the first picture of the video');
  const { width, height } = (await shown.boundingBox())!;
  expect(Math.round((width / height) * 9)).toBe(16);
  expect(await violations(bob, 'player')).toEqual([]);
  expect(await bob.locator('audio[aria-label="song.mp3"]').getAttribute('preload')).toBe('none');
  await until(() => isPlayed(bob, 'video'), 'the video');
  await until(() => isPlayed(bob, 'audio[aria-label="song.mp3"]'), 'the sound');
  await picture(bob, 'player');
  const [download] = await Promise.all([bob.waitForEvent('download'), bob.getByRole('button', { name: /song\.mp3/ }).click()]);
  expect(download.suggestedFilename()).toBe('song.mp3');

  // What cannot be played can be downloaded.
  await isPlayed(bob, 'audio[aria-label="broken.mp3"]').catch(() => {});
  await bob.locator('audio[aria-label="broken.mp3"]').waitFor({ state: 'detached' });
  await bob.getByRole('button', { name: /broken\.mp3/ }).waitFor();
  await bob.getByRole('button', { name: 'Try again' }).waitFor();

  // The arrow keys reach a player after all buttons of the row, and are its own there. Escape leads back.
  const row = bob.locator('article').last();
  await row.focus();
  await bob.keyboard.press('ArrowRight');
  const focused = () => bob.evaluate(() => document.activeElement?.tagName);
  const names: (string | null | undefined)[] = [];
  await until(async () => {
    names.push(await bob.evaluate(() => document.activeElement?.getAttribute('aria-label')));
    if ((await focused()) !== 'VIDEO') await bob.keyboard.press('ArrowRight');
    return (await focused()) === 'VIDEO';
  });
  expect(names).toContain('Message menu');
  await bob.keyboard.press('ArrowRight');
  expect(await focused()).toBe('VIDEO');
  await bob.keyboard.press('Escape');
  expect(await focused()).toBe('ARTICLE');
});

test('a player goes on with a new address when its address has expired', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const alice = await people.signIn(await people.person(), a);
  await openDm(alice, b);
  await send(alice, [{ name: 'trip.webm', mimeType: 'video/webm', buffer: await video(alice) }]);
  const context = await people.person();
  let asked = 0;
  await context.route(/expired/, (route) => route.fulfill({ contentType: 'video/webm', body: 'gone' }));
  await context.routeWebSocket(/v1\/ws/, (socket) => {
    const server = socket.connectToServer();
    socket.onMessage((frame) => server.send(frame));
    server.onMessage((frame) => {
      const answer = JSON.parse(String(frame));
      const isAddress = answer.items?.[0]?.expires_at !== undefined;
      // The first address has expired, and the client does not keep it.
      if (isAddress && !asked++) Object.assign(answer.items[0], { url: '/v1/files/expired', expires_at: 0 });
      socket.send(JSON.stringify(answer));
    });
  });
  const bob = await people.signIn(context, b);
  await openDm(bob, a);
  const shown = bob.locator('video');
  await until(() => shown.evaluate((element) => (element as HTMLVideoElement).videoWidth === 320), 'the video after another address');
  expect(asked).toBe(2);
});
