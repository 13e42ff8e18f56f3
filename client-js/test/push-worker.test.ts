/** The service worker's part of pushes, driven by the events of a fake browser. */
import { beforeEach, expect, test } from 'vitest';
import { handlePush, type PushPage, type PushPayload, type PushScope, type PushWorkerOptions } from '../src/push-worker.js';

type Options = { body: string; tag: string; data: never; silent?: boolean; renotify?: boolean; icon?: string };

class FakeWorker implements PushScope {
  /** The notifications that the browser shows, the oldest first. */
  notes: (Options & { title: string; close(): void })[] = [];
  /** How often the browser was told to show one. */
  shown = 0;
  badge: number | undefined;
  opened: string[] = [];
  pages: (PushPage & { focused: number; messages: unknown[]; open: string | undefined })[] = [];
  location = { href: 'https://chat.example.org/app/worker.js' };
  navigator: PushScope['navigator'] = {
    setAppBadge: async (badge: number) => void (this.badge = badge),
    clearAppBadge: async () => void (this.badge = 0),
  };
  #listeners: Record<string, (event: object) => void> = {};

  registration = {
    showNotification: async (title: string, options: Options) => {
      this.shown++;
      this.notes = this.notes.filter(({ tag }) => tag !== options.tag);
      const note = { ...options, title, close: () => void (this.notes = this.notes.filter((other) => other !== note)) };
      this.notes.push(note);
    },
    // A browser answers with new objects.
    getNotifications: async () => this.notes.map((note) => ({ ...note, close: () => note.close() })),
  } as never;
  clients = {
    matchAll: async () => this.pages,
    openWindow: async (url: string) => void this.opened.push(url),
  };

  addEventListener(type: string, listener: (event: object) => void): void {
    this.#listeners[type] = listener;
  }

  /** Has an event happen. Resolves when the browser may stop the worker. */
  async happen(type: string, fields: object): Promise<void> {
    let work: Promise<unknown> | undefined;
    const event = { ...fields, waitUntil: (promise: Promise<unknown>) => (work = promise) };
    this.#listeners[type]!(event);
    await work;
  }

  push(payload: Partial<PushPayload>): Promise<void> {
    const message = { conversation: 'c', kind: 'group', name: 'Lunch', sender: 'bob', body: 'See you', badge: 1, ...payload };
    return this.happen('push', { data: { json: () => JSON.parse(JSON.stringify(message)) } });
  }

  clear(conversation: string, badge = 0): Promise<void> {
    return this.happen('push', { data: { json: () => ({ conversation, badge, clear: true }) } });
  }

  click(tag: string): Promise<void> {
    return this.happen('notificationclick', { notification: this.notes.find((note) => note.tag === tag)! });
  }

  page(url: string, visibilityState = 'visible') {
    const page = {
      url: new URL(url, this.location.href).href,
      visibilityState,
      focused: 0,
      messages: [] as unknown[],
      focus: async () => void page.focused++,
      /** The conversation that the page has open, if its scripts answer. */
      open: undefined as string | undefined,
      postMessage: (message: { type: string; conversation: string }, [port]: MessagePort[] = []) => {
        if (message.type !== 'chat-gateway:is-open') page.messages.push(message);
        else if (page.open !== undefined) port!.postMessage(page.open === message.conversation);
      },
    };
    this.pages.push(page);
    return page;
  }

  get texts(): string[] {
    return this.notes.map(({ title, body }) => `${title}: ${body}`);
  }
}

let worker: FakeWorker;
const start = (options?: PushWorkerOptions) => {
  worker = new FakeWorker();
  handlePush(worker, options);
};
beforeEach(() => start());

test('each conversation has one notification, which counts its messages', async () => {
  await worker.push({ seq: 4, badge: 1 });
  await worker.push({ conversation: 'd', kind: 'dm', name: undefined, seq: 9, body: '', badge: 2 });
  await worker.push({ seq: 5, body: 'Soon', badge: 3 });
  expect(worker.texts).toEqual(['bob: An attachment', 'Lunch (2 new): bob: Soon']);
  expect(worker.notes[1]).toMatchObject({ tag: 'c', renotify: true });
  expect(worker.badge).toBe(3);
});

test('a worker that was stopped meanwhile goes on counting', async () => {
  await worker.push({ seq: 4 });
  const { notes } = worker;
  start();
  worker.notes = notes;
  await worker.push({ seq: 5 });
  expect(worker.texts).toEqual(['Lunch (2 new): bob: See you']);
});

test('two pushes at the same time count as two', async () => {
  await Promise.all([worker.push({ seq: 4 }), worker.push({ seq: 5 })]);
  expect(worker.texts).toEqual(['Lunch (2 new): bob: See you']);
});

test('a push that comes again, or late, shows the same without a sound', async () => {
  await worker.push({ seq: 5, body: 'newer' });
  for (const seq of [5, 4]) await worker.push({ seq, body: 'older' });
  expect(worker.texts).toEqual(['Lunch: bob: newer']);
  expect(worker.notes[0]).toMatchObject({ silent: true });
  expect(worker.shown, 'browsers demand a notification for each push').toBe(3);
});

