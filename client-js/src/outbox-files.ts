/** The files of messages in the outbox. The storage keeps them, so that a later tab can upload them. Of several tabs, the one
 * where they were chosen uploads them, and when it is closed, the one that sends for all. Loaded with the first file. */
import { within } from './backoff.js';
import { ChatError } from './codes.js';
import type { Local, OutboxHost } from './outbox-entry.js';
import type { KeptUpload, OutboxStorage } from './storage.js';
import type { Tabs } from './tabs.js';
import type { Attachment, ConversationId, UserId } from './types.js';
import type { Upload } from './upload.js';

/** The time after which a storage that still reads or writes files has failed. */
const KEEP_TIMEOUT_MS = 60_000;

/** What the files need of the outbox. */
export interface FilesHost {
  storage: OutboxStorage;
  tabs: Tabs;
  host: OutboxHost;
  /** The direct chats that the client creates when there is a connection. */
  dms: Map<ConversationId, UserId>;
  entry(clientId: string): Local | undefined;
  /** Reads the entries from the storage again. */
  load(): Promise<void>;
  store(entry: Local): Promise<void>;
  send(conversation: ConversationId): void;
  fail(entry: Local, error: ChatError): Promise<void>;
}

/** The files of one outbox. */
export class OutboxFiles {
  #of: FilesHost;
  /** The entries whose files this tab uploads, or waits to upload. */
  #busy = new WeakSet<Local>();
  /** The entries whose files were given to the storage. */
  #given = new WeakSet<Local>();

  constructor(of: FilesHost) {
    this.#of = of;
  }

  /** Uploads the files of messages, if this tab is not doing so yet, and has the messages sent.
   * @param all Whether it uploads those of other tabs, too, as soon as they are closed. */
  upload(entries: readonly Local[], all: boolean): void {
    for (const entry of entries) {
      void this.#keep(entry);
      if (this.#busy.has(entry) || !(entry.files || all)) continue;
      this.#busy.add(entry);
      const { clientId } = entry;
      const work = () => this.#uploadOne(clientId);
      void this.#of.tabs.locked(` ${clientId}`, work).finally(() => this.#busy.delete(entry));
    }
  }

  async #uploadOne(clientId: string): Promise<void> {
    if (!this.#of.entry(clientId)?.files) await this.#revive(clientId);
    const entry = this.#of.entry(clientId);
    if (entry?.files && !entry.failed) await this.#complete(entry, entry.files);
  }

  /** Has the storage keep the files of a message that it does not keep yet. Without room they are in memory only. */
  async #keep(entry: Local): Promise<void> {
    const { clientId, files, uploads, user } = entry;
    const { storage } = this.#of;
    // Before the user is known, nothing is stored.
    if (!storage.keep || !user || !files || uploads || this.#given.has(entry)) return;
    this.#given.add(entry);
    const blobs = uploadsOf(entry).map(({ blob }) => blob);
    try {
      await within(KEEP_TIMEOUT_MS, async () => storage.keep?.(clientId, blobs));
      const now = this.#of.entry(clientId);
      // It was sent or discarded meanwhile, or `logout()` was called.
      if (!now) await storage.remove(clientId);
      if (now !== entry || !entry.files) return;
      this.#store(entry);
    } catch (error) {
      this.#of.host.failed(error as Error);
    }
  }

  #store(entry: Local): void {
    // What was discarded, or deleted by `logout()`, must not come back.
    if (this.#of.entry(entry.clientId) !== entry) return;
    entry.uploads = keptOf(entry);
    void this.#of.store(entry);
  }

  /** Begins to upload what another tab left. */
  async #revive(clientId: string): Promise<void> {
    // After `disconnect()` there are no entries.
    if (!this.#of.entry(clientId)) return;
    // It may have been completed just before.
    await this.#of.load();
    const entry = this.#of.entry(clientId);
    if (!entry || !isLeft(entry)) return;
    const { conversation, attachments = [], uploads = [] } = entry;
    try {
      const kept = await within(KEEP_TIMEOUT_MS, async () => this.#of.storage.files?.(clientId) ?? []);
      if (this.#of.entry(clientId) !== entry) return;
      if (kept.length < uploads.length) throw new ChatError('not_found', 'the browser lost its files');
      // The files need the conversation, too.
      if (entry.dm) this.#of.dms.set(conversation, entry.dm);
      const files: (Attachment | Upload)[] = [...attachments];
      for (const [i, { at, ...known }] of uploads.entries())
        files[at] = Object.assign(this.#of.host.upload(conversation, kept[i]!, attachments[at]!), known);
      entry.files = files;
    } catch (error) {
      if (error instanceof ChatError && !error.temporary) await this.#of.fail(entry, error);
      else this.#of.host.failed(error as Error);
    }
  }

  /** Waits until the files of a message are uploaded, and has it sent. */
  async #complete(entry: Local, files: (Attachment | Upload)[]): Promise<void> {
    const uploads = uploadsOf(entry);
    // A later tab needs the ids. The gateway may have given some before this tab got the lock.
    if (entry.uploads) this.#store(entry);
    const ends = uploads.map((file) => file.on('state', (state) => state === 'uploading' && entry.uploads && this.#store(entry)));
    const isOver = () => this.#of.entry(entry.clientId) !== entry;
    try {
      await Promise.all(uploads.map(({ done }) => done));
      if (isOver()) return;
      entry.attachments = files.map((file) => (isUpload(file) ? file.attachment : file));
      entry.kept = entry.uploads?.map(({ at }) => ({ at }));
      entry.files = entry.uploads = undefined;
      const stored = this.#of.store(entry);
      this.#of.send(entry.conversation);
      await stored;
    } catch (thrown) {
      // It may have been discarded.
      if (isOver()) return;
      const error = thrown as ChatError;
      // As a message without files, it waits for the next connection: the user signs in again, or the gateway ended this one for good.
      const isClosed = error.code === 'unauthorized' || error.closeCode !== undefined;
      if (isClosed && entry.uploads) entry.files = undefined;
      else await this.#of.fail(entry, error);
    } finally {
      for (const end of ends) end();
    }
  }
}

/** Whether the files of a message are to be uploaded, but not by this tab yet. */
const isLeft = ({ files, uploads, failed }: Local) => !!uploads && !files && !failed;

// Without values of `upload.ts`, which would be a file of its own then.
const isUpload = (file: Attachment | Upload): file is Upload => 'blob' in file;
const uploadsOf = ({ files = [] }: Local) => files.filter(isUpload);

/** Returns the uploads of a message as they are stored. */
const keptOf = ({ files = [] }: Local): KeptUpload[] =>
  files.flatMap((file, at) => (isUpload(file) ? { at, id: file.id, parts: file.parts } : []));
