/** The chat page in a real Chromium, against a real gateway. support/people.ts describes the variables for pictures;
 * `SCROLL=100000` sets the number of messages to scroll through. */
import type { BrowserContextOptions, Page } from 'playwright-core';
import { expect, test } from 'vitest';
import { until, user } from './support/gateway.js';
import { connected, openDm, picture, setUp, texts, write } from './support/people.js';

const SCROLL = Number(process.env.SCROLL ?? 2_000);
const LONG = '0199c0de-0000-4000-8000-000000000002';

const lines = () => [
  { type: 'conversation', id: LONG, kind: 'channel', name: 'A long one', participants: ['importer', 'scroller'] },
  ...Array.from({ length: SCROLL }, (_, i) => ({
    type: 'message',
    conversation: LONG,
    sender: 'importer',
    body: `message ${i + 1} ${'word '.repeat((i * 7) % 40)}`,
    at: 1_700_000_000_000 + i * 60_000,
  })),
];
const { gateway, people } = setUp({ limits__body_bytes: '70000', limits__frame_bytes: '131072' }, lines);
const person = (options?: BrowserContextOptions) => people.person(options);
const signIn: typeof people.signIn = (...args) => people.signIn(...args);

/** Returns the number of pending messages in the browser's database. */
const waiting = (page: Page) =>
  page.evaluate(
    () =>
      new Promise<number>((resolve) => {
        const opening = indexedDB.open('chat-gateway');
        opening.onsuccess = () => {
          const counting = opening.result.transaction('outbox').objectStore('outbox').count();
          counting.onsuccess = () => resolve(counting.result);
          opening.result.close();
        };
      }),
  );
const states = (page: Page) =>
  page.locator('.message[data-state]').evaluateAll((rows) => rows.map((row) => row.getAttribute('data-state')));

test('two users chat while the gateway is killed and restarted: nothing is lost or duplicated on screen', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const [alice, bob] = [await signIn(await person(), a), await signIn(await person(), b)];
  await openDm(alice, b);
  await write(alice, 'Hello Bob');
  await bob.getByRole('button', { name: new RegExp(a) }).click();
  await bob.locator('.body', { hasText: 'Hello Bob' }).waitFor();
  await until(async () => (await states(alice))[0] === 'read', 'read');

  // The page shows that the other user is typing.
  await bob.getByLabel('Message', { exact: true }).pressSequentially('Hi');
  await alice.locator('.names', { hasText: `${b} is typing…` }).waitFor();
  await write(bob, 'Hi Alice');

  const expected = ['Hello Bob', 'Hi Alice'];
  for (let round = 0; round < 3; round++) {
    for (let i = 0; i < 5; i++) {
      await write(alice, `alice ${round}.${i}`);
      await write(bob, `bob ${round}.${i}`);
      expected.push(`alice ${round}.${i}`, `bob ${round}.${i}`);
      if (i === 2) await gateway.kill();
    }
    await alice.getByText('No connection. Trying again…').waitFor();
    await gateway.start();
  }
  for (const page of [alice, bob]) {
    await until(async () => (await texts(page)).length === expected.length, 'every message on screen');
    await until(async () => !(await states(page)).includes('sending'), 'everything sent');
    expect([...(await texts(page))].sort()).toEqual([...expected].sort());
  }
  // Both see the same order, and each sender's messages keep theirs.
  const shown = await texts(alice);
  expect(await texts(bob)).toEqual(shown);
  for (const name of ['alice', 'bob']) {
    const own = expected.filter((text) => text.startsWith(`${name} `));
    expect(shown.filter((text) => text.startsWith(`${name} `))).toEqual(own);
  }
});

test('messages written offline in a tab that is closed and opened again are sent once and in order', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const context = await person();
  const alice = await signIn(context, a);
  await openDm(alice, b);
  await write(alice, 'before');
  await until(async () => (await states(alice)).at(-1) === 'sent');
  const address = alice.url();
  await gateway.kill();
  for (const text of ['first', 'second', 'third']) await write(alice, text);
  await until(async () => (await states(alice)).filter((state) => state === 'sending').length === 3);
  // They are on screen at once. Those in the browser's database survive the tab.
  await until(async () => (await waiting(alice)) === 3);
  await alice.close();
  await gateway.start();
  const again = await context.newPage();
  await again.goto(address);
  await until(async () => (await texts(again)).length === 4 && !(await states(again)).includes('sending'));
  expect(await texts(again)).toEqual(['before', 'first', 'second', 'third']);
  const bob = await gateway.connect(b);
  const log: string[] = [];
  for await (const page of (await bob.dm(a)).pages()) log.unshift(...page.map(({ body }) => body));
  expect(log).toEqual(['before', 'first', 'second', 'third']);
});

