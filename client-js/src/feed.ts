/** Puts the messages of each conversation in order, once and without gaps. The seq of the last one is the first part of the
 * cursor from which a new connection replays. */
import { delay, persist } from './backoff.js';
import type { ConversationId, HistoryPage, Message, Rev, Seq } from './types.js';

/** The greatest number of messages of one conversation that wait for earlier ones. The history has those above it. */
const HELD_MAX = 1_000;
/** The size of the history pages that fill a gap. */
const FILL_PAGE = 200;
/** The longest time after a jump until the client asks for what is missing. Often that is on its way. If it is not, a jump comes to
 * all participants at the same moment, and they must not all ask then. */
export const FILL_SPREAD_MS = 200;
/** How long an event may be behind a page that has its message. */
const LATE_MS = 5_000;
/** The number of cursors that a gateway accepts. Above it, the conversations that were added last are sent. */
const CURSORS_MAX = 5_000;

/** Returns an entry of a page, which contains all changes up to the rev of the page. */
export const asOf = (message: Message, rev: Rev): Message => (rev > (message.rev ?? 0) ? { ...message, rev } : message);

/** The position in one conversation. */
interface Place {
  seq: Seq;
  /** Until when the first event may be of a message that was in the page before. Later it is a repetition. */
  late: number;
  held: Map<Seq, Message>;
  asking?: boolean;
}

/** The order of messages, for all conversations of a client. */
export class Feed {
  #places = new Map<ConversationId, Place>();
  #history: (conversation: ConversationId, after: Seq, limit: number) => Promise<HistoryPage>;
  #accept: (message: Message) => void;

  constructor(
    history: (conversation: ConversationId, after: Seq, limit: number) => Promise<HistoryPage>,
    accept: (message: Message) => void,
  ) {
    this.#history = history;
    this.#accept = accept;
  }

  /** Sets the cursor of a conversation, if it has none: messages up to `seq` are not missing. */
  begin(conversation: ConversationId, seq: Seq): Place {
    let place = this.#places.get(conversation);
    if (!place) this.#places.set(conversation, (place = { seq, late: performance.now() + LATE_MS, held: new Map() }));
    return place;
  }

  /** Returns the seq of the last message that was accepted. */
  seq(conversation: ConversationId): Seq | undefined {
    return this.#places.get(conversation)?.seq;
  }

  /** Accepts a message, or holds it until the ones before it are loaded. */
  receive(message: Message): void {
    const { conversation, seq } = message;
    const place = this.begin(conversation, seq - 1);
    if (seq <= place.seq && performance.now() < place.late) place.seq = seq - 1;
    place.late = 0;
    if (seq === place.seq + 1 || place.held.size < HELD_MAX) place.held.set(seq, message);
    this.#release(place);
    if (place.held.size) void this.#fill(conversation, place);
  }

  /** Moves the cursor to `seq` without the messages before it, because the client missed too many. */
  skip(conversation: ConversationId, seq: Seq): void {
    const place = this.begin(conversation, seq);
    place.seq = Math.max(place.seq, seq);
    this.#release(place);
  }

  /** Deletes the cursor of a conversation. */
  forget(conversation: ConversationId): void {
    this.#places.delete(conversation);
  }

  clear(): void {
    this.#places.clear();
  }

  /** Returns the cursors to connect with, as `[seq, rev]`. */
  cursors(revOf: (conversation: ConversationId) => Rev): Record<ConversationId, [Seq, Rev]> {
    const places = [...this.#places].slice(-CURSORS_MAX);
    return Object.fromEntries(places.map(([conversation, { seq }]) => [conversation, [seq, revOf(conversation)]]));
  }

  #release(place: Place): void {
    for (let message: Message | undefined; (message = place.held.get(place.seq + 1)); ) {
      place.seq = message.seq;
      this.#accept(message);
    }
    for (const seq of place.held.keys()) if (seq <= place.seq) place.held.delete(seq);
  }

  /** Waits a moment for the missing messages. Then it reads the history until no message waits for an earlier one. */
  async #fill(conversation: ConversationId, place: Place): Promise<void> {
    if (place.asking) return;
    place.asking = true;
    await delay(Math.random() * FILL_SPREAD_MS);
    while (place.held.size && this.#places.get(conversation) === place) {
      try {
        const { messages, rev } = await persist(() => this.#history(conversation, place.seq, FILL_PAGE));
        const first = messages[0]?.seq;
        if (!first) break;
        // Messages that are missing before it cannot be read.
        place.seq = Math.max(place.seq, first - 1);
        for (const message of messages) place.held.set(message.seq, asOf(message, rev));
        this.#release(place);
      } catch {
        // Either the user may not read the conversation any more, or `disconnect()` was called and the next connection replays.
        place.held.clear();
      }
    }
    place.asking = false;
  }
}
