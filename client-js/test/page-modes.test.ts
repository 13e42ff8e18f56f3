/** The chat page with forced colours and without motion; while it loads, and when a page of a list fails. */
import type { BrowserContext, Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { openDm, picture, setUp, write } from './support/people.js';

const DESK = { width: 1280, height: 800 };

const { gateway, people } = setUp();

/** A proxy that holds back the answers to some types of requests, or refuses requests. */
class Slow {
  types = new Set<string>();
  refuses: (request: Record<string, unknown>) => boolean = () => false;
  #held: (() => void)[] = [];

  async before(context: BrowserContext): Promise<this> {
    await context.routeWebSocket(/v1\/ws/, (socket) => {
      const server = socket.connectToServer();
      const asked = new Map<number, string>();
      socket.onMessage((frame) => {
        const request = JSON.parse(String(frame));
        asked.set(request.id, request.type);
        if (!this.refuses(request)) server.send(frame);
        else socket.send(JSON.stringify({ type: 'error', id: request.id, code: 'internal', message: 'out of order' }));
      });
      server.onMessage((frame) => {
        const pass = () => socket.send(frame);
        if (this.types.has(asked.get(JSON.parse(String(frame)).id) ?? '')) this.#held.push(pass);
        else pass();
      });
    });
    return this;
  }

  release(): void {
    this.types.clear();
    for (const pass of this.#held.splice(0)) pass();
  }
}

/** Returns the controls without a visible edge; called in the page. A chosen control needs more than another background. */
function unmarked(): string[] {
  const found: string[] = [];
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true })!;
  const light = (...colours: string[]) => {
    for (const colour of ['#fff', ...colours]) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) =>
      v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4,
    );
    return 0.2126 * r! + 0.7152 * g! + 0.0722 * b!;
  };
  const behind = (element: Element | null): string[] =>
    element ? [...behind(element.parentElement), getComputedStyle(element).backgroundColor] : [];
  const edgeOf = (element: Element) => {
    const { borderBlockEndStyle, borderBlockEndWidth, borderBlockEndColor } = getComputedStyle(element);
    if (borderBlockEndStyle === 'none') return 0;
    const under = behind(element.parentElement);
    const [a, b] = [light(...under, borderBlockEndColor), light(...under)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 3 ? 0 : Number.parseFloat(borderBlockEndWidth);
  };
  const controls =
    'button, select, textarea, input:not([type=checkbox], [type=radio]), .kinds label, dialog, .bubble, .badge, .avatar:not(:empty)';
  const open = document.querySelector('dialog');
  for (const control of document.querySelectorAll(controls)) {
    // Controls behind an open dialog are measured in another view.
    if (!control.checkVisibility({ opacityProperty: true }) || (open && !open.contains(control))) continue;
    const name = `${control.tagName} ${control.className} ${control.getAttribute('aria-label') ?? control.textContent?.slice(0, 30)}`;
    if (!edgeOf(control)) found.push(`no edge: ${name}`);
  }
  for (const [chosen, other] of [
    ['.sidebar li button[aria-current]', '.sidebar li button:not([aria-current])'],
    ['.kinds label:has(:checked)', '.kinds label:not(:has(:checked))'],
    ['.own .bubble', '.message:not(.own) .bubble'],
  ] as const) {
    const [a, b] = [document.querySelector(chosen), document.querySelector(other)];
    if (a && b && edgeOf(a) === edgeOf(b)) found.push(`told apart by its background only: ${chosen}`);
  }
  return found;
}

test('with forced colours every control has an edge, and a chosen one a thicker edge', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const dm = await bob.dm(a);
  await dm.send('Hello');
  const group = await bob.createGroup({ name: 'Weekend plans', participants: [a], public: true });
  await group.send('Hiking?', { attachments: [{ url: 'https://example.org/map', name: 'map.png', size: 5_000 }] });
  await group.send('Or swimming?', { replyTo: 2 });
  const page = await people.signIn(await people.person({ viewport: DESK, forcedColors: 'active' }), a);
  await page.getByRole('button', { name: /Weekend plans/ }).click();
  await write(page, 'Both');
  await page.locator('.own .bubble').waitFor();
  await page.getByRole('button', { name: 'Details' }).click();
  await page.locator('.members li').nth(1).waitFor();
  const found: string[] = [];
  for (const colorScheme of ['light', 'dark'] as const) {
    await page.emulateMedia({ forcedColors: 'active', colorScheme });
    found.push(...(await page.evaluate(unmarked)));
    await picture(page, `forced-conversation-${colorScheme}`);
  }
  await page.getByRole('button', { name: 'New conversation' }).click();
  await page.getByText('Group', { exact: true }).click();
  found.push(...(await page.evaluate(unmarked)));
  await picture(page, 'forced-new-conversation');
  await page.keyboard.press('Escape');
  await page.getByRole('button', { name: 'Browse public conversations' }).click();
  await page.locator('.browse li').first().waitFor();
  found.push(...(await page.evaluate(unmarked)));
  await page.keyboard.press('Escape');
  expect(found).toEqual([]);
  // The focus is visible.
  const field = page.getByLabel('Find a conversation');
  await field.focus();
  expect(await field.evaluate((e) => [getComputedStyle(e).outlineStyle, getComputedStyle(e).outlineWidth])).toEqual(['solid', '2px']);
});

