/** A part of a conversation's log without gaps, of bounded length, so that a million messages can be walked through.
 * Above the bound it is trimmed at the end that is farther from where the reader is. Pure. */
import type { Seq } from './types.js';

export class Timeline<Entry extends { readonly seq: Seq }> {
  /** Oldest first. Changed in place: adding one message to many must cost little. */
  readonly entries: Entry[] = [];
  /** The place that is looked at; without one, the newer end. */
  reader: Seq | undefined;
  #window: number;

  /** @param window Entries that are held. */
  constructor(window: number) {
    this.#window = window;
  }

  get first(): Seq | undefined {
    return this.entries[0]?.seq;
  }

  get last(): Seq | undefined {
    return this.entries[this.entries.length - 1]?.seq;
  }

  /** Begins anew with a page. */
  reset(page: readonly Entry[]): void {
    this.entries.splice(0, Infinity, ...page);
  }

  /** Adds newer entries; those that do not follow on are left out. An empty timeline begins with the first entry of the log.
   * A full one whose reader is in its older half stays as it is. */
  append(page: readonly Entry[]): void {
    for (const entry of page) {
      if (entry.seq !== (this.last ?? 0) + 1) continue;
      const isFull = this.entries.length >= this.#window;
      if (isFull && this.reader !== undefined && this.reader - this.first! < this.#window / 2) return;
      this.entries.push(entry);
      if (isFull) this.entries.shift();
    }
  }

  /** Adds older entries, oldest first; those that do not lead up to the first are left out. */
  prepend(page: readonly Entry[]): void {
    const { first = 0 } = this;
    const fresh = page.filter(({ seq }) => seq < first);
    if (fresh.at(-1)?.seq !== first - 1) return;
    this.entries.unshift(...fresh);
    this.entries.splice(this.#window);
  }
}
