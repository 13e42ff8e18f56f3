/** The outbox: messages that the gateway has not acknowledged. Each conversation sends one message at a time, so they keep
 * their order. A message is sent until it is acknowledged or refused for good; its `clientId` makes this idempotent. Among
 * the tabs of a browser, the one that holds the lock sends for all. */
import { delay, retryDelay, within } from './backoff.js';
import { BAD_FRAME, ChatError, type ErrorCode } from './codes.js';
import { uuid } from './ids.js';
import type { OutboxEntry, OutboxStorage } from './storage.js';
import type { Attachment, ConversationId, Replies, Request, Sent, Seq, UserId } from './types.js';

/** The greatest number of entries of one user. Above it, `send` rejects with `too_large`. */
export const OUTBOX_MAX = 1_000;
/** The age at which an entry is not retried any more. The gateway remembers a `clientId` for seven days. */
const RETRY_MAX_MS = 6 * 24 * 3600 * 1000;
/** The time after which a storage that does not answer has failed. */
const STORAGE_TIMEOUT_MS = 5_000;

/** A message to be sent. */
export interface Draft {
  conversation: ConversationId;
  body: string;
  attachments?: Attachment[] | undefined;
  replyTo?: Seq | undefined;
}

/** An entry as this tab sees it. */
export interface Pending extends OutboxEntry {
  /** The acknowledgement. The entry stays until its `message` event comes. */
  sent?: Sent | undefined;
}

interface Local extends Pending {
  /** Whether it may have been sent before. */
  tried?: boolean;
  /** Whether its last change is not in the storage yet. */
  unsaved?: boolean;
  /** Whether the storage refused it, so that no other tab can send it. */
  unstored?: boolean;
  /** Whether the gateway closed the connection with 4500 while it was in flight. */
  suspect?: boolean;
}

/** A note between tabs: an entry was acknowledged, `logout()` was called, or without a field, the storage changed. */
type Note = { sent?: [clientId: string, sent: Sent]; cleared?: true };

type Ask = <R extends Request & { type: 'send' | 'create' }>(request: R) => Promise<Replies[R['type']]>;

/** The outbox of one user and one gateway. */
export class Outbox {
  #storage: OutboxStorage;
  #scope: string;
  #ask: Ask;
  #user: UserId | undefined;
  /** By client id, in the order in which they are sent. */
  #entries = new Map<string, Local>();
  /** The promises of this tab's `send` calls, by client id. */
  #waiting = new Map<string, { resolve(sent: Sent): void; reject(error: ChatError): void }>();
  /** The conversations that are sending a message. */
  #sending = new Set<ConversationId>();
  /** The other users of direct chats that were opened without a connection. The first message creates the chat. */
  readonly dms = new Map<ConversationId, UserId>();
  /** Whether an error between tabs was reported. */
  #told = false;
  #connection: AbortSignal | undefined;
  /** The connection for which this tab holds the lock. */
  #turn: AbortSignal | undefined;
  #tabs: BroadcastChannel | undefined;
  /** The number of times this tab changed the storage. */
  #writes = 0;
  /** The time when another tab called `logout()`. Entries written before are not loaded again. */
  #cleared = 0;
  #changed: (conversation: ConversationId) => void;
  #failed: (error: Error) => void;

  /** @param failed Called with an error of the storage, or between tabs. */
  constructor(
    storage: OutboxStorage,
    scope: string,
    ask: Ask,
    changed: (conversation: ConversationId) => void,
    failed: (error: Error) => void,
  ) {
    this.#changed = changed;
    this.#failed = failed;
    this.#storage = storage;
    this.#scope = scope;
    this.#ask = ask;
  }

