/** The outbox: messages and changes of messages that the gateway has not acknowledged. A conversation sends one message at a
 * time, and a message one change, so they keep their order. Each is sent until it is acknowledged or refused for good. A
 * message has a `clientId` and an edit a `baseRev`, so that sending again does no harm. Among the tabs of a browser, the one
 * that holds the lock sends for all. */
import { backoff, delay, retryDelay, within } from './backoff.js';
import { keysOf } from './changes.js';
import { BAD_FRAME, ChatError, type ErrorCode } from './codes.js';
import { uuid } from './ids.js';
import type { ChangeRequest, Draft, Local, Note, OutboxHost, Pending, Text, Waiting } from './outbox-entry.js';
import { OUTBOX_MAX, plainOf, RETRY_MAX_MS, remember, STORAGE_TIMEOUT_MS, shown, uploadsOf, WATCH_MS, whatOf } from './outbox-entry.js';
import type { OutboxFiles } from './outbox-files.js';
import { editBefore, editsOver, isLate, isReady, merged, NOTE_MS, raised } from './outbox-rules.js';
import type { OutboxChange, OutboxEntry, OutboxStorage } from './storage.js';
import { Tabs } from './tabs.js';
import type { Accepted, Attachment, ConversationId, Rev, Sent, Seq, UserId } from './types.js';
import { Upload } from './upload.js';

/** The outbox of one user and one gateway. */
export class Outbox {
  #storage: OutboxStorage;
  #scope: string;
  #host: OutboxHost;
  #user: UserId | undefined;
  /** By client id, in the order in which they are sent. */
  #entries = new Map<string, Local>();
  /** The promises of this tab's calls, by client id. */
  #waiting = new Map<string, Waiting>();
  /** The client ids of the entries that are being sent, or wait to be sent again. */
  #sending = new Set<string>();
  /** The seqs of the user's own messages that are stored, by client id: a change may still name one by its key. */
  #seqs = new Map<string, Seq>();
  /** The revs of acknowledged changes, by client id: a tab may learn later of an edit over one of them. */
  #revs = new Map<string, Rev>();
  /** The other users of direct chats that were opened without a connection. The first message creates the chat. */
  readonly dms = new Map<ConversationId, UserId>();
  #connection: AbortSignal | undefined;
  /** The connection for which this tab holds the lock. */
  #turn: AbortSignal | undefined;
  #tabs: Tabs;
  /** Whether another tab told since the last look that it sent something. */
  #hasNews = false;
  /** The code for files, once it is needed. */
  #files: Promise<OutboxFiles> | undefined;
  /** The number of times this tab changed the storage. */
  #writes = 0;
  /** The number of writes in a row that failed, and the timer for the next one. */
  #failures = 0;
  #retry: ReturnType<typeof setTimeout> | undefined;
  /** The time when another tab called `logout()`. Entries written before are not loaded again. */
  #cleared = 0;

  constructor(storage: OutboxStorage, scope: string, host: OutboxHost) {
    this.#storage = storage;
    this.#scope = scope;
    this.#host = host;
    this.#tabs = new Tabs((error) => host.failed(error));
  }

  /** Returns the pending messages of a conversation. */
  of(conversation: ConversationId): Pending[] {
    return this.#all(conversation).filter(({ change }) => !change);
  }

  /** Returns the pending and refused changes of a conversation. */
  changesOf(conversation: ConversationId): Pending[] {
    return this.#all(conversation).filter(({ change }) => change);
  }

  #all(conversation: ConversationId): Local[] {
    return [...this.#entries.values()].filter((entry) => entry.conversation === conversation);
  }

  /** Queues a message. Resolves with its acknowledgement. */
  add(draft: Draft, files?: (Attachment | Upload)[]): Promise<Sent> {
    const isUploading = files?.some((file) => file instanceof Upload && file.state !== 'ready');
    return this.#add({ ...draft, attachments: files?.map(shown), ...(isUploading && { files: files!.slice() }) }) as Promise<Sent>;
  }

