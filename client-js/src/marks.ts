/** Sends the user's watermarks (`delivered`, `read`) to the gateway, one after the other. Those of one conversation are
 * coalesced, and each is retried until the gateway accepts it or refuses it for good. Loaded with the first connection. */
import { delay, retryDelay, unless } from './backoff.js';
import type { ChatError } from './codes.js';
import type { Connected, ConversationId, Millis, Seq } from './types.js';

/** The time for which the watermarks of one conversation are coalesced. */
const GATHER_MS = 200;

/** Watermarks that wait for this code: the highest ones, by type and conversation. */
export type Untold = Map<string, Parameters<Marks['add']>>;

type Mark = { type: 'read' | 'delivered'; conversation: ConversationId; seq: Seq };

/** The watermarks of one user. */
export class Marks {
  #gateway: { ask(mark: Mark): Promise<unknown> };
  #client: { readonly session: Connected | undefined };
  #untold: Untold;
  /** Watermarks to send, by type and conversation, in the order in which they are due. */
  #wanted = new Map<string, Mark & { due: number; at: Millis; refusals: number }>();
  /** Watermarks that the gateway has, by type and conversation. */
  #told = new Map<string, Seq>();
  /** When the watermarks of one page are added. They are due together, so that the newest goes first. */
  #added: number | undefined;
  #connection: AbortSignal | undefined;
  #telling = false;

  constructor(gateway: { ask(mark: Mark): Promise<unknown> }, client: { readonly session: Connected | undefined }, untold: Untold) {
    this.#gateway = gateway;
    this.#client = client;
    this.#untold = untold;
  }

  /** Queues a watermark.
   * @param at The time of the message. After a long absence there are many, and their senders look at the newest ones. */
  add(type: Mark['type'], conversation: ConversationId, seq: Seq, at: Millis = 0): void {
    if (this.#isTold(type, conversation, seq)) return;
    const wanted = this.#wanted.get(type + conversation);
    if (wanted) Object.assign(wanted, { seq: Math.max(wanted.seq, seq), at: Math.max(wanted.at, at) });
    else {
      if (this.#added === undefined) queueMicrotask(() => (this.#added = undefined));
      this.#added ??= performance.now();
      this.#wanted.set(type + conversation, { type, conversation, seq, at, refusals: 0, due: this.#added + GATHER_MS });
    }
    void this.#tell();
  }

  /** Sends on a new connection.
   * @param connection Aborted when the connection ends. */
  connected(connection: AbortSignal): void {
    for (const mark of this.#untold.values()) this.add(...mark);
    this.#untold.clear();
    // The code may have been loaded too late, when there is another connection already.
    if (connection.aborted) return;
    this.#connection = connection;
    void this.#tell();
  }

  /** Drops the watermarks of a conversation that the user left. */
  forget(conversation: ConversationId): void {
    for (const marks of [this.#wanted, this.#told]) for (const type of ['read', 'delivered']) marks.delete(type + conversation);
  }

  clear(): void {
    this.#wanted.clear();
    this.#told.clear();
  }

  /** Whether the gateway has this watermark. `read` includes `delivered`. */
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
        // `read` goes first, because a person caused it.
        const mark = due.find(({ type }) => type === 'read') ?? due.sort((a, b) => b.at - a.at)[0];
        if (!mark) {
          // No longer, because others may be added.
          await delay(Math.min(GATHER_MS, ...all.map(({ due }) => due - now)), connection);
          continue;
        }
        const { type, conversation, seq } = mark;
        try {
          if (!this.#isTold(type, conversation, seq)) await unless(connection, this.#gateway.ask({ type, conversation, seq }));
        } catch (thrown) {
          const error = thrown as ChatError;
          if (connection.aborted) break;
          // A watermark that is refused for good counts as sent. After another refusal those of other conversations do not wait.
          if (error.temporary) mark.due = performance.now() + retryDelay(error, mark.refusals++);
        }
        if (mark.due <= now && this.#wanted.get(type + conversation) === mark) {
          this.#told.set(type + conversation, seq);
          this.#wanted.delete(type + conversation);
          if (mark.seq > seq) this.add(type, conversation, mark.seq, mark.at);
        }
        // Watermarks use half of the user's rate, so that other requests find room.
        await delay(2_000 / (this.#client.session?.limits.requestsPerSecond ?? Infinity), connection);
      }
    } catch {
      // The next connection continues.
    }
    this.#telling = false;
    if (connection.aborted) void this.#tell();
  }
}
