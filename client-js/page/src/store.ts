/** What the browser stores for this page. Browsers refuse it where cookies are blocked or the storage is full: it is then kept in
 * memory, as long as the page is open. Nothing else of the page may use the browser's own storage of texts. */

/** A storage of texts. No call throws. */
export interface Store {
  get(key: string): string | null;
  set(key: string, text: string): void;
  remove(key: string): void;
  keys(): string[];
}

/** @param open Returns the storage of the browser. Some browsers throw already here. */
function storeOf(open: () => Storage): Store {
  /** What the browser refused: a text that it did not store, or null for one that it did not delete. */
  const refused = new Map<string, string | null>();
  const attempt = <T>(what: (storage: Storage) => T, otherwise: () => T): T => {
    try {
      return what(open());
    } catch {
      return otherwise();
    }
  };
  const change = (key: string, text: string | null, what: (storage: Storage) => void): void => {
    refused.delete(key);
    attempt(what, () => void refused.set(key, text));
  };
  const keys = (storage: Storage) => Array.from({ length: storage.length }, (_, i) => storage.key(i)!);
  return {
    get: (key) => {
      const text = refused.get(key);
      return text === undefined
        ? attempt(
            (storage) => storage.getItem(key),
            () => null,
          )
        : text;
    },
    set: (key, text) => change(key, text, (storage) => storage.setItem(key, text)),
    remove: (key) => change(key, null, (storage) => storage.removeItem(key)),
    keys: () => [...new Set([...attempt(keys, () => []), ...refused.keys()])],
  };
}

/** What this tab keeps. It survives a reload. */
export const ofTab: Store = storeOf(() => sessionStorage);
/** What all tabs share. */
export const ofBrowser: Store = storeOf(() => localStorage);
