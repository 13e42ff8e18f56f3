import { useSyncExternalStore } from 'react';

/** The number of keys of one set. */
const NOTED_MAX = 1_000;

/** What the page remembers while it is open: a set of keys, which loses its oldest ones, and which components watch. */
export class Noted {
  #keys = new Set<string>();
  #watchers = new Set<() => void>();

  add(key: string): void {
    this.#keys.add(key);
    for (const oldest of this.#keys) {
      if (this.#keys.size <= NOTED_MAX) break;
      this.#keys.delete(oldest);
    }
    this.#tell();
  }

  delete(key: string): void {
    this.#keys.delete(key);
    this.#tell();
  }

  clear(): void {
    this.#keys.clear();
  }

  /** Whether the set has a key, for a component. */
  useHas(key: string): boolean {
    return useSyncExternalStore(this.#watch, () => this.#keys.has(key));
  }

  #watch = (watcher: () => void) => {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  };

  #tell(): void {
    for (const watcher of this.#watchers) watcher();
  }
}
