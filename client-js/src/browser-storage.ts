/** The storage of the outbox in a browser. */
import type { openOutbox } from './indexed-db.js';
import type { OutboxStorage } from './storage.js';

/** Returns a storage in IndexedDB, which survives the tab and is shared by all tabs of the origin. Its code is loaded from a
 * file of its own. If that fails, or if the browser refuses to store, calls reject and messages are sent from memory. */
export function indexedDbStorage(name = 'chat-gateway'): OutboxStorage {
  let opened: Promise<ReturnType<typeof openOutbox>> | undefined;
  const open = () => {
    if (!opened) {
      opened = import('./indexed-db.js').then(({ openOutbox }) => openOutbox(name));
      opened.catch(() => (opened = undefined));
    }
    return opened;
  };
  open();
  return {
    shared: true,
    entries: async (user) => (await open()).entries(user),
    put: async (entry) => (await open()).put(entry),
    remove: async (clientId) => (await open()).remove(clientId),
    keep: async (clientId, files) => (await open()).keep(clientId, files),
    files: async (clientId) => (await open()).files(clientId),
    get: async (name) => (await open()).get(name),
    set: async (name, text) => (await open()).set(name, text),
  };
}
