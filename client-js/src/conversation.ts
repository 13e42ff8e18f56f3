/** A conversation: the live list of its messages, and the requests about it. */
import * as changes from './changes.js';
import type { Host } from './conversation-host.js';
import { asOf } from './feed.js';
import { gathered, isSame } from './gather.js';
import { type ChatMessage, List, type Stored } from './list.js';
import { FOR_EVER, isMuted } from './muting.js';
import type { EditOptions, SendOptions } from './options.js';
import { onItsWay, type Pending } from './outbox-entry.js';
import { type Paging, pages } from './pages.js';
import type { ChangeTarget, OutboxEntry } from './storage.js';
import type {
  Accepted,
  Attachment,
  Changed,
  ChangedItem,
  ConversationDetails,
  ConversationId,
  HistoryPage,
  InboxItem,
  Kind,
  Message,
  Millis,
  Participant,
  Posting,
  Reacted,
  Receipt,
  Replies,
  Request,
  Rev,
  Role,
  Sent,
  Seq,
  SystemChange,
  UserId,
} from './types.js';
import { Typists } from './typists.js';
import type { AttachOptions, Upload } from './upload.js';

/** The events of a conversation, by name. */
export interface ConversationEvents {
  /** Any property of the conversation changed. */
  change: Conversation;
  /** A message of this conversation. Each comes once, in order. */
  message: Message;
  /** Entries of this conversation were edited or deleted, or got other reactions. Each change comes once, in order. */
  changed: Changed;
}

/** A view of a conversation that never changes, for a component to render. */
export interface ConversationView {
  conversation: Conversation;
  messages: readonly ChatMessage[];
  typing: UserId[];
}

/** A request about one conversation. */
type About = Extract<Request, { conversation: ConversationId }>;

/** How far one user received and read the conversation. */
interface Watermarks {
  deliveredSeq: Seq;
  readSeq: Seq;
}

/** The properties whose change makes a new view. */
const VIEWED = [
  ...(['messages', 'typing', 'loading', 'loaded', 'atStart', 'atEnd', 'head'] as const),
  ...(['details', 'name', 'removed', 'error', 'item', 'quoted'] as const),
];
const WINDOW = 300;
const PARTICIPANTS_PAGE = 200;
/** The largest conversation, in participants, whose watermarks are followed. */
const FOLLOWED_MAX = 1_000;
/** The number of messages outside of the list that are kept, for replies that quote them: more than a list can show. */
const QUOTES_MAX = WINDOW + 100;
/** The least time between two `typing` requests. */
const TYPING_EVERY_MS = 3_000;

