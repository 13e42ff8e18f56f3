/** The texts of messages on the chat page, in a real Chromium against a real gateway: their formats, and what stays as it was typed. */
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { violations } from './support/access.js';
import { until, user } from './support/gateway.js';
import { openDm, picture, setUp, texts } from './support/people.js';
import { random } from './support/texts.js';

const { gateway, people } = setUp();

const NOTE = [
  'The **station**, at nine. Run `npm ci && npm run build` first:',
  '',
  '```ts',
  'const train = await book("07:42", { seats: 2 }); // a line that is longer than the bubble of a phone',
  '  // **not bold**',
  '```',
  '',
  '- the **thermos**',
  '- https://example.org/weather',
  '',
  '1. walk',
  '2. take the train',
  '',
  '> Who brings the map?',
  '> Nobody yet.',
].join('\n');

const RIGHT = [
  '**שלום** לכולם',
  'in English',
  '',
  '- ראשון',
  '- second',
  '- the longest line of all, with `npm ci`',
  '',
  '> מי מביא מפה?',
  '> Nobody yet.',
  '',
  '1. אחת',
  '2. שתיים',
].join('\n');

/** Signs two users in, and opens their direct chat. */
async function two(options = {}): Promise<{ alice: Page; dm: Awaited<ReturnType<Awaited<ReturnType<typeof gateway.connect>>['dm']>> }> {
  const [a, b] = [user('alice'), user('bob')];
  const dm = await (await gateway.connect(b)).dm(a);
  const alice = await people.signIn(await people.person(options), a);
  await openDm(alice, b);
  return { alice, dm };
}

test('formats are shown in the list only, and a text that is edited is the one that was typed', async () => {
  for (const [device, options] of [
    ['desk', { viewport: { width: 1280, height: 900 } }],
    ['phone', { viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true }],
  ] as const) {
    const { alice, dm } = await two(options);
    await dm.send(NOTE);
    const field = alice.getByLabel('Message', { exact: true });
    await field.fill(NOTE);
    await alice.getByRole('button', { name: 'Send', exact: true }).click();
    for (const body of [alice.locator('.message.own .body'), alice.locator('.message:not(.own) .body')]) {
      await body.locator('pre', { hasText: 'const train' }).waitFor();
      expect(await body.locator('strong').allTextContents()).toEqual(['station', 'thermos']);
      expect(await body.locator('p code').textContent()).toBe('npm ci && npm run build');
      expect(await body.locator('ul > li').count()).toBe(2);
      expect(await body.locator('ol > li').count()).toBe(2);
      expect(await body.locator('blockquote').textContent()).toBe('Who brings the map?\nNobody yet.');
      expect(await body.locator('li a').getAttribute('href')).toBe('https://example.org/weather');
      // No box in the list scrolls sideways.
      expect(await body.locator('pre').evaluate((pre) => pre.scrollWidth - pre.clientWidth)).toBe(0);
    }
    expect(await violations(alice, `${device} formats`)).toEqual([]);
    await alice.locator('.message.own').getByRole('button', { name: 'Message menu' }).click();
    await alice.getByRole('menuitem', { name: 'Edit' }).click();
    expect(await alice.getByLabel('Edited message').inputValue()).toBe(NOTE);
    await alice.keyboard.press('Escape');
    if (device === 'phone') await alice.getByRole('button', { name: 'Back to the conversations' }).click();
    expect(await alice.locator('.sidebar .preview').first().textContent()).toContain('The **station**, at nine. Run `npm ci');
    const lines = (line: Element) => line.getBoundingClientRect().height / Number.parseFloat(getComputedStyle(line).lineHeight);
    expect(await alice.locator('.sidebar .preview').first().evaluate(lines)).toBeLessThan(1.5);
  }
});

test('each line of a format has its own direction', async () => {
  const { alice, dm } = await two({ viewport: { width: 1000, height: 700 } });
  await dm.send(RIGHT);
  const body = alice.locator('.body');
  await body.locator('ol').waitFor();
  await picture(alice, 'formats-right-to-left');
  const sides = (selector: string) =>
    body.locator(selector).evaluate((element) => {
      const box = element.getBoundingClientRect();
      const nodes = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
      const rows = new Map<number, { left: number; right: number }>();
      for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
        const range = document.createRange();
        range.selectNodeContents(node);
        for (const { bottom, left, right, width } of range.getClientRects()) {
          const row = [...rows.keys()].find((at) => Math.abs(at - bottom) < 8) ?? bottom;
          const known = rows.get(row) ?? { left, right };
          if (width) rows.set(row, { left: Math.min(known.left, left), right: Math.max(known.right, right) });
        }
      }
      return [...rows.values()].map(({ left, right }) => (left - box.left < box.right - right ? 'left' : 'right'));
    });
  expect(await sides('p')).toEqual(['right', 'left']);
  expect(await sides('blockquote')).toEqual(['right', 'left']);
  expect([await sides('ul li:first-child'), await sides('ul li:nth-child(2)')]).toEqual([['right'], ['left']]);
  const css = (selector: string, name: 'direction' | 'borderRightWidth') =>
    body.locator(selector).evaluate((element, name) => getComputedStyle(element)[name], name);
  expect(await css('ol', 'direction')).toBe('rtl');
  expect(await css('blockquote', 'borderRightWidth')).toBe('3px');
});

