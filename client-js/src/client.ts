/** What an application holds: one user's connection to the gateways, and everything reached through it. */
import { backoff, delay, unless } from './backoff.js';
import { json } from './codec.js';
import { ChatError, UnauthorizedError } from './codes.js';
import { Connection, type State, type TokenSource } from './connection.js';
import { Conversation } from './conversation.js';
import { type Dispose, Emitter } from './emitter.js';
import { Feed } from './feed.js';
import { Inbox } from './inbox.js';
import { watchLifecycle } from './lifecycle.js';
import { Marks } from './marks.js';
import { Outbox, uuid } from './outbox.js';
import { type Paging, pages } from './pages.js';
import { indexedDbStorage, memoryStorage, type OutboxStorage } from './storage.js';
import type {
  Connected,
  ConversationChange,
  ConversationId,
  Kind,
  Message,
  Posting,
  Presence,
  PublicConversation,
  Receipt,
  Replies,
  Request,
  Resync,
  Seq,
  ServerEvent,
  Typing,
  UserId,
} from './types.js';

export interface ChatOptions {
  /** Gives a token of this user. Asked at first, when one is about to expire, and when the gateway refuses one; never
   * for a broken connection alone. Throw `UnauthorizedError` to give up; any other error is tried again. */
  token: TokenSource | string;
  /** `json`, or the smaller `msgpack`, which is loaded when it is asked for. */
  codec?: 'json' | 'msgpack';
  /** Where messages wait: IndexedDB in browsers, memory elsewhere. */
  storage?: OutboxStorage;
  /** Whose outbox it is, if known before the first connection: what waits in it is then shown at once. */
  user?: UserId;
  /** For the gateway's logs. */
  device?: string;
  /** Where there is no global one, as in Node before version 22. */
  WebSocket?: unknown;
  /** Cursors of an earlier client (`cursors()`): what came since is sent. */
  cursors?: Record<ConversationId, [Seq, number]>;
  /** Messages that a live list holds; 300, if not given. It is trimmed at the end that is not looked at. */
  window?: number;
}

export interface ClientEvents {
  state: State;
  /** Each message of every conversation: in order within one, once, none left out but by a `resync`. */
  message: Message;
  receipt: Receipt;
  typing: Typing;
  presence: Presence;
  conversation: ConversationChange;
  /** So much was missed that messages up to `head` come by no `message` event: they are in the history. */
  resync: Resync;
  /** Something went wrong that no promise tells of: the storage of the outbox, or the gateway said so. */
  error: Error;
}

export interface RequestOptions {
  signal?: AbortSignal;
  /** For the answer, waiting for a connection and further tries included. */
  timeoutMs?: number;
}

export interface NewConversation {
  name?: string;
  participants?: UserId[];
  public?: boolean;
  posting?: Posting;
  /** A UUID (version 4 or 7): creating it twice is one conversation. Without it, one is made up. */
  conversation?: ConversationId;
}

const REQUEST_TIMEOUT_MS = 15_000;