/** A conversation of the client's user, or a public one. `client.conversation(id)` returns it. */
export class Conversation extends List<ConversationEvents> {
  readonly id: ConversationId;
  /** Whether the user left or was removed, or a channel was made private while the user only subscribed to it. */
  removed = false;
  /** The details; loaded when the list is opened. */
  details: ConversationDetails | undefined;
  /** @internal The other user of a direct chat, which is in no inbox before its first message. */
  other: UserId | undefined;
  #host: Host;
  #head: Seq;
  /** The watermarks of all users that were heard of since the participants began to load. */
  #marks: Map<UserId, Watermarks> | undefined;
  /** The participants, once they are loaded. */
  #followed: Set<UserId> | undefined;
  /** Messages outside of the list that replies quote. Replaced after each change of one. */
  #quotes: ReadonlyMap<Seq, Stored> = new Map();
  /** Messages as they were shown with their pending changes, by key. */
  #changed = new Map<string, ChatMessage>();
  #typists = new Typists(() => this.changed());
  #typedAt = -Infinity;
  #looking = false;
  #shown: readonly ChatMessage[] = [];
  #isShown = false;
  #view: ConversationView | undefined;
  #viewOf: unknown[] = [];
  #told: ConversationView | undefined;
  #tell = gathered(() => {
    const before = this.#told;
    this.#told = this.view();
    if (before !== this.#told) this.emit('change', this);
  });

  /** @internal */
  constructor(host: Host, id: ConversationId, window = WINDOW) {
    super(window);
    this.#host = host;
    this.id = id;
    this.#head = this.item?.lastSeq ?? 0;
  }

  /** The highest known seq. */
  get head(): Seq {
    return Math.max(this.#head, this.#host.feed.seq(this.id) ?? 0);
  }

  /** The kind; undefined while it is unknown. */
  get kind(): Kind | undefined {
    return this.item?.kind ?? this.details?.kind;
  }

  /** The name; of a dm, the other user. Empty while it is unknown. */
  get name(): string {
    return this.item?.name || this.details?.name || this.other || this.#host.outbox.dms.get(this.id) || '';
  }

  /** The number of unread messages. */
  get unread(): number {
    return this.item?.unread ?? 0;
  }

  /** Whether the user muted the conversation, and that time is not over. */
  get muted(): boolean {
    return !!this.item && isMuted(this.item, this.#host.now());
  }

  /** Whether the user may send messages. True while the details are unknown. */
  get canSend(): boolean {
    if (this.removed) return false;
    if (!this.details) return true;
    const { posting, role } = this.details;
    return role !== undefined && (posting !== 'admins' || role !== 'member');
  }

  /** The messages of the list: stored ones without a gap, then pending ones. A new array after each change. */
  get messages(): readonly ChatMessage[] {
    if (this.#isShown) return this.#shown;
    this.#isShown = true;
    this.#showStates();
    const { entries } = this.timeline;
    const edits = this.#host.outbox.changesOf(this.id);
    const shown: ChatMessage[] = edits.length ? entries.map((entry) => this.#changing(entry, edits)) : [...entries];
    const waiting = this.following || !entries.length ? this.#host.outbox.of(this.id) : [];
    if (waiting.length) {
      const stored = new Set(entries.map(({ key }) => key));
      const before = new Map(this.#shown.map((message) => [message.key, message]));
      for (const entry of waiting) {
        const message = this.#changing(onItsWay(entry, this.#host.ahead), edits);
        const known = before.get(message.key);
        // An equal message stays the same object, so that a component need not render it again.
        if (!stored.has(message.key)) shown.push(known && isSame(known, message) ? known : message);
      }
    }
    if (!isSame(shown, this.#shown)) this.#shown = shown;
    return this.#shown;
  }

  /** @internal The loaded messages outside of the list. */
  get quoted(): ReadonlyMap<Seq, Stored> {
    return this.#quotes;
  }

  /** Returns a message of the list, or one that `loadMessage` loaded. It is a new object after each change. */
  message(seq: Seq): ChatMessage | undefined {
    const { first = 0, last = 0 } = this.timeline;
    if (first <= seq && seq <= last) return this.messages[seq - first];
    const quote = this.#quotes.get(seq);
    return quote && this.#changing(quote, this.#host.outbox.changesOf(this.id));
  }

  /** Loads a message, for example one that a reply quotes. While the list is open, `message(seq)` has its newest state. */
  async loadMessage(seq: Seq, signal?: AbortSignal): Promise<ChatMessage | undefined> {
    const known = this.message(seq);
    if (known) return known;
    const { messages, rev } = await this.history({ around: seq, limit: 1 }, signal);
    const found = messages.find((message) => message.seq === seq);
    if (!found) return;
    const quotes = new Map(this.#quotes).set(seq, this.stored(asOf(found, rev), true));
    const [oldest] = quotes.keys();
    if (quotes.size > QUOTES_MAX) quotes.delete(oldest!);
    this.#quotes = quotes;
    this.changed();
    return this.message(seq);
  }

  /** The inbox item of the conversation. */
  get item(): InboxItem | undefined {
    return this.#host.inbox.get(this.id);
  }

  /** The other users who are typing. */
  get typing(): UserId[] {
    return this.#typists.users;
  }

  /** Sends a message. It is in the list at once, and is sent when there is a connection and its files are ready. Resolves
   * when the gateway acknowledged it; rejects when it failed for good. */
  send(body: string, { attachments: files, replyTo }: SendOptions = {}): Promise<Sent> {
    this.#typedAt = -Infinity;
    return this.#host.outbox.add({ conversation: this.id, body, replyTo }, files);
  }

  /** Uploads a file for a message of this conversation. Pass what it returns to `send()`, at once or later. */
  attach(blob: Blob, options: AttachOptions = {}): Upload {
    return this.#host.upload(this.id, blob, options);
  }

  /** Replaces the text of a message of the user, and its attachments if they are passed: without them it keeps those that it
   * has, and `[]` removes all. It is shown at once, and sent when there is a connection.
   * Resolves when the gateway acknowledged it; rejects, and is undone, when it failed for good: with `conflict` if another
   * device, or another tab, changed the text after the one in `from`.
   * @param message The seq, or the key of a message that is not stored yet. */
  edit(message: Seq | string, body: string, attachments?: Attachment[], { from }: EditOptions = {}): Promise<Accepted> {
    const baseRev = this.#contentRev(message, from);
    const text = { body, attachments: attachments?.slice() };
    return this.#host.outbox.change(this.id, { type: 'edit', ...this.#target(message), ...text, baseRev }, from);
  }

  /** Deletes messages for everybody: at most 256 at once. Resolves, rejects and is undone as `edit`. */
  delete(seqs: Seq | readonly Seq[]): Promise<Accepted> {
    return this.#host.outbox.change(this.id, { type: 'delete', seqs: [seqs].flat() });
  }

  /** Adds a reaction of the user to a message. Resolves, rejects and is undone as `edit`. */
  react(message: Seq | string, emoji: string): Promise<Accepted> {
    return this.#host.outbox.change(this.id, { type: 'react', ...this.#target(message), emoji });
  }

  /** Removes a reaction of the user from a message. Resolves, rejects and is undone as `edit`. */
  unreact(message: Seq | string, emoji: string): Promise<Accepted> {
    return this.#host.outbox.change(this.id, { type: 'unreact', ...this.#target(message), emoji });
  }

  /** Returns one page of who reacted to a message. `after` is the `next` of the page before. */
  reactions(
    seq: Seq,
    { signal, ...where }: { emoji?: string; after?: string; limit?: number; signal?: AbortSignal } = {},
  ): Promise<Replies['reactions']> {
    return this.#ask('reactions', { ...where, seq }, signal);
  }

  /** Sends a failed message or a refused change again. An edit then replaces the text that is shown now. */
  retry(key: string): void {
    this.#host.outbox.retry(key, (seq) => this.#contentRev(seq));
  }

  /** Deletes a failed message, or a refused change. */
  discard(key: string): void {
    this.#host.outbox.discard(key);
  }

  /** Marks everything up to `seq` as read; without it, everything. */
  read(seq: Seq = this.head): void {
    this.timeline.reader = seq < this.head ? seq : undefined;
    if (seq <= (this.item?.readSeq ?? 0)) return;
    this.#host.inbox.read(this.id, seq);
    this.#host.mark('read', this.id, seq);
  }

  /** Shows the others that this user is typing. May be called for each key: at most one request in 3 s is sent. */
  sendTyping(): void {
    const now = performance.now();
    if (now - this.#typedAt < TYPING_EVERY_MS || this.kind === 'channel') return;
    this.#typedAt = now;
    this.#host.post({ type: 'typing', conversation: this.id });
  }

  /** Mutes the conversation on all devices of the user: nothing of it is pushed, and it does not count in the badge.
   * @param until When that ends; `Infinity` for never, null for at once. */
  mute(until: Millis | Date | null): Promise<void> {
    return this.#set({ mutedUntil: Math.min(Number(until), FOR_EVER) });
  }

  /** Turns pushes of this conversation to the user's devices on or off. */
  setPush(push: 'on' | 'off'): Promise<void> {
    return this.#set({ push });
  }

  async #set(what: { mutedUntil?: Millis; push?: 'on' | 'off' }): Promise<void> {
    const { version } = await this.#ask('settings_set', what);
    this.#host.inbox.settings({ ...what, conversation: this.id, version });
  }

  /** Returns one page: the newest, or the one before, after or around a seq. */
  history(where: { before?: Seq; after?: Seq; around?: Seq; limit?: number } = {}, signal?: AbortSignal): Promise<HistoryPage> {
    return this.#host.history({ ...where, type: 'history', conversation: this.id }, signal);
  }

  /** Returns pages from the newest message back to the first. Within a page the oldest message is first. */
  pages({ limit, before, signal }: Paging & { before?: Seq } = {}): AsyncGenerator<Message[]> {
    return pages(async (at: Seq | undefined = before) => {
      const { messages } = await this.history({ limit, before: at }, signal);
      const first = messages[0]?.seq ?? 1;
      return { items: messages, next: first > 1 ? first : undefined };
    });
  }

  /** Loads the details again. */
  async loadDetails(signal?: AbortSignal): Promise<ConversationDetails> {
    const details = await this.#ask('conversation', {}, signal);
    if (!isSame(details, this.details)) this.details = details;
    this.changed();
    return details;
  }

  /** Lists the participants, page by page. */
  participants({ limit, signal }: Paging = {}): AsyncGenerator<Participant[]> {
    return pages((after: UserId | undefined) => this.#ask('participants', { limit, after }, signal));
  }

  add(user: UserId) {
    return this.#ask('add', { user });
  }
  remove(user: UserId) {
    return this.#ask('remove', { user });
  }
  join() {
    return this.#ask('join', {});
  }
  leave() {
    return this.#ask('leave', {});
  }
  setRole(user: UserId, role: Role) {
    return this.#ask('set_role', { user, role });
  }
  update(what: { name?: string; posting?: Posting; public?: boolean }) {
    return this.#ask('update', what);
  }

  /** Subscribes to a public channel without joining it. Its messages come from now on, also after a reconnect. */
  async subscribe(): Promise<void> {
    this.#looking = true;
    this.hold();
    const { feed, changeFeed } = this.#host;
    const after = feed.seq(this.id);
    const { head, rev } = await this.#ask('subscribe', { after, rev: after === undefined ? undefined : changeFeed.rev(this.id) });
    changeFeed.begin(this.id, rev);
    this.reaches(head);
    this.fill();
  }
  /** Ends the subscription. */
  async unsubscribe(): Promise<void> {
    this.#looking = false;
    this.hold();
    await this.#ask('unsubscribe', {});
  }

  /** @internal */
  accept(message: Message): void {
    const { seq, sender, system } = message;
    if (this.users) this.arrived(this.stored(message));
    this.reaches(seq);
    this.#typists.stopped(sender);
    if (system) this.#follow(message, system);
    // The sender of a message has read the earlier ones. The gateway sends no receipt for that.
    else this.receipt({ user: sender, readSeq: seq });
    this.changed();
    this.emit('message', message);
  }

  /** @internal Applies changes to the messages of the list, and to those that replies quote. */
  change(items: readonly ChangedItem[]): void {
    for (const item of items) this.#update((entry) => changes.changed(entry, item, this.#host.user), item.seq);
    this.replace((entry) => this.#upToDate(entry));
    this.changed();
  }

  /** @internal Applies a reaction of the user. */
  reacted({ seq, emoji, on, rev }: Omit<Reacted, 'conversation'>): void {
    this.#update((entry) => changes.reacted(entry, emoji, on, rev), seq);
    this.changed();
  }

  /** @internal Applies a change that the gateway acknowledged, because its event comes later. */
  accepted(entry: OutboxEntry, rev: Rev): void {
    for (const seq of changes.keysOf(entry.change!) as Seq[])
      this.#update((known) => this.#upToDate(changes.acknowledged(known, entry, rev, this.#host.ahead)), seq);
  }

  /** @internal Drops all states, because the client missed too many changes, and reads the list again. */
  reset(): void {
    this.replace(changes.forgotten);
    this.#quotes = new Map();
    this.reread(changes.isNewer);
    this.changed();
  }

  /** @internal Returns how many messages of people are in (from, to]; undefined if the list does not contain them. */
  countMessages(from: Seq, to: Seq): number | undefined {
    const { first = Infinity, last = 0, entries } = this.timeline;
    if (from + 1 < first || to > last) return undefined;
    return entries.filter(({ seq, kind, deleted }) => seq > from && seq <= to && kind === 'text' && !deleted).length;
  }

  #upToDate(entry: Stored): Stored {
    return changes.upTo(entry, this.#host.changeFeed.rev(this.id));
  }

  #update(change: (entry: Stored) => Stored, seq: Seq): void {
    this.replace(change, seq);
    const quote = this.#quotes.get(seq);
    const now = quote && change(quote);
    if (now !== quote) this.#quotes = new Map(this.#quotes).set(seq, now!);
  }

  /** Returns a message with its pending and refused changes. An equal one stays the same object. */
  #changing<M extends ChatMessage>(message: M, waiting: readonly Pending[]): M {
    const { key, seq = key } = message;
    const own = waiting.filter(({ change }) => changes.keysOf(change!).includes(seq));
    if (!own.length) return message;
    const now = changes.pending(message, own, this.#host.ahead);
    const before = this.#changed.get(key) as M;
    if (isSame(before, now)) return before;
    this.#changed.set(key, now);
    return now;
  }

  /** Returns how a change names its message: by its seq, or by its key while it has none. */
  #target(message: Seq | string): ChangeTarget {
    if (typeof message === 'number') return { seq: message };
    const seq = this.messages.find(({ key }) => key === message)?.seq ?? this.#host.outbox.seqOf(message);
    return seq === undefined ? { of: message } : { seq };
  }

  /** Returns the rev of the text that the user sees, or saw in `from`. */
  #contentRev(message: Seq | string, from?: ChatMessage): Rev {
    const { seq } = this.#target(message);
    const now = from && (this.messages.find(({ key }) => key === from.key) ?? (seq && this.message(seq)));
    // The same text counts as seen, whatever its rev: it may be an own edit that was acknowledged meanwhile.
    if (from && !(now && changes.sameText(now, from))) return changes.contentRev(from as Stored);
    if (seq === undefined) return 0;
    const { first = 0, entries } = this.timeline;
    const entry = entries[seq - first] ?? this.#quotes.get(seq);
    // Without the entry, the user saw it elsewhere, for example in a `message` event, and all changes up to the cursor.
    return entry ? changes.contentRev(entry) : this.#host.changeFeed.rev(this.id);
  }

  /** @internal */
  receipt({ user, readSeq = 0, deliveredSeq = 0 }: Omit<Receipt, 'conversation'>): void {
    const known = this.#marks?.get(user);
    const read = Math.max(known?.readSeq ?? 0, readSeq);
    this.#marks?.set(user, { readSeq: read, deliveredSeq: Math.max(known?.deliveredSeq ?? 0, deliveredSeq, read) });
    this.changed();
  }

  /** @internal */
  typed(user: UserId): void {
    if (user !== this.#host.user) this.#typists.typed(user);
  }

  /** @internal */
  detailsChanged(removed: boolean): void {
    this.removed = removed;
    if (this.users && !removed) {
      void this.meet();
      this.fill();
    }
    this.changed();
  }

  /** @internal Ends what only a connection keeps up. */
  disconnected(): void {
    this.#typists.clear();
    this.pause();
  }

  /** @internal Subscribes and loads again on a new connection what the gateway does not push. */
  connected(): void {
    if (this.#looking) this.subscribe().catch(() => {});
    if (!this.users) return;
    void this.meet();
    this.fill();
  }

  /** @internal Returns the current view: the same object until a property changes. */
  view(): ConversationView {
    const of = VIEWED.map((name) => this[name]);
    if (!this.#view || !isSame(of, this.#viewOf)) {
      this.#viewOf = of;
      this.#view = { conversation: this, messages: this.messages, typing: this.typing };
    }
    return this.#view;
  }

  /** Has the client keep the conversation as long as it has a listener or a subscription. */
  protected override listened(): void {
    this.#told ??= this.view();
    this.hold();
  }

  /** @internal */
  protected hold(): void {
    this.#host.hold(this, this.users > 0 || this.#looking || this.hasListeners);
  }

  #ask<T extends About['type']>(
    type: T,
    more: Omit<About & { type: T }, 'type' | 'conversation'>,
    signal?: AbortSignal,
  ): Promise<Replies[T]> {
    return this.#host.request({ ...more, type, conversation: this.id } as About & { type: T }, { signal });
  }

  /** @internal Raises the highest known seq. */
  protected reaches(head: Seq): void {
    // An empty dm is in no inbox. Without a cursor its first messages would be missed.
    this.#host.feed.begin(this.id, head);
    this.#head = Math.max(this.#head, head);
  }

  /** @internal */
  protected released(): void {
    this.#marks = this.#followed = undefined;
    this.#quotes = new Map();
    this.#changed.clear();
    this.hold();
    this.changed();
  }

  /** @internal Loads the details, and the watermarks of all participants. */
  protected async meet(): Promise<void> {
    const epoch = this.epoch;
    try {
      const { kind, participantCount } = await this.loadDetails();
      if (kind === 'channel' || participantCount > FOLLOWED_MAX) return;
      if (epoch === this.epoch) this.#marks ??= new Map();
      const followed = new Set<UserId>();
      for await (const page of this.participants({ limit: PARTICIPANTS_PAGE }))
        for (const participant of page) {
          this.receipt(participant);
          followed.add(participant.user);
        }
      if (kind === 'dm') this.other = [...followed].find((user) => user !== this.#host.user) ?? this.#host.user;
      if (epoch !== this.epoch) return this.changed();
      this.#followed = followed;
      this.changed();
    } catch {
      // The next connection loads them. Until then messages stay `sent`.
    }
  }

  /** Applies a system message to the followed participants. */
  #follow({ seq, sender }: Message, system: SystemChange): void {
    const user = 'user' in system ? system.user : sender;
    if (system.change === 'added' || system.change === 'joined') {
      this.#followed?.add(user);
      this.receipt({ user, readSeq: seq });
    }
    if (system.change === 'removed' || system.change === 'left') this.#followed?.delete(user);
    if (this.users && this.details) void this.loadDetails().catch(() => {});
  }

  /** @internal Returns a stored message as the list shows it; `#showStates` sets its state. */
  protected stored(message: Message, isPage = false): Stored {
    const { clientId: key, sender, kind, seq } = message;
    const own = sender === this.#host.user && kind === 'text';
    // A change may have waited for the seq since before the application was closed.
    if (own) this.#host.outbox.placed(key, seq);
    const { rev: _, ...shown } = message;
    return { ...shown, key, state: own ? 'sent' : undefined, ...changes.stateful(message, isPage) };
  }

  /** Sets the states of the user's own messages by the watermarks of all other participants. */
  #showStates(): void {
    const others = [...(this.#followed ?? [])].filter((user) => user !== this.#host.user);
    // Without other participants, or without their watermarks, messages stay `sent`.
    const least = (name: keyof Watermarks) => (others.length ? Math.min(...others.map((user) => this.#marks!.get(user)![name])) : 0);
    const [readSeq, deliveredSeq] = [least('readSeq'), least('deliveredSeq')];
    for (const [i, message] of this.timeline.entries.entries()) {
      const { seq } = message;
      const state = message.state && (seq <= readSeq ? 'read' : seq <= deliveredSeq ? 'delivered' : 'sent');
      if (state !== message.state) this.timeline.entries[i] = { ...message, state };
    }
  }

  /** @internal */
  changed(): void {
    this.#isShown = false;
    if (this.hasListeners) this.#tell();
  }
}