  /** Queues a change of a message. Resolves with its acknowledgement.
   * @param from The text that the user saw when editing. Default: the one of the last waiting edit. */
  change(conversation: ConversationId, change: OutboxChange, from?: Text): Promise<Accepted> {
    // It takes the place of an equal one that was refused.
    this.#dropFailed(conversation, keysOf(change), whatOf(change));
    return this.#add({ conversation, body: '', change, over: this.#editBefore(conversation, change, from) }) as Promise<Accepted>;
  }

  #editBefore(conversation: ConversationId, change: OutboxChange, from?: Text): string | undefined {
    return change.type === 'edit' ? editBefore(this.changesOf(conversation), change, from) : undefined;
  }

  /** Returns the seq of a message that the user sent, if it is known. */
  seqOf(clientId: string): Seq | undefined {
    return this.#seqs.get(clientId);
  }

  #add(draft: Pick<Local, 'change' | 'over' | 'files'> & Draft): Promise<Sent | Accepted> {
    const sent = new Promise<Sent | Accepted>((resolve, reject) => {
      if (this.#entries.size >= OUTBOX_MAX) reject(new ChatError('too_large', 'the outbox is full'));
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

  /** Sends a failed message or change again, after all others. `contentRev` returns the rev of the text that the user sees now. */
  retry(clientId: string, contentRev: (seq: Seq) => Rev): void {
    const entry = this.#entries.get(clientId);
    if (!entry?.failed) return;
    const { change } = entry;
    // The gateway may have erased its files, because the message came too late.
    if (entry.failed.code === 'conflict') entry.uploads ??= entry.kept;
    for (const file of uploadsOf(entry)) file.retry();
    this.#entries.delete(clientId);
    if (change?.type === 'edit' && change.seq) entry.change = { ...change, baseRev: contentRev(change.seq) };
    const over = change && this.#editBefore(entry.conversation, change);
    this.#queue({ ...entry, over, failed: undefined, suspect: false });
  }

  /** Deletes a failed message with its changes, or a failed change. */
  discard(clientId: string): void {
    const entry = this.#entries.get(clientId);
    if (!entry?.failed) return;
    for (const file of uploadsOf(entry)) file.abort();
    this.#forget(entry);
    for (const other of this.#changesOfPending(clientId)) {
      this.#settle(other.clientId)?.reject(new ChatError('closed', 'discarded'));
      this.#forget(other);
    }
  }

  /** Deletes the refused changes of a message that was deleted. */
  deleted(conversation: ConversationId, seq: Seq): void {
    this.#dropFailed(conversation, [seq]);
  }

  #dropFailed(conversation: ConversationId, keys: (string | Seq)[], what?: string): void {
    for (const entry of this.changesOf(conversation)) {
      const change = entry.change!;
      if (entry.failed && keysOf(change).some((key) => keys.includes(key)) && (!what || whatOf(change) === what)) this.#forget(entry);
    }
  }

  /** Gives the changes of a pending message its seq, so that they can be sent. */
  placed(clientId: string, seq: Seq): void {
    remember(this.#seqs, clientId, seq);
    for (const entry of this.#changesOfPending(clientId)) {
      const { of: _, ...change } = entry.change as OutboxChange & { of: string };
      entry.change = { ...change, seq } as OutboxChange;
      this.#store(entry);
      // The acknowledgement of the message may still be being processed.
      queueMicrotask(() => this.#send(entry.conversation));
    }
  }

  #changesOfPending(clientId: string): Local[] {
    return [...this.#entries.values()].filter(({ change }) => change && 'of' in change && change.of === clientId);
  }

  /** Removes an entry whose message event came. */
  seen(clientId: string, sent: Sent): void {
    this.placed(clientId, sent.seq);
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
      void this.#store(entry);
    }
    this.#uploadAll();
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
    // No other tab can send the entries that could not be stored, so they need no lock.
    this.#sendAll();
    void this.#tabs.locked('', turn, signal);
    this.#watch(signal);
  }

  /** Looks every few seconds whether the tab with the lock sends. One that shows a dialog, or is being debugged, keeps the lock and
   * does nothing. What it does not send is sent without the lock: the gateway stores it once. */
  #watch(connection: AbortSignal): void {
    const look = () => {
      if (this.#turn === connection) return;
      const late = [...this.#entries.values()].filter((entry) => !this.#hasNews && isLate(entry));
      this.#hasNews = false;
      for (const entry of late) entry.alone = entry.tried = true;
      if (late[0]) this.#sendAll();
      this.#watch(connection);
    };
    delay(WATCH_MS, connection).then(look, () => {});
  }

  /** Deletes everything that is stored for this user and this gateway. Other tabs drop their entries. */
  async clear(user: UserId | undefined): Promise<void> {
    // What is being stored must not come back.
    this.#drop();
    if (!user) return this.close();
    this.#meet(user);
    this.#tabs.tell({ cleared: true });
    try {
      await within(STORAGE_TIMEOUT_MS, async () => {
        const stored = await this.#stored(user);
        await Promise.all(stored.map(({ clientId }) => this.#storage.remove(clientId)));
      });
    } finally {
      // Another tab may have loaded the entries meanwhile.
      this.#tabs.tell({ cleared: true });
      this.close();
    }
  }

  /** Ends sending and the exchange with other tabs. Entries stay in the storage, and those that it does not have stay here. */
  close(): void {
    this.#tabs.close();
    this.#user = this.#connection = undefined;
    this.#drop(undefined, true);
  }

  /** Rejects all waiting `send` calls. */
  reject(error: ChatError): void {
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
  }

  #drop(why = 'disconnect() was called', isKept = false): void {
    this.reject(new ChatError('closed', why));
    this.#retry = void clearTimeout(this.#retry);
    for (const entry of this.#entries.values()) this.#stopWaiting(entry);
    for (const [id, { unsaved }] of this.#entries) if (!isKept || !unsaved) this.#entries.delete(id);
    this.#seqs.clear();
    this.#revs.clear();
    if (!isKept) this.dms.clear();
  }

  /** Begins the exchange with other tabs of this user. */
  #meet(user: UserId): void {
    if (this.#storage.shared) this.#tabs.open(`chat ${this.#scope} ${user}`, (note) => this.#heard(note));
  }

  /** Removes and returns the promise of an entry whose outcome is known. */
  #settle(clientId: string) {
    this.#stopWaiting(this.#entries.get(clientId));
    const waiting = this.#waiting.get(clientId);
    this.#waiting.delete(clientId);
    return waiting;
  }

  /** Returns the entries of the storage that are for this gateway. */
  async #stored(user: UserId): Promise<OutboxEntry[]> {
    const all = await this.#storage.entries(user);
    return all.filter((entry) => entry?.clientId && entry.at > this.#cleared && entry.gateway === this.#scope);
  }

  #queue(entry: Local): void {
    const last = [...this.#entries.values()].at(-1);
    entry.at = Math.max(Date.now(), (last?.at ?? 0) + 1);
    this.#entries.set(entry.clientId, entry);
    this.#store(entry);
    this.#uploadAll();
    this.#send(entry.conversation);
  }

  /** Uploads the files of waiting messages. A failure to load the code is repaired on the next connection. */
  #uploadAll(): void {
    const waiting = [...this.#entries.values()].filter(({ files, uploads, failed }) => (files || uploads) && !failed);
    // Without a user there is no lock that keeps other tabs from uploading the same. `open()` calls this again.
    if (!this.#user || !waiting.length) return;
    this.#files ??= import('./transfer.js').then(
      ({ OutboxFiles }) =>
        new OutboxFiles({
          storage: this.#storage,
          tabs: this.#tabs,
          host: this.#host,
          dms: this.dms,
          entry: (clientId) => this.#entries.get(clientId),
          load: () => this.#load(),
          store: (entry) => this.#store(entry),
          send: (conversation) => this.#send(conversation),
          fail: (entry, error) => this.#fail(entry, error),
        }),
    );
    this.#files
      .then((files) => files.upload(waiting, !!this.#turn && this.#turn === this.#connection))
      .catch((error) => {
        this.#files = undefined;
        this.#host.failed(error);
      });
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
      const stored = await within(STORAGE_TIMEOUT_MS, () => this.#stored(user));
      if (this.#user !== user) return;
      // This tab changed the storage meanwhile, so the answer may be outdated.
      if (this.#writes !== writes) return this.#load();
      const before = [...this.#entries.values()];
      const now = before.filter((entry) => entry.sent || entry.unsaved || (entry.files && !entry.uploads));
      for (const entry of stored) {
        // It was acknowledged, and its removal failed or is late. Sent again, it could undo a later change.
        if (this.#revs.has(entry.clientId)) {
          void this.#write(() => this.#storage.remove(entry.clientId));
          continue;
        }
        const known = this.#entries.get(entry.clientId);
        this.#stopWaiting(known);
        // Another tab, or an earlier one, may have sent it.
        const local = merged(known, entry, this.#storage.shared && this.#turn !== this.#connection);
        if (entry.dm) this.dms.set(entry.conversation, entry.dm);
        now.push(local);
        if (entry.failed) this.#settle(entry.clientId)?.reject(new ChatError(entry.failed.code as ErrorCode, entry.failed.message));
      }
      // No tab said yet why these are gone. Its note may still be on the way.
      const kept = new Set(now.map(({ clientId }) => clientId));
      const gone = before.filter((entry) => !kept.has(entry.clientId) && this.#isAwaited(entry, now));
      now.push(...gone);
      now.sort((a, b) => a.at - b.at);
      this.#entries = new Map(now.map((entry) => [entry.clientId, entry]));
      for (const entry of gone) this.#missed(entry);
      for (const { conversation } of [...before, ...stored]) this.#host.changed(conversation);
    } catch (error) {
      this.#host.failed(error as Error);
      this.#again();
    }
  }

  /** Changes the storage, and reports a failure only. */
  #write(work: () => Promise<unknown>): Promise<unknown> {
    return within(STORAGE_TIMEOUT_MS, work).catch((error) => this.#host.failed(error));
  }

  /** Waits for the note about an entry that is gone. Without one it is sent again: the gateway stores it if no tab sent it. */
  #missed(entry: Local): void {
    entry.missingTimer ??= setTimeout(() => {
      const { clientId, conversation, change } = entry;
      this.#stopWaiting(entry);
      if (this.#entries.get(clientId) === entry) {
        const of = change && 'of' in change && change.of;
        const isDiscarded = of && !this.#entries.has(of) && !this.seqOf(of);
        // Another tab discarded its message.
        if (isDiscarded) this.#settle(clientId)?.reject(new ChatError('closed', 'discarded'));
        if (!isDiscarded && this.#isAwaited(entry, this.#all(conversation))) this.#store(Object.assign(entry, { tried: true }));
        else this.#entries.delete(clientId);
        this.#host.changed(conversation);
      }
      this.#send(conversation);
    }, NOTE_MS);
  }

  /** Ends the wait for the note about an entry. */
  #stopWaiting(entry: Local | undefined): void {
    clearTimeout(entry?.missingTimer);
    if (entry) entry.missingTimer = undefined;
  }

  /** Whether this tab needs the outcome of an entry: for a promise, or for an edit over it, whose base is then known. */
  #isAwaited({ clientId, failed }: Local, among: readonly Local[]): boolean {
    const isReplaced = () => !failed && !this.#revs.has(clientId) && among.some(({ over }) => over === clientId);
    return this.#waiting.has(clientId) || isReplaced();
  }

  /** Writes an entry to the storage. Does not wait for earlier writes, because the tab may be closed at any moment. */
  async #store(entry: Local, remove = false): Promise<void> {
    this.#host.changed(entry.conversation);
    if (!this.#user) entry.unsaved = true;
    if (!this.#user || (entry.files && !entry.uploads && !remove)) return;
    const plain = plainOf(entry);
    entry.unsaved = !remove;
    this.#writes++;
    return within(STORAGE_TIMEOUT_MS, () => (remove ? this.#storage.remove(plain.clientId) : this.#storage.put(plain))).then(
      () => {
        entry.unsaved = false;
        this.#failures = 0;
        this.#tabs.tell({});
      },
      (error) => {
        if (!this.#failures) this.#host.failed(error as Error);
        this.#again();
        // It is sent from memory. Without a connection it has to be stored, so that it survives the tab.
        entry.alone = entry.tried = true;
        this.#send(entry.conversation);
      },
    );
  }

  /** Stores and loads later what could not be. */
  #again(): void {
    const again = () => {
      this.#retry = undefined;
      for (const entry of this.#entries.values()) if (entry.unsaved && entry.alone) void this.#store(entry);
      void this.#load().then(() => this.#sendAll());
    };
    this.#retry ??= setTimeout(again, backoff(this.#failures++));
  }

  #heard({ sent, accepted, cleared }: Note): void {
    if (cleared) {
      this.#cleared = Date.now();
      for (const entry of this.#entries.values()) {
        for (const file of uploadsOf(entry)) file.abort();
        this.#host.changed(entry.conversation);
      }
      return this.#drop('logout() was called in another tab');
    }
    const [clientId] = accepted ?? sent ?? [];
    if (!clientId) return void this.#load().then(() => this.#sendAll());
    const entry = this.#entries.get(clientId);
    this.#hasNews = true;
    if (accepted) {
      remember(this.#revs, ...accepted);
      if (entry) {
        // The leader may learn of them too late to store their base.
        this.#raise(entry, accepted[1], true);
        this.#accept(entry, accepted[1]);
      }
    }
    if (sent) {
      if (entry) entry.sent = sent[1];
      this.placed(clientId, sent[1].seq);
      this.#settle(clientId)?.resolve(sent[1]);
    }
    // Later entries may have waited for this note.
    if (entry) this.#send(entry.conversation);
  }

  /** Removes a change that was acknowledged at `rev`. */
  #accept(entry: Local, rev: Rev): void {
    this.#entries.delete(entry.clientId);
    this.#host.accepted(entry, rev);
    this.#host.changed(entry.conversation);
    this.#settle(entry.clientId)?.resolve({ rev });
  }

  #sendAll(): void {
    this.#uploadAll();
    const suspect = this.#suspect();
    const all = suspect ? [suspect] : this.#entries.values();
    for (const conversation of new Set([...all].map(({ conversation }) => conversation))) this.#send(conversation);
  }

  #suspect(): Local | undefined {
    return [...this.#entries.values()].find((entry) => entry.suspect && this.#isDue(entry));
  }

  #isDue(entry: Local): boolean {
    return isReady(entry) && (!!entry.alone || this.#turn === this.#connection);
  }

  /** Begins to send the entries of a conversation that no earlier one holds up, as long as the connection and the lock last. */
  #send(conversation: ConversationId): void {
    const connection = this.#connection;
    if (!connection || connection.aborted) return;
    // A message that may have closed the connection is sent alone, so that no other one is blamed for it.
    const suspect = this.#suspect();
    const busy = new Set<string | Seq>();
    for (const entry of this.#all(conversation)) {
      // One that is missing may be sent again, before those after it.
      const isBusy = this.#sending.has(entry.clientId) || entry.missingTimer;
      if (!isBusy && !this.#isDue(entry)) continue;
      const keys = entry.change ? keysOf(entry.change) : ['message'];
      const isFree = !isBusy && !keys.some((key) => busy.has(key));
      for (const key of keys) busy.add(key);
      if (isFree && (!suspect || suspect === entry)) void this.#keepSending(entry, connection);
    }
  }

  /** Sends an entry until it is acknowledged or refused for good, or the connection ends. */
  async #keepSending({ clientId, conversation }: Local, connection: AbortSignal): Promise<void> {
    this.#sending.add(clientId);
    let error: ChatError | undefined;
    let wasSuspect = false;
    try {
      for (let attempt = 1; !connection.aborted; attempt++) {
        const entry = this.#entries.get(clientId);
        const suspect = this.#suspect();
        if (!entry || !this.#isDue(entry) || (suspect && suspect !== entry)) break;
        wasSuspect = suspect === entry;
        error = await this.#sendOne(entry);
        // The next connection continues.
        if (!error || error.code === 'lost') break;
        await delay(retryDelay(error, attempt), connection);
      }
    } catch {
      // The connection ended during the delay.
    }
    this.#sending.delete(clientId);
    if (wasSuspect && !error && !connection.aborted) setTimeout(() => this.#sendAll());
    // There may be a new connection already.
    if (!error || connection.aborted) this.#send(conversation);
  }

  /** Sends one entry. Returns the error if it has to be retried. */
  async #sendOne(entry: Local): Promise<ChatError | undefined> {
    const retry = entry.tried;
    entry.tried = true;
    try {
      await (entry.change ? this.#sendChange(entry, entry.change) : this.#sendMessage(entry, retry));
    } catch (thrown) {
      let error = thrown as ChatError;
      const isFault = error.closeCode === BAD_FRAME;
      if (isFault && entry.suspect) {
        error = new ChatError('bad_request', 'it closed the connection twice');
      } else if (error.temporary) {
        entry.suspect ||= isFault;
        return error;
      }
      this.#fail(entry, error);
    }
    return undefined;
  }

  #fail(entry: Local, error: ChatError): Promise<void> {
    entry.failed = { code: error.code, message: error.message };
    this.#settle(entry.clientId)?.reject(error);
    return this.#store(entry);
  }

  async #sendMessage(entry: Local, retry: boolean | undefined): Promise<void> {
    const { clientId, conversation, body, attachments, replyTo } = entry;
    if (retry && Date.now() - entry.at > RETRY_MAX_MS) throw new ChatError('expired', 'it may have been stored');
    if (entry.dm) {
      await this.#host.ask({ type: 'create', kind: 'dm', participants: [entry.dm] });
      this.dms.delete(conversation);
      delete entry.dm;
    }
    const sent = await this.#host.ask({ type: 'send', clientId, conversation, body, attachments, replyTo, retry });
    entry.sent = sent;
    // The message event of a duplicate came before, so none will come to remove the entry.
    if (sent.duplicate) this.#entries.delete(clientId);
    // Before the message leaves the storage, or a crash between could leave its changes without a seq.
    this.placed(clientId, sent.seq);
    this.#settle(clientId)?.resolve(sent);
    this.#tabs.tell({ sent: [clientId, sent] });
    this.#store(entry, true);
  }

  async #sendChange(entry: Local, change: OutboxChange): Promise<void> {
    const { clientId, conversation, over = '' } = entry;
    const now = change.type === 'edit' ? raised(change, this.#revs.get(over)) : change;
    const { rev = 0 } = await this.#host.ask({ conversation, ...now } as ChangeRequest);
    remember(this.#revs, clientId, rev);
    // Before this one leaves the storage, as for `placed`.
    this.#raise(entry, rev);
    this.#accept(entry, rev);
    this.#tabs.tell({ accepted: [clientId, rev] });
    this.#store(entry, true);
  }

  /** Raises and stores the base of the edits over an acknowledged one, with `onlyMine` only of those with a promise of this tab. */
  #raise(entry: Local, rev: Rev, onlyMine = false): void {
    for (const other of editsOver(this.changesOf(entry.conversation), entry)) {
      const edit = other.change as OutboxChange & { type: 'edit' };
      if (edit.baseRev >= rev || (onlyMine && !this.#waiting.has(other.clientId))) continue;
      other.change = raised(edit, rev);
      this.#store(other);
    }
  }
}
