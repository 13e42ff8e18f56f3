/** What takes the place of what an application does not pass to a client. */
import { indexedDbStorage } from './browser-storage.js';
import { memoryStorage, type OutboxStorage } from './storage.js';

/** Returns IndexedDB if there is one, else memory. Some browsers throw where storage is forbidden.
 * @param failed Called with the reason if a browser has none. */
export function ownStorage(failed: (error: Error) => void): OutboxStorage {
  let reason: unknown = 'no IndexedDB';
  try {
    if (globalThis.indexedDB) return indexedDbStorage();
  } catch (error) {
    reason = error;
  }
  // Reported later, so that the application can listen first. Outside browsers memory is the expected storage.
  if (globalThis.document) queueMicrotask(() => failed(new Error(`The outbox is in memory only: ${reason}`)));
  return memoryStorage();
}
