/** Messages that are not stored yet. Of one conversation one is under way at a time, so they keep their order; each
 * is sent until it is stored or refused for good, and the gateway drops what it has by `clientId`. Among the tabs of
 * a browser, the one that holds the lock sends for all. */
import { delay, retryDelay, within } from './backoff.js';
import { BAD_FRAME, ChatError, type ErrorCode } from './codes.js';
import { uuid } from './ids.js';
import type { OutboxEntry, OutboxStorage } from './storage.js';
import type { Attachment, ConversationId, Replies, Request, Sent, Seq, UserId } from './types.js';

/** Entries of one user; `send` rejects the next one with `too_large`. */
export const OUTBOX_MAX = 1_000;
/** The gateway knows a `clientId` again for seven days. */
const RETRY_MAX_MS = 6 * 24 * 3600 * 1000;
/** A storage that does not answer in this time has failed. */
const STORAGE_TIMEOUT_MS = 5_000;

export interface Draft {
  conversation: ConversationId;
  body: string;
  attachments?: Attachment[] | undefined;
  replyTo?: Seq | undefined;
}

/** An entry as this tab sees it. */
export interface Pending extends OutboxEntry {
  /** It is stored; its message event is about to come. */
  sent?: Sent | undefined;
}

interface Local extends Pending {
  tried?: boolean;
  /** Not in the storage yet. */
  unsaved?: boolean;
  /** The storage refused it: no other tab can send it. */
  unstored?: boolean;
  /** The gateway closed the connection with 4500 while it was under way. */
  suspect?: boolean;
}

/** Tabs tell each other that the storage has changed, what became of an entry, or that `logout()` was called. */
type Note = { sent?: [clientId: string, sent: Sent]; cleared?: true };

type Ask = <R extends Request & { type: 'send' | 'create' }>(request: R) => Promise<Replies[R['type']]>;

export class Outbox {
  #storage: OutboxStorage;
  #scope: string;
  #ask: Ask;
  #user: UserId | undefined;
  /** In the order in which they are sent. */
  #entries = new Map<string, Local>();
  /** Who waits here for what becomes of an entry. */
  #waiting = new Map<string, { resolve(sent: Sent): void; reject(error: ChatError): void }>();
  #sending = new Set<ConversationId>();
  /** Direct chats that were begun without a connection, and their other user. The first message creates them. */
  readonly dms = new Map<ConversationId, UserId>();
  #told = false;
  #connection: AbortSignal | undefined;
  /** The connection during which this tab may send. */
  #turn: AbortSignal | undefined;
  #tabs: BroadcastChannel | undefined;
  /** How often this tab has changed the storage. */
  #writes = 0;
  /** When another tab called `logout()`: what was written before is not taken up again. */
  #cleared = 0;
  #changed: (conversation: ConversationId) => void;
  #failed: (error: Error) => void;

  /** @param failed Is told what went wrong with the storage, or between tabs. */
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

  of(conversation: ConversationId): Pending[] {
    return [...this.#entries.values()].filter((entry) => entry.conversation === conversation);
  }

  add(draft: Draft): Promise<Sent> {
    const sent = new Promise<Sent>((resolve, reject) => {
      if (this.#entries.size >= OUTBOX_MAX) reject(new ChatError('too_large', `${OUTBOX_MAX} messages wait already`));
      else {
        const clientId = uuid();
        this.#waiting.set(clientId, { resolve, reject });
        const dm = this.dms.get(draft.conversation);
        this.#queue({ ...draft, clientId, user: this.#user!, gateway: this.#scope, ...(dm && { dm }), at: 0 });
      }
    });
    // The list shows what became of it; nobody has to wait for it.
    sent.catch(() => {});
    return sent;
  }

  /** Sends a failed one again, after the others. */
  retry(clientId: string): void {
    const entry = this.#entries.get(clientId);
    if (!entry?.failed) return;
    this.#entries.delete(clientId);
    this.#queue({ ...entry, failed: undefined, suspect: false });
  }

  /** Gives one up that failed. */
  discard(clientId: string): void {
    const entry = this.#entries.get(clientId);
    if (entry?.failed) this.#forget(entry);
  }

  /** Its message was seen in the log. */
  seen(clientId: string, sent: Sent): void {
    this.#settle(clientId)?.resolve(sent);
    const entry = this.#entries.get(clientId);
    if (entry) this.#forget(entry);
  }

  /** What is stored up to here will not be seen any more. */
  passed(conversation: ConversationId, seq: Seq): void {
    for (const entry of this.of(conversation)) if (entry.sent && entry.sent.seq <= seq) this.#forget(entry);
  }

  /** From now on it is known whose outbox it is: what waits there from before is taken up. */
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

  /** This tab is connected: it sends, or waits for its turn to.
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
    // What could not be stored does not wait for the turn.
    this.#sendAll();
    const { name } = this.#tabs;
    const locked = async () => navigator.locks.request(name, { signal }, turn);
    locked().catch((error) => {
      if (signal.aborted) return;
      this.#alone(error);
      void turn();
    });
  }

  /** Deletes everything that is stored for this user and this gateway. Other tabs give up what they wrote. */
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
      // Another tab may have read the storage meanwhile.
      this.#tell({ cleared: true });
      this.close();
    }
  }

