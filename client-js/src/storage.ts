/** Where messages wait until they are stored by a gateway. */
import type { Attachment, ConversationId, Millis, Seq, UserId } from './types.js';

/** A message on its way. Plain data. */
export interface OutboxEntry {
  /** Makes sending it twice one message. */
  clientId: string;
  user: UserId;
  /** The origin of the gateway it was written for. Entries of earlier versions have none. */
  gateway?: string;
  /** The other user of a direct chat that may not have been created yet. */
  dm?: UserId;
  conversation: ConversationId;
  body: string;
  attachments?: Attachment[];
  replyTo?: Seq;
  /** When it was written; entries are sent in this order. */
  at: Millis;
  /** Refused for good: kept until somebody retries or discards it. */
  failed?: { code: string; message: string };
}

/** Calls are not awaited one by one: they take effect, and see the effects, in the order in which they are made. */
export interface OutboxStorage {
  /** Other tabs of this browser see the same: one of them sends. */
  readonly shared: boolean;
  /** Those of one user, in any order. */
  entries(user: UserId): Promise<OutboxEntry[]>;
  /** Adds it, or replaces the one with this `clientId`. */
  put(entry: OutboxEntry): Promise<unknown>;
  remove(clientId: string): Promise<unknown>;
}

/** Gone with the process. */
export function memoryStorage(): OutboxStorage {
  const entries = new Map<string, OutboxEntry>();
  return {
    shared: false,
    entries: async (user) => [...entries.values()].filter((entry) => entry.user === user),
    put: async (entry) => entries.set(entry.clientId, { ...entry }),
    remove: async (clientId) => entries.delete(clientId),
  };
}