test('content `none` names nobody', async () => {
  const none = { kind: undefined, name: undefined, sender: undefined, body: undefined };
  await worker.push({ ...none, seq: 1 });
  expect(worker.texts).toEqual(['New message: ']);
  await worker.push({ ...none, seq: 2 });
  expect(worker.texts).toEqual(['2 new messages: ']);
});

test('nothing is shown to somebody who looks at the conversation', async () => {
  const page = worker.page('./#/c');
  await worker.push({ seq: 4 });
  expect(worker.shown).toBe(0);
  page.visibilityState = 'hidden';
  await worker.push({ seq: 5 });
  expect(worker.texts).toHaveLength(1);
  worker.page('./#/other');
  worker.page('https://chat.example.org/other-app/#/c');
  await worker.push({ seq: 6 });
  expect(worker.texts).toEqual(['Lunch (2 new): bob: See you']);
  // What a page says is more than its address, which may be an old one.
  page.visibilityState = 'visible';
  page.open = 'd';
  await worker.push({ seq: 7 });
  expect(worker.texts).toEqual(['Lunch (3 new): bob: See you']);
  page.open = 'c';
  await worker.push({ seq: 8 });
  expect(worker.texts).toEqual(['Lunch (3 new): bob: See you']);
});

test('a click opens the conversation: in the page that shows it, in another one, or in a new one', async () => {
  await worker.push({ seq: 4 });
  await worker.click('c');
  expect(worker.opened).toEqual(['https://chat.example.org/app/#/c']);
  expect(worker.notes).toEqual([]);
  const other = worker.page('./', 'hidden');
  await worker.push({ seq: 5 });
  await worker.click('c');
  expect(other).toMatchObject({ focused: 1, messages: [{ type: 'chat-gateway:open', conversation: 'c' }] });
  const right = worker.page('./#/c', 'hidden');
  await worker.push({ seq: 6 });
  await worker.click('c');
  expect(right).toMatchObject({ focused: 1, messages: [] });
  expect(other.focused).toBe(1);
  expect(worker.opened).toHaveLength(1);
});

test('what was read in a page disappears, with the badge', async () => {
  await worker.push({ seq: 4 });
  await worker.push({ conversation: 'd', seq: 4 });
  await worker.happen('message', { data: { type: 'chat-gateway:read', conversations: ['c', 'x'], badge: 1 } });
  expect(worker.notes.map(({ tag }) => tag)).toEqual(['d']);
  expect(worker.badge).toBe(1);
  await worker.happen('message', { data: { type: 'chat-gateway:read', conversations: ['d'], badge: 0 } });
  expect(worker.notes).toEqual([]);
  expect(worker.badge).toBe(0);
});

test('what was read on another device disappears; another notification meets what the browser demands', async () => {
  for (const [i, conversation] of ['c', 'd', 'e'].entries()) await worker.push({ conversation, seq: 4, body: `text ${i}` });
  worker.shown = 0;
  await worker.clear('e', 2);
  expect(worker.texts).toEqual(['Lunch: bob: text 0', 'Lunch: bob: text 1']);
  expect(worker.notes[1]).toMatchObject({ tag: 'd', silent: true });
  expect(worker.shown).toBe(1);
  expect(worker.badge).toBe(2);
});

test('the last notification that was read on another device says so, until somebody looks', async () => {
  await worker.push({ seq: 4 });
  await worker.clear('c');
  expect(worker.texts).toEqual(['Lunch: Read on another device']);
  expect(worker.notes[0]).toMatchObject({ silent: true, tag: 'c' });
  await worker.push({ seq: 6, body: 'next' });
  expect(worker.texts).toEqual(['Lunch: bob: next']);
  worker.page('./');
  await worker.clear('c');
  expect(worker.notes, 'while a page is visible, browsers demand nothing').toEqual([]);
  worker.pages = [];
  worker.shown = 0;
  await worker.clear('c');
  expect(worker.shown, 'no notification out of nothing').toBe(0);
});

test('texts, icons and addresses are the application’s', async () => {
  start({
    icon: 'icon.png',
    badge: 'badge.png',
    url: (conversation) => `/app/chats/${conversation}`,
    texts: ({ sender }, count) => ({ title: `${count} neue`, body: `von ${sender}` }),
    readText: 'gelesen',
  });
  await worker.push({ seq: 4 });
  expect(worker.notes[0]).toMatchObject({ title: '1 neue', body: 'von bob', icon: 'icon.png', badge: 'badge.png' });
  await worker.clear('c');
  expect(worker.texts).toEqual(['1 neue: gelesen']);
  await worker.click('c');
  expect(worker.opened).toEqual(['https://chat.example.org/app/chats/c']);
});

test('what is of something else is left alone, and a browser without badges too', async () => {
  worker.navigator = {};
  await worker.push({ seq: 4 });
  expect(worker.texts).toHaveLength(1);
  await worker.happen('push', { data: null });
  await worker.happen('push', { data: { json: () => ({ title: 'Sale' }) } });
  const broken = { json: () => JSON.parse('text') };
  await worker.happen('push', { data: broken });
  await worker.happen('message', { data: 'of the app' });
  await worker.happen('notificationclick', { notification: { tag: 'of the app' } });
  expect(worker.texts).toHaveLength(1);
  expect(worker.opened).toEqual([]);
});
