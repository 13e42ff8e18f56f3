/** The entries of the outbox, and what it needs of others. */
import type { ChatError } from './codes.js';
import type { ChatMessage } from './list.js';
import type { OutboxChange, OutboxEntry } from './storage.js';
import type { Accepted, Attachment, ConversationId, Millis, Replies, Request, Rev, Sent, Seq } from './types.js';
import { type AttachOptions, Upload } from './upload.js';

/** The greatest number of entries of one user. Above it, `send` rejects with `too_large`. */
export const OUTBOX_MAX = 1_000;

/** The age at which an entry is not retried any more. The gateway remembers a `clientId` for seven days. */
export const RETRY_MAX_MS = 6 * 24 * 3600 * 1000;

/** The time between two looks at what the tab with the lock should send. */
export const WATCH_MS = 3_000;

/** The time after which a storage that does not answer has failed. */
export const STORAGE_TIMEOUT_MS = 5_000;

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

/** An entry with what this tab does for it. */
export interface Local extends Pending {
  /** The attachments, while this tab uploads them. The message is not sent until they are ready, and not stored before `uploads`
   * says that the storage keeps them. */
  files?: (Attachment | Upload)[];
  /** Whether it may have been sent before. */
  tried?: boolean;
  /** Whether its last change is not in the storage yet. */
  unsaved?: boolean;
  /** Whether this tab sends it without the lock: the storage refused it, or the tab with the lock did not send it. */
  alone?: boolean;
  /** The timer of `#missed`, if another tab removed it from the storage and has not said why yet. */
  missingTimer?: ReturnType<typeof setTimeout> | undefined;
  /** Whether the gateway closed the connection with 4500 while it was in flight. */
  suspect?: boolean;
}

/** A note between tabs: a message or change was acknowledged, `logout()` was called, or without a field, the storage changed. */
export type Note = { sent?: [clientId: string, sent: Sent]; accepted?: [clientId: string, rev: Rev]; cleared?: true };

export type ChangeRequest = Extract<Request, { type: OutboxChange['type'] }>;
type Ask = <R extends ChangeRequest | (Request & { type: 'send' | 'create' })>(request: R) => Promise<Replies[R['type']]>;

/** The promise of a `send` call or of a change. */
export interface Waiting {
  resolve(answer: Sent | Accepted): void;
  reject(error: ChatError): void;
}

/** The text and the attachments of a message. */
export type Text = Pick<Draft, 'body' | 'attachments'>;

/** What the outbox needs of its client. */
export interface OutboxHost {
  ask: Ask;
  /** Called when the entries of a conversation changed. */
  changed(conversation: ConversationId): void;
  /** Called when a change was acknowledged. */
  accepted(entry: OutboxEntry, rev: Rev): void;
  /** Called with an error of the storage, or between tabs. */
  failed(error: Error): void;
  upload(conversation: ConversationId, blob: Blob, options: AttachOptions): Upload;
}

/** Returns a pending message as the list shows it, with a time of the gateway.
 * @param ahead How far the clock of the gateway is ahead. */
export function onItsWay(entry: Pending, ahead: Millis): ChatMessage {
  const { clientId, conversation, body, attachments, replyTo, user: sender, failed: error, sent } = entry;
  const state = error ? 'failed' : sent ? 'sent' : 'sending';
  const message = { conversation, clientId, body, sender, key: clientId, kind: 'text' as const, state, error } as const;
  return { ...message, at: sent?.at ?? entry.at + ahead, seq: sent?.seq, ...(attachments && { attachments }), ...(replyTo && { replyTo }) };
}

/** Returns a request with only those fields of uploaded files that a client may send. */
export function sendable<R extends { type: string }>(request: R): R {
  if (!('attachments' in request)) return request;
  const files = request.attachments as Attachment[] | undefined;
  return { ...request, attachments: files?.map((file) => (file.id ? { id: file.id, alt: file.alt } : file)) };
}

/** Returns what the storage keeps of an entry. */
export function plainOf(entry: Local): OutboxEntry {
  const { sent: _, tried: __, unsaved: ___, alone: ____, suspect: _____, missingTimer: ______, files: _______, ...plain } = entry;
  return plain;
}

/** Returns what a change is about. `react` and `unreact` with one emoji are about the same. */
export const whatOf = (change: OutboxChange): string => ('emoji' in change ? `react ${change.emoji}` : change.type);

/** Adds to a map of limited size, which loses its oldest entry. */
export function remember<T>(map: Map<string, T>, clientId: string, value: T): void {
  map.set(clientId, value);
  const [oldest] = map.keys();
  if (map.size > OUTBOX_MAX) map.delete(oldest!);
}

/** Returns the uploads of a message that is not sent until they are ready. */
export const uploadsOf = ({ files = [] }: Local) => files.filter((file) => file instanceof Upload);

/** Returns an attachment as the list shows it. */
export const shown = (file: Attachment | Upload): Attachment => (file instanceof Upload ? file.attachment : file);
