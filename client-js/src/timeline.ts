/** A window of a conversation's log: contiguous entries, bounded in number, so that a user can scroll through a million
 * messages. Above the bound it is trimmed at the end farther from the reader. No I/O. */
import type { Seq } from './types.js';

/** A bounded, contiguous window of a log. */
export class Timeline<Entry extends { readonly seq: Seq }> {
  /** The entries, oldest first. Changed in place, so that adding one entry to many is cheap. */
  readonly entries: Entry[] = [];
  /** The seq that the user looks at; without one, the newer end. */
  reader: Seq | undefined;
  #window: number;

  /** @param window The greatest number of entries. */
  constructor(window: number) {
    this.#window = window;
  }

  get first(): Seq | undefined {
    return this.entries[0]?.seq;
  }

  get last(): Seq | undefined {
    return this.entries.at(-1)?.seq;
  }

  /** Replaces all entries by a page. */
  reset(page: readonly Entry[]): void {
    this.entries.splice(0, Infinity, ...page);
  }

  /** Adds newer entries, and ignores an entry that does not follow the last one. An empty timeline accepts only the first
   * entry of the log. A full one does not change while its reader is in its older half. */
  append(page: readonly Entry[]): void {
    for (const entry of page) {
      if (entry.seq !== (this.last ?? 0) + 1) continue;
      const isFull = this.entries.length >= this.#window;
      if (isFull && this.reader !== undefined && this.reader - this.first! < this.#window / 2) return;
      this.entries.push(entry);
      if (isFull) this.entries.shift();
    }
  }

  /** Adds a page of older entries, oldest first. Ignores a page that does not end right before the first entry. */
  prepend(page: readonly Entry[]): void {
    const { first = 0 } = this;
    const fresh = page.filter(({ seq }) => seq < first);
    if (fresh.at(-1)?.seq !== first - 1) return;
    this.entries.unshift(...fresh);
    this.entries.splice(this.#window);
  }
}
