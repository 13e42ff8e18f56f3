/** The part of a service worker that shows pushed messages. It is an entry of its own, because a service worker has no page:
 * `handlePush(self, { icon: 'icon.png' })`. It imports nothing. */

/** The time limit for a page to say which conversation it has open. A page may sleep. */
const ASK_TIMEOUT_MS = 300;

/** What a push says. With `content: 'none'` it has no `kind`, `name`, `sender` and `body`. */
export interface PushPayload {
  conversation: string;
  kind?: 'dm' | 'group';
  /** The name of a group. */
  name?: string;
  seq?: number;
  message_id?: string;
  sender?: string;
  /** The beginning of the text. */
  body?: string;
  /** The number of unread messages in all conversations that are not muted. */
  badge: number;
  /** The user read the conversation elsewhere, so its notification has to go. Such a push has no other fields but `badge`. */
  clear?: boolean;
}

/** The texts of a notification. */
export interface PushTexts {
  title: string;
  body: string;
}

export interface PushWorkerOptions {
  /** The URL of a picture. */
  icon?: string;
  /** The URL of a small picture in one colour, which Android shows in its status bar. */
  badge?: string;
  /** Returns the address at which the app shows a conversation, relative to the service worker. Default: `./#/<conversation>`. */
  url?(conversation: string): string;
  /** Returns the texts for the newest message, and how many were pushed since the user last looked. Default: English. */
  texts?(payload: PushPayload, count: number): PushTexts;
  /** Returns the text in the place of messages that were read on another device, where a browser demands a notification. */
  readText?: string;
}

/** A window of the app. */
export interface PushPage {
  readonly url: string;
  readonly visibilityState: string;
  focus(): Promise<unknown>;
  postMessage(message: unknown, ports?: MessagePort[]): void;
}

/** What a notification of this worker remembers. */
interface Shown {
  conversation: string;
  /** The seq of its newest message. */
  seq: number;
  count: number;
}

interface Note {
  readonly tag: string;
  readonly title: string;
  readonly body: string;
  readonly data?: Shown;
  close(): void;
}

interface WorkerEvent {
  waitUntil(work: Promise<unknown>): void;
}

/** The parts of a `ServiceWorkerGlobalScope` that are used. */
export interface PushScope {
  readonly registration: {
    showNotification(title: string, options?: object): Promise<void>;
    getNotifications(filter?: { tag?: string }): Promise<Note[]>;
  };
  readonly clients: {
    matchAll(options: { type: 'window'; includeUncontrolled: true }): Promise<readonly PushPage[]>;
    openWindow(url: string): Promise<unknown>;
  };
  readonly location: { readonly href: string };
  readonly navigator: { setAppBadge?(count: number): Promise<void>; clearAppBadge?(): Promise<void> };
  // biome-ignore lint/suspicious/noExplicitAny: the events of a service worker are in no library that a page can use too.
  addEventListener(type: string, listener: (event: any) => void): void;
}

/** Shows a notification for each conversation with pushed messages, and opens the conversation when it is clicked. Call it while
 * the service worker is first run, because browsers accept listeners only then.
 * @param self The global object of the service worker. */
export function handlePush(self: PushScope, options: PushWorkerOptions = {}): void {
  const worker = new PushWorker(self, options);
  self.addEventListener('push', (event: WorkerEvent & { data: { json(): PushPayload } | null }) => {
    const payload = payloadOf(event.data);
    if (payload) event.waitUntil(worker.pushed(payload));
  });
  self.addEventListener('notificationclick', (event: WorkerEvent & { notification: Note }) => {
    if (event.notification.data?.conversation) event.waitUntil(worker.clicked(event.notification));
  });
  self.addEventListener('message', (event: WorkerEvent & { data: unknown }) => {
    const { type, conversations, badge } = (event.data ?? {}) as { type?: string; conversations: string[]; badge: number };
    if (type === 'chat-gateway:read') event.waitUntil(worker.read(conversations, badge));
  });
}

/** Returns what a push says; undefined if it is not of a gateway. */
function payloadOf(data: { json(): PushPayload } | null): PushPayload | undefined {
  try {
    const payload = data?.json();
    return typeof payload?.conversation === 'string' ? payload : undefined;
  } catch {
    return undefined;
  }
}

class PushWorker {
  #self: PushScope;
  #options: PushWorkerOptions;
  /** Pushes are handled one after the other: two of one conversation at once would count only one. */
  #last: Promise<unknown> = Promise.resolve();

  constructor(self: PushScope, options: PushWorkerOptions) {
    this.#self = self;
    this.#options = options;
  }