test('two tabs of one user share one outbox, and one of them sends', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const context = await person();
  const first = await signIn(context, a);
  await openDm(first, b);
  const second = await context.newPage();
  const sends: string[] = [];
  const acknowledged: unknown[] = [];
  for (const [name, page] of [
    ['first', first],
    ['second', second],
  ] as const) {
    page.on('websocket', (socket) => {
      socket.on('framesent', ({ payload }) => /"type":"send"/.test(String(payload)) && sends.push(name));
      socket.on('framereceived', ({ payload }) => /"type":"sent"/.test(String(payload)) && acknowledged.push(payload));
    });
  }
  await second.goto(first.url());
  await connected(second);
  await second.getByLabel('Message', { exact: true }).waitFor();
  await gateway.kill();
  await write(first, 'from the first');
  await write(second, 'from the second');
  // Each tab shows the pending messages of the other.
  for (const page of [first, second]) await until(async () => (await states(page)).length === 2);
  await gateway.start();
  const sent = async (count: number) => {
    for (const page of [first, second]) {
      await until(async () => (await states(page)).every((state) => state === 'sent') && (await texts(page)).length === count);
    }
  };
  await sent(2);
  // Also while both are connected.
  for (const page of [first, second]) await write(page, 'again');
  await sent(4);
  expect(new Set(sends).size, 'one of them sends').toBe(1);
  // A gateway that has just started may refuse one, which is then sent again. None is sent again after its acknowledgement.
  // A page may show a message as sent before its acknowledgement arrives.
  await until(async () => acknowledged.length >= 4);
  expect(acknowledged).toHaveLength(4);
  // When the sending tab is closed, the other one sends.
  const [sender, other] = sends[0] === 'first' ? [first, second] : [second, first];
  await sender.close();
  await write(other, 'alone');
  await until(async () => (await states(other)).length === 5 && (await states(other)).at(-1) === 'sent');
});

test('scrolls from the newest message to the first, ten at a time', async () => {
  const page = await signIn(await person({ viewport: { width: 1200, height: 800 } }), 'scroller');
  await page.getByRole('button', { name: /A long one/ }).click();
  // Without this the list would begin at the first message, which is unread.
  await page.locator('.message').first().waitFor();
  await page.evaluate(() => {
    const tasks: number[] = [];
    (globalThis as { tasks?: number[] }).tasks = tasks;
    new PerformanceObserver((list) => tasks.push(...list.getEntries().map(({ duration }) => duration))).observe({
      entryTypes: ['longtask'],
    });
  });
  const toEnd = page.getByRole('button', { name: /^To the end/ });
  await toEnd.click();
  await page.locator(`[data-seq="${SCROLL + 1}"]`).waitFor();
  // Scrolls up as fast as pages come. Messages in sight must not move when older ones are added above.
  const result = await page.evaluate(async () => {
    const box = document.querySelector<HTMLElement>('.messages')!;
    const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
    const firstSeq = () => Number(box.querySelector<HTMLElement>('[data-seq]')!.dataset.seq);
    let [pages, jumps, rows, step] = [0, 0, 0, Infinity];
    const began = performance.now();
    while (firstSeq() > 1) {
      const before = firstSeq();
      // A fast scroll ends a little below the top.
      box.scrollTop = Math.min(box.scrollTop, 40);
      const anchor = box.querySelector<HTMLElement>(`[data-seq="${before}"]`)!;
      // The end of the row is compared, because its day and sender may move to an older row.
      const end = anchor.getBoundingClientRect().bottom;
      const at = performance.now();
      while (firstSeq() === before && performance.now() - at < 20_000) await frame();
      if (firstSeq() === before) throw new Error(`stuck at ${before}`);
      if (anchor.isConnected && Math.abs(anchor.getBoundingClientRect().bottom - end) > 1.5) jumps++;
      pages += (before - firstSeq()) / 10;
      if (firstSeq() > 1) step = Math.min(step, before - firstSeq());
      rows = Math.max(rows, box.querySelectorAll('[data-seq]').length);
    }
    return { pages, jumps, rows, step, ms: performance.now() - began };
  });
  const tasks = await page.evaluate(() => (globalThis as { tasks?: number[] }).tasks!);
  const longest = tasks.length ? `${Math.max(...tasks).toFixed(0)} ms` : 'below 50 ms';
  console.log(
    `scrolled through ${SCROLL} messages: ${(result.ms / result.pages).toFixed(1)} ms per page of ten, ` +
      `longest task ${longest} (${tasks.length} above 50 ms), at most ${result.rows} messages in the document`,
  );
  expect(result.jumps).toBe(0);
  expect(result.step).toBe(10);
  expect(result.rows).toBeLessThanOrEqual(300);
  await page.getByText('This is the beginning of the conversation.').waitFor();
  await picture(page, 'beginning');
  // One click leads back to the end.
  await toEnd.click();
  await page.locator(`[data-seq="${SCROLL + 1}"]`).waitFor();
});

