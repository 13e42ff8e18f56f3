/** Watermarks (`delivered`, `read`) on their way to the gateway. Those of one conversation are gathered, all are told one
 * after the other, and each is tried until the gateway takes it or refuses it for good. */
import { delay, persist } from './backoff.js';
import type { ConversationId, Seq } from './types.js';

/** The watermark of one conversation is told at most this often. */
const GATHER_MS = 200;

type Mark = { type: 'read' | 'delivered'; conversation: ConversationId; seq: Seq };

export class Marks {
  #ask: (mark: Mark) => Promise<unknown>;
  #pause: () => number;
  /** By type and conversation, in the order in which they are due. */
  #wanted = new Map<string, Mark & { due: number }>();
  #told = new Map<string, Seq>();
  #connection: AbortSignal | undefined;
  #telling = false;

  /** @param pause Milliseconds between two marks, so that other requests find room below the rate limit. */
  constructor(ask: (mark: Mark) => Promise<unknown>, pause: () => number) {
    this.#ask = ask;
    this.#pause = pause;
  }

  add(type: Mark['type'], conversation: ConversationId, seq: Seq): void {
    if (this.#isTold(type, conversation, seq)) return;
    const wanted = this.#wanted.get(type + conversation);
    if (wanted) wanted.seq = Math.max(wanted.seq, seq);
    else this.#wanted.set(type + conversation, { type, conversation, seq, due: performance.now() + GATHER_MS });
    void this.#tell();
  }

  /** @param connection Aborted when the connection ends. */
  connected(connection: AbortSignal): void {
    this.#connection = connection;
    void this.#tell();
  }

  /** The user is not in this conversation any more. */
  forget(conversation: ConversationId): void {
    for (const marks of [this.#wanted, this.#told]) for (const type of ['read', 'delivered']) marks.delete(type + conversation);
  }

  clear(): void {
    this.#wanted.clear();
    this.#told.clear();
  }

  /** A message that was read has been received. */
  #isTold(type: Mark['type'], conversation: ConversationId, seq: Seq): boolean {
    return ['read', type].some((type) => seq <= (this.#told.get(type + conversation) ?? 0));
  }

  async #tell(): Promise<void> {
    const connection = this.#connection;
    if (!connection || connection.aborted || this.#telling) return;
    this.#telling = true;
    try {
      while (this.#wanted.size) {
        const now = performance.now();
        const all = [...this.#wanted.values()];
        const due = all.filter(({ due }) => due <= now);
        // What a person has read goes before what a device has received.
        const mark = due.find(({ type }) => type === 'read') ?? due[0];
        if (!mark) {
          await delay(all[0]!.due - now, connection);
          continue;
        }
        const { type, conversation, seq } = mark;
        try {
          if (!this.#isTold(type, conversation, seq)) await persist(() => this.#ask({ type, conversation, seq }), connection);
        } catch {
          if (connection.aborted) break;
          // A mark that is refused for good is not told again either.
        }
        if (this.#wanted.get(type + conversation) === mark) {
          this.#told.set(type + conversation, seq);
          this.#wanted.delete(type + conversation);
          if (mark.seq > seq) this.add(type, conversation, mark.seq);
        }
        await delay(this.#pause(), connection);
      }
    } catch {
      // The next connection goes on.
    }
    this.#telling = false;
    if (connection.aborted) void this.#tell();
  }
}
