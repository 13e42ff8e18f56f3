/** One conversation: a live, ordered list of its messages without gaps, and everything one can do with it. */
import { backoff } from './backoff.js';
import type { ChatClient } from './client.js';
import type { ChatError } from './codes.js';
import { type Dispose, Emitter } from './emitter.js';
import { gathered, isSame } from './gather.js';
import type { Pending } from './outbox.js';
import { type Paging, pages } from './pages.js';
import { Timeline } from './timeline.js';
import type {
  Attachment,
  ConversationDetails,
  ConversationId,
  HistoryPage,
  InboxItem,
  Kind,
  Message,
  Participant,
  Posting,
  Receipt,
  Replies,
  Request,
  Role,
  Sent,
  Seq,
  SystemChange,
  UserId,
} from './types.js';

/** `sending` includes waiting for a connection. `delivered` and `read` mean by everyone else; in channels a message
 * stays `sent`. */
export type MessageState = 'sending' | 'sent' | 'delivered' | 'read' | 'failed';

/** A message as it is shown: stored, or on its way. */
export interface ChatMessage extends Omit<Message, 'seq' | 'messageId'> {
  /** The same before and after it is stored. */
  key: string;
  /** Its place; not there yet while it is on its way. */
  seq?: Seq | undefined;
  /** Of one's own text messages. */
  state?: MessageState | undefined;
  /** Why it failed. */
  error?: { code: string; message: string } | undefined;
}

export interface ConversationEvents {
  /** Anything that can be read from the conversation has changed. */
  change: Conversation;
  /** Each message, in order, once. */
  message: Message;
}

export interface SendOptions {
  attachments?: Attachment[];
  replyTo?: Seq;
}

/** What a component shows of a conversation. */
export interface ConversationView {
  conversation: Conversation;
  messages: readonly ChatMessage[];
  typing: UserId[];
}

/** A stored message as it is shown. */
type Stored = ChatMessage & { seq: Seq };

/** What is asked about one conversation. */
type About = Extract<Request, { conversation: ConversationId }>;

/** One page of the log, for the list as it was when it was asked for. */
type ReadPage = (where: { before?: Seq; after?: Seq; around?: Seq; limit: number }) => Promise<Stored[]>;

interface Marks {
  deliveredSeq: Seq;
  readSeq: Seq;
}

const FIRST_PAGE = 30;
const PAGE = 10;
const FILL_PAGE = 200;
const WINDOW = 300;
const PARTICIPANTS_PAGE = 200;
/** Of larger conversations, who has read what is not followed. */
const FOLLOWED_MAX = 1_000;
/** After this without another event, somebody has stopped typing. */
const TYPING_MS = 6_000;
const TYPING_EVERY_MS = 3_000;
/** A list that nobody uses is let go then: a component may be mounted again at once. */
const RELEASE_MS = 2_500;