test('input of users is never markup or script', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const dm = await bob.dm(a);
  const hostile = [
    '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">',
    '"><svg onload=window.pwned=1><b>bold</b> &lt;i&gt; {{7*7}} ${7*7}',
    'javascript:window.pwned=1 https://example.org/?q="onmouseover=window.pwned=1 https://example.org/)',
    'left \u202Eright to left override\u202C \u2066isolated, never closed',
    'W'.repeat(65_536),
    '👩‍👩‍👧‍👦🏳️‍🌈👍🏽 e\u0301\u0301\u0301 Z͑ͫa̸l̵g̶o\u0000\u0007 \u200B\uFEFF',
    'line one\nline two\n\n\tindented',
  ];
  for (const body of hostile) await dm.send(body);
  const group = await bob.createGroup({ name: '<img src=x onerror=window.pwned=1>', participants: [a] });
  await group.send('x', { attachments: [{ url: 'https://example.org/a"b', name: '<b>file</b>.exe', size: 5000 }], replyTo: 1 });
  const alice = await signIn(await person(), a);
  await alice.locator('.sidebar li', { has: alice.locator('.title', { hasText: b }) }).click();
  await until(async () => (await texts(alice)).length === hostile.length);
  expect(await texts(alice)).toEqual(hostile);
  const facts = await alice.evaluate(() => {
    const box = document.querySelector('.messages')!;
    return {
      pwned: 'pwned' in globalThis,
      markup: box.querySelectorAll('script, img, svg:not(.icon), b, i:not(.icon)').length,
      inlineHandlers: [...document.querySelectorAll('*')].filter((e) => [...e.attributes].some(({ name }) => name.startsWith('on'))).length,
      links: [...box.querySelectorAll('a')].map((a) => [a.protocol, a.rel]),
      tooWide: [box, document.documentElement, ...box.querySelectorAll('.body')].some((e) => e.scrollWidth > e.clientWidth),
    };
  });
  expect(facts).toEqual({
    pwned: false,
    markup: 0,
    inlineHandlers: 0,
    links: [
      ['https:', 'noopener noreferrer nofollow ugc'],
      ['https:', 'noopener noreferrer nofollow ugc'],
    ],
    tooWide: false,
  });
  await picture(alice, 'hostile');
  await alice.getByRole('button', { name: /img src/ }).click();
  await alice.locator('.attachment').waitFor();
  expect(await alice.locator('.thread h2').textContent()).toBe('<img src=x onerror=window.pwned=1>');
  expect(await alice.evaluate(() => 'pwned' in globalThis)).toBe(false);
  // The policy would stop an inline script even if one got into the page.
  const policy = (await alice.request.get(gateway.page)).headers()['content-security-policy']!;
  expect(policy).toContain("script-src 'self'");
  expect(policy).not.toContain('unsafe');
});

