/** The inbox: the user's conversations with their unread counts, kept up to date by events. */
import { backoff } from './backoff.js';
import type { ChatError } from './codes.js';
import { Emitter } from './emitter.js';
import type { Feed } from './feed.js';
import { gathered, isSame } from './gather.js';
import type { Marks } from './marks.js';
import { type Paging, pages } from './pages.js';
import type { ConversationId, InboxItem, Message, Receipt, Replies, Request, Seq, UserId } from './types.js';

/** The size of the first page: small, so that it comes soon. */
const FIRST_PAGE = 50;
/** The size of the other pages. */
const PAGE = 200;
/** The number of conversations that are loaded by themselves, and so have cursors. `loadMore()` loads more. */
export const INBOX_LOADED = 1_000;

/** What the inbox needs of its client. */
export interface InboxHost {
  readonly feed: Feed;
  readonly marks: Marks;
  request<R extends Request>(request: R, options?: { signal?: AbortSignal | undefined }): Promise<Replies[R['type']]>;
  /** Says that the inbox item of a conversation changed. */
  changed(conversation: ConversationId): void;
}

/** The inbox of the client's user. */
export class Inbox extends Emitter<{ change: readonly InboxItem[] }> {
  /** Whether the first page was loaded. */
  loaded = false;
  /** The error of the last attempt to load the inbox. It is retried until it succeeds. */
  error: ChatError | undefined;
  /** Whether the gateway has more items than `items`. */
  get more(): boolean {
    return this.#next !== undefined;
  }
  #host: InboxHost;
  #items = new Map<ConversationId, InboxItem>();
  #sorted: readonly InboxItem[] | undefined = [];
  #next: string | undefined;
  #loading: Promise<void> | undefined;
  #again = false;
  #wanted = 0;
  #failures = 0;
  #retry: ReturnType<typeof setTimeout> | undefined;
  /** Conversations that got messages and have no item. The next load shows whether they are in the inbox. */
  #unknown = new Set<ConversationId>();
  /** Conversations that are not in the inbox: channels that the user only subscribed to. */
  #outside = new Set<ConversationId>();
  #changed = gathered(() => this.emit('change', this.items));

  /** @internal */
  constructor(host: InboxHost) {
    super();
    this.#host = host;
  }

