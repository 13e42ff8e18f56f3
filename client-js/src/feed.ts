/** Puts the messages of all conversations in order: each once, none left out. The highest seq of each is the cursor
 * that a new connection begins with. */
import { persist } from './backoff.js';
import type { ConversationId, HistoryPage, Message, Seq } from './types.js';

/** Messages of one conversation held back because others before them are missing. More are read from the history. */
const HELD_MAX = 1_000;
/** A page of the history that fills a gap. */
const FILL_PAGE = 200;
/** Cursors that a gateway accepts; of more, the newest known are sent. */
const CURSORS_MAX = 5_000;

interface Place {
  seq: Seq;
  held: Map<Seq, Message>;
  filling: boolean;
}

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

  /** What came before is not missing. Does nothing where something is known already. */
  begin(conversation: ConversationId, seq: Seq): Place {
    let place = this.#places.get(conversation);
    if (!place) this.#places.set(conversation, (place = { seq, held: new Map(), filling: false }));
    return place;
  }

  seq(conversation: ConversationId): Seq | undefined {
    return this.#places.get(conversation)?.seq;
  }

  receive(message: Message): void {
    const { conversation, seq } = message;
    const place = this.begin(conversation, seq - 1);
    if (place.held.size < HELD_MAX || seq === place.seq + 1) place.held.set(seq, message);
    this.#release(place);
    if (place.held.size) void this.#fill(conversation, place);
  }

  /** What lies before is given up: too much of it was missed. */
  skip(conversation: ConversationId, seq: Seq): void {
    const place = this.begin(conversation, seq);
    place.seq = Math.max(place.seq, seq);
    this.#release(place);
  }

  forget(conversation: ConversationId): void {
    this.#places.delete(conversation);
  }

  clear(): void {
    this.#places.clear();
  }

  cursors(): Record<ConversationId, [Seq, number]> {
    const places = [...this.#places].slice(-CURSORS_MAX);
    return Object.fromEntries(places.map(([conversation, { seq }]) => [conversation, [seq, 0]]));
  }

  #release(place: Place): void {
    for (let message: Message | undefined; (message = place.held.get(place.seq + 1)); ) {
      place.seq = message.seq;
      this.#accept(message);
    }
    for (const seq of place.held.keys()) if (seq <= place.seq) place.held.delete(seq);
  }

  async #fill(conversation: ConversationId, place: Place): Promise<void> {
    if (place.filling) return;
    place.filling = true;
    while (place.held.size && this.#places.get(conversation) === place) {
      try {
        const { messages } = await persist(() => this.#history(conversation, place.seq, FILL_PAGE));
        const first = messages[0]?.seq;
        if (!first) break;
        // What lies before it cannot be read.
        if (first > place.seq + 1) place.seq = first - 1;
        for (const message of messages) place.held.set(message.seq, message);
        this.#release(place);
      } catch {
        // Where it is not for this user any more, there is nothing to fill; after `disconnect()` the next connection sends it.
        place.held.clear();
      }
    }
    place.filling = false;
  }
}
