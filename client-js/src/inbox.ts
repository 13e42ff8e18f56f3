/** The inbox: the user's conversations with their unread counts, kept up to date by events. */
import { backoff } from './backoff.js';
import type { ChangeFeed } from './change-feed.js';
import type { ChatError } from './codes.js';
import type { State } from './connection.js';
import { cut } from './cut.js';
import { Emitter } from './emitter.js';
import type { Feed } from './feed.js';
import { gathered, isSame } from './gather.js';
import type { Marks } from './marks.js';
import { type Paging, pages } from './pages.js';
import type {
  Attachment,
  Changed,
  ConversationId,
  InboxItem,
  LastMessage,
  Message,
  Receipt,
  Replies,
  Request,
  Rev,
  Seq,
  Settings,
  UserId,
} from './types.js';

/** The size of the first page: small, so that it comes soon. */
const FIRST_PAGE = 50;
/** The size of the other pages. */
const PAGE = 200;
/** The number of conversations that are loaded by themselves, and so have cursors. `loadMore()` loads more. */
export const INBOX_LOADED = 1_000;

/** The number of code points in a preview, as at the gateway. */
const PREVIEW_CHARS = 100;

/** The rev of an item whose state is not known any more. */
const NO_STATE = -1;

/** Returns what inboxes are ordered by (docs/protocol.md), as text: the time in the id of the newest entry, a UUID of version 1, and
 * the conversation. */
const rank = ({ conversation, lastMessage }: InboxItem) =>
  [lastMessage?.messageId.replace(/(.{8})-(.{4})-1(.{3})-.*/, '$3$2$1'), conversation].join();

/** What the inbox needs of its client. */
export interface InboxHost {
  readonly feed: Feed;
  readonly changeFeed: ChangeFeed;
  /** Queues a watermark. */
  mark(...mark: Parameters<Marks['add']>): void;
  request<R extends Request>(request: R, options?: { signal?: AbortSignal | undefined }): Promise<Replies[R['type']]>;
  readonly state: State;
  /** Settles as `work` does, or rejects when there will be no connection any more. */
  whileOpen<T>(work: Promise<T>): Promise<T>;
  /** Returns how many messages of people are in (from, to], without deleted ones; undefined if they are not loaded. */
  countMessages(conversation: ConversationId, from: Seq, to: Seq): number | undefined;
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
  /** Unread entries that do not count: system entries with rev 0, and deleted messages with the rev of their deletion. */
  #uncounted = new Map<ConversationId, Map<Seq, Rev>>();
  /** Conversations of which the user read a part, so that only the gateway knows how much is unread. */
  #inexact = new Set<ConversationId>();
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
    return (this.#sorted ??= [...this.#items.values()].sort((a, b) => (rank(a) < rank(b) ? 1 : -1)));
  }

