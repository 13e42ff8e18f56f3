/** The conversations of the user, most active first, with their unread counts; kept up to date by what happens. */
import { backoff } from './backoff.js';
import type { ChatClient } from './client.js';
import type { ChatError } from './codes.js';
import { Emitter } from './emitter.js';
import { gathered, isSame } from './gather.js';
import { type Paging, pages } from './pages.js';
import type { ConversationId, InboxItem, Message, Receipt, Seq, UserId } from './types.js';

/** The first page is small, to be shown at once; the others are fewer. */
const FIRST_PAGE = 50;
const PAGE = 200;
/** Loaded without being asked: so many conversations have cursors, and miss nothing. More by `loadMore()`. */
export const INBOX_LOADED = 1_000;

export class Inbox extends Emitter<{ change: readonly InboxItem[] }> {
  /** The first page is there. */
  loaded = false;
  /** Why the last try to load it failed; it is tried again until it succeeds. */
  error: ChatError | undefined;
  /** There is more on the server than `items`. */
  get more(): boolean {
    return this.#next !== undefined;
  }
  #client: ChatClient;
  #items = new Map<ConversationId, InboxItem>();
  #sorted: readonly InboxItem[] | undefined = [];
  #next: string | undefined;
  #loading: Promise<void> | undefined;
  #again = false;
  #wanted = 0;
  #failures = 0;
  #retry: ReturnType<typeof setTimeout> | undefined;
  /** Messages came for these, and the next load says whether they are in the inbox. */
  #unknown = new Set<ConversationId>();
  /** These are not in the inbox: channels that the user only looks into. */
  #outside = new Set<ConversationId>();
  #changed = gathered(() => this.emit('change', this.items));

  /** @internal */
  constructor(client: ChatClient) {
    super();
    this.#client = client;
  }

  /** Newest first. A new array whenever something changed. */
  get items(): readonly InboxItem[] {
    const at = (item: InboxItem) => item.lastMessage?.at ?? 0;
    const order = (a: InboxItem, b: InboxItem) => at(b) - at(a) || (a.conversation < b.conversation ? 1 : -1);
    return (this.#sorted ??= [...this.#items.values()].sort(order));
  }

  get(conversation: ConversationId): InboxItem | undefined {
    return this.#items.get(conversation);
  }

  /** The next page into `items`. */
  async loadMore(): Promise<void> {
    if (!this.more) return;
    this.#next = await this.#page(this.#next, FIRST_PAGE);
    if (!this.more) this.#changed();
  }

  /** All pages, newest first, straight from the server. */
  pages({ limit, signal }: Paging = {}): AsyncGenerator<InboxItem[]> {
    return pages((before: string | undefined) => this.#client.request({ type: 'inbox', limit, before }, { signal }));
  }

  /** Reads the newest page again, or everything that is loaded. */
  refresh({ all = false } = {}): Promise<void> {
    this.#outside.clear();
    return this.#refresh(all);
  }

  /** @internal A load that failed is begun again by the next connection. */
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
    // `disconnect()` ended it: there is nothing to show, and nothing to try again.
    if (error.code === 'closed') return;
    this.error = error;
    this.#changed();
    this.#retry = setTimeout(() => this.#refresh().catch(() => {}), backoff(this.#failures++));
  }

  /** Returns where the next one begins. */
  async #page(before: string | undefined, limit: number): Promise<string | undefined> {
    const { items, next } = await this.#client.request({ type: 'inbox', limit, before });
    if (!this.loaded) this.#changed();
    this.loaded = true;
    for (const item of items) {
      const { conversation, kind, lastSeq, unread } = item;
      this.#client.feed.begin(conversation, lastSeq);
      if (unread && kind !== 'channel') this.#client.marks.add('delivered', conversation, lastSeq);
      this.#set(item);
    }
    return next;
  }

  /** @internal Nothing of the user is kept. */
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
    // A character has at most two units.
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

  /** What is known already may be newer: a message came while the page was on its way. `unread` follows from the rest. */
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
    this.#client.changed(conversation);
    this.#changed();
  }
}
