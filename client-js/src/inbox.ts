/** The conversations of the user, most active first, with their unread counts; kept up to date by what happens. */
import { Emitter } from './emitter.js';
import { type Paging, pages } from './pages.js';
import type { ConversationId, InboxItem, Message, Receipt, Replies, Request, Seq, UserId } from './types.js';

/** The first page is small, to be shown at once; the others are fewer. */
const FIRST_PAGE = 50;
const PAGE = 200;
/** Loaded without being asked: so many conversations have cursors, and miss nothing. More by `loadMore()`. */
export const INBOX_LOADED = 1_000;

type Ask = (request: Request & { type: 'inbox' }, signal?: AbortSignal) => Promise<Replies['inbox']>;

export class Inbox extends Emitter<{ change: readonly InboxItem[] }> {
  /** Newest first. A new array whenever something changed. */
  items: readonly InboxItem[] = [];
  /** The first page is there. */
  loaded = false;
  /** There is more on the server than `items`. */
  get more(): boolean {
    return this.#next !== undefined;
  }
  #ask: Ask;
  #known: (item: InboxItem) => void;
  #next: string | undefined;
  #loading: Promise<void> | undefined;
  #again = false;
  #wanted = 0;

  /** @internal */
  constructor(ask: Ask, known: (item: InboxItem) => void) {
    super();
    this.#ask = ask;
    this.#known = known;
  }

  get(conversation: ConversationId): InboxItem | undefined {
    return this.items.find((item) => item.conversation === conversation);
  }

  /** The next page into `items`. */
  async loadMore(): Promise<void> {
    if (this.more) this.#next = await this.#page(this.#next, FIRST_PAGE);
  }

  /** All pages, newest first, straight from the server. */
  pages({ limit, signal }: Paging = {}): AsyncGenerator<InboxItem[]> {
    return pages((before: string | undefined) => this.#ask({ type: 'inbox', limit, before }, signal));
  }

  /** Reads the newest page again, or everything that is loaded. */
  refresh({ all = false } = {}): Promise<void> {
    if (all || !this.loaded) this.#wanted = Math.max(INBOX_LOADED, this.items.length);
    this.#again = true;
    this.#loading ??= this.#load().finally(() => {
      this.#loading = undefined;
    });
    return this.#loading;
  }

  async #load(): Promise<void> {
    while (this.#again) {
      const wanted = this.#wanted;
      this.#again = false;
      this.#wanted = 0;
      let before = await this.#page(undefined, FIRST_PAGE);
      for (let read = FIRST_PAGE; before && read < wanted; read += PAGE) before = await this.#page(before, PAGE);
      if (wanted) this.#next = before;
    }
  }

  /** Returns where the next one begins. */
  async #page(before: string | undefined, limit: number): Promise<string | undefined> {
    const { items, next } = await this.#ask({ type: 'inbox', limit, before });
    this.loaded = true;
    for (const item of items) this.#known(item);
    this.#set(items);
    return next;
  }

  /** @internal */
  receive(message: Message, me: UserId | undefined): void {
    const { conversation, seq, messageId, at, sender, kind } = message;
    const item = this.get(conversation);
    if (!item) return void this.refresh().catch(() => {});
    if (seq <= item.lastSeq) return;
    const readSeq = sender === me ? seq : item.readSeq;
    const preview = [...(message.body || message.attachments?.[0]?.name || '')].slice(0, 100).join('');
    const lastMessage = { seq, messageId, at, sender, kind, preview };
    this.#set([{ ...item, lastSeq: seq, lastMessage, readSeq }]);
  }

  /** @internal */
  receipt({ conversation, user, readSeq }: Receipt, me: UserId | undefined): void {
    const item = this.get(conversation);
    if (item && user === me && readSeq) this.#set([{ ...item, readSeq }]);
  }

  /** @internal */
  remove(conversation: ConversationId): void {
    this.#show(this.items.filter((item) => item.conversation !== conversation));
  }

  /** What is known already may be newer: a message came while the page was on its way. `unread` follows from the rest. */
  #set(changed: InboxItem[]): void {
    const items = new Map(this.items.map((item) => [item.conversation, item]));
    for (const item of changed) {
      const known = items.get(item.conversation);
      const newest = known && known.lastSeq > item.lastSeq ? known : item;
      const readSeq: Seq = Math.max(item.readSeq, known?.readSeq ?? 0);
      const unread = Math.max(0, newest.lastSeq - readSeq);
      items.set(item.conversation, { ...newest, readSeq, unread });
    }
    this.#show([...items.values()]);
  }

  #show(items: InboxItem[]): void {
    const at = (item: InboxItem) => item.lastMessage?.at ?? 0;
    const order = (a: InboxItem, b: InboxItem) => at(b) - at(a) || (a.conversation < b.conversation ? 1 : -1);
    this.items = items.sort(order);
    this.emit('change', this.items);
  }
}
