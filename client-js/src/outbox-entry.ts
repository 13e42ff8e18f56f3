/** The entries of the outbox, and what it needs of others. */
import type { ChatError } from './codes.js';
import type { OutboxChange, OutboxEntry } from './storage.js';
import type { Accepted, Attachment, ConversationId, Replies, Request, Rev, Sent, Seq } from './types.js';

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
  /** Whether it may have been sent before. */
  tried?: boolean;
  /** Whether its last change is not in the storage yet. */
  unsaved?: boolean;
  /** Whether the storage refused it, so that no other tab can send it. */
  unstored?: boolean;
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
}