test('groups and channels: members, roles, posting, subscribing, joining, leaving', async () => {
  const [a, b, c] = [user('alice'), user('bob'), user('carol')];
  const alice = await signIn(await person({ viewport: { width: 1300, height: 800 } }), a);
  const name = `Lunch ${a}`;
  await alice.getByRole('button', { name: 'New conversation' }).click();
  await alice.getByText('Group', { exact: true }).click();
  await alice.getByLabel('Name').fill(name);
  await alice.getByLabel('People').fill(`${b}, ${c}`);
  await alice.getByRole('button', { name: 'Create' }).click();
  await alice.getByText('You created this group').waitFor();
  await alice.locator('.names', { hasText: '3 members' }).waitFor();
  await write(alice, 'Who is hungry?');
  const bob = await signIn(await person(), b, '?codec=msgpack');
  await bob.getByRole('button', { name: new RegExp(name) }).click();
  await bob.locator('.body', { hasText: 'Who is hungry?' }).waitFor();
  // Bob replies with the keyboard only.
  await bob.locator('.message').last().hover();
  await bob.getByRole('button', { name: 'Reply' }).last().click();
  await write(bob, 'Me!');
  await alice.locator('.message .quote', { hasText: 'Who is hungry?' }).waitFor();

  await alice.getByRole('button', { name: 'Details' }).click();
  await alice.getByLabel('Who may post').selectOption('admins');
  await bob.getByText('Only admins can post here.').waitFor();
  await alice.getByLabel(`Role of ${b}`).selectOption('admin');
  await bob.getByLabel('Message', { exact: true }).waitFor();
  await alice.getByRole('button', { name: `Remove ${c}` }).click();
  await alice.getByRole('dialog').getByRole('button', { name: 'Remove' }).click();
  await alice.locator('.names', { hasText: '2 members' }).waitFor();
  await alice.getByRole('dialog').waitFor({ state: 'detached' });
  await alice.locator('.details input[name=value]').first().fill(`Dinner ${a}`);
  await alice.getByRole('button', { name: 'Rename' }).click();
  await bob.getByRole('button', { name: new RegExp(`Dinner ${a}`) }).waitFor();
  await picture(alice, 'group');
  await bob.getByRole('button', { name: 'Details' }).click();
  await bob.getByRole('button', { name: 'Leave this group' }).click();
  await bob.getByRole('dialog').getByRole('button', { name: 'Leave' }).click();
  await bob.getByText('You are not in this conversation any more.').waitFor();

  await alice.getByRole('button', { name: 'New conversation' }).click();
  await alice.getByText('Channel', { exact: true }).click();
  await alice.getByLabel('Name', { exact: true }).first().fill(`News ${a}`);
  await alice.getByRole('button', { name: 'Create' }).click();
  await alice.getByText('You created this channel').waitFor();
  const carol = await signIn(await person(), c);
  await carol.getByRole('button', { name: 'Browse public conversations' }).click();
  await carol.getByRole('button', { name: new RegExp(`News ${a}`) }).click();
  await carol.getByText('You are looking in. Join to take part.').waitFor();
  await write(alice, 'Extra, extra!');
  await carol.locator('.body', { hasText: 'Extra, extra!' }).waitFor();
  await carol.getByRole('button', { name: 'Join' }).click();
  await carol.getByText('Only admins can post here.').waitFor();
  await carol.getByRole('button', { name: new RegExp(`News ${a}`) }).waitFor();
});