  pushed(payload: PushPayload): Promise<void> {
    return this.#next(async () => {
      await this.#setBadge(payload.badge);
      if (payload.clear) await this.#clear(payload.conversation);
      else await this.#show(payload);
    });
  }

  clicked(note: Note): Promise<void> {
    const { conversation } = note.data!;
    note.close();
    return this.#open(conversation);
  }

  /** Closes the notifications of conversations that were read in a page. */
  read(conversations: readonly string[], badge: number): Promise<void> {
    return this.#next(async () => {
      const read = new Set(conversations);
      for (const note of await this.#notes()) if (read.has(note.data.conversation)) note.close();
      await this.#setBadge(badge);
    });
  }

  async #show(payload: PushPayload): Promise<void> {
    const { conversation, seq = 0 } = payload;
    const visible = (await this.#pages()).filter(({ visibilityState }) => visibilityState === 'visible');
    if (await this.#pageOf(conversation, visible)) return;
    const shown = (await this.#notes()).find(({ data }) => data.conversation === conversation);
    // A push that was repeated, or overtook a newer one, has nothing new. But browsers demand a notification for each push.
    if (shown && shown.data.seq >= seq) return this.#again(shown);
    const count = (shown?.data.count ?? 0) + 1;
    const { title, body } = (this.#options.texts ?? textsOf)(payload, count);
    await this.#notify(title, body, { conversation, seq, count }, { renotify: true });
  }

  /** Closes the notification of a conversation that was read on another device. Browsers forbid silent pushes while no page is
   * visible, so another notification is shown again, without a sound. If there is no other one, it is replaced. */
  async #clear(conversation: string): Promise<void> {
    const notes = await this.#notes();
    const isFree = (await this.#pages()).some(({ visibilityState }) => visibilityState === 'visible');
    const read = notes.filter(({ data }) => data.conversation === conversation);
    const other = notes.filter(({ data }) => data.conversation !== conversation).at(-1);
    const [last] = read;
    if (!isFree && other) await this.#again(other);
    if (!isFree && !other && last) {
      const { readText = 'Read on another device' } = this.#options;
      return this.#notify(last.title, readText, { conversation, seq: last.data.seq, count: 0 }, { silent: true });
    }
    for (const note of read) note.close();
  }

  /** Shows a notification as it is, without a sound. */
  #again({ title, body, data }: Note & { data: Shown }): Promise<void> {
    return this.#notify(title, body, data, { silent: true });
  }

  #notify(title: string, body: string, data: Shown, more: { renotify: true } | { silent: true }): Promise<void> {
    const { icon, badge } = this.#options;
    // The tag makes it replace the earlier notification of the conversation.
    return this.#self.registration.showNotification(title, { body, icon, badge, tag: data.conversation, data, ...more });
  }

  /** Shows a conversation in a window of the app, if possible in one that has it open. */
  async #open(conversation: string): Promise<void> {
    const pages = await this.#pages();
    const open = await this.#pageOf(conversation, pages);
    if (open) return void (await open.focus());
    const [page] = pages;
    if (!page) return void (await this.#self.clients.openWindow(this.#url(conversation)));
    // Its scripts show the conversation without loading the page again.
    page.postMessage({ type: 'chat-gateway:open', conversation });
    await page.focus();
  }

  /** Returns the page that has a conversation open. */
  async #pageOf(conversation: string, pages: readonly PushPage[]): Promise<PushPage | undefined> {
    const open = await Promise.all(pages.map((page) => this.#isOpen(page, conversation)));
    return pages[open.indexOf(true)];
  }

  /** Asks a page whether it has a conversation open. The client of a page answers once the page registered a subscription. If none
   * does, the address tells; but in some browsers it is the one with which the page was loaded. */
  #isOpen(page: PushPage, conversation: string): Promise<boolean> {
    return new Promise((resolve) => {
      const { port1, port2 } = new MessageChannel();
      const done = (isOpen: boolean) => {
        port1.close();
        resolve(isOpen);
      };
      port1.onmessage = ({ data }) => done(data === true);
      setTimeout(() => done(page.url === this.#url(conversation)), ASK_TIMEOUT_MS);
      page.postMessage({ type: 'chat-gateway:is-open', conversation }, [port2]);
    });
  }

  #url(conversation: string): string {
    const url = this.#options.url?.(conversation) ?? `./#/${conversation}`;
    return new URL(url, this.#self.location.href).href;
  }

  /** Returns the windows of the app: not those of other apps on the same host. */
  async #pages(): Promise<PushPage[]> {
    const app = new URL('.', this.#url('')).href;
    const pages = await this.#self.clients.matchAll({ type: 'window', includeUncontrolled: true });
    return pages.filter(({ url }) => url.startsWith(app));
  }

  /** Returns the notifications of messages, the oldest first. */
  async #notes(): Promise<(Note & { data: Shown })[]> {
    const notes = await this.#self.registration.getNotifications();
    return notes.filter((note): note is Note & { data: Shown } => !!note.data?.conversation);
  }

  async #setBadge(badge: number): Promise<void> {
    const { navigator } = this.#self;
    // Only installed apps have a badge.
    await (badge ? navigator.setAppBadge?.(badge) : navigator.clearAppBadge?.())?.catch(() => {});
  }

  #next(work: () => Promise<void>): Promise<void> {
    const done = this.#last.then(work);
    this.#last = done.catch(() => {});
    return done;
  }
}

/** Returns the texts of a notification in English. */
function textsOf({ kind, name, sender, body }: PushPayload, count: number): PushTexts {
  if (!sender) return { title: count > 1 ? `${count} new messages` : 'New message', body: '' };
  const title = name ?? (kind === 'group' ? 'A group' : sender);
  const text = body || 'An attachment';
  return { title: count > 1 ? `${title} (${count} new)` : title, body: kind === 'group' ? `${sender}: ${text}` : text };
}
