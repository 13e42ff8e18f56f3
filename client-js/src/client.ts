/** What an application holds: one user's connection to the gateways, and everything reached through it. */
import { abortable, persist, unless, within } from './backoff.js';
import { indexedDbStorage } from './browser-storage.js';
import { json } from './codec.js';
import { BAD_FRAME, ChatError, UnauthorizedError } from './codes.js';
import { Connection, type State, type TokenSource } from './connection.js';
import { Conversation, type Host } from './conversation.js';
import { type Dispose, Emitter } from './emitter.js';
import { Feed } from './feed.js';
import { dmId, uuid } from './ids.js';
import { Inbox, type InboxHost } from './inbox.js';
import { watchLifecycle } from './lifecycle.js';
import { Marks } from './marks.js';
import { Outbox } from './outbox.js';
import { type Paging, pages } from './pages.js';
import { memoryStorage, type OutboxStorage } from './storage.js';
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
import type { Watcher, WatcherHost } from './watcher.js';

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
  /** Names the gateway whose outbox this is: messages written for one are never sent to another. The origin of `url`,
   * if not given; where `url` is a function, give one for each of several services. */
  scope?: string;
  /** What the client does, for the developer: `console` fits. Without it, `console` is used only to warn once of an
   * `error` that nobody listens to. */
  logger?: Logger;
  /** For the gateway's logs. */
  device?: string;
  /** Where there is no global one, as in Node before version 22. */
  WebSocket?: unknown;
  /** Cursors of an earlier client (`cursors()`): what came since is sent. */
  cursors?: Record<ConversationId, [Seq, number]>;
  /** Messages that a live list holds; 300, if not given. It is trimmed at the end that is not looked at. */
  window?: number;
}

