/** One conversation: a live, ordered list of its messages without gaps, and everything one can do with it. */
import type { Feed } from './feed.js';
import { gathered, isSame } from './gather.js';
import type { Inbox } from './inbox.js';
import { type ChatMessage, List, type Stored } from './list.js';
import type { Marks } from './marks.js';
import type { Outbox, Pending } from './outbox.js';
import { type Paging, pages } from './pages.js';
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

/** What a conversation needs of its client. */
export interface Host {
  readonly user: UserId | undefined;
  readonly inbox: Inbox;
  readonly outbox: Outbox;
  readonly feed: Feed;
  readonly marks: Marks;
  request<R extends Request>(request: R, options?: { signal?: AbortSignal | undefined }): Promise<Replies[R['type']]>;
  /** Sends a request that has no answer. */
  post(request: Request): void;
  /** Keeps the conversation, or lets it be collected. */
  hold(conversation: Conversation, held: boolean): void;
}

/** What is asked about one conversation. */
type About = Extract<Request, { conversation: ConversationId }>;

interface Watermarks {
  deliveredSeq: Seq;
  readSeq: Seq;
}

/** What makes a view another one. */
const VIEWED = ['messages', 'typing', 'loading', 'atStart', 'atEnd', 'head', 'details', 'removed', 'error', 'item'] as const;
const WINDOW = 300;
const PARTICIPANTS_PAGE = 200;
/** Of larger conversations, who has read what is not followed. */
const FOLLOWED_MAX = 1_000;
/** After this without another event, somebody has stopped typing. */
const TYPING_MS = 6_000;
const TYPING_EVERY_MS = 3_000;

export class Conversation extends List<ConversationEvents> {
  readonly id: ConversationId;
  /** This user is not in it any more. */
  removed = false;
  /** What is known of it; asked for when it is opened. */
  details: ConversationDetails | undefined;
  #host: Host;
  #head: Seq;
  #followed: Map<UserId, Watermarks> | undefined;
  #typing = new Map<UserId, ReturnType<typeof setTimeout>>();
  #typedAt = 0;
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