export class Conversation extends Emitter<ConversationEvents> {
  readonly id: ConversationId;
  /** A page is on its way. */
  loading = false;
  /** Why the last page could not be loaded. */
  error: ChatError | undefined;
  /** This user is not in it any more. */
  removed = false;
  /** What is known of it; asked for when it is opened. */
  details: ConversationDetails | undefined;
  #client: ChatClient;
  #head: Seq;
  #timeline: Timeline<Stored>;
  /** Messages that came while the list did not reach up to them: the newest, without gaps. */
  #ahead: Timeline<Stored>;
  #begun = false;
  /** The list is to reach the newest message; it is filled until it does. */
  #following = false;
  #users = 0;
  #releasing: ReturnType<typeof setTimeout> | undefined;
  /** The pages that are on their way, one after the other. */
  #pages: Promise<unknown> = Promise.resolve();
  #filling = false;
  #failures = 0;
  #retrying: ReturnType<typeof setTimeout> | undefined;
  #epoch = 0;
  #followed: Map<UserId, Marks> | undefined;
  /** How far everyone else has got, as the states of the list say. */
  #least: Marks = { deliveredSeq: 0, readSeq: 0 };
  #typing = new Map<UserId, ReturnType<typeof setTimeout>>();
  #typedAt = 0;
  #looking = false;
  #shown: readonly ChatMessage[] = [];
  #isShown = false;
  #onTheirWay = new Map<string, ChatMessage>();
  #view: ConversationView | undefined;
  #viewOf: unknown[] = [];
  #told: ConversationView | undefined;
  #tell = gathered(() => {
    const before = this.#told;
    this.#told = this.view();
    if (before !== this.#told) this.emit('change', this);
  });

  /** @internal */
  constructor(client: ChatClient, id: ConversationId, window = WINDOW) {
    super();
    this.#client = client;
    this.id = id;
    this.#timeline = new Timeline(window);
    this.#ahead = new Timeline(window);
    this.#head = this.item?.lastSeq ?? 0;
  }

  /** The newest message known of. */
  get head(): Seq {
    return Math.max(this.#head, this.#client.feed.seq(this.id) ?? 0);
  }

  get kind(): Kind | undefined {
    return this.item?.kind ?? this.details?.kind;
  }

  /** Of a dm: the other user. Empty if it is unknown. */
  get name(): string {
    return this.item?.name ?? this.details?.name ?? this.#client.outbox.dms.get(this.id) ?? '';
  }

  get unread(): number {
    return this.item?.unread ?? 0;
  }

  /** This user may send messages; so it is assumed while it is not known. */
  get canSend(): boolean {
    if (this.removed) return false;
    if (!this.details) return true;
    const { posting, role } = this.details;
    return role !== undefined && (posting !== 'admins' || role !== 'member');
  }

  /** The list: stored messages without a gap, then those on their way. A new array whenever it changed. */
  get messages(): readonly ChatMessage[] {
    if (this.#isShown) return this.#shown;
    this.#isShown = true;
    this.#showStates();
    const { entries } = this.#timeline;
    const shown: ChatMessage[] = [...entries];
    const waiting = this.#following || !entries.length ? this.#client.outbox.of(this.id) : [];
    const before = this.#onTheirWay;
    this.#onTheirWay = new Map();
    if (waiting.length) {
      const stored = new Set(entries.map(({ key }) => key));
      for (const entry of waiting) {
        if (stored.has(entry.clientId)) continue;
        const message = onItsWay(entry);
        const known = before.get(message.key);
        // The same object as before if it is the same: what shows it need not look again.
        const same = known && known.seq === message.seq && known.state === message.state && known.at === message.at;
        this.#onTheirWay.set(message.key, same ? known : message);
      }
      shown.push(...this.#onTheirWay.values());
    }
    const isNew = shown.length !== this.#shown.length || shown.some((message, i) => message !== this.#shown[i]);
    if (isNew) this.#shown = shown;
    return this.#shown;
  }

  /** The first message of all is in the list. */
  get atStart(): boolean {
    return this.#begun && (this.#timeline.first === 1 || !this.head);
  }

  /** The newest message is in the list: it is live. */
  get atEnd(): boolean {
    return this.#begun && (this.#timeline.last ?? 0) >= this.head;
  }

  /** Its place in the inbox. */
  get item(): InboxItem | undefined {
    return this.#client.inbox.get(this.id);
  }

  /** Everyone else who is typing. */
  get typing(): UserId[] {
    return [...this.#typing.keys()];
  }

  /** Begins the live list, at the newest message or around `at`; to be disposed of when it is not looked at any more. */
  open({ at }: { at?: Seq } = {}): Dispose {
    clearTimeout(this.#releasing);
    if (++this.#users === 1 && !this.#timeline.entries.length) this.#begin(at);
    this.#hold();
    let open = true;
    return () => {
      if (!open) return;
      open = false;
      if (--this.#users) return;
      this.#releasing = setTimeout(() => this.#release(), RELEASE_MS);
    };
  }

  /** Until the pages asked for are there. */
  async loaded(): Promise<this> {
    await this.#pages;
    if (this.error) throw this.error;
    return this;
  }

  /** Extends the list at its older end. */
  loadOlder(limit = PAGE): Promise<void> {
    return this.#page(async (read) => {
      const before = this.#timeline.first;
      if (!before || this.atStart) return;
      this.#timeline.prepend(await read({ before, limit }));
      this.#timeline.reader = before;
      this.#following = this.atEnd;
    });
  }

  /** Extends the list at its newer end, where that is not live. */
  loadNewer(limit = PAGE): Promise<void> {
    return this.#page(async (read) => {
      this.#timeline.reader = undefined;
      await this.#newer(read, limit);
    });
  }

  /** The list begins anew around this place; without one, at the newest message. */
  jumpTo(seq?: Seq, limit = FIRST_PAGE): Promise<void> {
    const { first = 0, last = 0 } = this.#timeline;
    this.#timeline.reader = seq;
    if (seq === undefined ? this.atEnd : first <= seq && seq <= last) return Promise.resolve();
    return this.#page((read) => this.#load(read, seq, limit));
  }

  /** Sends a message: shown at once, stored when there is a connection. Resolves when it is stored; rejects when it is
   * refused for good. */
  send(body: string, { attachments, replyTo }: SendOptions = {}): Promise<Sent> {
    this.#typedAt = 0;
    return this.#client.outbox.add({ conversation: this.id, body, attachments, replyTo: replyTo });
  }

  /** Sends a failed message again. */
  retry(key: string): void {
    this.#client.outbox.retry(key);
  }

  /** Gives a failed message up. */
  discard(key: string): void {
    this.#client.outbox.discard(key);
  }

  /** Everything up to here has been read. */
  read(seq: Seq = this.head): void {
    const { user, inbox, marks } = this.#client;
    this.#timeline.reader = seq < this.head ? seq : undefined;
    if (seq <= (this.item?.readSeq ?? 0)) return;
    if (user) inbox.receipt({ conversation: this.id, user, readSeq: seq }, user);
    marks.add('read', this.id, seq);
  }

  /** Tells the others that this user is typing; may be called for each key. */
  sendTyping(): void {
    const now = Date.now();
    if (now - this.#typedAt < TYPING_EVERY_MS || this.kind === 'channel') return;
    this.#typedAt = now;
    this.#client.post({ type: 'typing', conversation: this.id });
  }

  /** One page: the newest, or before, after or around a place. */
  history(where: { before?: Seq; after?: Seq; around?: Seq; limit?: number } = {}, signal?: AbortSignal): Promise<HistoryPage> {
    return this.#ask('history', where, signal);
  }

  /** Pages from the newest message back to the first; each oldest first. */
  pages({ limit, before, signal }: Paging & { before?: Seq } = {}): AsyncGenerator<Message[]> {
    return pages(async (at: Seq | undefined = before) => {
      const { messages } = await this.history({ limit, before: at }, signal);
      const first = messages[0]?.seq ?? 1;
      return { items: messages, next: first > 1 ? first : undefined };
    });
  }

  async loadDetails(signal?: AbortSignal): Promise<ConversationDetails> {
    const details = await this.#ask('conversation', {}, signal);
    if (!isSame(details, this.details)) this.details = details;
    this.changed();
    return details;
  }

  /** Everyone in it, page by page. */
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

  /** Looks into a public channel without joining: its messages come from now on, also over new connections. */
  async subscribe(): Promise<void> {
    this.#looking = true;
    this.#hold();
    const after = this.#client.feed.seq(this.id);
    const { head } = await this.#ask('subscribe', { after });
    this.#reaches(head);
    this.#fill();
  }
  async unsubscribe(): Promise<void> {
    this.#looking = false;
    this.#hold();
    await this.#ask('unsubscribe', {});
  }

  /** @internal */
  accept(message: Message): void {
    const { seq, sender, system } = message;
    const { last = 0 } = this.#timeline;
    if (this.#users && seq > last) {
      const stored = this.#stored(message);
      if (this.#following && this.#begun && seq === last + 1) {
        this.#timeline.append([stored]);
        this.#following = this.#timeline.last === seq;
      } else {
        if (seq !== (this.#ahead.last ?? seq) + 1) this.#ahead.reset([stored]);
        else this.#ahead.append([stored]);
        this.#fill();
      }
    }
    this.#reaches(seq);
    this.#stopTyping(sender);
    if (system) this.#follow(message, system);
    this.changed();
    this.emit('message', message);
  }

  /** @internal */
  receipt({ user, readSeq = 0, deliveredSeq = 0 }: Receipt): void {
    const marks = this.#followed?.get(user);
    if (!marks) return;
    marks.readSeq = Math.max(marks.readSeq, readSeq);
    marks.deliveredSeq = Math.max(marks.deliveredSeq, deliveredSeq, readSeq);
    this.changed();
  }

  /** @internal */
  typed(user: UserId): void {
    if (user === this.#client.user) return;
    clearTimeout(this.#typing.get(user));
    this.#typing.set(
      user,
      setTimeout(() => this.#stopTyping(user), TYPING_MS),
    );
    this.changed();
  }

  /** @internal Too much was missed: the list begins anew where it was live. */
  resync(head: Seq): void {
    const live = this.atEnd;
    this.#reaches(head);
    if (!live && !this.#following) return;
    this.#following = true;
    if (!this.#timeline.entries.length) this.#fill();
    else void this.#page((read) => this.#load(read)).catch(() => this.#retry(() => this.#fill()));
  }

  /** @internal */
  detailsChanged(removed: boolean): void {
    this.removed = removed;
    if (this.#users && !removed) {
      void this.#meet();
      this.#fill();
    }
    this.changed();
  }

  /** @internal A new connection: what is not pushed is asked for again. */
  connected(): void {
    if (this.#looking) this.subscribe().catch(() => {});
    if (!this.#users) return;
    void this.#meet();
    this.#fill();
  }

  /** @internal The same object as long as nothing that can be read from it has changed. */
  view(): ConversationView {
    const { messages, typing, loading, atStart, atEnd, head, details, removed, error, item } = this;
    const of = [messages, typing.join(' '), loading, atStart, atEnd, head, details, removed, error, item];
    if (!this.#view || of.some((value, i) => value !== this.#viewOf[i])) {
      this.#viewOf = of;
      this.#view = { conversation: this, messages, typing };
    }
    return this.#view;
  }

  /** The client keeps it as long as somebody listens or follows, whoever else has let go of it. */
  protected override listened(): void {
    this.#told ??= this.view();
    this.#hold();
  }

  #hold(): void {
    this.#client.hold(this, this.#users > 0 || this.#looking || this.hasListeners);
  }

  #ask<T extends About['type']>(
    type: T,
    more: Omit<About & { type: T }, 'type' | 'conversation'>,
    signal?: AbortSignal,
  ): Promise<Replies[T]> {
    return this.#client.request({ ...more, type, conversation: this.id } as About & { type: T }, { signal });
  }

  #begin(at?: Seq): void {
    this.#following = at === undefined;
    void this.#page((read) => this.#load(read, at)).catch(() => this.#retry(() => this.#begin(at)));
    void this.#meet();
  }

  async #load(read: ReadPage, around?: Seq, limit = FIRST_PAGE): Promise<void> {
    const page = await read({ limit, around });
    this.#timeline.reset(page);
    this.#timeline.reader = around;
    this.#begun = true;
    this.#following = around === undefined;
    if (this.#following || this.atEnd) await this.#newer(read, FILL_PAGE);
  }

  /** Reads on until the list is as long as was asked for, and up to the newest message if that is near or followed. */
  async #newer(read: ReadPage, limit: number): Promise<void> {
    for (;;) {
      this.#catchUp();
      const { last: after } = this.#timeline;
      if (!after || this.atEnd) break;
      const page = await read({ after, limit });
      this.#timeline.append(page);
      this.#catchUp();
      if (this.atEnd) break;
      if (this.#timeline.last === after) {
        // The list is full, and its reader is elsewhere.
        if (!this.#following || page[0]?.seq === after + 1) break;
        // What lies between cannot be read: the list begins anew behind it.
        this.#timeline.reset(await read({ limit: FIRST_PAGE }));
        this.#catchUp();
        break;
      }
      // A short page is the last one; what came meanwhile follows it.
      if (!this.#following && page.length >= limit) break;
    }
    this.#following = this.atEnd;
  }

  /** Takes over what came meanwhile. */
  #catchUp(): void {
    this.#timeline.append(this.#ahead.entries);
    if ((this.#ahead.last ?? 0) <= (this.#timeline.last ?? 0)) this.#ahead.reset([]);
  }

  /** A list that follows and does not reach the newest message is continued; one that could not be loaded is loaded. */
  #fill(): void {
    if (!this.#users || this.#filling || this.loading) return;
    if (!this.#begun) return this.error && this.#begin();
    if (!this.#following || this.atEnd) return;
    this.#filling = true;
    const { last } = this.#timeline;
    void this.#page((read) => (last ? this.#newer(read, FILL_PAGE) : this.#load(read)))
      .catch(() => this.#retry(() => this.#fill()))
      .finally(() => {
        this.#filling = false;
        if (!this.error) this.#fill();
      });
  }

  #retry(again: () => void): void {
    clearTimeout(this.#retrying);
    if (!this.error?.temporary || !this.#users) return;
    this.#retrying = setTimeout(again, backoff(this.#failures++));
  }

  /** Pages are loaded one at a time. What was begun for an earlier list is over. */
  #page(load: (read: ReadPage) => Promise<void>): Promise<void> {
    const epoch = this.#epoch;
    const isOver = () => epoch !== this.#epoch;
    const page = this.#pages.then(async () => {
      if (isOver()) return;
      this.loading = true;
      this.changed();
      try {
        await load(async (where) => {
          const { messages, head } = await this.history(where);
          // Nobody waits for it any more.
          if (isOver()) throw head;
          this.#reaches(head);
          return messages.map((message) => this.#stored(message));
        });
        this.error = undefined;
        this.#failures = 0;
        clearTimeout(this.#retrying);
      } catch (error) {
        if (isOver()) return;
        this.error = error as ChatError;
        throw error;
      } finally {
        this.loading = false;
        this.changed();
      }
    });
    this.#pages = page.catch(() => {});
    // What came after the last page had been read.
    void this.#pages.then(() => this.error || this.#fill());
    return page;
  }

  /** Its newest message is this, or one known before. */
  #reaches(head: Seq): void {
    // An empty dm is in no inbox: without a cursor of its own, the first messages would be missed.
    this.#client.feed.begin(this.id, head);
    this.#head = Math.max(this.#head, head);
  }

  #release(): void {
    this.#epoch++;
    this.#timeline.reset([]);
    this.#ahead.reset([]);
    this.#begun = this.#following = false;
    this.#followed = undefined;
    clearTimeout(this.#retrying);
    this.#hold();
    this.changed();
  }

  /** Asks what it is, and who has read how far. */
  async #meet(): Promise<void> {
    const epoch = this.#epoch;
    try {
      const { kind, participantCount } = await this.loadDetails();
      if (kind === 'channel' || participantCount > FOLLOWED_MAX) return;
      const followed = new Map<UserId, Marks>();
      for await (const page of this.participants({ limit: PARTICIPANTS_PAGE }))
        for (const { user, deliveredSeq = 0, readSeq = 0 } of page) followed.set(user, { deliveredSeq, readSeq });
      if (epoch !== this.#epoch) return;
      this.#followed = followed;
      this.changed();
    } catch {
      // The next connection asks again; until then messages are `sent`.
    }
  }

  /** Who came and who went. */
  #follow({ seq, sender }: Message, system: SystemChange): void {
    const user = 'user' in system ? system.user : sender;
    if (system.change === 'added' || system.change === 'joined') {
      this.#followed?.set(user, { deliveredSeq: seq, readSeq: seq });
    }
    if (system.change === 'removed' || system.change === 'left') this.#followed?.delete(user);
    if (this.#users && this.details) void this.loadDetails().catch(() => {});
  }

  /** A message as it is shown, with the state it has by what is known so far. */
  #stored(message: Message): Stored {
    const own = message.sender === this.#client.user && message.kind === 'text';
    return { ...message, key: message.clientId, state: own ? this.#stateOf(message.seq) : undefined };
  }

  #stateOf(seq: Seq): MessageState {
    const { readSeq, deliveredSeq } = this.#least;
    return seq <= readSeq ? 'read' : seq <= deliveredSeq ? 'delivered' : 'sent';
  }

  /** Brings the states of one's own messages up to date, if somebody has got further. */
  #showStates(): void {
    let [deliveredSeq, readSeq] = [Infinity, Infinity];
    for (const [user, marks] of this.#followed ?? []) {
      if (user === this.#client.user) continue;
      deliveredSeq = Math.min(deliveredSeq, marks.deliveredSeq);
      readSeq = Math.min(readSeq, marks.readSeq);
    }
    // There is nobody else, or nobody is followed.
    if (deliveredSeq === Infinity) deliveredSeq = readSeq = 0;
    if (isSame(this.#least, { deliveredSeq, readSeq })) return;
    this.#least = { deliveredSeq, readSeq };
    for (const [i, message] of this.#timeline.entries.entries()) {
      const state = message.state && this.#stateOf(message.seq);
      if (state !== message.state) this.#timeline.entries[i] = { ...message, state };
    }
  }

  #stopTyping(user: UserId): void {
    clearTimeout(this.#typing.get(user));
    if (this.#typing.delete(user)) this.changed();
  }

  /** @internal */
  changed(): void {
    this.#isShown = false;
    if (this.hasListeners) this.#tell();
  }
}

function onItsWay(entry: Pending): ChatMessage {
  const { clientId, conversation, body, attachments, replyTo, user: sender, failed: error, sent } = entry;
  const state = error ? 'failed' : sent ? 'sent' : 'sending';
  const message = { conversation, clientId, body, sender, key: clientId, kind: 'text' as const, state, error } as const;
  // Once it is stored, the gateway's clock is what counts.
  return { ...message, at: sent?.at ?? entry.at, seq: sent?.seq, ...(attachments && { attachments }), ...(replyTo && { replyTo }) };
}
