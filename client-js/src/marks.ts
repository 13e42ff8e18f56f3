/** Watermarks (`delivered`, `read`) on their way to the gateway. Those of one conversation are gathered, all are told one
 * after the other, and each is tried until the gateway takes it or refuses it for good. */
import { backoff, delay } from './backoff.js';
import type { ChatError } from './codes.js';
import type { ConversationId, Seq } from './types.js';

/** The watermark of one conversation is told at most this often. */
const GATHER_MS = 200;

type Mark = { type: 'read' | 'delivered'; conversation: ConversationId; seq: Seq };

export class Marks {
  #ask: (mark: Mark) => Promise<unknown>;
  #pause: () => number;
  /** In the order in which they are due. */
  #wanted = { read: new Map<ConversationId, Mark & { due: number }>(), delivered: new Map<ConversationId, Mark & { due: number }>() };
  #told = { read: new Map<ConversationId, Seq>(), delivered: new Map<ConversationId, Seq>() };
  #connection: AbortSignal | undefined;
  #disconnect = () => {};
  #telling = false;

  /** @param pause Milliseconds between two marks, so that other requests find room below the rate limit. */
  constructor(ask: (mark: Mark) => Promise<unknown>, pause: () => number) {
    this.#ask = ask;
    this.#pause = pause;
  }

  add(type: Mark['type'], conversation: ConversationId, seq: Seq): void {
    if (this.#isTold(type, conversation, seq)) return;
    const wanted = this.#wanted[type].get(conversation);
    if (wanted) wanted.seq = Math.max(wanted.seq, seq);
    else this.#wanted[type].set(conversation, { type, conversation, seq, due: performance.now() + GATHER_MS });
    void this.#tell();
  }

  connected(): void {
    const connection = new AbortController();
    this.#connection = connection.signal;
    this.#disconnect = () => connection.abort();
    void this.#tell();
  }

  disconnected(): void {
    this.#disconnect();
    this.#connection = undefined;
  }

  /** The user is not in this conversation any more. */
  forget(conversation: ConversationId): void {
    for (const type of ['read', 'delivered'] as const) {
      this.#wanted[type].delete(conversation);
      this.#told[type].delete(conversation);
    }
  }

  clear(): void {
    for (const marks of [this.#wanted, this.#told]) {
      marks.read.clear();
      marks.delivered.clear();
    }
  }

  /** Whoever has read a message has received it. */
  #isTold(type: Mark['type'], conversation: ConversationId, seq: Seq): boolean {
    const told = (type: Mark['type']) => this.#told[type].get(conversation) ?? 0;
    return seq <= told('read') || (type === 'delivered' && seq <= told('delivered'));
  }

  async #tell(): Promise<void> {
    const connection = this.#connection;
    if (!connection || this.#telling) return;
    this.#telling = true;
    try {
      for (let attempt = 0; ; ) {
        // What a person has read goes before what a device has received.
        const { read, delivered } = this.#wanted;
        const next = [read, delivered].flatMap((wanted) => wanted.values().next().value ?? []);
        if (!next.length) break;
        const now = performance.now();
        const mark = next.find(({ due }) => due <= now);
        if (!mark) {
          await delay(Math.min(...next.map(({ due }) => due)) - now, connection);
          continue;
        }
        const { type, conversation, seq } = mark;
        try {
          if (!this.#isTold(type, conversation, seq)) await this.#ask({ type, conversation, seq });
          attempt = 0;
        } catch (thrown) {
          const error = thrown as ChatError;
          if (error.temporary) {
            await delay((error.retryAfterMs ?? 0) + backoff(attempt++), connection);
            continue;
          }
        }
        // A mark that is refused for good is not told again either.
        if (this.#wanted[type].get(conversation) === mark) {
          this.#told[type].set(conversation, Math.max(seq, this.#told[type].get(conversation) ?? 0));
          this.#wanted[type].delete(conversation);
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
