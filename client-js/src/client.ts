/** The client of one user: the connection to a gateway, and everything that an application reaches through it. */
import type { Addresses } from './addresses.js';
import { abortable, persist, unless, within } from './backoff.js';
import { ChangeFeed } from './change-feed.js';
import { json } from './codec.js';
import { BAD_FRAME, ChatError, UnauthorizedError } from './codes.js';
import { Connection, type State } from './connection.js';
import { Conversation } from './conversation.js';
import { type Dispose, Emitter } from './emitter.js';
import { Feed } from './feed.js';
import { dmId, uuid } from './ids.js';
import { Inbox } from './inbox.js';
import { watchLifecycle } from './lifecycle.js';
import type { Marks, Untold } from './marks.js';
import type { ChatOptions, ClientEvents, Logger, NewConversation, PushOptions, RequestOptions } from './options.js';
import { Outbox } from './outbox.js';
import { sendable } from './outbox-entry.js';
import { type Paging, pages } from './pages.js';
import type { Push } from './push.js';
import { fixed, loadedOnce, originOf, ownStorage, type Parts, urlsOf } from './sources.js';
import type { OutboxStorage } from './storage.js';
import type {
  AppToken,
  AttachmentId,
  AttachmentUrl,
  Changed,
  ChangedItem,
  Connected,
  ConversationId,
  Devices,
  HistoryPage,
  Kind,
  Message,
  Millis,
  Presence,
  PublicConversation,
  Replies,
  Request,
  Rev,
  Seq,
  ServerEvent,
  UserId,
  WebSubscription,
} from './types.js';
import { type AttachOptions, type Sender, Upload } from './upload.js';
import type { Watcher } from './watcher.js';

const REQUEST_TIMEOUT_MS = 15_000;
/** The time limit for removing this device when the user signs out. */
const LEAVE_TIMEOUT_MS = 4_000;