  /** Resolves when the first page is loaded; rejects if the client is closed, or not connecting. */
  async whenLoaded(): Promise<this> {
    while (!this.loaded) await this.#host.whileOpen(new Promise<unknown>((resolve) => this.once('change', resolve)));
    return this;
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
    // The next connection, if there is one, loads the inbox again.
    if (this.#host.state.at === 'connected') this.#retry = setTimeout(() => this.#refresh().catch(() => {}), backoff(this.#failures++));
  }

  /** Loads a page. Returns where the next one begins. */
  async #page(before: string | undefined, limit: number): Promise<string | undefined> {
    const { items, next } = await this.#host.request({ type: 'inbox', limit, before });
    if (!this.loaded) this.#changed();
    this.loaded = true;
    for (const item of items) {
      const { conversation, kind, lastSeq, lastMessage, unread } = item;
      this.#host.feed.begin(conversation, lastSeq);
      if (this.#hasState(conversation)) this.#host.changeFeed.begin(conversation, item.rev);
      else this.#host.changeFeed.page(conversation, item.rev, 'inbox');
      if (unread && kind !== 'channel') this.#host.mark('delivered', conversation, lastSeq, lastMessage?.at);
      this.#set(item);
    }
    return next;
  }

  /** @internal Deletes everything. */
  clear(): void {
    clearTimeout(this.#retry);
    this.#items.clear();
    this.#outside.clear();
    this.#uncounted.clear();
    this.#inexact.clear();
    this.#next = undefined;
    this.#sorted = undefined;
    this.loaded = false;
    this.#changed();
  }

  /** @internal */
  receive(message: Message, me: UserId | undefined): void {
    const { conversation, seq, messageId, at, sender, kind, deleted, rev = 0 } = message;
    const item = this.get(conversation);
    if (!item) {
      if (this.#outside.has(conversation)) return;
      this.#unknown.add(conversation);
      return void this.#refresh().catch(() => {});
    }
    if (seq <= item.lastSeq) return;
    const preview = previewOf(message);
    const lastMessage = { seq, messageId, at, sender, kind, preview, ...(deleted && { deleted: true }) };
    if (kind !== 'text' || deleted) this.#uncount(conversation, seq, rev);
    const counted = seq - item.lastSeq - this.#uncountedIn(conversation, item.lastSeq, seq);
    const isOwn = sender === me;
    this.#store({ ...item, lastSeq: seq, lastMessage, ...(isOwn ? { readSeq: seq, unread: 0 } : { unread: item.unread + counted }) });
  }

  /** @internal Applies edits and deletions to the preview and to the number of unread messages. */
  changed({ conversation, rev, items }: Changed): void {
    const item = this.get(conversation);
    // The changes up to the rev of the item are in it already.
    if (!item || !this.#hasState(conversation) || rev <= item.rev) return;
    let { unread, lastMessage } = item;
    for (const { seq, rev, deleted, body, attachments } of items) {
      if (rev <= item.rev) continue;
      if (deleted && seq > item.readSeq && this.#uncount(conversation, seq, rev) && seq <= item.lastSeq) unread--;
      if (lastMessage?.seq !== seq) continue;
      if (deleted) lastMessage = { ...lastMessage, preview: '', deleted: true };
      else if (body !== undefined) lastMessage = { ...lastMessage, preview: previewOf({ body, attachments }) };
    }
    const now = { ...item, rev, lastMessage, unread: Math.max(0, unread) };
    // Reactions change only the rev, which nobody has to render.
    if (unread === item.unread && lastMessage === item.lastMessage) this.#items.set(conversation, now);
    else this.#store(now);
  }

  /** @internal Loads the inbox again, because the client missed too many changes of a conversation. */
  reset(conversation: ConversationId): void {
    const item = this.get(conversation);
    // Until then, later changes are not enough.
    if (item) this.#items.set(conversation, { ...item, rev: NO_STATE });
    this.#refresh(true).catch(() => {});
  }

  /** Whether the preview and the number of unread messages are known as of some rev. */
  #hasState(conversation: ConversationId): boolean {
    return (this.get(conversation)?.rev ?? NO_STATE) !== NO_STATE;
  }

  /** @internal */
  receipt({ conversation, user, readSeq }: Receipt, me: UserId | undefined): void {
    const item = this.get(conversation);
    if (!item || user !== me || !readSeq) return;
    this.#store(this.#read(item, readSeq));
    // The gateway has the watermark, so it knows the number.
    if (this.#inexact.has(conversation)) this.#refresh().catch(() => {});
  }

  /** @internal Applies what the user set for a conversation, on this device or another one. */
  settings({ conversation, version, mutedUntil, push }: Settings): void {
    const item = this.get(conversation);
    if (!item || version <= (item.settingsVersion ?? 0)) return;
    const set = { ...(mutedUntil !== undefined && { mutedUntil }), ...(push && { push }) };
    this.#store({ ...item, ...set, settingsVersion: version });
  }

  /** @internal Marks as read on this device; the gateway does not know it yet. */
  read(conversation: ConversationId, seq: Seq): void {
    const item = this.get(conversation);
    if (item) this.#store(this.#read(item, seq));
  }

  /** Returns an item with a higher read watermark. */
  #read(item: InboxItem, seq: Seq): InboxItem {
    const { conversation, readSeq, lastSeq } = item;
    if (seq <= readSeq) return item;
    let unread = 0;
    if (seq < lastSeq) {
      const counted = this.#host.countMessages(conversation, readSeq, seq);
      const left = lastSeq - seq - this.#uncountedIn(conversation, seq, lastSeq);
      const isKnown = item.unread === lastSeq - readSeq - this.#uncountedIn(conversation, readSeq, lastSeq);
      if (counted === undefined && !isKnown) this.#inexact.add(conversation);
      unread = counted === undefined ? Math.min(item.unread, left) : Math.max(0, item.unread - counted);
    } else this.#inexact.delete(conversation);
    const uncounted = this.#uncounted.get(conversation);
    for (const known of uncounted?.keys() ?? []) if (known <= seq) uncounted!.delete(known);
    return { ...item, readSeq: seq, unread };
  }

  /** Notes that an entry does not count as unread. Returns whether that is new. */
  #uncount(conversation: ConversationId, seq: Seq, rev: Rev): boolean {
    let seqs = this.#uncounted.get(conversation);
    if (!seqs) this.#uncounted.set(conversation, (seqs = new Map()));
    if (seqs.has(seq)) return false;
    seqs.set(seq, rev);
    return true;
  }

  #uncountedIn(conversation: ConversationId, from: Seq, to: Seq, after: Rev = -1): number {
    const seqs = [...(this.#uncounted.get(conversation) ?? [])];
    return seqs.filter(([seq, rev]) => seq > from && seq <= to && rev > after).length;
  }

  /** @internal */
  remove(conversation: ConversationId): void {
    this.#uncounted.delete(conversation);
    this.#inexact.delete(conversation);
    if (this.#items.delete(conversation)) this.#touched(conversation);
  }

  /** Stores an item of a page. The known one may be newer, if messages, changes or receipts came while the page was loaded. */
  #set(item: InboxItem): void {
    const { conversation } = item;
    const known = this.get(conversation);
    if (!known) return this.#store(item);
    const rev = Math.max(item.rev, known.rev);
    const isNewer = known.lastSeq > item.lastSeq || (known.lastSeq === item.lastSeq && known.rev > item.rev);
    const { lastSeq, lastMessage } = isNewer ? known : item;
    const later = lastSeq - item.lastSeq - this.#uncountedIn(conversation, item.lastSeq, lastSeq);
    // The page does not contain these deletions.
    const deleted = this.#uncountedIn(conversation, item.readSeq, item.lastSeq, item.rev);
    const { settingsVersion = 0, mutedUntil, push } = known;
    const set = settingsVersion > (item.settingsVersion ?? 0) && { settingsVersion, mutedUntil, push };
    const now = { ...item, ...set, rev, lastSeq, lastMessage, unread: Math.max(0, item.unread + later - deleted) };
    this.#inexact.delete(conversation);
    // The gateway may not have the watermark yet.
    this.#store(this.#read(now, known.readSeq));
  }

  #store(now: InboxItem): void {
    const { conversation } = now;
    if (isSame(this.get(conversation), now)) return;
    this.#items.set(conversation, now);
    this.#touched(conversation);
  }

  #touched(conversation: ConversationId): void {
    this.#sorted = undefined;
    this.#host.changed(conversation);
    this.#changed();
  }
}

/** Returns the beginning of a text, or without text the name, or else the URL, of the first attachment. */
function previewOf({ body, attachments }: { body: string; attachments?: Attachment[] | undefined }): LastMessage['preview'] {
  const [first] = attachments ?? [];
  return cut(body || first?.name || first?.url || '', PREVIEW_CHARS);
}
