/** Uploaded files in the chat page, in a real Chromium against a real gateway. */
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { give, openDm, picture, setUp } from './support/people.js';
import { noise, png } from './support/pictures.js';

const { gateway, people } = setUp();

/** Signs two users in, and opens their direct chat. */
async function two(): Promise<[alice: Page, bob: Page]> {
  const [a, b] = [user('alice'), user('bob')];
  const [alice, bob] = [await people.signIn(await people.person(), a), await people.signIn(await people.person(), b)];
  await openDm(alice, b);
  await openDm(bob, a);
  return [alice, bob];
}
const digestOf = (data: Uint8Array) => createHash('sha256').update(data).digest('hex');
const send = (page: Page) => page.getByRole('button', { name: 'Send', exact: true }).click();
const widthOf = (page: Page, selector: string) => page.locator(selector).evaluate((image) => (image as HTMLImageElement).naturalWidth);

test('a picture is attached, described and sent, and the other user sees it in the list and in full', async () => {
  const [alice, bob] = await two();
  expect(await alice.getByRole('button', { name: 'Send', exact: true }).isDisabled()).toBe(true);
  await alice.locator('input[type=file]').setInputFiles({ name: 'cat.png', mimeType: 'image/png', buffer: png(1200, 600) });
  await alice.locator('.attached li[data-state="ready"]').waitFor();
  // The preview is drawn.
  await until(() => alice.locator('.attached canvas').evaluate((canvas) => (canvas as HTMLCanvasElement).width === 128));
  await alice.getByLabel('Description of cat.png').fill('a cat on a mat');
  await picture(alice, 'files-composer');
  await send(alice);
  await alice.locator('.attached').waitFor({ state: 'detached' });
  for (const page of [alice, bob]) {
    const button = page.getByRole('button', { name: 'Show a cat on a mat' });
    await button.waitFor();
    await until(async () => (await widthOf(page, '.picture img')) > 0, 'the thumbnail');
    expect(await widthOf(page, '.picture img')).toBe(640);
    const { width, height } = (await button.boundingBox())!;
    expect([Math.round(width), Math.round(height)]).toEqual([320, 160]);
  }
  await picture(bob, 'files-list');
  // A message without a text is called by its file.
  expect(await bob.getByRole('article', { name: /cat\.png/ }).count()).toBe(1);
  await bob.getByRole('button', { name: 'Show a cat on a mat' }).click();
  const window = bob.getByRole('dialog', { name: 'cat.png' });
  await window.waitFor();
  await until(async () => (await widthOf(bob, '.lightbox img')) === 1200, 'the full picture');
  await picture(bob, 'files-lightbox');
  const [download] = await Promise.all([bob.waitForEvent('download'), window.getByRole('link', { name: 'Download' }).click()]);
  expect(download.suggestedFilename()).toBe('cat.png');
  expect(digestOf(readFileSync(await download.path()))).toBe(digestOf(png(1200, 600)));
  await bob.keyboard.press('Escape');
  await window.waitFor({ state: 'detached' });
});

