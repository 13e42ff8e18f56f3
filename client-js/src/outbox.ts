/** Messages that are not stored yet. Of one conversation one is under way at a time, so they keep their order; each
 * is sent until it is stored or refused for good, and the gateway drops what it has by `clientId`. Among the tabs of
 * a browser, the one that holds the lock sends for all. */
import { backoff, delay } from './backoff.js';
import { ChatError } from './codes.js';
import { Emitter } from './emitter.js';
import type { OutboxEntry, OutboxStorage } from './storage.js';
import type { Attachment, ConversationId, Request, Sent, Seq, UserId } from './types.js';

/** Entries of one user; `send` rejects the next one with `too_large`. */
export const OUTBOX_MAX = 1_000;
/** The gateway knows a `clientId` again for seven days. */
const RETRY_MAX_MS = 6 * 24 * 3600 * 1000;

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
  /** Who waits for it here. */
  waiting?: { resolve(sent: Sent): void; reject(error: ChatError): void };
}

/** Tabs tell each other that the storage has changed, or what became of an entry. */
type Note = { sent?: [clientId: string, sent: Sent] };

type Send = Request & { type: 'send' };

export class Outbox extends Emitter<{ changed: ConversationId; failed: Error }> {
  #storage: OutboxStorage;
  #scope: string;
  #ask: (request: Send) => Promise<Sent>;
  #user: UserId | undefined;
  /** In the order in which they are sent. */
  #entries = new Map<string, Local>();
  #sending = new Set<ConversationId>();
  #connection: AbortController | undefined;
  /** Set while this tab may send. */
  #turn: AbortSignal | undefined;
  #tabs: BroadcastChannel | undefined;
  /** How often this tab has changed the storage. */
  #writes = 0;

  constructor(storage: OutboxStorage, scope: string, ask: (request: Send) => Promise<Sent>) {
    super();
    this.#storage = storage;
    this.#scope = scope;
    this.#ask = ask;
  }