/**
 * Returns the running animations. A highlight whose frames are all the same does not count. With `of`, returns undefined
 * while no element that fits it has an animation of any kind. Runs in the page.
 */
const animations = (of?: string) => {
  const all = document.getAnimations();
  if (of && !all.some(({ effect }) => (effect as KeyframeEffect).target?.matches(of))) return;
  return all.flatMap((animation) => {
    const effect = animation.effect as KeyframeEffect;
    const frames = effect
      .getKeyframes()
      .map(({ offset: _, computedOffset: __, easing: ___, composite: ____, ...rest }) => JSON.stringify(rest));
    const isStill = new Set(frames).size === 1;
    const { duration } = effect.getComputedTiming();
    if (animation.playState !== 'running' || isStill || Number(duration) <= 10) return [];
    return [`${effect.target?.className}${effect.pseudoElement ?? ''} ${frames.join(' ')}`];
  });
};

const moving = async (page: Page) => (await page.evaluate(animations, undefined))!;

test('nothing moves for a user who prefers reduced motion', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const dm = await bob.dm(a);
  await dm.send('first');
  await dm.send('second', { replyTo: 1 });
  for (const reducedMotion of ['no-preference', 'reduce'] as const) {
    const context = await people.person({ viewport: DESK, reducedMotion });
    const slow = await new Slow().before(context);
    slow.types.add('inbox');
    const page = await people.signIn(context, a);
    const seen: Record<string, string[]> = {};
    await page.locator('.sidebar .skeleton').waitFor();
    seen.skeleton = await moving(page);
    slow.release();
    slow.types.add('history');
    await page.getByRole('button', { name: new RegExp(b) }).click();
    await page.locator('.messages-frame .loading').waitFor();
    seen.loading = await moving(page);
    slow.release();
    // The message is marked either way. That is short, so the page looks at each frame, from before the click.
    const [marked] = await Promise.all([page.waitForFunction(animations, '.message'), page.locator('.quote').click()]);
    seen.highlight = (await marked.jsonValue())!;
    await gateway.kill();
    await page.locator('.spinner').waitFor();
    seen.spinner = await moving(page);
    await gateway.start();
    for (const [what, found] of Object.entries(seen)) {
      if (reducedMotion === 'reduce') expect(found, what).toEqual([]);
      else expect(found, `${what}: the test looks at something`).not.toEqual([]);
    }
  }
});

test('grey shapes stand for rows that are loading, and lists are marked as busy', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const group = await bob.createGroup({ name: `Slow ${a}`, participants: [a], public: true });
  await group.send('here at last');
  const context = await people.person({ viewport: DESK });
  const slow = await new Slow().before(context);
  /** Checks that a list has shapes while its answer is held back, and rows afterwards. */
  const watch = async (type: string, list: string, shapes: string, what: string, begin: () => Promise<unknown>) => {
    slow.types.add(type);
    await begin();
    await page.locator(`${list}[aria-busy=true]`).waitFor({ state: 'attached' });
    const skeleton = page.locator(shapes);
    await skeleton.waitFor();
    await until(async () => (await skeleton.evaluate((e) => getComputedStyle(e).opacity)) === '1', 'seen after a moment');
    expect(await skeleton.getAttribute('aria-hidden')).toBe('true');
    expect(await page.locator(what).count()).toBe(0);
    slow.release();
    await page.locator(what).first().waitFor();
    await page.locator(`${list}[aria-busy=false]`).waitFor({ state: 'attached' });
    expect(await page.locator(shapes).count()).toBe(0);
  };
  const page = await context.newPage();
  const signIn = async () => {
    await page.goto(gateway.page);
    await page.getByLabel('Name').fill(a);
    await page.getByRole('button', { name: 'Sign in' }).click();
  };
  await watch('inbox', '.sidebar > ul', '.sidebar .skeleton', '.sidebar li .title', signIn);
  const open = () => page.getByRole('button', { name: new RegExp(`Slow ${a}`) }).click();
  await watch('history', '.messages', '.messages .skeleton', '.messages .body', open);
  const details = () => page.getByRole('button', { name: 'Details' }).click();
  await watch('participants', '.members', '.details .skeleton', '.members li', details);
  const browse = () => page.getByRole('button', { name: 'Browse public conversations' }).click();
  await watch('public', '.browse', 'dialog .skeleton', '.browse li', browse);
});