  /** Nothing is sent or heard any more. What is stored stays there. */
  close(): void {
    this.#tabs?.close();
    this.#tabs = this.#user = this.#connection = undefined;
    this.#drop('disconnect() was called');
  }

  /** There will be no connection. */
  reject(error: ChatError): void {
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
  }

  #drop(why: string): void {
    this.reject(new ChatError('closed', why));
    this.#entries.clear();
    this.dms.clear();
  }

  /** Other tabs of this user are heard from now on. */
  #meet(user: UserId): void {
    if (!this.#storage.shared) return;
    try {
      this.#tabs ??= new BroadcastChannel(`chat ${this.#scope} ${user}`);
      this.#tabs.onmessage = ({ data }) => this.#heard(data as Note);
    } catch (error) {
      this.#alone(error);
    }
  }

  /** Whoever waits for it is to be told now. */
  #settle(clientId: string) {
    const waiting = this.#waiting.get(clientId);
    this.#waiting.delete(clientId);
    return waiting;
  }

  /** Entries of earlier versions do not say for which gateway they were written. */
  #isOurs({ gateway, at }: OutboxEntry): boolean {
    return at > this.#cleared && (gateway === undefined || gateway === this.#scope);
  }

  /** Says once that this tab does not know of the others. The gateway still stores each message once. */
  #alone(error: unknown): void {
    if (!this.#told) this.#failed(new Error(`This tab sends on its own: ${error}`));
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

  /** The storage as it is now, and what this tab alone knows. */
  async #load(): Promise<void> {
    const user = this.#user!;
    const writes = this.#writes;
    try {
      const stored = (await within(STORAGE_TIMEOUT_MS, () => this.#storage.entries(user))).filter((entry) => this.#isOurs(entry));
      if (this.#user !== user) return;
      // What this tab put or removed meanwhile is not in it.
      if (this.#writes !== writes) return this.#load();
      const before = [...this.#entries.values()];
      const now = before.filter((entry) => entry.sent || entry.unsaved);
      for (const entry of stored) {
        if (entry.gateway === undefined) {
          // Sending it might tell the wrong gateway what it says: that is for the user to decide.
          const message = 'written for an unknown gateway: retry or discard it';
          Object.assign(entry, { gateway: this.#scope, failed: entry.failed ?? { code: 'expired', message } });
          this.#storage.put(entry).catch(this.#failed);
        }
        const known = this.#entries.get(entry.clientId);
        const same = known && !known.failed === !entry.failed;
        const local: Local = same ? known : { ...known, ...entry, failed: entry.failed };
        // What another tab could see, or one before, may have been tried there.
        if (!same || (this.#storage.shared && this.#turn !== this.#connection)) local.tried = true;
        now.push(local);
        // Another tab was refused.
        if (entry.failed) this.#settle(entry.clientId)?.reject(new ChatError(entry.failed.code as ErrorCode, entry.failed.message));
      }
      // Gone, and no tab has said why: asking the gateway once more tells its place, and stores it if nobody did.
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

  /** It has changed. Does not wait for the write before: the tab may be closed at any moment. */
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
        // It stays in memory, and is sent from there.
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

  /** Sends what waits in a conversation, one at a time, as long as this tab may. */
  async #send(conversation: ConversationId): Promise<void> {
    const connection = this.#connection;
    if (!connection || connection.aborted || this.#sending.has(conversation)) return;
    this.#sending.add(conversation);
    try {
      for (let attempt = 0; !connection.aborted; ) {
        // A message that may have closed the connection is repeated alone, so that no other one is blamed for it.
        const suspect = this.#suspect();
        if (suspect && suspect.conversation !== conversation) break;
        const entry: Local | undefined = suspect ?? this.of(conversation).find((entry) => this.#isDue(entry));
        if (!entry) break;
        const error = await this.#sendOne(entry);
        // It goes on with the next connection.
        if (error?.code === 'lost') break;
        attempt = error ? attempt + 1 : 0;
        if (error) await delay(retryDelay(error, attempt), connection);
        else if (suspect && !connection.aborted) setTimeout(() => this.#sendAll());
      }
    } catch {
      // The connection ended while it waited.
    }
    this.#sending.delete(conversation);
    // Meanwhile there may be another connection.
    if (connection.aborted) void this.#send(conversation);
  }

  /** Returns why it is to be tried again. */
  async #sendOne(entry: Local): Promise<ChatError | undefined> {
    const { clientId, conversation, body, attachments, replyTo, tried: retry } = entry;
    entry.tried = true;
    try {
      if (retry && Date.now() - entry.at > RETRY_MAX_MS)
        throw new ChatError('expired', 'it may have been stored: look, then retry or discard it');
      if (entry.dm) {
        await this.#ask({ type: 'create', kind: 'dm', participants: [entry.dm] });
        this.dms.delete(conversation);
        delete entry.dm;
      }
      const sent = await this.#ask({ type: 'send', clientId, conversation, body, attachments, replyTo, retry });
      entry.sent = sent;
      // Its message came before: nothing is about to come that would take it from the list.
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
