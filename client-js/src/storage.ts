/** The storage of the outbox, as an interface and in memory. */
import type { Attachment, AttachmentId, ConversationId, Millis, Rev, Seq, UserId } from './types.js';

/** The message that a pending change belongs to: its seq, or its client id while it has no seq. */
export interface ChangeTarget {
  seq?: Seq;
  of?: string;
}

/** A pending change of a message, as plain data. `baseRev` is the rev of the text that the user saw when editing. */
export type OutboxChange =
  | ({ type: 'edit'; body: string; attachments?: Attachment[] | undefined; baseRev: Rev } & ChangeTarget)
  | { type: 'delete'; seqs: Seq[] }
  | ({ type: 'react' | 'unreact'; emoji: string } & ChangeTarget);

/** An upload of a pending message, as plain data. */
export interface KeptUpload {
  /** The index of its attachment. */
  at: number;
  /** The id at the gateway, once it knows the file. */
  id?: AttachmentId | undefined;
  /** Where the gateway lists the missing parts, if they go to its file storage. */
  parts?: string | undefined;
}

/** A pending message or a pending change of one, as plain data. */
export interface OutboxEntry {
  /** The idempotency key: a message that is sent twice is stored once. */
  clientId: string;
  user: UserId;
  /** The scope of the gateway it is for. */
  gateway: string;
  /** The other user of a direct chat that may not have been created yet. */
  dm?: UserId;
  conversation: ConversationId;
  body: string;
  attachments?: Attachment[];
  /** The uploads for its attachments, until all are ready. It is not sent before. The storage keeps a file for each. */
  uploads?: KeptUpload[] | undefined;
  /** The uploads for its attachments that are ready. If the gateway erased one before the message came, a retry begins them anew. */
  kept?: KeptUpload[] | undefined;
  replyTo?: Seq;
  /** The change, if the entry is not a message. `body` is then empty. */
  change?: OutboxChange;
  /** For an edit: the client id of the waiting edit whose text it replaces; empty if there is none. It is no conflict with that
   * one. */
  over?: string | undefined;
  /** The time when it was written. Entries are sent in this order. */
  at: Millis;
  /** Why it was refused for good. It is kept until the user retries or discards it. */
  failed?: { code: string; message: string };
}

/** A storage for the outbox. The client does not await each call, so calls must take effect in the order in which they are made. */
export interface OutboxStorage {
  /** Whether the tabs of a browser share the entries, so that one tab sends for all. */
  readonly shared: boolean;
  /** Returns the entries of one user, in any order. */
  entries(user: UserId): Promise<OutboxEntry[]>;
  /** Adds an entry, or replaces the one with the same `clientId`. */
  put(entry: OutboxEntry): Promise<unknown>;
  /** Deletes an entry, and the files that are kept for it. */
  remove(clientId: string): Promise<unknown>;
  /** Keeps the files of a message, in the place of those kept before. Rejects if there is no room. A storage without this method
   * gets a message only when its files are uploaded. */
  keep?(clientId: string, files: Blob[]): Promise<unknown>;
  /** Returns the files that are kept for a message, in their order. */
  files?(clientId: string): Promise<Blob[]>;
  /** Returns the text that is kept under a name: how this device is registered for pushes. */
  get?(name: string): Promise<string | undefined>;
  /** Keeps a text under a name; without a text deletes it. Without `get` and `set`, the client forgets after each start how its
   * device is registered. */
  set?(name: string, text?: string): Promise<unknown>;
}

/** Returns a storage that lives as long as the page or process. */
export function memoryStorage(): OutboxStorage {
  const entries = new Map<string, OutboxEntry>();
  const texts = new Map<string, string>();
  return {
    shared: false,
    entries: async (user) => [...entries.values()].filter((entry) => entry.user === user),
    put: async (entry) => entries.set(entry.clientId, { ...entry }),
    remove: async (clientId) => entries.delete(clientId),
    get: async (name) => texts.get(name),
    set: async (name, text) => (text === undefined ? texts.delete(name) : texts.set(name, text)),
  };
}