  /** The newest message known of. */
  get head(): Seq {
    return Math.max(this.#head, this.#host.feed.seq(this.id) ?? 0);
  }

  get kind(): Kind | undefined {
    return this.item?.kind ?? this.details?.kind;
  }

  /** Of a dm: the other user. Empty if it is unknown. */
  get name(): string {
    return this.item?.name ?? this.details?.name ?? this.#host.outbox.dms.get(this.id) ?? '';
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
    const { entries } = this.timeline;
    const shown: ChatMessage[] = [...entries];
    const waiting = this.following || !entries.length ? this.#host.outbox.of(this.id) : [];
    if (waiting.length) {
      const stored = new Set(entries.map(({ key }) => key));
      const before = new Map(this.#shown.map((message) => [message.key, message]));
      for (const entry of waiting) {
        const message = onItsWay(entry);
        const known = before.get(message.key);
        // The same object as before if it is the same: what shows it need not look again.
        if (!stored.has(message.key)) shown.push(known && isSame(known, message) ? known : message);
      }
    }
    if (!isSame(shown, this.#shown)) this.#shown = shown;
    return this.#shown;
  }

  /** Its place in the inbox. */
  get item(): InboxItem | undefined {
    return this.#host.inbox.get(this.id);
  }

  /** Everyone else who is typing. */
  get typing(): UserId[] {
    return [...this.#typing.keys()];
  }

  /** Sends a message: shown at once, stored when there is a connection. Resolves when it is stored; rejects when it is
   * refused for good. */
  send(body: string, { attachments, replyTo }: SendOptions = {}): Promise<Sent> {
    this.#typedAt = 0;
    return this.#host.outbox.add({ conversation: this.id, body, attachments, replyTo });
  }

  /** Sends a failed message again. */
  retry(key: string): void {
    this.#host.outbox.retry(key);
  }

  /** Gives a failed message up. */
  discard(key: string): void {
    this.#host.outbox.discard(key);
  }

  /** Everything up to here has been read. */
  read(seq: Seq = this.head): void {
    const { user, inbox, marks } = this.#host;
    this.timeline.reader = seq < this.head ? seq : undefined;
    if (seq <= (this.item?.readSeq ?? 0)) return;
    if (user) inbox.receipt({ conversation: this.id, user, readSeq: seq }, user);
    marks.add('read', this.id, seq);
  }

  /** Tells the others that this user is typing; may be called for each key. */
  sendTyping(): void {
    const now = Date.now();
    if (now - this.#typedAt < TYPING_EVERY_MS || this.kind === 'channel') return;
    this.#typedAt = now;
    this.#host.post({ type: 'typing', conversation: this.id });
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
    this.hold();
    const after = this.#host.feed.seq(this.id);
    const { head } = await this.#ask('subscribe', { after });
    this.reaches(head);
    this.fill();
  }
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
    if (user === this.#host.user) return;
    clearTimeout(this.#typing.get(user));
    this.#typing.set(
      user,
      setTimeout(() => this.#stopTyping(user), TYPING_MS),
    );
    this.changed();
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

  /** @internal A new connection: what is not pushed is asked for again. */
  connected(): void {
    if (this.#looking) this.subscribe().catch(() => {});
    if (!this.users) return;
    void this.meet();
    this.fill();
  }

  /** @internal The same object as long as nothing that can be read from it has changed. */
  view(): ConversationView {
    const of = VIEWED.map((name) => this[name]);
    if (!this.#view || !isSame(of, this.#viewOf)) {
      this.#viewOf = of;
      this.#view = { conversation: this, messages: this.messages, typing: this.typing };
    }
    return this.#view;
  }

  /** The client keeps it as long as somebody listens or follows, whoever else has let go of it. */
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

  /** @internal Its newest message is this, or one known before. */
  protected reaches(head: Seq): void {
    // An empty dm is in no inbox: without a cursor of its own, the first messages would be missed.
    this.#host.feed.begin(this.id, head);
    this.#head = Math.max(this.#head, head);
  }

  /** @internal */
  protected released(): void {
    this.#followed = undefined;
    this.hold();
    this.changed();
  }

  /** @internal Asks what it is, and who has read how far. */
  protected async meet(): Promise<void> {
    const epoch = this.epoch;
    try {
      const { kind, participantCount } = await this.loadDetails();
      if (kind === 'channel' || participantCount > FOLLOWED_MAX) return;
      const followed = new Map<UserId, Watermarks>();
      for await (const page of this.participants({ limit: PARTICIPANTS_PAGE }))
        for (const { user, deliveredSeq = 0, readSeq = 0 } of page) followed.set(user, { deliveredSeq, readSeq });
      if (epoch !== this.epoch) return;
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
    if (this.users && this.details) void this.loadDetails().catch(() => {});
  }

  /** @internal A message as it is shown; `#showStates` finds its state. */
  protected stored(message: Message): Stored {
    const own = message.sender === this.#host.user && message.kind === 'text';
    return { ...message, key: message.clientId, state: own ? 'sent' : undefined };
  }

  /** Brings the states of one's own messages up to date with how far everyone else has got. */
  #showStates(): void {
    const others = [...(this.#followed ?? [])].filter(([user]) => user !== this.#host.user);
    // Where there is nobody else, or nobody is followed, messages are `sent`.
    const least = (name: keyof Watermarks) => (others.length ? Math.min(...others.map(([, marks]) => marks[name])) : 0);
    const [readSeq, deliveredSeq] = [least('readSeq'), least('deliveredSeq')];
    for (const [i, message] of this.timeline.entries.entries()) {
      const { seq } = message;
      const state = message.state && (seq <= readSeq ? 'read' : seq <= deliveredSeq ? 'delivered' : 'sent');
      if (state !== message.state) this.timeline.entries[i] = { ...message, state };
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