test('SVG and HTML are links to downloads, and nothing of them runs', async () => {
  const [alice, bob] = await two();
  const script = 'window.opener?.console.error("ran"); document.title = "ran"; fetch("/v1/ran")';
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>${script}</script></svg>`;
  const html = `<!doctype html><script>${script}</script>`;
  await alice.locator('input[type=file]').setInputFiles([
    { name: 'x.svg', mimeType: 'image/svg+xml', buffer: Buffer.from(svg) },
    { name: 'x.html', mimeType: 'text/html', buffer: Buffer.from(html) },
    // It says that it is a picture.
    { name: 'x.png', mimeType: 'image/png', buffer: Buffer.from(html) },
  ]);
  await until(async () => (await alice.locator('.attached li[data-state="ready"]').count()) === 3);
  await alice.getByLabel('Message', { exact: true }).fill('three files');
  await send(alice);
  await bob.locator('.body', { hasText: 'three files' }).waitFor();
  expect(await bob.locator('.messages img').count()).toBe(0);
  const requests: string[] = [];
  for (const page of [alice, bob]) page.on('request', (request) => requests.push(request.url()));
  let url = '';
  for (const [name, text] of [
    ['x.svg', svg],
    ['x.html', html],
    ['x.png', html],
  ] as const) {
    const [download] = await Promise.all([bob.waitForEvent('download'), bob.getByRole('button', { name: new RegExp(name) }).click()]);
    url = download.url();
    expect(download.suggestedFilename()).toBe(name);
    expect(readFileSync(await download.path(), 'utf8')).toBe(text);
  }
  // Opened as a page of its own, it is a download, too.
  const { headers } = await fetch(url);
  expect(headers.get('content-disposition')).toMatch(/^attachment/);
  expect(headers.get('content-security-policy')).toBe("sandbox; default-src 'none'");
  expect(requests.some((url) => url.endsWith('/v1/ran'))).toBe(false);
  expect(await bob.title()).not.toBe('ran');
});

test('files are pasted and dropped, removed, and sent while they are uploaded', async () => {
  const [alice, bob] = await two();
  const file = (size: number) => ({ size, mime: 'text/plain' });
  await give(alice.locator('textarea'), 'paste', 'pasted.txt', file(2000));
  // Pasted pictures often have the same name.
  await give(alice.locator('textarea'), 'paste', 'same.txt', file(1000));
  await give(alice.locator('textarea'), 'paste', 'same.txt', file(4000));
  await alice.getByRole('button', { name: 'Remove same.txt' }).first().click();
  expect(await alice.locator('.attached li', { hasText: 'same.txt' }).allTextContents()).toEqual(['same.txt 4 KiB']);
  await alice.getByRole('button', { name: 'Remove same.txt' }).click();
  await give(alice.locator('.messages'), 'drop', 'dropped.bin', file(3000));
  await until(async () => (await alice.locator('.attached li').count()) === 2);
  await alice.getByRole('button', { name: 'Remove pasted.txt' }).click();
  expect(await alice.locator('.attached li').count()).toBe(1);
  await alice.locator('input[type=file]').setInputFiles({ name: 'large.bin', mimeType: '', buffer: Buffer.from(noise(20 << 20)) });
  await send(alice);
  await alice.locator('.message[data-state="sending"] .attachment', { hasText: 'large.bin' }).waitFor();
  await bob.getByRole('button', { name: /large\.bin 20 MiB/ }).waitFor();
  expect(await bob.locator('.attachment').allTextContents()).toEqual(['dropped.bin 3 KiB', 'large.bin 20 MiB']);
});

test('a file that keeps its metadata says so to its uploader, before and after it is sent', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const [alice, bob] = [await people.signIn(await people.person(), a), await people.signIn(await people.person(), b)];
  const phone = await people.signIn(await people.person({ viewport: { width: 360, height: 640 }, colorScheme: 'dark' }), a);
  await openDm(alice, b);
  await openDm(phone, b);
  await openDm(bob, a);
  const heic = Buffer.from('\0\0\0\x18ftypheic\0\0\0\0mif1heic', 'latin1');
  await alice.locator('input[type=file]').setInputFiles([
    { name: 'beach.heic', mimeType: 'image/heic', buffer: heic },
    { name: 'cat.png', mimeType: 'image/png', buffer: png(300, 200) },
  ]);
  await until(async () => (await alice.locator('.attached li[data-state="ready"]').count()) === 2);
  const note = 'May say where it was made: its metadata could not be removed.';
  // Screen readers announce it with the name.
  expect(await alice.locator('.attached [role=status]').allTextContents()).toEqual([`beach.heic: ${note}`, '']);
  const found = await violations(alice, 'a file with metadata is attached');
  await picture(alice, 'files-kept-composer');
  await send(alice);
  for (const page of [alice, phone]) {
    await page.locator('.message.own .kept').waitFor();
    expect(await page.locator('.message.own .kept').allTextContents()).toEqual([note]);
  }
  found.push(...(await violations(alice, 'a file with metadata is sent')), ...(await violations(phone, 'on a phone in the dark')));
  await picture(alice, 'files-kept-sent');
  await picture(phone, 'files-kept-phone');
  await bob.locator('.attachment', { hasText: 'beach.heic' }).waitFor();
  expect(await bob.getByText(note).count()).toBe(0);
  expect(found).toEqual([]);
});

test('an upload that fails is tried again or removed', async () => {
  const [alice] = await two();
  await alice.route(
    '**/v1/attachments',
    (route) => route.fulfill({ status: 413, json: { code: 'too_large', message: 'at most 9 MiB in a day' } }),
    {
      times: 1,
    },
  );
  await alice.locator('input[type=file]').setInputFiles({ name: 'a.txt', mimeType: 'text/plain', buffer: Buffer.from('text') });
  await alice.getByText('at most 9 MiB in a day').waitFor();
  await alice.getByLabel('Message', { exact: true }).fill('text');
  expect(await alice.getByRole('button', { name: 'Send', exact: true }).isDisabled()).toBe(true);
  await alice.getByRole('button', { name: 'Upload a.txt again' }).click();
  await alice.locator('.attached li[data-state="ready"]').waitFor();
  await send(alice);
  await alice
    .locator('.message[data-state="sent"] .attachment, .message[data-state="read"] .attachment', { hasText: 'a.txt 4 bytes' })
    .waitFor();
  await gateway.kill();
  await alice.locator('input[type=file]').setInputFiles({ name: 'later.txt', mimeType: 'text/plain', buffer: Buffer.from('later') });
  await alice.locator('.attached li[data-state="waiting"]').waitFor();
  await gateway.start();
  await alice.locator('.attached li[data-state="ready"]').waitFor();
});

test.each([
  ['a desk', {}],
  ['a phone', { viewport: { width: 360, height: 640 }, hasTouch: true, isMobile: true }],
])('axe finds nothing on %s', async (view, options) => {
  const [a, b] = [user('alice'), user('bob')];
  const alice = await people.signIn(await people.person(options), a);
  await openDm(alice, b);
  await alice.locator('input[type=file]').setInputFiles([
    { name: 'wide.png', mimeType: 'image/png', buffer: png(900, 300) },
    { name: 'a document with quite a long name, which does not fit.txt', mimeType: 'text/plain', buffer: Buffer.from('text') },
  ]);
  await until(async () => (await alice.locator('.attached li[data-state="ready"]').count()) === 2);
  const found = await violations(alice, `${view}: attached files`);
  await send(alice);
  await until(async () => (await widthOf(alice, '.picture img').catch(() => 0)) > 0);
  await alice.getByRole('button', { name: /a document/ }).waitFor();
  found.push(...(await violations(alice, `${view}: files`)));
  await alice.getByRole('button', { name: 'Show wide.png' }).click();
  await until(async () => (await widthOf(alice, '.lightbox img')) === 900);
  found.push(...(await violations(alice, `${view}: a picture in full`)));
  expect(found).toEqual([]);
});