test('a line that is too long is cut at the end of its text, which is at the left in Hebrew', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const long = 'שלום לכולם, '.repeat(12).trim();
  const group = await (await gateway.connect(b)).createGroup({ name: long, participants: [a] });
  await group.send(long);
  const alice = await people.signIn(await people.person({ viewport: { width: 1000, height: 700 } }), a);
  await alice.locator('.sidebar li button', { hasText: 'שלום' }).click();
  await alice.locator('.bubble').hover();
  await alice.getByRole('button', { name: 'Reply' }).click();
  await picture(alice, 'cut-right-to-left');
  for (const line of ['.sidebar li .title', '.sidebar li .preview', '.thread .names h2', '.replying > span']) {
    const cut = await alice.locator(line).evaluate((element) => {
      const text = element.querySelector('bdi:last-of-type')!;
      return [element.scrollWidth - element.clientWidth, text.scrollWidth > text.clientWidth, getComputedStyle(text).direction];
    });
    expect([line, ...cut]).toEqual([line, 0, true, 'rtl']);
  }
});

test('one to three emoji alone are large', async () => {
  const { alice, dm } = await two();
  const large = ['👍', '❤️🎉😂', '👨‍👩‍👧‍👦 👩🏽‍🚀', '🇩🇪', '1️⃣', '🏴󠁧󠁢󠁥󠁮󠁧󠁿\n🏳️‍🌈'];
  const usual = ['👍👍👍👍', 'ok 👍', '1', '123', '#', '© ™', '👍.', '👍\u0301', `👍${'\u200d👍'.repeat(60)}`];
  for (const body of [...large, ...usual]) await dm.send(body);
  await until(async () => (await texts(alice)).length === large.length + usual.length, 'all messages');
  expect(await alice.locator('.body.large').allTextContents()).toEqual(large);
  const size = (selector: string) =>
    alice
      .locator(selector)
      .first()
      .evaluate((body) => Number.parseFloat(getComputedStyle(body).fontSize));
  expect(await size('.body.large')).toBeGreaterThan(2 * (await size('.body:not(.large)')));
  await picture(alice, 'emoji-large');
});

test('code shows the characters that change its direction', async () => {
  const { alice, dm } = await two();
  await dm.send('`if (admin\u202e // nimda` \u202eand text');
  await dm.send('```\nx\u2066y\u2069\n```');
  await alice.locator('.body pre').waitFor();
  expect(await alice.locator('.body code').textContent()).toBe('if (admin\\u202e // nimda');
  expect(await alice.locator('.body pre').textContent()).toBe('x\\u2066y\\u2069');
});

test('no text of a message becomes another element, and nothing of it runs', async () => {
  const { alice, dm } = await two();
  const bodies = [
    ...random(40).filter((body) => body.trim()),
    '**<img src=x onerror="document.title=1">** `<script>document.title=1</script>`',
    '```"><img/src=x/onerror=document.title=1>\nx\n```\n- <a href="javascript:document.title=1">x</a>',
    '`'.repeat(16_000),
    '**a** '.repeat(2_600).trim(),
    `${'> '.repeat(8_000)}x`,
  ];
  for (const body of bodies) await dm.send(body);
  await dm.send('the end');
  await alice.locator('.body', { hasText: 'the end' }).waitFor();
  const names = () => alice.locator('.body *').evaluateAll((all) => [...new Set(all.map(({ tagName }) => tagName.toLowerCase()))]);
  await until(async () => (await alice.locator('.message').count()) > bodies.length, 'all messages');
  const allowed = ['a', 'blockquote', 'code', 'li', 'ol', 'p', 'pre', 'strong', 'ul'];
  expect((await names()).filter((name) => !allowed.includes(name))).toEqual([]);
  expect(await names()).toContain('strong');
  expect(await alice.title()).toMatch(/Chat$/);
  // What has too many elements is shown as it was typed.
  expect(await texts(alice)).toContain('**a** '.repeat(2_600).trim());
});