  /** Returns the pending messages of a conversation. */
  of(conversation: ConversationId): Pending[] {
    return [...this.#entries.values()].filter((entry) => entry.conversation === conversation);
  }

  /** Queues a message. Resolves with its acknowledgement. */
  add(draft: Draft): Promise<Sent> {
    const sent = new Promise<Sent>((resolve, reject) => {
      if (this.#entries.size >= OUTBOX_MAX) reject(new ChatError('too_large', `The outbox is full (${OUTBOX_MAX})`));
      else {
        const clientId = uuid();
        this.#waiting.set(clientId, { resolve, reject });
        const dm = this.dms.get(draft.conversation);
        this.#queue({ ...draft, clientId, user: this.#user!, gateway: this.#scope, ...(dm && { dm }), at: 0 });
      }
    });
    // The list shows a failure, so a caller that does not wait gets no unhandled rejection.
    sent.catch(() => {});
    return sent;
  }

  /** Sends a failed message again, after all others. */
  retry(clientId: string): void {
    const entry = this.#entries.get(clientId);
    if (!entry?.failed) return;
    this.#entries.delete(clientId);
    this.#queue({ ...entry, failed: undefined, suspect: false });
  }

  /** Deletes a failed message. */
  discard(clientId: string): void {
    const entry = this.#entries.get(clientId);
    if (entry?.failed) this.#forget(entry);
  }

  /** Removes an entry whose message event came. */
  seen(clientId: string, sent: Sent): void {
    this.#settle(clientId)?.resolve(sent);
    const entry = this.#entries.get(clientId);
    if (entry) this.#forget(entry);
  }

  /** Removes acknowledged entries up to `seq`, whose message events will not come. */
  passed(conversation: ConversationId, seq: Seq): void {
    for (const entry of this.of(conversation)) if (entry.sent && entry.sent.seq <= seq) this.#forget(entry);
  }

  /** Sets the user, and loads the entries of earlier sessions. */
  async open(user: UserId): Promise<void> {
    if (this.#user === user) return;
    this.#user = user;
    for (const entry of this.#entries.values()) {
      entry.user = user;
      this.#store(entry);
    }
    this.#meet(user);
    await this.#load();
  }

  /** Sends on a new connection, as soon as this tab holds the lock.
   * @param signal Aborted when the connection ends. */
  connected(signal: AbortSignal): void {
    if (signal.aborted) return;
    this.#connection = signal;
    const turn = async () => {
      await this.#load();
      if (signal.aborted) return;
      this.#turn = signal;
      this.#sendAll();
      return new Promise((end) => signal.addEventListener('abort', end));
    };
    if (!this.#tabs) return void turn();
    // No other tab can send the entries that could not be stored, so they need no lock.
    this.#sendAll();
    const { name } = this.#tabs;
    const locked = async () => navigator.locks.request(name, { signal }, turn);
    locked().catch((error) => {
      if (signal.aborted) return;
      this.#alone(error);
      void turn();
    });
  }

  /** Deletes everything that is stored for this user and this gateway. Other tabs drop their entries. */
  async clear(user: UserId | undefined): Promise<void> {
    if (!user) return this.close();
    this.#meet(user);
    this.#tell({ cleared: true });
    try {
      await within(STORAGE_TIMEOUT_MS, async () => {
        const stored = await this.#storage.entries(user);
        await Promise.all(stored.filter((entry) => this.#isOurs(entry)).map(({ clientId }) => this.#storage.remove(clientId)));
      });
    } finally {
      // Another tab may have loaded the entries meanwhile.
      this.#tell({ cleared: true });
      this.close();
    }
  }

  /** Ends sending and the exchange with other tabs. Stored entries stay. */
  close(): void {
    this.#tabs?.close();
    this.#tabs = this.#user = this.#connection = undefined;
    this.#drop('disconnect() was called');
  }

  /** Rejects all waiting `send` calls. */
  reject(error: ChatError): void {
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
  }

  #drop(why: string): void {
    this.reject(new ChatError('closed', why));
    this.#entries.clear();
    this.dms.clear();
  }

  /** Begins the exchange with other tabs of this user. */
  #meet(user: UserId): void {
    if (!this.#storage.shared) return;
    try {
      this.#tabs ??= new BroadcastChannel(`chat ${this.#scope} ${user}`);
      this.#tabs.onmessage = ({ data }) => this.#heard(data as Note);
    } catch (error) {
      this.#alone(error);
    }
  }

  /** Removes and returns the promise of an entry. */
  #settle(clientId: string) {
    const waiting = this.#waiting.get(clientId);
    this.#waiting.delete(clientId);
    return waiting;
  }

  /** Whether an entry is for this gateway. Entries of earlier versions name none. */
  #isOurs({ gateway, at }: OutboxEntry): boolean {
    return at > this.#cleared && (gateway === undefined || gateway === this.#scope);
  }

  /** Reports once that this tab cannot coordinate with others. The gateway still stores each message once. */
  #alone(error: unknown): void {
    if (!this.#told) this.#failed(new Error(`Tabs cannot share the outbox: ${error}`));
    this.#told = true;
  }

  #tell(note: Note): void {
    try {
      this.#tabs?.postMessage(note);
    } catch (error) {
      this.#alone(error);
    }
  }

  #queue(entry: Local): void {
    const last = [...this.#entries.values()].at(-1);
    entry.at = Math.max(Date.now(), (last?.at ?? 0) + 1);
    this.#entries.set(entry.clientId, entry);
    this.#store(entry);
    this.#send(entry.conversation);
  }

  #forget(entry: Local): void {
    this.#entries.delete(entry.clientId);
    this.#store(entry, true);
  }

  /** Replaces the entries by those in the storage, with what only this tab knows. */
  async #load(): Promise<void> {
    const user = this.#user!;
    const writes = this.#writes;
    try {
      const stored = (await within(STORAGE_TIMEOUT_MS, () => this.#storage.entries(user))).filter((entry) => this.#isOurs(entry));
      if (this.#user !== user) return;
      // This tab changed the storage meanwhile, so the answer may be outdated.
      if (this.#writes !== writes) return this.#load();
      const before = [...this.#entries.values()];
      const now = before.filter((entry) => entry.sent || entry.unsaved);
      for (const entry of stored) {
        if (entry.gateway === undefined) {
          // It may be meant for another gateway, so the user decides whether to send it.
          const message = 'written for an unknown gateway: retry or discard it';
          Object.assign(entry, { gateway: this.#scope, failed: entry.failed ?? { code: 'expired', message } });
          this.#storage.put(entry).catch(this.#failed);
        }
        const known = this.#entries.get(entry.clientId);
        const same = known && !known.failed === !entry.failed;
        const local: Local = same ? known : { ...known, ...entry, failed: entry.failed };
        // Another tab, or an earlier one, may have sent it.
        if (!same || (this.#storage.shared && this.#turn !== this.#connection)) local.tried = true;
        now.push(local);
        // The gateway refused it in another tab.
        if (entry.failed) this.#settle(entry.clientId)?.reject(new ChatError(entry.failed.code as ErrorCode, entry.failed.message));
      }
      // No tab said why these are gone. Sending them again returns their seq, and stores them if no tab sent them.
      const gone = before.filter((entry) => this.#waiting.has(entry.clientId) && !now.includes(entry));
      now.push(...gone);
      now.sort((a, b) => a.at - b.at);
      this.#entries = new Map(now.map((entry) => [entry.clientId, entry]));
      for (const entry of gone) this.#store(Object.assign(entry, { tried: true }));
      for (const { conversation } of [...before, ...stored]) this.#changed(conversation);
    } catch (error) {
      this.#failed(error as Error);
    }
  }

  /** Writes an entry to the storage. Does not wait for earlier writes, because the tab may be closed at any moment. */
  #store(entry: Local, remove = false): void {
    this.#changed(entry.conversation);
    if (!this.#user) return;
    const { sent: _, tried: __, unsaved: ___, unstored: ____, suspect: _____, ...plain } = entry;
    entry.unsaved = !remove;
    this.#writes++;
    within(STORAGE_TIMEOUT_MS, () => (remove ? this.#storage.remove(plain.clientId) : this.#storage.put(plain))).then(
      () => {
        entry.unsaved = false;
        this.#tell({});
      },
      (error) => {
        this.#failed(error as Error);
        // It stays in memory and is sent from there.
        entry.unstored = entry.tried = true;
        void this.#send(entry.conversation);
      },
    );
  }

  #heard({ sent, cleared }: Note): void {
    if (cleared) {
      this.#cleared = Date.now();
      for (const { conversation } of this.#entries.values()) this.#changed(conversation);
      return this.#drop('logout() was called in another tab');
    }
    if (!sent) return void this.#load().then(() => this.#sendAll());
    const entry = this.#entries.get(sent[0]);
    if (entry) entry.sent = sent[1];
    this.#settle(sent[0])?.resolve(sent[1]);
  }

  #sendAll(): void {
    const suspect = this.#suspect();
    if (suspect) void this.#send(suspect.conversation);
    else for (const { conversation } of this.#entries.values()) this.#send(conversation);
  }

  #suspect(): Local | undefined {
    return [...this.#entries.values()].find((entry) => entry.suspect && this.#isDue(entry));
  }

  #isDue({ failed, sent, unstored }: Local): boolean {
    return !failed && !sent && (unstored || this.#turn === this.#connection);
  }

  /** Sends the entries of a conversation one after the other, as long as the connection and the lock last. */
  async #send(conversation: ConversationId): Promise<void> {
    const connection = this.#connection;
    if (!connection || connection.aborted || this.#sending.has(conversation)) return;
    this.#sending.add(conversation);
    try {
      for (let attempt = 0; !connection.aborted; ) {
        // A message that may have closed the connection is sent alone, so that no other one is blamed for it.
        const suspect = this.#suspect();
        if (suspect && suspect.conversation !== conversation) break;
        const entry: Local | undefined = suspect ?? this.of(conversation).find((entry) => this.#isDue(entry));
        if (!entry) break;
        const error = await this.#sendOne(entry);
        // The next connection continues.
        if (error?.code === 'lost') break;
        attempt = error ? attempt + 1 : 0;
        if (error) await delay(retryDelay(error, attempt), connection);
        else if (suspect && !connection.aborted) setTimeout(() => this.#sendAll());
      }
    } catch {
      // The connection ended during the delay.
    }
    this.#sending.delete(conversation);
    // There may be a new connection already.
    if (connection.aborted) void this.#send(conversation);
  }

  /** Sends one entry. Returns the error if it has to be retried. */
  async #sendOne(entry: Local): Promise<ChatError | undefined> {
    const { clientId, conversation, body, attachments, replyTo, tried: retry } = entry;
    entry.tried = true;
    try {
      if (retry && Date.now() - entry.at > RETRY_MAX_MS)
        throw new ChatError('expired', 'it may have been stored: check, then retry or discard it');
      if (entry.dm) {
        await this.#ask({ type: 'create', kind: 'dm', participants: [entry.dm] });
        this.dms.delete(conversation);
        delete entry.dm;
      }
      const sent = await this.#ask({ type: 'send', clientId, conversation, body, attachments, replyTo, retry });
      entry.sent = sent;
      // The message event of a duplicate came before, so none will come to remove the entry.
      if (sent.duplicate) this.#entries.delete(clientId);
      this.#settle(clientId)?.resolve(sent);
      this.#tell({ sent: [clientId, sent] });
      this.#store(entry, true);
    } catch (thrown) {
      let error = thrown as ChatError;
      const isFault = error.closeCode === BAD_FRAME;
      if (isFault && entry.suspect) {
        error = new ChatError('bad_request', 'it closed the connection twice: retry or discard it');
      } else if (error.temporary) {
        entry.suspect ||= isFault;
        return error;
      }
      entry.failed = { code: error.code, message: error.message };
      this.#settle(clientId)?.reject(error);
      this.#store(entry);
    }
    return undefined;
  }
}
