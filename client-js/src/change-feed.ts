/** Puts the changes of each conversation in order and without gaps. The rev of the last one is the second part of the cursor. */
import { persist } from './backoff.js';
import type { Feed } from './feed.js';
import type { Changed, ChangedItem, ConversationId, Message, Replies, Request, Rev, Seq } from './types.js';

/** What the change feed needs of its client. */
export interface ChangeHost {
  readonly feed: Feed;
  request<R extends Request>(request: R): Promise<Replies[R['type']]>;
  /** Applies changes, of which the application was not told those in `fresh`. `asOf` is the rev of the answer to `changes`;
   * undefined for an event. */
  apply(changed: Changed, fresh: ChangedItem[], asOf: Rev | undefined): void;
}

/** The position in the changes of one conversation. */
interface Place {
  rev: Rev;
  /** The rev up to which changes were reported to the application. */
  told: Rev;
  /** Whether no changes came on this connection yet. */
  isResumed: boolean;
  /** The changes of messages that were not accepted yet. */
  early: Map<Seq, ChangedItem[]>;
}

/** The order of changes, for all conversations of a client. */
export class ChangeFeed {
  #host: ChangeHost;
  #places = new Map<ConversationId, Place>();
  /** The conversations to ask about, with the rev that has to be reached. They are asked about one after the other. */
  #behind = new Map<ConversationId, Rev>();
  #isAsking = false;

  constructor(host: ChangeHost) {
    this.#host = host;
  }

  /** Sets the cursor of a conversation, if it has none: the client knows all changes up to `rev`. */
  begin(conversation: ConversationId, rev: Rev = 0): Place {
    let place = this.#places.get(conversation);
    if (!place) this.#places.set(conversation, (place = { rev, told: rev, isResumed: false, early: new Map() }));
    return place;
  }

  /** Returns the rev of the cursor; 0 while the client holds nothing of the conversation. */
  rev(conversation: ConversationId): Rev {
    return this.#places.get(conversation)?.rev ?? 0;
  }

  /** Called when the cursors are sent on a new connection. */
  connecting(): void {
    for (const place of this.#places.values()) place.isResumed = true;
  }

  /** Notes that the client got a page whose states contain all changes up to `rev`. If the cursor is higher, the client missed
   * the changes between for the entries of this page. The cursor is set back before asking, so that a new connection continues there. */
  page(conversation: ConversationId, rev: Rev = 0): void {
    const place = this.begin(conversation, rev);
    const before = place.rev;
    if (rev >= before) return;
    place.rev = rev;
    this.#ask(conversation, before);
  }

  /** Applies changes, or asks for those before them. */
  receive(changed: Changed, asOf?: Rev): void {
    const { conversation, after, rev, items } = changed;
    const place = this.begin(conversation, after);
    // An event does not say whether the user took part in several reactions. On other devices that may have been missed.
    const isUnclear = place.isResumed && asOf === undefined && items.some(({ reactions, by, mine }) => reactions && !by && !mine);
    if (after > place.rev || (isUnclear && rev > place.rev)) return this.#ask(conversation, rev);
    place.isResumed = false;
    const seq = this.#host.feed.seq(conversation) ?? Infinity;
    for (const item of items) if (item.seq > seq) place.early.set(item.seq, [...(place.early.get(item.seq) ?? []), item]);
    const { told } = place;
    place.rev = Math.max(place.rev, rev);
    place.told = Math.max(told, rev);
    const fresh = items.filter(({ rev }) => rev > told);
    this.#host.apply(changed, fresh, asOf);
  }

  /** Returns a message with the changes that overtook it, and these changes. */
  overtaken(message: Message): [Message, ChangedItem[]] {
    const early = this.#places.get(message.conversation)?.early;
    const items = early?.get(message.seq) ?? [];
    early?.delete(message.seq);
    for (const { by: _, mine: __, ...state } of items)
      if (state.rev > (message.rev ?? 0)) message = { ...message, ...state, ...(state.deleted && { body: '', attachments: [] }) };
    return [message, items];
  }

  forget(conversation: ConversationId): void {
    this.#places.delete(conversation);
    this.#behind.delete(conversation);
  }

  clear(): void {
    this.#places.clear();
    this.#behind.clear();
  }

  #ask(conversation: ConversationId, wanted: Rev): void {
    this.#behind.set(conversation, Math.max(wanted, this.#behind.get(conversation) ?? 0));
    void this.#askAll();
  }

  async #askAll(): Promise<void> {
    if (this.#isAsking) return;
    this.#isAsking = true;
    while (this.#behind.size) {
      const [[conversation, wanted]] = this.#behind as unknown as [[ConversationId, Rev]];
      this.#behind.delete(conversation);
      const place = this.#places.get(conversation);
      if (!place || place.rev >= wanted) continue;
      try {
        const before = place.rev;
        const { after, rev, items, more, reset } = await persist(() =>
          this.#host.request({ type: 'changes', conversation, after: before }),
        );
        if (this.#places.get(conversation) !== place) continue;
        if (reset) {
          place.rev = place.told = rev;
          this.#host.apply({ conversation, after, rev, items: [], reset }, [], rev);
        } else {
          this.receive({ conversation, after, rev, items }, rev);
          if (more && rev > before) this.#ask(conversation, rev + 1);
        }
      } catch {
        // Either the gateway refused for good, or `disconnect()` was called: the next event or connection asks again.
      }
    }
    this.#isAsking = false;
  }
}