test('a failed page of members or public conversations is shown, and More continues', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  await bob.createGroup({ name: `Crowd ${a}`, participants: [a, ...Array.from({ length: 68 }, () => user('guest'))] });
  for (let i = 0; i < 60; i++) await bob.createGroup({ name: `Public ${i} ${a}`, public: true });
  const context = await people.person({ viewport: DESK });
  const slow = await new Slow().before(context);
  const alice = await people.signIn(context, a);
  await alice.getByRole('button', { name: new RegExp(`Crowd ${a}`) }).click();
  await alice.getByRole('button', { name: 'Details' }).click();
  const members = alice.locator('.members li');
  await members.nth(49).waitFor();
  expect(await members.count()).toBe(50);
  slow.refuses = ({ type }) => type === 'participants';
  const problem = alice.locator('.problem', { hasText: 'out of order' });
  const more = alice.getByRole('button', { name: 'More' });
  await more.click();
  await problem.waitFor();
  slow.refuses = () => false;
  await more.click();
  await members.nth(69).waitFor();
  expect(new Set(await members.allTextContents()).size).toBe(70);
  expect(await problem.count()).toBe(0);
  // The first page may fail too.
  await alice.getByRole('button', { name: 'Details' }).click();
  slow.refuses = ({ type }) => type === 'participants';
  await alice.getByRole('button', { name: 'Details' }).click();
  await problem.waitFor();
  slow.refuses = () => false;
  await problem.getByRole('button', { name: 'Try again' }).click();
  await members.nth(49).waitFor();
  await alice.getByRole('button', { name: 'Close' }).click();

  await alice.getByRole('button', { name: 'Browse public conversations' }).click();
  const items = alice.locator('.browse li');
  await items.nth(49).waitFor();
  slow.refuses = ({ type }) => type === 'public';
  await more.last().click();
  await problem.waitFor();
  slow.refuses = () => false;
  await problem.getByRole('button', { name: 'Try again' }).click();
  await items.nth(59).waitFor();
  const listed = await items.allTextContents();
  expect(new Set(listed).size).toBe(listed.length);
  expect(await problem.count()).toBe(0);
});

test('sent, delivered and read differ by shape and text, not only by colour', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const alice = await people.signIn(await people.person({ viewport: DESK }), a);
  await openDm(alice, b);
  const seen = new Map<string, string>();
  const note = async (state: string) => {
    const mark = alice.locator(`.message[data-state=${state}] .state`).last();
    await mark.waitFor();
    seen.set(`${await mark.locator('.sr-only').textContent()}`, `${await mark.locator('path').getAttribute('d')}`);
    expect(await mark.getAttribute('title')).toBe(await mark.locator('.sr-only').textContent());
  };
  await write(alice, 'Hello');
  await note('sent');
  const bob = await gateway.connect(b);
  await note('delivered');
  (await bob.dm(a)).read(1);
  await note('read');
  await gateway.kill();
  await write(alice, 'in a tunnel');
  await note('sending');
  await gateway.start();
  expect([...seen.keys()]).toEqual(['sent', 'delivered', 'read', 'waiting to be sent']);
  expect(new Set(seen.values()).size).toBe(4);
});

test('the field to write in takes no focus from the details when it appears after them', async () => {
  const [a, b] = [user('alice'), user('bob')];
  await (await gateway.connect(b)).createGroup({ name: 'Weekend plans', participants: [a] });
  const context = await people.person({ viewport: DESK });
  const slow = await new Slow().before(context);
  const alice = await people.signIn(context, a);
  slow.types.add('conversation');
  await alice.getByRole('button', { name: /Weekend plans/ }).click();
  await alice.getByRole('button', { name: 'Details' }).click();
  await alice.locator('.details:focus').waitFor();
  expect(await alice.getByLabel('Message', { exact: true }).count()).toBe(0);
  slow.release();
  await alice.getByLabel('Message', { exact: true }).waitFor();
  await alice.locator('.members li').first().waitFor();
  expect(await alice.locator('.details:focus').count()).toBe(1);
});