  of(conversation: ConversationId): Pending[] {
    return [...this.#entries.values()].filter((entry) => entry.conversation === conversation);
  }

  add(draft: Draft): Promise<Sent> {
    const sent = new Promise<Sent>((resolve, reject) => {
      if (this.#entries.size >= OUTBOX_MAX) reject(new ChatError('too_large', 'outbox full'));
      else this.#queue({ ...draft, clientId: uuid(), user: this.#user!, at: 0, waiting: { resolve, reject } });
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
    this.#queue({ ...entry, failed: undefined });
  }

  /** Gives one up that failed. */
  discard(clientId: string): void {
    const entry = this.#entries.get(clientId);
    if (entry?.failed) this.#forget(entry);
  }

  /** Its message was seen in the log. */
  seen(clientId: string, sent: Sent): void {
    const entry = this.#entries.get(clientId);
    if (!entry) return;
    entry.waiting?.resolve(sent);
    this.#forget(entry);
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
    if (this.#storage.shared) {
      this.#tabs = new BroadcastChannel(`chat ${this.#scope} ${user}`);
      this.#tabs.onmessage = ({ data }) => this.#heard(data as Note);
    }
    await this.#load();
  }

  /** This tab is connected: it sends, or waits for its turn to. */
  connected(): void {
    this.#connection = new AbortController();
    const { signal } = this.#connection;
    const turn = async () => {
      await this.#load();
      if (signal.aborted) return;
      this.#turn = signal;
      this.#sendAll();
      return new Promise((end) => signal.addEventListener('abort', end));
    };
    const locks = this.#tabs && globalThis.navigator?.locks;
    if (locks) locks.request(this.#tabs!.name, { signal }, turn).catch(() => {});
    else void turn();
  }

  disconnected(): void {
    this.#connection?.abort();
    this.#turn = undefined;
  }

  /** Nothing is sent or heard any more. What is stored stays there. */
  close(): void {
    this.disconnected();
    this.#tabs?.close();
    this.#tabs = this.#user = undefined;
    for (const { waiting } of this.#entries.values()) waiting?.reject(new ChatError('closed', 'not connected'));
    this.#entries.clear();
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
      const stored = await this.#storage.entries(user);
      if (this.#user !== user) return;
      // What this tab put or removed meanwhile is not in it.
      if (this.#writes !== writes) return this.#load();
      const before = [...this.#entries.values()];
      const now = before.filter((entry) => entry.sent || entry.unsaved);
      for (const entry of stored) {
        const known = this.#entries.get(entry.clientId);
        // What another tab wrote, or one before, may have been tried there.
        const same = known && !known.failed === !entry.failed;
        now.push(same ? known : { ...known, ...entry, failed: entry.failed, tried: true });
      }
      now.sort((a, b) => a.at - b.at);
      this.#entries = new Map(now.map((entry) => [entry.clientId, entry]));
      for (const { conversation } of [...before, ...stored]) this.emit('changed', conversation);
    } catch (error) {
      this.emit('failed', error as Error);
    }
  }

  /** It has changed. Does not wait for the write before: the tab may be closed at any moment. */
  #store(entry: Local, remove = false): void {
    this.emit('changed', entry.conversation);
    if (!this.#user) return;
    const { sent: _, tried: __, unsaved: ___, waiting: ____, ...plain } = entry;
    entry.unsaved = !remove;
    this.#writes++;
    (remove ? this.#storage.remove(plain.clientId) : this.#storage.put(plain)).then(
      () => {
        entry.unsaved = false;
        this.#tabs?.postMessage({});
      },
      // It stays in memory, and is sent from there.
      (error) => this.emit('failed', error as Error),
    );
  }

  #heard({ sent }: Note): void {
    if (!sent) return void this.#load().then(() => this.#sendAll());
    const entry = this.#entries.get(sent[0]);
    if (!entry) return;
    entry.sent = sent[1];
    entry.waiting?.resolve(sent[1]);
  }

  #sendAll(): void {
    for (const { conversation } of this.#entries.values()) this.#send(conversation);
  }

  /** Sends what waits in a conversation, one at a time, as long as this tab may. */
  async #send(conversation: ConversationId): Promise<void> {
    const turn = this.#turn;
    if (!turn || this.#sending.has(conversation)) return;
    this.#sending.add(conversation);
    try {
      for (let attempt = 0; !turn.aborted; ) {
        const entry: Local | undefined = this.of(conversation).find(({ failed, sent }) => !failed && !sent);
        if (!entry) break;
        const error = await this.#sendOne(entry);
        // It goes on with the next connection.
        if (error?.code === 'lost') break;
        attempt = error ? attempt + 1 : 0;
        if (error) await delay(error.retryAfterMs ?? backoff(attempt), turn);
      }
    } catch {
      // The connection ended while it waited.
    }
    this.#sending.delete(conversation);
    // Meanwhile there may be another connection.
    if (turn.aborted) void this.#send(conversation);
  }

  /** Returns why it is to be tried again. */
  async #sendOne(entry: Local): Promise<ChatError | undefined> {
    const { clientId, conversation, body, attachments, replyTo, tried: retry } = entry;
    entry.tried = true;
    try {
      if (retry && Date.now() - entry.at > RETRY_MAX_MS) throw new ChatError('expired', 'too late');
      const sent = await this.#ask({ type: 'send', clientId, conversation, body, attachments, replyTo, retry });
      entry.sent = sent;
      entry.waiting?.resolve(sent);
      this.#tabs?.postMessage({ sent: [clientId, sent] });
      this.#store(entry, true);
    } catch (thrown) {
      const error = thrown as ChatError;
      if (error.temporary) return error;
      entry.failed = { code: error.code, message: error.message };
      entry.waiting?.reject(error);
      this.#store(entry);
    }
    return undefined;
  }
}

/** Version 4. `crypto.randomUUID` is there on secure pages only. */
export function uuid(): string {
  const digit = () => (crypto.getRandomValues(new Uint8Array(1))[0]! & 15).toString(16);
  return 'xxxxxxxx-xxxx-4xxx-8xxx-xxxxxxxxxxxx'.replace(/x/g, digit);
}