  /** The loaded items, the one with the newest message first. A new array after each change. */
  get items(): readonly InboxItem[] {
    const at = (item: InboxItem) => item.lastMessage?.at ?? 0;
    const order = (a: InboxItem, b: InboxItem) => at(b) - at(a) || (a.conversation < b.conversation ? 1 : -1);
    return (this.#sorted ??= [...this.#items.values()].sort(order));
  }

  /** Returns the item of a conversation, if it is loaded. */
  get(conversation: ConversationId): InboxItem | undefined {
    return this.#items.get(conversation);
  }

  /** Loads the next page into `items`. */
  async loadMore(): Promise<void> {
    if (!this.more) return;
    this.#next = await this.#page(this.#next, FIRST_PAGE);
    if (!this.more) this.#changed();
  }

  /** Reads all pages from the gateway, the newest first, without changing `items`. */
  pages({ limit, signal }: Paging = {}): AsyncGenerator<InboxItem[]> {
    return pages((before: string | undefined) => this.#host.request({ type: 'inbox', limit, before }, { signal }));
  }

  /** Loads the first page again, or with `all` everything that was loaded. */
  refresh({ all = false } = {}): Promise<void> {
    this.#outside.clear();
    return this.#refresh(all);
  }

  /** @internal Stops retrying. The next connection loads the inbox again. */
  disconnected(): void {
    clearTimeout(this.#retry);
  }

  #refresh(all = false): Promise<void> {
    if (all || !this.loaded) this.#wanted = Math.max(INBOX_LOADED, this.#items.size);
    this.#again = true;
    clearTimeout(this.#retry);
    this.#loading ??= this.#load().finally(() => {
      this.#loading = undefined;
    });
    return this.#loading;
  }

  async #load(): Promise<void> {
    while (this.#again) {
      const [wanted, unknown, more] = [this.#wanted, this.#unknown, this.more];
      this.#again = false;
      this.#wanted = 0;
      this.#unknown = new Set();
      try {
        let before = await this.#page(undefined, FIRST_PAGE);
        for (let read = FIRST_PAGE; before && read < wanted; read += PAGE) before = await this.#page(before, PAGE);
        if (wanted) this.#next = before;
      } catch (error) {
        this.#wanted = Math.max(this.#wanted, wanted);
        this.#failed(error as ChatError);
        throw error;
      }
      for (const conversation of unknown) if (!this.#items.has(conversation)) this.#outside.add(conversation);
      this.#failures = 0;
      if (this.more !== more || this.error) this.#changed();
      this.error = undefined;
    }
  }

  #failed(error: ChatError): void {
    // After `disconnect()` there is no error to show and nothing to retry.
    if (error.code === 'closed') return;
    this.error = error;
    this.#changed();
    this.#retry = setTimeout(() => this.#refresh().catch(() => {}), backoff(this.#failures++));
  }

  /** Loads a page. Returns where the next one begins. */
  async #page(before: string | undefined, limit: number): Promise<string | undefined> {
    const { items, next } = await this.#host.request({ type: 'inbox', limit, before });
    if (!this.loaded) this.#changed();
    this.loaded = true;
    for (const item of items) {
      const { conversation, kind, lastSeq, unread } = item;
      this.#host.feed.begin(conversation, lastSeq);
      if (unread && kind !== 'channel') this.#host.marks.add('delivered', conversation, lastSeq);
      this.#set(item);
    }
    return next;
  }

  /** @internal Deletes everything. */
  clear(): void {
    clearTimeout(this.#retry);
    this.#items.clear();
    this.#outside.clear();
    this.#next = undefined;
    this.#sorted = undefined;
    this.loaded = false;
    this.#changed();
  }

  /** @internal */
  receive(message: Message, me: UserId | undefined): void {
    const { conversation, seq, messageId, at, sender, kind } = message;
    const item = this.get(conversation);
    if (!item) {
      if (this.#outside.has(conversation)) return;
      this.#unknown.add(conversation);
      return void this.#refresh().catch(() => {});
    }
    if (seq <= item.lastSeq) return;
    const readSeq = sender === me ? seq : item.readSeq;
    const text = message.body || message.attachments?.[0]?.name || '';
    // A character has at most two UTF-16 units.
    const preview = [...text.slice(0, 200)].slice(0, 100).join('');
    const lastMessage = { seq, messageId, at, sender, kind, preview };
    this.#set({ ...item, lastSeq: seq, lastMessage, readSeq });
  }

  /** @internal */
  receipt({ conversation, user, readSeq }: Receipt, me: UserId | undefined): void {
    const item = this.get(conversation);
    if (item && user === me && readSeq) this.#set({ ...item, readSeq });
  }

  /** @internal */
  remove(conversation: ConversationId): void {
    if (this.#items.delete(conversation)) this.#touched(conversation);
  }

  /** Stores an item. The known one may be newer, if a message came while the page was loaded. */
  #set(item: InboxItem): void {
    const { conversation } = item;
    const known = this.get(conversation);
    const { lastSeq, lastMessage } = known && known.lastSeq > item.lastSeq ? known : item;
    const readSeq: Seq = Math.max(item.readSeq, known?.readSeq ?? 0);
    const unread = Math.max(0, lastSeq - readSeq);
    const now = { ...item, lastSeq, lastMessage, readSeq, unread };
    if (isSame(known, now)) return;
    this.#items.set(conversation, now);
    this.#touched(conversation);
  }

  #touched(conversation: ConversationId): void {
    this.#sorted = undefined;
    this.#host.changed(conversation);
    this.#changed();
  }
}