export class ChatClient extends Emitter<ClientEvents> {
  readonly inbox: Inbox;
  /** @internal */
  readonly outbox: Outbox;
  /** @internal */
  readonly feed: Feed;
  /** Who this is; known from the first connection on. */
  user: UserId | undefined;
  /** What the last connection began with. */
  session: Connected | undefined;
  #connection: Connection;
  /** @internal */
  readonly marks: Marks;
  #window: number | undefined;
  /** What nobody holds is dropped: a client may see more conversations than its memory has room for. */
  #conversations = new Map<ConversationId, { deref(): Conversation | undefined }>();
  #held = new Set<Conversation>();
  #dropped =
    globalThis.FinalizationRegistry && new FinalizationRegistry<ConversationId>((id) => this.#known(id) || this.#conversations.delete(id));
  #watches = new Set<UserId[]>();
  #presence = new Map<UserId, Presence>();
  #lifecycle: Dispose | undefined;

  /** @param url Of the gateway: `wss://chat.example.org/v1/ws`; or what finds one, asked for each connection. */
  constructor(url: string | URL | (() => Promise<string> | string), options: ChatOptions) {
    super();
    const { token, storage = globalThis.indexedDB ? indexedDbStorage() : memoryStorage() } = options;
    this.user = options.user;
    this.feed = new Feed(
      (conversation, after, limit) => this.request({ type: 'history', conversation, after, limit }),
      (message) => this.#accept(message),
    );
    for (const [conversation, [seq]] of Object.entries(options.cursors ?? {})) this.feed.begin(conversation, seq);
    this.#window = options.window;
    this.inbox = new Inbox({
      ask: (request, signal) => this.request(request, { signal }),
      known: ({ conversation, kind, lastSeq, unread }) => {
        this.feed.begin(conversation, lastSeq);
        if (unread && kind !== 'channel') this.marks.add('delivered', conversation, lastSeq);
      },
      changed: (conversation) => this.#known(conversation)?.changed(),
    });
    // Half of what a user may ask is left to other requests.
    const pause = () => 2_000 / (this.session?.limits.requestsPerSecond ?? Infinity);
    this.marks = new Marks((mark) => this.#connection.ask(mark), pause);
    this.#connection = new Connection({
      url: typeof url === 'function' ? url : () => String(url),
      codec: async () => (options.codec === 'msgpack' ? (await import('./msgpack.js')).msgpack : json),
      token: typeof token === 'string' ? fixed(token) : token,
      WebSocket: (options.WebSocket ?? globalThis.WebSocket) as typeof WebSocket,
      device: options.device,
      cursors: () => this.feed.cursors(),
      connected: (hello) => this.#connected(hello),
      changed: (state) => this.#changed(state),
      event: (event) => this.#receive(event),
    });
    this.outbox = new Outbox(storage, typeof url === 'function' ? '' : String(url), (request) => this.#connection.ask(request));
    this.outbox.on('changed', (conversation) => this.#known(conversation)?.changed());
    this.outbox.on('failed', (error) => this.emit('error', error));
  }

  get state(): State {
    return this.#connection.state;
  }

  /** Connects, and stays connected until `disconnect()`. Resolves with the first connection; rejects when there will
   * be none: the token is refused for good, or `disconnect()` was called. */
  async connect({ signal }: { signal?: AbortSignal } = {}): Promise<Connected> {
    this.#lifecycle ??= watchLifecycle(() => this.#connection.awake());
    if (this.user) void this.outbox.open(this.user);
    this.#connection.step({ on: 'connect' });
    await this.#ready(signal);
    return this.session!;
  }

  /** Closes the connection. What waits in the outbox stays there; conversations keep what they show. */
  disconnect(): void {
    this.#lifecycle?.();
    this.#lifecycle = undefined;
    this.#connection.step({ on: 'disconnect' });
    this.outbox.close();
  }

  /** Asks the gateway. A broken connection, `unavailable` and `rate_limited` are tried again until the time is up: every
   * request may be repeated. */
  async request<R extends Request>(
    request: R,
    { signal, timeoutMs = REQUEST_TIMEOUT_MS }: RequestOptions = {},
  ): Promise<Replies[R['type']]> {
    const time = AbortSignal.timeout(timeoutMs);
    const over = signal ? AbortSignal.any([signal, time]) : time;
    let last = new ChatError('timeout', `${request.type}: no answer`);
    try {
      for (let attempt = 0; ; attempt++) {
        await this.#ready(over);
        try {
          return await unless(over, this.#connection.ask(request));
        } catch (error) {
          if (!(error instanceof ChatError && error.temporary)) throw error;
          if (error.code !== 'lost') last = error;
          await delay(error.retryAfterMs ?? backoff(attempt), over);
        }
      }
    } catch (error) {
      throw over.aborted && !signal?.aborted ? last : error;
    }
  }

  /** @internal Says something that has no answer, if there is a connection. */
  post(request: Request): void {
    this.#connection.post(request);
  }

  /** The same object for the same id, as long as anything holds it: a variable, a listener, an open list. */
  conversation(id: ConversationId): Conversation {
    const known = this.#known(id);
    if (known) return known;
    const conversation = new Conversation(this, id, this.#window);
    this.#conversations.set(id, globalThis.WeakRef ? new WeakRef(conversation) : { deref: () => conversation });
    this.#dropped?.register(conversation, id);
    return conversation;
  }

  /** @internal Whether it is kept though the application may have let go of it. */
  hold(conversation: Conversation, held: boolean): void {
    if (held) this.#held.add(conversation);
    else this.#held.delete(conversation);
  }

  #known(id: ConversationId): Conversation | undefined {
    return this.#conversations.get(id)?.deref();
  }

  /** The direct chat with this user; the one there is, if there is one. */
  async dm(user: UserId): Promise<Conversation> {
    return this.#create('dm', { participants: [user] });
  }

  createGroup(group: NewConversation): Promise<Conversation> {
    return this.#create('group', { conversation: uuid(), ...group });
  }

  createChannel(channel: NewConversation): Promise<Conversation> {
    return this.#create('channel', { conversation: uuid(), ...channel });
  }

  /** Public groups and channels, page by page. */
  publicConversations({ limit, signal }: Paging = {}): AsyncGenerator<PublicConversation[]> {
    return pages((after: ConversationId | undefined) => this.request({ type: 'public', limit, after }, { signal }));
  }

  /** Follows who is online, until disposed of: `presence` events, and `presence(user)`. */
  watch(users: UserId[]): Dispose {
    this.#watches.add(users);
    this.#askPresence(users);
    return () => {
      if (!this.#watches.delete(users)) return;
      const others = this.#watched();
      const over = users.filter((user) => !others.includes(user) && this.#presence.delete(user));
      if (over[0]) this.#connection.ask({ type: 'unwatch', users: over }).catch(() => {});
    };
  }

  /** What is known of a watched user. */
  presence(user: UserId): Presence | undefined {
    return this.#presence.get(user);
  }

  /** Where each conversation has got to: for a later client to begin with. */
  cursors(): Record<ConversationId, [Seq, number]> {
    return this.feed.cursors();
  }

  async #create(kind: Kind, what: NewConversation): Promise<Conversation> {
    const { conversation } = await this.request({ ...what, type: 'create', kind });
    await this.inbox.refresh().catch(() => {});
    return this.conversation(conversation);
  }

  /** Until there is a connection. */
  async #ready(signal?: AbortSignal): Promise<void> {
    let off: Dispose;
    const over = new Promise<State>((resolve) => {
      // Neither connecting nor waiting.
      const look = () => !/ing$/.test(this.state.at) && resolve(this.state);
      off = this.on('state', look);
      look();
    });
    const state = await unless(signal, over).finally(() => off());
    if (state.at === 'closed') throw state.error;
    if (state.at !== 'connected') throw new ChatError('closed', 'not connected');
  }

  #connected(hello: Connected): Error | undefined {
    const { user } = hello;
    this.user ??= user;
    if (this.user !== user) return new UnauthorizedError(`a token of ${user}`);
    this.session = hello;
    return undefined;
  }

  #changed(state: State): void {
    if (state.at === 'connected') {
      const begin = () => this.state === state && this.outbox.connected();
      void this.outbox.open(this.user!).then(begin);
      this.inbox.refresh({ all: true }).catch(() => {});
      this.marks.connected();
      for (const conversation of this.#held) conversation.connected();
      this.#askPresence(this.#watched());
    } else {
      this.outbox.disconnected();
      this.marks.disconnected();
      this.inbox.disconnected();
    }
    this.emit('state', state);
  }

  #watched(): UserId[] {
    return [...this.#watches].flat();
  }

  #askPresence(users: UserId[]): void {
    if (!users[0] || this.state.at !== 'connected') return;
    const before = new Map(this.#presence);
    this.#connection.ask({ type: 'watch', users }).then(
      ({ items }) => {
        // An event that came meanwhile is newer than the answer.
        for (const item of items) {
          const { user } = item;
          if (before.get(user) === this.#presence.get(user)) this.#receive({ type: 'presence', ...item });
        }
      },
      // The next connection asks again; too many of them is the application's to know.
      (error: ChatError) => this.emit('error', error),
    );
  }

  #receive(event: ServerEvent): void {
    const conversation = 'conversation' in event ? this.#known(event.conversation) : undefined;
    if (event.type === 'message') return this.feed.receive(event);
    if (event.type === 'error') return this.emit('error', new ChatError(event.code, event.message));
    if (event.type === 'receipt') {
      this.inbox.receipt(event, this.user);
      conversation?.receipt(event);
    } else if (event.type === 'typing') conversation?.typed(event.user);
    else if (event.type === 'presence') this.#presence.set(event.user, event);
    else if (event.type === 'conversation') {
      const removed = event.change === 'removed';
      if (removed) {
        this.inbox.remove(event.conversation);
        this.feed.forget(event.conversation);
        this.marks.forget(event.conversation);
      } else this.inbox.refresh().catch(() => {});
      conversation?.detailsChanged(removed);
    } else if (event.type === 'resync') {
      this.feed.skip(event.conversation, event.head);
      this.outbox.passed(event.conversation, event.head);
      conversation?.resync(event.head);
    }
    // Nobody listens for `reconnect`: the close code that follows says what to do. Nor for events of later versions.
    this.emit(event.type as never, event as never);
  }

  #accept(message: Message): void {
    const { conversation, seq, messageId, at, sender, clientId } = message;
    this.inbox.receive(message, this.user);
    this.#known(conversation)?.accept(message);
    const item = this.inbox.get(conversation);
    if (item && item.kind !== 'channel' && sender !== this.user) this.marks.add('delivered', conversation, seq);
    if (sender === this.user) this.outbox.seen(clientId, { seq, messageId, at, duplicate: false });
    this.emit('message', message);
  }
}

/** A token that cannot be replaced. */
function fixed(token: string): TokenSource {
  return ({ reason }) => {
    if (reason !== 'initial') throw new UnauthorizedError();
    return token;
  };
}
