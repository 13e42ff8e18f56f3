/** The storage of the outbox in IndexedDB. `indexedDbStorage` loads this file. */
import { within } from './backoff.js';
import type { ChatError } from './codes.js';
import type { OutboxEntry, OutboxStorage } from './storage.js';

/** The time after which a database that does not answer is opened again: shorter than the client waits for its storage. Some
 * browsers never open it the first time. */
const ANSWER_TIMEOUT_MS = 4_000;
/** The same for files. */
const FILES_TIMEOUT_MS = 50_000;
/** The greatest number of bytes of all files that wait in one browser. Above it, they are in memory only. */
const KEPT_BYTES_MAX = 200 << 20;
/** The age at which a file without a message is deleted. A younger one may be of a message that is just being stored. */
const ABANDONED_MS = 10 * 60 * 1000;
/** The age at which any file is deleted: its user did not come back. */
const KEPT_MAX_MS = 30 * 24 * 3600 * 1000;

/** The key of a file: its message, its number there, its size, and when it was stored. So they are known without reading files. */
type FileKey = [clientId: string, number: number, size: number, at: number];

/** Opens the database, and creates it if there is none. A connection that the browser dropped is made anew. */
export function openOutbox(name: string): Omit<Required<OutboxStorage>, 'shared'> {
  let opened: Promise<IDBDatabase> | undefined;
  const connect = () => {
    const opening = (opened ??= within(ANSWER_TIMEOUT_MS, (over) => open(name, over)));
    const forget = () => {
      if (opened === opening) opened = undefined;
    };
    opening.then((database) => {
      // Closing it lets another tab delete or upgrade the database without waiting for this one.
      database.onversionchange = database.onclose = () => {
        forget();
        database.close();
      };
    }, forget);
    return { opening, forget };
  };
  /** Calls `work`, and again with a new connection if the browser dropped the known one, of which it does not always tell. One that
   * does not answer is given up, too. */
  const use = async <T>(work: (database: IDBDatabase) => Promise<T>, ms = ANSWER_TIMEOUT_MS): Promise<T> => {
    const { opening, forget } = connect();
    try {
      const database = await opening;
      return await within(ms, () => work(database));
    } catch (thrown) {
      // WebKit calls it an unknown error.
      const isDropped = ['InvalidStateError', 'UnknownError'].includes((thrown as Error).name);
      if (isDropped || (thrown as ChatError).code === 'timeout') forget();
      if (!isDropped) throw thrown;
      return work(await connect().opening);
    }
  };
  const run = <T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>, name = 'outbox', ms?: number): Promise<T> =>
    use((database) => {
      const transaction = database.transaction(name, mode);
      const request = work(transaction.objectStore(name));
      // Without it the browser commits after `onsuccess`, and the tab may be closed before that.
      transaction.commit?.();
      return new Promise((resolve, reject) => {
        transaction.oncomplete = () => resolve(request.result);
        transaction.onabort = () => reject(transaction.error);
      });
    }, ms);
  const forget = (range: IDBKeyRange | IDBValidKey) =>
    // The next tab tidies up what is left.
    void run('readwrite', (store) => store.delete(range), 'files').catch(() => {});
  const tidy = async () => {
    const waiting = new Set(await run('readonly', (store) => store.getAllKeys()));
    for (const key of await run('readonly', (store) => store.getAllKeys(), 'files')) {
      const [clientId, , , at] = key as FileKey;
      const age = Date.now() - at;
      if (age > KEPT_MAX_MS || (age > ABANDONED_MS && !waiting.has(clientId))) forget(key);
    }
  };
  tidy().catch(() => {});
  return {
    entries: async (user) => {
      const all = await run<OutboxEntry[]>('readonly', (store) => store.getAll());
      return all.filter((entry) => entry.user === user);
    },
    put: (entry) => run('readwrite', (store) => store.put(entry)),
    remove: async (clientId) => {
      await run('readwrite', (store) => store.delete(clientId));
      // Not awaited: files of another message may be being written, which takes long.
      forget(ofMessage(clientId));
    },
    keep: (clientId, files) => use(async (database) => keep(database.transaction('files', 'readwrite'), clientId, files), FILES_TIMEOUT_MS),
    files: (clientId) => run('readonly', (store) => store.getAll(ofMessage(clientId)), 'files', FILES_TIMEOUT_MS),
    get: (name) => run('readonly', (store) => store.get(name), 'texts'),
    set: (name, text) =>
      run('readwrite', (store) => (text === undefined ? store.delete(name) : store.put(text, name)) as IDBRequest<unknown>, 'texts'),
  };
}

/** @param over Aborted if it took too long. A database that opens afterwards is closed. */
function open(name: string, over: AbortSignal): Promise<IDBDatabase> {
  const request = indexedDB.open(name, 4);
  request.onupgradeneeded = () => {
    const { result: database } = request;
    // The earlier versions were never released.
    for (const old of database.objectStoreNames) database.deleteObjectStore(old);
    database.createObjectStore('outbox', { keyPath: 'clientId' });
    // A store of their own, because an entry is written often.
    database.createObjectStore('files');
    database.createObjectStore('texts');
  };
  return new Promise((resolve, reject) => {
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      if (over.aborted) request.result.close();
      resolve(request.result);
    };
  });
}

/** Returns the range of the keys of a message's files. An array is greater than any number. */
const ofMessage = (clientId: string) => IDBKeyRange.bound([clientId], [clientId, []]);

/** Stores the files of a message, if there is room for all of them. */
function keep(transaction: IDBTransaction, clientId: string, files: Blob[]): Promise<void> {
  const store = transaction.objectStore('files');
  let failed: unknown;
  store.delete(ofMessage(clientId));
  const keys = store.getAllKeys();
  keys.onsuccess = () => {
    const sizes = [...(keys.result as FileKey[]).map(([, , size]) => size), ...files.map(({ size }) => size)];
    try {
      if (sizes.reduce((sum, size) => sum + size, 0) > KEPT_BYTES_MAX)
        throw new Error(`more than ${KEPT_BYTES_MAX >> 20} MiB of files wait. The last ones are lost when this page is closed`);
      for (const [i, file] of files.entries()) store.put(file, [clientId, i, file.size, Date.now()] satisfies FileKey);
    } catch (error) {
      failed = error;
      transaction.abort();
    }
  };
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(failed ?? transaction.error);
  });
}