/** One user's client. It stays connected from `connect()` until `disconnect()`. */
export class ChatClient extends Emitter<ClientEvents> {
  readonly inbox: Inbox;
  /** @internal */
  readonly outbox: Outbox;
  /** @internal */
  readonly feed: Feed;
  /** @internal */
  readonly changeFeed: ChangeFeed = new ChangeFeed(this);
  /** The user; known after the first connection, or from the option `user`. */
  user: UserId | undefined;
  /** The answer to the last `connect`. */
  session: Connected | undefined;
  #options: ChatOptions;
  #connection: Connection;
  /** Weak references: a client may see more conversations than its memory has room for. */
  #conversations = new Map<ConversationId, { deref(): Conversation | undefined }>();
  /** The conversations that are in use, kept from being collected. */
  #held = new Set<Conversation>();
  #dropped =
    globalThis.FinalizationRegistry && new FinalizationRegistry<ConversationId>((id) => this.#known(id) || this.#conversations.delete(id));
  #watches = new Set<readonly UserId[]>();
  #watcher: Watcher | undefined;
  /** What is loaded once it is needed. */
  #parts: Parts<{ addresses: Addresses; sender: Sender; push: Push; marks: Marks }> = {};
  #marks: Marks | undefined;
  /** The watermarks that wait for their code: the highest ones, by type and conversation. */
  #untold: Untold = new Map();
  #storage: OutboxStorage;
  #scope: string;
  /** Whether nobody looks at this device, and what the gateway knows of it. */
  #away = false;
  #awayTold: boolean | undefined = false;
  /** @internal Returns the URL of the gateway. */
  readonly url: () => Promise<string> | string;
  #warned = false;
  #presence = new Map<UserId, Presence>();
  #lifecycle: Dispose | undefined;

  /** @param url The URL of the gateway, as `wss://chat.example.org/v1/ws`, or a function that returns it for each connection. */
  constructor(url: string | URL | (() => Promise<string> | string), options: ChatOptions) {
    super();
    const { token } = options;
    const storage = options.storage ?? ownStorage((error) => this.#failed(error));
    this.#storage = storage;
    this.user = options.user;
    this.#options = options;
    this.feed = new Feed(
      (conversation, after, limit) => this.history({ type: 'history', conversation, after, limit }),
      (message) => this.#accept(message),
    );
    for (const [conversation, [seq, rev]] of Object.entries(options.cursors ?? {})) {
      this.feed.begin(conversation, seq).late = 0;
      this.changeFeed.begin(conversation, rev);
    }
    this.inbox = new Inbox(this);
    this.url = typeof url === 'function' ? urlsOf(url) : () => String(url);
    this.#connection = new Connection({
      url: this.url,
      codec: async () => (options.codec === 'msgpack' ? (await import('./msgpack.js')).msgpack : json),
      token: typeof token === 'function' ? token : fixed(token),
      WebSocket: (options.WebSocket ?? globalThis.WebSocket) as typeof WebSocket | undefined,
      device: options.device,
      cursors: () => this.cursors(),
      connected: (hello) => this.#connected(hello),
      changed: (state, over) => this.#stateChanged(state, over),
      event: (event) => this.#receive(event),
    });
    this.#scope = options.scope ?? (typeof url === 'function' ? '' : originOf(String(url)));
    this.outbox = new Outbox(storage, this.#scope, {
      ask: (request) => this.#connection.ask(sendable(request)),
      changed: (conversation) => this.changed(conversation),
      accepted: (entry, rev) => this.#known(entry.conversation)?.accepted(entry, rev),
      failed: (error) => this.#failed(error),
      upload: this.upload,
    });
  }

  get state(): State {
    return this.#connection.state;
  }

  /** Connects, and stays connected until `disconnect()`. Resolves with the first connection. Rejects when none is
   * possible: the token is refused for good, the URL is invalid, or `disconnect()` was called. Need not be awaited.
   * Call it again when an app comes back to the foreground: it ends a wait, and probes the connection if there is one. */
  connect({ signal }: { signal?: AbortSignal } = {}): Promise<Connected> {
    this.#lifecycle ??= watchLifecycle(
      (isOffline) => this.#connection.awake(isOffline),
      (isHidden) => this.away(isHidden),
    );
    if (this.user) void this.outbox.open(this.user);
    this.#connection.step({ on: 'connect' });
    // Probes a connection that there is.
    this.#connection.awake(false);
    const connected = this.#ready(signal).then(() => this.session!);
    // The state shows the same failure, so a caller that does not wait gets no unhandled rejection.
    connected.catch(() => {});
    return connected;
  }

  /** Closes the connection. Pending messages stay in the outbox, and lists keep the messages they show. */
  disconnect(): void {
    this.#disconnect();
    this.outbox.close();
  }

  /** Disconnects, and deletes everything that is stored for this user, and the registration of this device for pushes. Create
   * a new client for the next user. */
  async logout(): Promise<void> {
    await this.#leavePush();
    this.#disconnect();
    for (const kept of [this.#connection, this.inbox, this.feed, this.changeFeed, this.#presence, this.#untold]) kept.clear();
    this.#marks?.clear();
    delete this.#parts.addresses;
    await this.outbox.clear(this.user);
  }

  #disconnect(): void {
    this.#lifecycle?.();
    this.#lifecycle = undefined;
    this.#connection.step({ on: 'disconnect' });
  }

  /** Sends a request and returns its answer. Every request is idempotent, so it is retried after a broken connection,
   * `unavailable` and `rate_limited`, until `timeoutMs` have passed. */
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
          throw new ChatError('bad_request', `${request.type} closed the connection twice`);
        if (error.temporary && error.code !== 'lost') last = error;
        throw error;
      }
    };
    try {
      return await within(timeoutMs, (over) => this.whileOpen(persist(() => once(over), over)), signal);
    } catch (error) {
      if ((error as ChatError).code !== 'timeout' || signal?.aborted) throw error;
      throw last ?? new ChatError('timeout', `${request.type}: no answer within ${timeoutMs} ms. ${this.state.error?.message ?? ''}`);
    }
  }

  /** @internal Sends a request once, as soon as there is a connection. */
  async askOnce<R extends Request>(request: R): Promise<Replies[R['type']]> {
    await this.#ready();
    return within(REQUEST_TIMEOUT_MS, () => this.#connection.ask(request));
  }

  /** @internal Sends a request that has no answer. Does nothing without a connection. */
  post(request: Request): void {
    this.#connection.post(request);
  }

  /** Returns the conversation with this id: the same object as long as a variable, a listener or an open list holds it. */
  conversation(id: ConversationId): Conversation {
    const known = this.#known(id);
    if (known) return known;
    const conversation = new Conversation(this, id, this.#options.window);
    this.#conversations.set(id, globalThis.WeakRef ? new WeakRef(conversation) : { deref: () => conversation });
    this.#dropped?.register(conversation, id);
    return conversation;
  }

  /** @internal Keeps a conversation that the application may not hold any more, or lets it be collected. */
  hold(conversation: Conversation, held: boolean): void {
    this.#held[held ? 'add' : 'delete'](conversation);
  }

  #known(id: ConversationId): Conversation | undefined {
    return this.#conversations.get(id)?.deref();
  }

  /** @internal */
  isOpen(id: ConversationId): boolean {
    return !!this.#known(id)?.users;
  }

  /** @internal Reports that the inbox item or the pending messages of a conversation changed. */
  changed(conversation: ConversationId): void {
    this.#known(conversation)?.changed();
  }

  /** Returns the direct chat with this user, and creates it if there is none. Without a connection it is created later,
   * provided that the client's own user is known. */
  async dm(user: UserId): Promise<Conversation> {
    const id = this.state.at !== 'connected' && this.user && (await dmId(this.user, user));
    if (id && !this.inbox.get(id)) this.outbox.dms.set(id, user);
    const conversation = id ? this.conversation(id) : await this.#create('dm', { participants: [user] });
    conversation.other = user;
    return conversation;
  }

  /** Creates a group. */
  createGroup(group: NewConversation): Promise<Conversation> {
    return this.#create('group', { conversation: uuid(), ...group });
  }

  /** Creates a channel. */
  createChannel(channel: NewConversation): Promise<Conversation> {
    return this.#create('channel', { conversation: uuid(), ...channel });
  }

  /** Lists public groups and channels, page by page. */
  publicConversations({ limit, signal }: Paging = {}): AsyncGenerator<PublicConversation[]> {
    return pages((after: ConversationId | undefined) => this.request({ type: 'public', limit, after }, { signal }));
  }

  /** Returns the addresses of an uploaded file. They are kept until shortly before they expire, and requests of one tick are sent
   * together. Rejects with `not_found` if the user may not download the file. */
  async attachment(id: AttachmentId): Promise<AttachmentUrl> {
    const addresses = await loadedOnce(this.#parts, 'addresses', async () => new (await import('./addresses.js')).Addresses(this));
    return addresses.get(id);
  }

  /** @internal */
  upload = (conversation: ConversationId, blob: Blob, options: AttachOptions): Upload =>
    new Upload(conversation, blob, options, () => this.#loadSender());

  async #loadSender(): Promise<Sender> {
    // Without a connection the code cannot be loaded either.
    await this.#ready();
    return loadedOnce(this.#parts, 'sender', async () => new (await import('./transfer.js')).Transfers(this));
  }

  /** @internal Resolves when there is a connection, and a direct chat that was opened without one is created. */
  async ready(conversation: ConversationId, signal: AbortSignal): Promise<void> {
    await this.#ready(signal);
    await this.#begin(conversation, signal);
  }

  /** @internal */
  token(isRefused: boolean): Promise<string> {
    return this.#connection.token(isRefused ? 'rejected' : 'initial');
  }

  /** Returns the time of the gateway in milliseconds. Compare it, not the clock of the device, with the times in messages, with the
   * edit window and with `mutedUntil`. */
  now(): Millis {
    return this.#connection.now();
  }

  /** @internal */
  get ahead(): Millis {
    return this.#connection.ahead;
  }

  /** Says whether nobody looks at this device: an app in the background, a screen that is locked. Messages are pushed to the
   * user's devices only while all connections are away or gone. In browsers the client says it, by the visibility of the page. */
  away(isAway: boolean): void {
    this.#away = isAway;
    if (this.state.at !== 'connected' || this.#awayTold === isAway) return;
    this.#awayTold = isAway;
    // A gateway without pushes refuses it. The next connection, or the next call, tells it again.
    this.#connection.ask({ type: 'away', away: isAway }).catch(() => {
      this.#awayTold = undefined;
    });
  }

  /** Registers this device, so that messages are pushed to it while nobody looks. Call it at each start: subscriptions and
   * tokens change. `logout()` ends it.
   * @param target The `PushSubscription` of a browser, or the token of an app. */
  async registerPush(target: WebSubscription | AppToken, options: PushOptions = {}): Promise<void> {
    await (await this.#loadPush()).register(target, options);
  }

  /** Ends pushes to this device, and in browsers its subscription. */
  async unregisterPush(): Promise<void> {
    await (await this.#loadPush()).unregister();
  }

  /** Returns the user's devices, and the key with which browsers subscribe. */
  devices(): Promise<Devices> {
    return this.request({ type: 'devices' });
  }

  async #loadPush(): Promise<Push> {
    // A registration belongs to a user, whose name the first connection tells.
    if (!this.user) await this.#ready();
    return loadedOnce(this.#parts, 'push', async () => new (await import('./push.js')).Push(this, this.#storage, this.#pushName));
  }

  /** The name in the storage under which the registration for pushes is kept. */
  get #pushName(): string {
    return `push ${this.#scope} ${this.user}`;
  }

  /** Removes this device if it is registered, so that it shows the next user nothing. Without a connection, an `error` event says
   * that the gateway does not know it. */
  async #leavePush(): Promise<void> {
    const storage = this.#storage;
    const name = this.#pushName;
    await within(LEAVE_TIMEOUT_MS, async () => {
      if (this.#parts.push ?? (await storage.get?.(name))) await this.unregisterPush();
    }).catch((error) => this.#failed(error));
    (async () => storage.set?.(name))().catch(() => {});
  }

  /** @internal Queues a watermark, if need be until its code is loaded. */
  mark(...mark: Parameters<Marks['add']>): void {
    const key = mark[0] + mark[1];
    if (this.#marks) this.#marks.add(...mark);
    else if (mark[2] >= (this.#untold.get(key)?.[2] ?? 0)) this.#untold.set(key, mark);
  }

  async #loadMarks(connection: AbortSignal): Promise<void> {
    const load = () =>
      loadedOnce(this.#parts, 'marks', async () => new (await import('./marks.js')).Marks(this.#connection, this, this.#untold));
    try {
      this.#marks = await load().catch((error) => {
        this.#failed(error);
        return persist(load, connection);
      });
      this.#marks.connected(connection);
    } catch {
      // The next connection loads the code again.
    }
  }

  /** Watches whether these users are online: `presence` events come, and `presence(user)` is known. Returns a function that ends it. */
  watch(users: readonly UserId[]): Dispose {
    const watch = [...users];
    this.#watches.add(watch);
    void this.#watchAll();
    return () => {
      if (this.#watches.delete(watch)) void this.#watchAll();
    };
  }

  /** Returns the last known presence of a watched user. */
  presence(user: UserId): Presence | undefined {
    return this.#presence.get(user);
  }

  /** Returns the cursor of each conversation, for the option `cursors` of a later client. */
  cursors(): Record<ConversationId, [Seq, Rev]> {
    return this.feed.cursors((conversation) => this.changeFeed.rev(conversation));
  }

  /** @internal Returns a page, and notes the rev of its states. */
  async history(request: Request & { type: 'history' }, signal?: AbortSignal): Promise<HistoryPage> {
    const page = await this.request(request, signal && { signal });
    this.changeFeed.page(request.conversation, page.rev);
    return page;
  }

  /** @internal */
  apply(changed: Changed, fresh: ChangedItem[]): void {
    const { conversation, items, reset } = changed;
    const known = this.#known(conversation);
    if (reset) {
      known?.reset();
      this.inbox.reset(conversation);
    } else {
      this.inbox.changed(changed);
      known?.change(items);
      for (const { seq, deleted } of items) if (deleted) this.outbox.deleted(conversation, seq);
      if (!fresh.length) return;
    }
    const event = { ...changed, items: fresh };
    known?.emit('changed', event);
    this.emit('changed', event);
  }

  /** @internal */
  countMessages(conversation: ConversationId, from: Seq, to: Seq): number | undefined {
    return this.#known(conversation)?.countMessages(from, to);
  }

  async #create(kind: Kind, what: NewConversation): Promise<Conversation> {
    const { conversation } = await this.request({ ...what, type: 'create', kind });
    await this.inbox.refresh().catch(() => {});
    return this.conversation(conversation);
  }

  /** Resolves when there is a connection; rejects when there will be none. */
  async #ready(signal?: AbortSignal): Promise<void> {
    const state = await abortable<State>(signal, (resolve) =>
      // `connecting` and `waiting` are the states that end by themselves.
      this.#look(() => !/ing$/.test(this.state.at) && resolve(this.state)),
    );
    if (state.at !== 'connected') throw this.#ended(state);
  }

  /** Returns why there will be no connection, if that is so. */
  #ended({ at, error } = this.state): ChatError | undefined {
    return at === 'idle' ? new ChatError('closed', 'call connect()') : at === 'closed' ? error : undefined;
  }

  /** @internal Returns a promise that settles as `work` does, or rejects when there will be no connection any more. */
  whileOpen<T>(work: Promise<T>): Promise<T> {
    return abortable(undefined, (resolve, reject) => {
      work.then(resolve, reject);
      return this.#look(() => this.#ended() && reject(this.#ended()));
    });
  }

  /** Calls `look` now and after each change of the state. */
  #look(look: () => unknown): Dispose {
    look();
    return this.on('state', look);
  }

  #connected(hello: Connected): Error | undefined {
    const { user } = hello;
    this.user ??= user;
    if (this.user !== user) return new UnauthorizedError(`the token is of ${user}, not of ${this.user}`);
    this.session = hello;
    return undefined;
  }

  #stateChanged(state: State, over: AbortSignal): void {
    if (state.at === 'connected') {
      this.#awayTold = false;
      this.away(this.#away);
      void this.outbox.open(this.user!).then(() => this.outbox.connected(over));
      this.inbox.refresh({ all: true }).catch(() => {});
      void this.#loadMarks(over);
      this.changeFeed.connected();
      for (const conversation of this.#held) conversation.connected();
      void this.#watchAll();
      for (const id of this.outbox.dms.keys()) this.#begin(id).catch(() => {});
    } else {
      this.inbox.disconnected();
      for (const known of this.#conversations.values()) known.deref()?.disconnected();
      if (state.at === 'closed') this.outbox.reject(state.error);
      if (state.at === 'closed' || state.at === 'idle') this.changeFeed.disconnected();
    }
    const { error } = state;
    const level = state.at === 'closed' ? 'error' : state.at === 'waiting' ? 'warn' : 'debug';
    this.#log(level, error ? `${state.at}: ${error.message}` : state.at, state);
    this.emit('state', state);
  }

  /** Sends the gateway the users to watch. */
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
      // The next `watch()` and the next connection load the code again.
      this.#failed(error as Error);
    }
  }

  /** Creates a direct chat that the user opened without a connection. */
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
      globalThis.console?.warn(`chat: ${message} (see on('error'))`);
    }
    this.emit('error', error);
  }

  #log(level: keyof Logger, message: string, ...more: unknown[]): void {
    // A logger that throws, now or later, must not stop the client.
    (async () => this.#options.logger?.[level]?.(`chat: ${message}`, ...more))().catch(() => {});
  }

  #receive(event: ServerEvent): void {
    const conversation = 'conversation' in event ? this.#known(event.conversation) : undefined;
    if (event.type === 'message') return this.feed.receive(event);
    if (event.type === 'changed') return this.changeFeed.receive(event);
    if (event.type === 'error') return this.#failed(new ChatError(event.code, event.message));
    if (event.type === 'receipt') {
      this.inbox.receipt(event, this.user);
      conversation?.receipt(event);
    } else if (event.type === 'settings') this.inbox.settings(event);
    else if (event.type === 'reacted') conversation?.reacted(event);
    else if (event.type === 'typing') conversation?.typed(event.user);
    else if (event.type === 'presence') this.#presence.set(event.user, event);
    else if (event.type === 'conversation') {
      const removed = event.change === 'removed';
      if (removed) {
        this.inbox.remove(event.conversation);
        this.feed.forget(event.conversation);
        this.changeFeed.forget(event.conversation);
        this.#marks?.forget(event.conversation);
        for (const type of ['read', 'delivered']) this.#untold.delete(type + event.conversation);
      } else this.inbox.refresh().catch(() => {});
      conversation?.detailsChanged(removed);
    } else if (event.type === 'resync') {
      this.feed.skip(event.conversation, event.head);
      this.changeFeed.passed(event.conversation, event.head);
      this.outbox.passed(event.conversation, event.head);
      conversation?.resync(event.head);
      // Only the gateway knows how many of the missed messages are unread.
      this.inbox.refresh({ all: true }).catch(() => {});
    }
    // Events without a listener are ignored: `reconnect`, because the close code says what to do, and those of later versions.
    this.emit(event.type as never, event as never);
  }

  #accept(entry: Message): void {
    const [message, items] = this.changeFeed.overtaken(entry);
    const { conversation, seq, messageId, at, sender, clientId } = message;
    this.inbox.receive(message, this.user);
    const known = this.#known(conversation);
    known?.accept(message);
    if (items.length) known?.change(items);
    const item = this.inbox.get(conversation);
    if (item && item.kind !== 'channel' && sender !== this.user) this.mark('delivered', conversation, seq, at);
    if (sender === this.user) this.outbox.seen(clientId, { seq, messageId, at, duplicate: false });
    this.emit('message', message);
  }
}
