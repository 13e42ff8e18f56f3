/** The outbox of a browser. */
import type { openOutbox } from './indexed-db.js';
import type { OutboxStorage } from './storage.js';

/** Survives the tab, and is one for all tabs of this origin. Its code is a file of its own, loaded at once. While it cannot be
 * loaded, calls fail, as they do where the browser refuses to store: messages are then sent from memory. */
export function indexedDbStorage(name = 'chat-gateway'): OutboxStorage {
  let opened: ReturnType<typeof openOutbox> | undefined;
  const forget = () => {
    opened = undefined;
  };
  const load = async () => (await import('./indexed-db.js')).openOutbox(name, forget);
  const open = () => {
    if (!opened) {
      opened = load();
      opened.catch(forget);
    }
    return opened;
  };
  open();
  return {
    shared: true,
    entries: async (user) => (await open()).entries(user),
    put: async (entry) => (await open()).put(entry),
    remove: async (clientId) => (await open()).remove(clientId),
  };
}
