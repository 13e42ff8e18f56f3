/** Where messages wait until they are stored by a gateway. */
import type { Attachment, ConversationId, Millis, Seq, UserId } from './types.js';
import { fromWire } from './wire.js';

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

/** Survives the tab, and is one for all tabs of this origin. */
export function indexedDbStorage(name = 'chat-gateway'): OutboxStorage {
  let opened: Promise<IDBDatabase> | undefined;
  const database = () =>
    (opened ??= new Promise<IDBDatabase>((resolve, reject) => {
      const request = indexedDB.open(name, 2);
      request.onupgradeneeded = () => {
        const { result: database, transaction } = request;
        const create = () => database.createObjectStore('outbox', { keyPath: 'clientId' });
        if (!database.objectStoreNames.contains('outbox')) return create();
        // Version 1 had the field names of the wire.
        const old = transaction!.objectStore('outbox').getAll();
        old.onsuccess = () => {
          database.deleteObjectStore('outbox');
          const outbox = create();
          for (const entry of old.result) outbox.put(fromWire(entry));
        };
      };
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const database = request.result;
        // Whoever deletes or upgrades it need not wait for this tab.
        database.onversionchange = database.onclose = () => {
          opened = undefined;
          database.close();
        };
        resolve(database);
      };
    }).catch((error) => {
      opened = undefined;
      throw error;
    }));
  const run = async <T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> => {
    const transaction = (await database()).transaction('outbox', mode);
    const request = work(transaction.objectStore('outbox'));
    // Not only once this tab has heard that the request succeeded: it may be closed before.
    transaction.commit?.();
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  };
  return {
    shared: true,
    entries: async (user) => {
      const all = await run<OutboxEntry[]>('readonly', (store) => store.getAll());
      return all.filter((entry) => entry.user === user);
    },
    put: (entry) => run('readwrite', (store) => store.put(entry)),
    remove: (clientId) => run('readwrite', (store) => store.delete(clientId)),
  };
}