export interface Logger {
  debug?(message: string, ...more: unknown[]): void;
  info?(message: string, ...more: unknown[]): void;
  warn?(message: string, ...more: unknown[]): void;
  error?(message: string, ...more: unknown[]): void;
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

export class ChatClient extends Emitter<ClientEvents> implements Host, InboxHost, WatcherHost {
  readonly inbox: Inbox;
  /** @internal */
  readonly outbox: Outbox;
  /** @internal */
  readonly feed: Feed;
  /** Who this is; known from the first connection on. */
  user: UserId | undefined;
  /** What the last connection began with. */
  session: Connected | undefined;
  #options: ChatOptions;
  #connection: Connection;
  /** @internal */
  readonly marks: Marks;
  /** What nobody holds is dropped: a client may see more conversations than its memory has room for. */
  #conversations = new Map<ConversationId, { deref(): Conversation | undefined }>();
  #held = new Set<Conversation>();
  #dropped =
    globalThis.FinalizationRegistry && new FinalizationRegistry<ConversationId>((id) => this.#known(id) || this.#conversations.delete(id));
  #watches = new Set<readonly UserId[]>();
  #watcher: Watcher | undefined;
  #warned = false;
  #presence = new Map<UserId, Presence>();
  #lifecycle: Dispose | undefined;

  /** @param url Of the gateway: `wss://chat.example.org/v1/ws`; or what finds one, asked for each connection. */
  constructor(url: string | URL | (() => Promise<string> | string), options: ChatOptions) {
    super();
    const { token, storage = this.#storage() } = options;
    this.user = options.user;
    this.#options = options;
    this.feed = new Feed(
      (conversation, after, limit) => this.request({ type: 'history', conversation, after, limit }),
      (message) => this.#accept(message),
    );
    for (const [conversation, [seq]] of Object.entries(options.cursors ?? {})) this.feed.begin(conversation, seq);
    this.inbox = new Inbox(this);
    // Half of what a user may ask is left to other requests.
    const pause = () => 2_000 / (this.session?.limits.requestsPerSecond ?? Infinity);
    this.marks = new Marks((mark) => this.#connection.ask(mark), pause);
    this.#connection = new Connection({
      url: typeof url === 'function' ? url : () => String(url),
      codec: async () => (options.codec === 'msgpack' ? (await import('./msgpack.js')).msgpack : json),
      token: typeof token === 'string' ? fixed(token) : token,
      WebSocket: (options.WebSocket ?? globalThis.WebSocket) as typeof WebSocket | undefined,
      device: options.device,
      cursors: () => this.feed.cursors(),
      connected: (hello) => this.#connected(hello),
      changed: (state, over) => this.#stateChanged(state, over),
      event: (event) => this.#receive(event),
    });
    const scope = options.scope ?? (typeof url === 'function' ? '' : originOf(String(url)));
    this.outbox = new Outbox(
      storage,
      scope,
      (request) => this.#connection.ask(request),
      (conversation) => this.changed(conversation),
      (error) => this.#failed(error),
    );
  }

  get state(): State {
    return this.#connection.state;
  }

  /** Connects, and stays connected until `disconnect()`. Resolves with the first connection; rejects when there will
   * be none: the token is refused for good, the URL is none, or `disconnect()` was called. Need not be awaited. */
  connect({ signal }: { signal?: AbortSignal } = {}): Promise<Connected> {
    this.#lifecycle ??= watchLifecycle(() => this.#connection.awake());
    if (this.user) void this.outbox.open(this.user);
    this.#connection.step({ on: 'connect' });
    const connected = this.#ready(signal).then(() => this.session!);
    // The state tells the same; a component that mounts need not wait.
    connected.catch(() => {});
    return connected;
  }

  /** Closes the connection. What waits in the outbox stays there; conversations keep what they show. */
  disconnect(): void {
    this.#disconnect();
    this.outbox.close();
  }

  /** Disconnects, and deletes everything that is stored for this user. The next user gets a new client. */
  async logout(): Promise<void> {
    this.#disconnect();
    for (const kept of [this.#connection, this.inbox, this.feed, this.marks, this.#presence]) kept.clear();
    await this.outbox.clear(this.user);
  }

  #disconnect(): void {
    this.#lifecycle?.();
    this.#lifecycle = undefined;
    this.#connection.step({ on: 'disconnect' });
  }

  /** Asks the gateway. A broken connection, `unavailable` and `rate_limited` are tried again until the time is up: every
   * request may be repeated. */
  async request<R extends Request>(
    request: R,
    { signal, timeoutMs = REQUEST_TIMEOUT_MS }: RequestOptions = {},
  ): Promise<Replies[R['type']]> {
    let last: ChatError | undefined;
    let faults = 0;
    const once = async (over: AbortSignal) => {
      await this.#ready(over);
      try {
        if ('conversation' in request && request.conversation) await this.#begin(request.conversation, over);
        return await unless(over, this.#connection.ask(request));
      } catch (thrown) {
        const error = thrown as ChatError;
        if (error.closeCode === BAD_FRAME && ++faults > 1)
          throw new ChatError('bad_request', `${request.type}: it closed the connection twice`);
        if (error.temporary && error.code !== 'lost') last = error;
        throw error;
      }
    };
    try {
      return await within(timeoutMs, (over) => persist(() => once(over), over), signal);
    } catch (error) {
      if (error instanceof ChatError || signal?.aborted) throw error;
      throw last ?? new ChatError('timeout', `${request.type}: no answer within ${timeoutMs} ms. ${this.state.error?.message ?? ''}`);
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
    const conversation = new Conversation(this, id, this.#options.window);
    this.#conversations.set(id, globalThis.WeakRef ? new WeakRef(conversation) : { deref: () => conversation });
    this.#dropped?.register(conversation, id);
    return conversation;
  }

  /** @internal Whether it is kept though the application may have let go of it. */
  hold(conversation: Conversation, held: boolean): void {
    this.#held[held ? 'add' : 'delete'](conversation);
  }

  #known(id: ConversationId): Conversation | undefined {
    return this.#conversations.get(id)?.deref();
  }

  /** @internal What is known of this conversation is another thing now. */
  changed(conversation: ConversationId): void {
    this.#known(conversation)?.changed();
  }

  /** The direct chat with this user; the one there is, if there is one. Without a connection it is created later, if it is
   * known who this client is. */
  async dm(user: UserId): Promise<Conversation> {
    const id = this.state.at !== 'connected' && this.user && (await dmId(this.user, user));
    if (!id) return this.#create('dm', { participants: [user] });
    if (!this.inbox.get(id)) this.outbox.dms.set(id, user);
    return this.conversation(id);
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
  watch(users: readonly UserId[]): Dispose {
    const watch = [...users];
    this.#watches.add(watch);
    void this.#watchAll();
    return () => {
      if (this.#watches.delete(watch)) void this.#watchAll();
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
    const state = await abortable<State>(signal, (resolve) => {
      // Neither connecting nor waiting.
      const look = () => !/ing$/.test(this.state.at) && resolve(this.state);
      look();
      return this.on('state', look);
    });
    if (state.at === 'closed') throw state.error;
    if (state.at !== 'connected') throw new ChatError('closed', 'not connected: call connect()');
  }

  #connected(hello: Connected): Error | undefined {
    const { user } = hello;
    this.user ??= user;
    if (this.user !== user) return new UnauthorizedError(`token() gave a token of ${user}, not of ${this.user}`);
    this.session = hello;
    return undefined;
  }

  #stateChanged(state: State, over: AbortSignal): void {
    if (state.at === 'connected') {
      void this.outbox.open(this.user!).then(() => this.outbox.connected(over));
      this.inbox.refresh({ all: true }).catch(() => {});
      this.marks.connected(over);
      for (const conversation of this.#held) conversation.connected();
      void this.#watchAll();
      for (const id of this.outbox.dms.keys()) this.#begin(id).catch(() => {});
    } else {
      this.inbox.disconnected();
      if (state.at === 'closed') this.outbox.reject(state.error);
    }
    const { error } = state;
    const level = state.at === 'closed' ? 'error' : state.at === 'waiting' ? 'warn' : 'debug';
    this.#log(level, error ? `${state.at}: ${error.message}` : state.at, state);
    this.emit('state', state);
  }

  /** Tells the gateway whom to watch. */
  async #watchAll(): Promise<void> {
    if (this.state.at !== 'connected') return;
    try {
      if (!this.#watcher) {
        if (!this.#watches.size) return;
        const { Watcher } = await import('./watcher.js');
        const failed = (error: Error) => this.#failed(error);
        const refused = (why: string) => failed(new ChatError('too_large', why));
        this.#watcher ??= new Watcher(this, this.#watches, this.#presence, refused, failed);
      }
      await this.#watcher.tell();
    } catch (error) {
      // Loading it is tried again by the next `watch()`, and by the next connection.
      this.#failed(error as Error);
    }
  }

  /** Creates a direct chat that was begun without a connection. */
  async #begin(conversation: ConversationId, over?: AbortSignal): Promise<void> {
    const user = this.outbox.dms.get(conversation);
    if (!user) return;
    await unless(over, this.#connection.ask({ type: 'create', kind: 'dm', participants: [user] }));
    this.outbox.dms.delete(conversation);
  }

  #failed(error: Error): void {
    const { message } = error;
    this.#log('error', message, error);
    if (!this.hasListener('error') && !this.#options.logger && !this.#warned) {
      this.#warned = true;
      globalThis.console?.warn(`chat: ${message} (on('error') tells all)`);
    }
    this.emit('error', error);
  }

  #log(level: keyof Logger, message: string, ...more: unknown[]): void {
    try {
      this.#options.logger?.[level]?.(`chat: ${message}`, ...more);
    } catch {
      // A logger harms nobody.
    }
  }

  /** IndexedDB, unless there is none: some browsers throw where storage is forbidden. */
  #storage(): OutboxStorage {
    let reason: unknown = 'no IndexedDB';
    try {
      if (globalThis.indexedDB) return indexedDbStorage();
    } catch (error) {
      reason = error;
    }
    // Once the application had time to listen. Outside browsers nobody expects it.
    if (globalThis.document) queueMicrotask(() => this.#failed(new Error(`The outbox is in memory only: ${reason}`)));
    return memoryStorage();
  }

  #receive(event: ServerEvent): void {
    const conversation = 'conversation' in event ? this.#known(event.conversation) : undefined;
    if (event.type === 'message') return this.feed.receive(event);
    if (event.type === 'error') return this.#failed(new ChatError(event.code, event.message));
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

/** `http:` and `ws:` of one host are one gateway. */
function originOf(url: string): string {
  try {
    return new URL(url, globalThis.location?.href).origin.replace(/^http/, 'ws');
  } catch {
    // Connecting says what is wrong with it.
    return url;
  }
}

/** A token that cannot be replaced. */
function fixed(token: string): TokenSource {
  return ({ reason }) => {
    if (reason !== 'initial') throw new UnauthorizedError('the token expired or was refused: pass a function');
    return token;
  };
}
