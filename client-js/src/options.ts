/** The options that an application passes to a client and its requests, and the events of a client. */
import type { State, TokenSource } from './connection.js';
import type { ChatMessage } from './list.js';
import type { OutboxStorage } from './storage.js';
import type {
  Attachment,
  Changed,
  ConversationChange,
  ConversationId,
  Inspected,
  Message,
  Posting,
  Presence,
  PushContent,
  Reacted,
  Receipt,
  Resync,
  Rev,
  Seq,
  Settings,
  Typing,
  UserId,
} from './types.js';
import type { Upload } from './upload.js';

export interface ChatOptions {
  /** Returns a token of this user. Called before the first connection, shortly before a token expires, and when the
   * gateway refuses one; not when a connection merely broke. Throw `UnauthorizedError` to give up. After any other error
   * the client tries again. */
  token: TokenSource | string;
  /** The encoding of frames; `json` by default. The code of `msgpack`, whose frames are smaller, is loaded when it is used. */
  codec?: 'json' | 'msgpack';
  /** The storage of the outbox. Default: IndexedDB in browsers, memory elsewhere. */
  storage?: OutboxStorage;
  /** The user, if the application knows it before the first connection: pending messages are then shown at once. */
  user?: UserId;
  /** The name of the service that the outbox belongs to: a message written for one service is never sent to another.
   * Default: the origin of `url`, or empty if `url` is a function. An application that passes a function and uses several
   * services gives each a scope. */
  scope?: string;
  /** Receives log lines for the developer, for example `console`. Without a logger, the client warns once on `console`
   * about an `error` event that has no listener. */
  logger?: Logger;
  /** The name of this device in the gateway's logs. */
  device?: string;
  /** The WebSocket class. Needed where there is no global one, as in Node before version 22. */
  WebSocket?: unknown;
  /** The `cursors()` of an earlier client: the gateway replays later messages. */
  cursors?: Record<ConversationId, [Seq, Rev]>;
  /** The number of messages that a live list holds; 300 by default. A longer list is trimmed at the end far from its reader. */
  window?: number;
}

/** Receives log lines, one method for each level. */
export interface Logger {
  debug?(message: string, ...more: unknown[]): void;
  info?(message: string, ...more: unknown[]): void;
  warn?(message: string, ...more: unknown[]): void;
  error?(message: string, ...more: unknown[]): void;
}

/** The events of a client, by name. */
export interface ClientEvents {
  state: State;
  /** A message of any conversation. Each comes once, in the order of its conversation, without gaps except after a `resync`. */
  message: Message;
  /** Entries were edited or deleted, or got other reactions. Each change comes once, in the order of its conversation, and none
   * is left out except after a `reset`. */
  changed: Changed;
  /** The user added or removed a reaction, on this device or another one. */
  reacted: Reacted;
  attachment: Inspected;
  receipt: Receipt;
  typing: Typing;
  presence: Presence;
  conversation: ConversationChange;
  /** The user muted a conversation or turned its pushes on or off, on this device or another one. */
  settings: Settings;
  /** The user clicked the notification of a conversation, which the application should show. */
  open: ConversationId;
  /** The client missed too much: messages up to `head` come as no `message` event and are in the history only. */
  resync: Resync;
  /** An error that rejects no promise: the storage of the outbox failed, or the gateway reported it. */
  error: Error;
}

/** How long to wait for the answer to a request. */
export interface RequestOptions {
  signal?: AbortSignal;
  /** The time limit in milliseconds, with the wait for a connection and all retries; 15,000 by default. */
  timeoutMs?: number;
}

/** A group or channel to be created. */
export interface NewConversation {
  name?: string;
  participants?: UserId[];
  public?: boolean;
  posting?: Posting;
  /** The id, a UUID of version 4 or 7, random by default. Creating the same id again has no effect. */
  conversation?: ConversationId;
}

/** The optional parts of a message to send. */
export interface SendOptions {
  /** Links, uploaded files, and files that are being uploaded: the message is sent when all of them are ready. */
  attachments?: (Attachment | Upload)[];
  replyTo?: Seq;
}

/** The optional parts of an edit. */
export interface EditOptions {
  /** The message as it was shown when the user began to edit. If its text changed since then, the edit is refused with
   * `conflict`. Default: as it is shown now. */
  from?: ChatMessage;
}

/** How a device is registered for pushes. */
export interface PushOptions {
  /** What a push says; `full` by default. */
  content?: PushContent;
  /** The id of the device. Default: an id that the storage keeps. An application whose storage has no `get` and `set` passes an
   * id that stays the same. */
  device?: string;
}
