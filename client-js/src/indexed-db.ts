/** The storage of the outbox in IndexedDB. `indexedDbStorage` loads this file. */
import type { OutboxEntry, OutboxStorage } from './storage.js';

/** Opens the database, and creates it if there is none.
 * @param closed Called when the browser or another tab closes the database, so that it has to be opened again. */
export async function openOutbox(name: string, closed: () => void): Promise<Omit<OutboxStorage, 'shared'>> {
  const request = indexedDB.open(name, 2);
  request.onupgradeneeded = () => {
    const { result: database, transaction } = request;
    const create = () => database.createObjectStore('outbox', { keyPath: 'clientId' });
    if (!database.objectStoreNames.contains('outbox')) return create();
    // The fields of version 1 have `snake_case` names.
    const old = transaction!.objectStore('outbox').getAll();
    old.onsuccess = () => {
      database.deleteObjectStore('outbox');
      const outbox = create();
      for (const { client_id: clientId, reply_to: replyTo, ...entry } of old.result) outbox.put({ ...entry, clientId, replyTo });
    };
  };
  const database = await new Promise<IDBDatabase>((resolve, reject) => {
    request.onerror = () => reject(request.error);
    request.onsuccess = () => resolve(request.result);
  });
  // Closing it lets another tab delete or upgrade the database without waiting for this one.
  database.onversionchange = database.onclose = () => {
    closed();
    database.close();
  };
  const run = <T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> => {
    const transaction = database.transaction('outbox', mode);
    const request = work(transaction.objectStore('outbox'));
    // Without it the browser commits after `onsuccess`, and the tab may be closed before that.
    transaction.commit?.();
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  };
  return {
    entries: async (user) => {
      const all = await run<OutboxEntry[]>('readonly', (store) => store.getAll());
      return all.filter((entry) => entry.user === user);
    },
    put: (entry) => run('readwrite', (store) => store.put(entry)),
    remove: (clientId) => run('readwrite', (store) => store.delete(clientId)),
  };
}
