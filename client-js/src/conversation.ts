/** One conversation: a live, ordered list of its messages without gaps, and everything one can do with it. */
import type { ChatClient } from './client.js';
import type { ChatError } from './codes.js';
import { type Dispose, Emitter } from './emitter.js';
import type { Pending } from './outbox.js';
import { type Paging, pages } from './pages.js';
import { Timeline } from './timeline.js';
import type {
  Attachment,
  ConversationDetails,
  ConversationId,
  HistoryPage,
  InboxItem,
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

/** What is asked about one conversation. */
type About = Extract<Request, { conversation: ConversationId }>;

/** One page of the log, for the list as it was when it was asked for. */
type ReadPage = (where: { before?: Seq; after?: Seq; around?: Seq; limit: number }) => Promise<Message[]>;

interface Marks {
  deliveredSeq: Seq;
  readSeq: Seq;
}

const FIRST_PAGE = 30;
const PAGE = 10;
const PARTICIPANTS_PAGE = 200;
/** Of larger conversations, who has read what is not followed. */
const FOLLOWED_MAX = 1_000;
/** Watermarks are gathered for so long. */
const MARK_MS = 200;
/** After this without another event, somebody has stopped typing. */
const TYPING_MS = 6_000;
const TYPING_EVERY_MS = 3_000;
/** A list that nobody uses is let go then: a component may be mounted again at once. */
const RELEASE_MS = 2_500;

export class Conversation extends Emitter<ConversationEvents> {
  readonly id: ConversationId;
  /** The newest message known of. */
  head: Seq;
  /** A page is on its way. */
  loading = false;
  /** Why the last page could not be loaded. */
  error: ChatError | undefined;
  /** This user is not in it any more. */
  removed = false;
  /** What is known of it; asked for when it is opened. */
  details: ConversationDetails | undefined;
  #client: ChatClient;
  #timeline = new Timeline();
  #begun = false;
  #users = 0;
  #releasing: ReturnType<typeof setTimeout> | undefined;
  /** The pages that are on their way, one after the other. */
  #pages: Promise<unknown> = Promise.resolve();
  #epoch = 0;
  #followed: Map<UserId, Marks> | undefined;
  #typing = new Map<UserId, ReturnType<typeof setTimeout>>();
  #typedAt = 0;
  #marks = { read: 0, delivered: 0 };
  #told = { read: 0, delivered: 0 };
  #telling = false;
  #looking = false;
  #shown: readonly ChatMessage[] | undefined;
  #cache = new Map<string, ChatMessage>();

  /** @internal */
  constructor(client: ChatClient, id: ConversationId) {
    super();
    this.#client = client;
    this.id = id;
    this.head = this.item?.lastSeq ?? 0;
  }

  /** The list: stored messages without a gap, then those on their way. A new array whenever it changed. */
  get messages(): readonly ChatMessage[] {
    if (this.#shown) return this.#shown;
    const me = this.#client.user;
    const [delivered, read] = [this.#least('deliveredSeq'), this.#least('readSeq')];
    const shown: ChatMessage[] = this.#timeline.messages.map((message) => {
      const { clientId: key, seq } = message;
      const state = seq <= read ? 'read' : seq <= delivered ? 'delivered' : 'sent';
      const own = message.sender === me && message.kind === 'text';
      return this.#reuse({ ...message, key, state: own ? state : undefined });
    });
    if (this.atEnd || !this.#timeline.messages.length) {
      const stored = new Set(shown.map(({ key }) => key));
      for (const entry of this.#client.outbox.of(this.id)) {
        if (!stored.has(entry.clientId)) shown.push(this.#reuse(onItsWay(entry)));
      }
    }
    this.#cache = new Map(shown.map((message) => [message.key, message]));
    this.#shown = shown;
    return shown;
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
    if (++this.#users === 1 && !this.#timeline.messages.length) this.#begin(at);
    let open = true;
    return () => {
      if (!open) return;
      open = false;
      if (--this.#users === 0) this.#releasing = setTimeout(() => this.#release(), RELEASE_MS);
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
      if (before && !this.atStart) this.#timeline.prepend(await read({ before, limit }));
    });
  }

  /** Extends the list at its newer end, where that is not live. */
  loadNewer(limit = PAGE): Promise<void> {
    return this.#page((read) => this.#newer(read, limit));
  }

  /** The list begins anew around this place; without one, at the newest message. */
  jumpTo(seq?: Seq, limit = FIRST_PAGE): Promise<void> {
    const here = this.#timeline.messages;
    if (seq === undefined ? this.atEnd : here.some((message) => message.seq === seq)) return Promise.resolve();
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
    const { user, inbox } = this.#client;
    if (user) inbox.receipt({ conversation: this.id, user, readSeq: seq }, user);
    this.mark('read', seq);
  }

  /** Tells the others that this user is typing; may be called for each key. */
  sendTyping(): void {
    const now = Date.now();
    if (now - this.#typedAt < TYPING_EVERY_MS || this.#kind === 'channel') return;
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
    this.details = await this.#ask('conversation', {}, signal);
    this.changed();
    return this.details;
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
    const after = this.#client.feed.seq(this.id);
    const { head } = await this.#ask('subscribe', { after });
    this.#reaches(head);
  }
  async unsubscribe(): Promise<void> {
    this.#looking = false;
    await this.#ask('unsubscribe', {});
  }

  /** @internal */
  accept(message: Message): void {
    const { seq, sender, system } = message;
    if (this.atEnd) this.#timeline.append([message]);
    this.#reaches(seq);
    this.#stopTyping(sender);
    if (sender !== this.#client.user && this.item && this.#kind !== 'channel') void this.mark('delivered', seq);
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
    if (live && this.#timeline.messages.length) void this.#page((read) => this.#load(read)).catch(() => {});
  }

  /** @internal */
  detailsChanged(removed: boolean): void {
    this.removed = removed;
    if (this.#users) void this.#meet();
    this.changed();
  }

  /** @internal A new connection: what is not pushed is asked for again. */
  connected(): void {
    if (this.#looking) this.subscribe().catch(() => {});
    void this.mark('read', 0);
    if (!this.#users) return;
    void this.#meet();
    // A list that could not be loaded is now.
    if (!this.#timeline.messages.length && this.error) this.#begin();
  }

  get #kind() {
    return this.item?.kind ?? this.details?.kind;
  }

  #ask<T extends About['type']>(
    type: T,
    more: Omit<About & { type: T }, 'type' | 'conversation'>,
    signal?: AbortSignal,
  ): Promise<Replies[T]> {
    return this.#client.request({ ...more, type, conversation: this.id } as About & { type: T }, { signal });
  }

  #begin(at?: Seq): void {
    void this.#page((read) => this.#load(read, at)).catch(() => {});
    void this.#meet();
  }

  async #load(read: ReadPage, around?: Seq, limit = FIRST_PAGE): Promise<void> {
    this.#timeline.reset(await read({ limit, around }));
    this.#begun = true;
    if (!around) await this.#newer(read, 200);
  }

  /** What came while a page was on its way, or after what is held. */
  async #newer(read: ReadPage, limit: number): Promise<void> {
    const after = this.#timeline.last;
    if (after && !this.atEnd) this.#timeline.append(await read({ after, limit }));
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
          return messages;
        });
        this.error = undefined;
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
    return page;
  }

  /** Its newest message is this, or one known before. */
  #reaches(head: Seq): void {
    // An empty dm is in no inbox: without a cursor of its own, the first messages would be missed.
    this.#client.feed.begin(this.id, head);
    this.head = Math.max(this.head, head);
  }

  #release(): void {
    this.#epoch++;
    this.#timeline.reset([]);
    this.#begun = false;
    this.#followed = undefined;
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

  /** How far everyone else has got. */
  #least(mark: keyof Marks): Seq {
    const others = [...(this.#followed ?? [])].filter(([user]) => user !== this.#client.user);
    return others.length && Math.min(...others.map(([, marks]) => marks[mark]));
  }

  /** The same object as before if it is the same: what shows it need not look again. */
  #reuse(message: ChatMessage): ChatMessage {
    const known = this.#cache.get(message.key);
    return known && known.seq === message.seq && known.state === message.state ? known : message;
  }

  #stopTyping(user: UserId): void {
    clearTimeout(this.#typing.get(user));
    if (this.#typing.delete(user)) this.changed();
  }

  /** @internal Tells the gateway a watermark; many in a row are one. What could not be told is with the next connection. */
  async mark(type: 'read' | 'delivered', seq: Seq): Promise<void> {
    this.#marks[type] = Math.max(this.#marks[type], seq);
    if (this.#telling) return;
    this.#telling = true;
    try {
      for (let told = false; !told; ) {
        await new Promise((wait) => setTimeout(wait, MARK_MS));
        told = true;
        // Who has read it, has got it.
        for (const type of ['read', 'delivered'] as const) {
          const seq = this.#marks[type];
          if (seq <= Math.max(this.#told[type], this.#told.read)) continue;
          await this.#ask(type, { seq });
          this.#told[type] = seq;
          told = false;
        }
      }
    } catch {
      // It was removed, or there is no connection.
    }
    this.#telling = false;
  }

  /** @internal */
  changed(): void {
    this.#shown = undefined;
    this.emit('change', this);
  }
}

function onItsWay(entry: Pending): ChatMessage {
  const { clientId, user, failed, sent } = entry;
  const state = failed ? 'failed' : sent ? 'sent' : 'sending';
  return { ...entry, key: clientId, sender: user, kind: 'text', seq: sent?.seq, state, error: failed };
}
