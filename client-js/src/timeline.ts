/** A part of a conversation's log without gaps, at most so many entries: what goes on at one end is let go at the
 * other, so that a million messages can be walked through. Pure. */
import type { Message, Seq } from './types.js';

/** Messages held around the place that is looked at. */
const WINDOW = 300;

export class Timeline {
  messages: readonly Message[] = [];

  get first(): Seq | undefined {
    return this.messages[0]?.seq;
  }

  get last(): Seq | undefined {
    return this.messages.at(-1)?.seq;
  }

  /** Begins anew with a page. */
  reset(page: readonly Message[]): void {
    this.messages = page;
  }

  /** Newer ones; those that do not follow on are left out. An empty one begins with the first message of all. */
  append(page: readonly Message[]): void {
    let { last = 0 } = this;
    const fresh = page.filter(({ seq }) => seq === last + 1 && (last = seq));
    if (fresh.length) this.messages = [...this.messages, ...fresh].slice(-WINDOW);
  }

  /** Older ones, oldest first; those that do not lead up to the first are left out. */
  prepend(page: readonly Message[]): void {
    const { first = 0 } = this;
    const fresh = page.filter(({ seq }) => seq < first);
    if (fresh.at(-1)?.seq === first - 1) this.messages = [...fresh, ...this.messages].slice(0, WINDOW);
  }
}
