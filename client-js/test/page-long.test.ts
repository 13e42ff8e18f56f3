/** Thousands of messages in the list of the chat page: each causes little work. `MESSAGES=100000` takes more, and
 * `RATE=100000` has them arrive as fast as possible. Times are printed; assertions count work, which does not depend on the
 * load of the machine. */
import { setTimeout as sleep } from 'node:timers/promises';
import type { Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { until } from './support/gateway.js';
import { setUp } from './support/people.js';

const MESSAGES = Number(process.env.MESSAGES ?? 2_000);
const LONG = '0199c0de-0000-4000-8000-000000000003';
const LIVE = '0199c0de-0000-4000-8000-000000000004';
/** The greatest number of messages in the list. */
const WINDOW = 300;
const WRITERS = 8;
/** The number of messages that arrive per second. */
const RATE = Number(process.env.RATE ?? 500);

/** Returns the lines to import: two conversations and their messages. */
function lines(): object[] {
  const lines: object[] = [LONG, LIVE].map((id) => ({
    type: 'conversation',
    id,
    kind: 'channel',
    name: id === LONG ? 'A long one' : 'A busy one',
    posting: 'everyone',
    participants: ['reader', ...Array.from({ length: WRITERS }, (_, i) => `writer${i}`)],
  }));
  for (let i = 0; i < MESSAGES; i++)
    lines.push({
      type: 'message',
      conversation: LONG,
      sender: `writer${i % WRITERS}`,
      body: bodyOf(i),
      at: 1_700_000_000_000 + i * 60_000,
    });
  lines.push({ type: 'message', conversation: LIVE, sender: 'writer0', body: 'the first', at: 1_700_000_000_000 });
  return lines;
}

const { gateway, people } = setUp({}, lines);

const bodyOf = (i: number) => `message ${i + 1} ${'word '.repeat((i * 7) % 40)}${i % 9 ? '' : 'https://example.org/page'}`;

interface Work {
  /** The durations of tasks above 50 ms, in milliseconds. */
  tasks: number[];
  /** The number of rendered rows. Each formats its time once. */
  renders: number;
  /** The number of times React added or removed rows. */
  commits: number;
  rows: number;
  elements: number;
}

/** Opens a conversation in the page, and measures the work of the browser. */
async function reader(name: RegExp): Promise<{ page: Page; begin(): Promise<void>; work(): Promise<Work> }> {
  const context = await people.person({ viewport: { width: 1200, height: 800 } });
  await context.addInitScript(() => {
    const work = { tasks: [] as number[], renders: 0, commits: 0, rows: 0, elements: 0 };
    Object.assign(globalThis, { work });
    const { get } = Object.getOwnPropertyDescriptor(Intl.DateTimeFormat.prototype, 'format')!;
    Object.defineProperty(Intl.DateTimeFormat.prototype, 'format', {
      get(this: Intl.DateTimeFormat) {
        // Counts the clock time of a row, not its day or its title.
        if (!this.resolvedOptions().dateStyle && !this.resolvedOptions().month) work.renders++;
        return get!.call(this);
      },
    });
    new PerformanceObserver((list) => work.tasks.push(...list.getEntries().map(({ duration }) => duration))).observe({
      entryTypes: ['longtask'],
    });
  });
  const page = await people.signIn(context, 'reader');
  await page.getByRole('button', { name }).click();
  await page.locator('.message').first().waitFor();
  const toEnd = page.getByRole('button', { name: /^To the end/ });
  if (await toEnd.isVisible()) await toEnd.click();
  await page.evaluate(() => {
    const { work } = globalThis as unknown as { work: Work };
    const box = document.querySelector('.rows')!;
    new MutationObserver(() => {
      work.commits++;
      work.rows = Math.max(work.rows, box.querySelectorAll('[data-seq]').length);
      work.elements = Math.max(work.elements, document.querySelectorAll('*').length);
    }).observe(box, { childList: true });
  });
  return {
    page,
    begin: () =>
      page.evaluate(() => {
        Object.assign((globalThis as unknown as { work: Work }).work, { renders: 0, commits: 0, rows: 0, elements: 0 }).tasks.length = 0;
      }),
    work: () => page.evaluate(() => (globalThis as unknown as { work: Work }).work),
  };
}

/** Checks bounds that do not depend on the length of the conversation. */
function check(what: string, work: Work, ms: number): void {
  const { tasks, renders, commits, rows, elements } = work;
  const longest = tasks.length ? `the longest ${Math.max(...tasks).toFixed(0)} ms` : 'the longest below 50 ms';
  console.log(
    `${MESSAGES} messages ${what}: ${(ms / 1_000).toFixed(1)} s, ${tasks.length} tasks above 50 ms, ${longest}; ` +
      `${renders} rows rendered, ${commits} commits, at most ${rows} rows and ${elements} elements in the document`,
  );
  // A message is rendered once, and at most once more, when the message before it changes.
  expect(renders, 'the test counts something').toBeGreaterThan(MESSAGES / 2);
  expect(renders).toBeLessThanOrEqual(MESSAGES * 2 + WINDOW);
  expect(rows).toBeLessThanOrEqual(WINDOW);
  expect(elements).toBeLessThan(WINDOW * 20);
}

test('thousands of messages are paged through, from the newest to the first', async () => {
  const { page, begin, work } = await reader(/A long one/);
  await page.locator(`[data-seq="${MESSAGES + 1}"]`).waitFor();
  await begin();
  const ms = await page.evaluate(async () => {
    const box = document.querySelector<HTMLElement>('.messages')!;
    const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
    const firstSeq = () => Number(box.querySelector<HTMLElement>('[data-seq]')!.dataset.seq);
    const began = performance.now();
    while (firstSeq() > 1) {
      const before = firstSeq();
      box.scrollTop = Math.min(box.scrollTop, 40);
      const at = performance.now();
      while (firstSeq() === before && performance.now() - at < 20_000) await frame();
      if (firstSeq() === before) throw new Error(`stuck at ${before}`);
    }
    return performance.now() - began;
  });
  const done = await work();
  check('paged through', done, ms);
  expect(done.commits, 'one for each page of ten, and one for what it pushes out').toBeLessThanOrEqual((MESSAGES / 10) * 2 + 10);
});

test('thousands of messages arrive in the conversation that is open', async () => {
  const { page, begin, work } = await reader(/A busy one/);
  const writers = await Promise.all(Array.from({ length: WRITERS }, (_, i) => gateway.connect(`writer${i}`)));
  await begin();
  const at = Date.now();
  await Promise.all(
    writers.map(async (writer, w) => {
      const busy = writer.conversation(LIVE);
      for (let i = w; i < MESSAGES; i += WRITERS) {
        await busy.send(bodyOf(i));
        const ahead = ((i + 1) * 1_000) / RATE - (Date.now() - at);
        if (ahead > 0) await sleep(ahead);
      }
    }),
  );
  await page.locator('.messages [data-key]').last().waitFor();
  const last = () => page.evaluate(() => Number([...document.querySelectorAll<HTMLElement>('.messages [data-seq]')].at(-1)?.dataset.seq));
  await until(async () => (await last()) === MESSAGES + 2, 'the last one');
  const done = await work();
  check('arrived', done, Date.now() - at);
  expect(done.commits).toBeLessThanOrEqual(MESSAGES);
  // The newest message stays in sight.
  expect(
    await page.evaluate(() => {
      const { scrollTop, clientHeight, scrollHeight } = document.querySelector('.messages')!;
      return scrollHeight - scrollTop - clientHeight;
    }),
  ).toBeLessThan(48);
});