test('unread messages: the line, the number, and the keyboard', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const dm = await bob.dm(a);
  const other = await bob.createGroup({ name: 'Other', participants: [a] });
  await other.send('unread too');
  for (let i = 1; i <= 60; i++) await dm.send(`number ${i} ${'and so on '.repeat(10)}`);
  const alice = await signIn(await person({ viewport: { width: 1100, height: 600 } }), a);
  await until(async () => (await alice.title()) === '(61) Chat', 'the number of unread messages');
  const item = alice.locator('.sidebar li', { has: alice.locator('.title', { hasText: b }) });
  expect(await item.locator('.badge').textContent()).toContain('60');
  await item.click();
  // The list begins under the line, and reading on lowers the number.
  const line = alice.getByText('New messages');
  await line.waitFor();
  await until(
    () => line.evaluate((e) => e.getBoundingClientRect().top > 0 && e.getBoundingClientRect().top < innerHeight),
    'the line on screen',
  );
  await until(async () => Number(await alice.locator('.float .badge').textContent()) < 60, 'fewer');
  await picture(alice, 'unread');
  await alice.getByRole('button', { name: /^To the end/ }).click();
  await until(async () => (await alice.title()) === '(1) Chat');
  await until(() => dm.id && bob.inbox.get(dm.id)?.unread === 0);
  // The keyboard alone leads to the other conversation and back.
  await alice.keyboard.press('Alt+ArrowUp');
  expect(alice.url(), 'it is the first already').toContain(dm.id);
  await alice.keyboard.press('Alt+ArrowDown');
  await until(async () => alice.url().includes(other.id));
  await until(async () => (await alice.title()) === 'Chat');
  await until(() => alice.evaluate(() => document.activeElement?.tagName === 'TEXTAREA'), 'the cursor in the field');
  await alice.keyboard.type('From the keyboard');
  await alice.keyboard.press('Enter');
  await alice.locator('.body', { hasText: 'From the keyboard' }).waitFor();
  // The conversation with the newest message is the first.
  await until(async () => (await alice.locator('.sidebar li .title').first().textContent()) === 'Other', 'the other one is first');
  // In the field these keys move the cursor; from the messages they select a conversation.
  await alice.keyboard.press('Alt+ArrowDown');
  expect(alice.url()).toContain(other.id);
  await alice.getByRole('log').focus();
  await alice.keyboard.press('Alt+ArrowDown');
  await until(async () => alice.url().includes(dm.id));
});

test('looks like a chat, on a desk, on a phone and in the dark', async () => {
  const [a, b, c] = ['Alice', 'Bob', 'Carol'].map((name) => user(name)) as [string, string, string];
  const [bob, carol] = [await gateway.connect(b), await gateway.connect(c)];
  const dm = await bob.dm(a);
  await dm.send('Have you seen the new release?');
  const group = await carol.createGroup({ name: 'Weekend plans', participants: [a, b] });
  await group.send('Hiking on Saturday?');
  await group.send('The forecast is good: https://example.org/weather');
  await bob
    .conversation(group.id)
    .send('Count me in! What time do we meet, and where? I can bring the big thermos and some of those cinnamon rolls.');
  await carol.createChannel({ name: 'Announcements', participants: [a] });
  const alice = await signIn(await person({ viewport: { width: 1280, height: 800 } }), a);
  await alice.getByRole('button', { name: /Weekend plans/ }).click();
  await write(alice, 'Nine at the station?');
  await bob.conversation(group.id).send('Perfect 👍');
  await alice.locator('.body', { hasText: 'Perfect' }).waitFor();
  await picture(alice, 'desktop');
  const wide = await alice.evaluate(() => document.documentElement.scrollWidth <= innerWidth);
  expect(wide).toBe(true);

  const dark = await signIn(await person({ viewport: { width: 1280, height: 800 }, colorScheme: 'dark' }), a);
  await dark.getByRole('button', { name: /Weekend plans/ }).click();
  await dark.locator('.body', { hasText: 'Perfect' }).waitFor();
  await dark.getByRole('button', { name: 'Details' }).click();
  await dark.locator('.members li').nth(2).waitFor();
  const [back, text] = await dark.evaluate(() => {
    const { backgroundColor, color } = getComputedStyle(document.body);
    return [backgroundColor, color];
  });
  const light = (colour: string) =>
    colour
      .match(/\d+/g)!
      .slice(0, 3)
      .reduce((sum, part) => sum + Number(part), 0);
  expect(light(back!)).toBeLessThan(150);
  expect(light(text!)).toBeGreaterThan(500);
  await picture(dark, 'dark');

  const phone = await signIn(
    await person({ viewport: { width: 390, height: 780 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 }),
    a,
  );
  await picture(phone, 'phone-inbox');
  await phone.getByRole('button', { name: /Weekend plans/ }).tap();
  await phone.locator('.body', { hasText: 'Perfect' }).waitFor();
  expect(await phone.locator('.sidebar').isVisible()).toBe(false);
  await picture(phone, 'phone-thread');
  // `innerWidth` of a phone grows with what is too wide.
  expect(await phone.evaluate(() => document.documentElement.scrollWidth)).toBe(390);
  await phone.getByRole('button', { name: 'Back to the conversations' }).tap();
  await phone.locator('.sidebar').waitFor();

  const empty = await person({ viewport: { width: 1280, height: 800 } });
  const page = await empty.newPage();
  await page.goto(gateway.page);
  await picture(page, 'sign-in');
});
