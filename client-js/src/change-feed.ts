/** Puts the changes of each conversation in order and without gaps. The rev of the last one is the second part of the cursor. */
import { backoff, retryDelay } from './backoff.js';
import { BAD_FRAME, type ChatError } from './codes.js';
import type { Feed } from './feed.js';
import type { Changed, ChangedItem, ConversationId, Message, Millis, Replies, Request, Rev, Seq } from './types.js';

/** The longest time after an event until the client asks for what it missed. An event without items comes to all participants
 * at the same moment, and they must not all ask then. */
export const GAP_SPREAD_MS = 1_000;
/** The number of conversations that are asked about at once. */
const ASKED_AT_ONCE = 4;
/** The greatest number of messages of one conversation that are not accepted yet and whose changes are kept. As in the feed, the
 * history has those above it. */
const EARLY_MAX = 1_000;

/** What the change feed needs of its client. */
export interface ChangeHost {
  readonly feed: Feed;
  /** Sends a request once, as soon as there is a connection. */
  askOnce<R extends Request>(request: R): Promise<Replies[R['type']]>;
  /** Applies changes, of which the application was not told those in `fresh`. */
  apply(changed: Changed, fresh: ChangedItem[]): void;
}

/** The position in the changes of one conversation. */
interface Place {
  rev: Rev;
  /** The rev up to which changes were reported to the application. */
  told: Rev;
  /** The changes of messages that were not accepted yet. */
  early: Map<Seq, ChangedItem[]>;
  /** The number of answers in a row that were a `reset`. */
  resets: number;
  /** The time before which the client does not ask again after a `reset`. */
  pausedTo: Millis;
  /** The sources whose last page was behind the cursor. */
  late: Set<PageSource>;
}

/** Where a page comes from. The gateway writes the rev of the inbox later than the history. */
type PageSource = 'inbox' | 'history';

/** What is to be asked about a conversation. */
interface Behind {
  /** The rev that has to be reached. */
  wanted: Rev;
  due: Millis;
  /** The number of requests that failed since the last one that did not. */
  failures: number;
}

/** The order of changes, for all conversations of a client. */
export class ChangeFeed {
  #host: ChangeHost;
  #places = new Map<ConversationId, Place>();
  /** The conversations to ask about, in turn. */
  #behind = new Map<ConversationId, Behind>();
  /** The conversations that are being asked about. */
  #asked = new Set<ConversationId>();
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(host: ChangeHost) {
    this.#host = host;
  }

  /** Sets the cursor of a conversation, if it has none: the client knows all changes up to `rev`. */
  begin(conversation: ConversationId, rev: Rev = 0): Place {
    let place = this.#places.get(conversation);
    if (!place) this.#places.set(conversation, (place = { rev, told: rev, early: new Map(), resets: 0, pausedTo: 0, late: new Set() }));
    return place;
  }

  /** Returns the rev of the cursor; 0 while the client holds nothing of the conversation. */
  rev(conversation: ConversationId): Rev {
    return this.#places.get(conversation)?.rev ?? 0;
  }

  /** Notes that the client got a page whose states contain all changes up to `rev`. If the cursor is higher, the client missed
   * the changes between for the entries of this page. The cursor is set back before asking, so that a new connection continues there. */
  page(conversation: ConversationId, rev: Rev = 0, source: PageSource = 'history'): void {
    const place = this.begin(conversation, rev);
    const before = place.rev;
    if (rev < before) {
      place.rev = rev;
      place.late.add(source);
      return this.#ask(conversation, before);
    }
    place.late.delete(source);
    // The pages of one source may be good while those of another stay behind and lead to the next `reset`.
    if (!place.late.size && performance.now() > place.pausedTo) place.resets = 0;
  }

  /** Applies changes, or asks for those before them.
   * @param isReply Whether they are the answer to `changes`, not an event. */
  receive(changed: Changed, isReply = false): void {
    const { conversation, after, rev, items } = changed;
    const place = this.begin(conversation, after);
    if (after > place.rev) return this.#ask(conversation, rev, isReply ? 0 : Math.random() * GAP_SPREAD_MS);
    const { told, early } = place;
    const seq = this.#host.feed.seq(conversation) ?? Infinity;
    for (const item of items) {
      const known = early.get(item.seq);
      if (item.seq > seq && (known || early.size < EARLY_MAX)) early.set(item.seq, [...(known ?? []), item]);
    }
    place.rev = Math.max(place.rev, rev);
    place.told = Math.max(told, rev);
    const fresh = items.filter(({ rev }) => rev > told);
    this.#host.apply(changed, fresh);
  }

  /** Returns a message with the changes that overtook it, and these changes. */
  overtaken(message: Message): [Message, ChangedItem[]] {
    const items = this.#places.get(message.conversation)?.early.get(message.seq) ?? [];
    this.passed(message.conversation, message.seq);
    for (const { by: _, mine: __, ...state } of items)
      if (state.rev > (message.rev ?? 0)) message = { ...message, ...state, ...(state.deleted && { body: '', attachments: [] }) };
    return [message, items];
  }

  /** Drops the changes of messages up to `seq`, which are accepted or will not come. */
  passed(conversation: ConversationId, seq: Seq = 0): void {
    const early = this.#places.get(conversation)?.early;
    for (const known of early?.keys() ?? []) if (known <= seq) early!.delete(known);
  }

  forget(conversation: ConversationId): void {
    this.#places.delete(conversation);
    this.#behind.delete(conversation);
  }

  clear(): void {
    this.#places.clear();
    this.disconnected();
  }

  /** Stops asking. The gateway pushes what a new connection missed. */
  disconnected(): void {
    clearTimeout(this.#timer);
    this.#behind.clear();
  }

  /** Asks now what waits after a failure on an earlier connection. */
  connected(): void {
    for (const [conversation, behind] of this.#behind) if (behind.failures) behind.due = this.begin(conversation).pausedTo;
    this.#askAll();
  }

  #ask(conversation: ConversationId, rev: Rev, ms: Millis = 0, failed = 0): void {
    const known = this.#behind.get(conversation);
    const failures = Math.max(failed, known?.failures ?? 0);
    let due = performance.now() + ms;
    // Another event neither delays the request nor shortens the pause after a failure.
    if (known && !failed) due = failures ? known.due : Math.min(due, known.due);
    due = Math.max(due, this.begin(conversation).pausedTo);
    this.#behind.set(conversation, { wanted: Math.max(rev, known?.wanted ?? 0), due, failures });
    this.#askAll();
  }

  /** Asks about the conversations that are due, a few at once: one that gets no answer must not hold up all others. */
  #askAll(): void {
    clearTimeout(this.#timer);
    const now = performance.now();
    let next = Infinity;
    for (const [conversation, behind] of this.#behind) {
      if (this.#asked.size >= ASKED_AT_ONCE) return;
      if (this.#asked.has(conversation)) continue;
      if (behind.due <= now) void this.#askOne(conversation, behind);
      else next = Math.min(next, behind.due);
    }
    if (next < Infinity) this.#timer = setTimeout(() => this.#askAll(), Math.ceil(next - now));
  }

  async #askOne(conversation: ConversationId, { wanted, failures }: Behind): Promise<void> {
    this.#behind.delete(conversation);
    const place = this.#places.get(conversation);
    if (!place || place.rev >= wanted) return;
    const before = place.rev;
    this.#asked.add(conversation);
    try {
      const { after, rev, items, more, reset } = await this.#host.askOnce({ type: 'changes', conversation, after: before });
      if (this.#places.get(conversation) !== place) return;
      if (reset) {
        place.rev = place.told = rev;
        // The pages may still be behind, and lead to the next `reset`.
        place.pausedTo = performance.now() + backoff(++place.resets);
        this.passed(conversation, this.#host.feed.seq(conversation));
        this.#host.apply({ conversation, after, rev, items: [], reset }, []);
      } else {
        place.resets = 0;
        place.late.clear();
        this.receive({ conversation, after, rev, items }, true);
        if (more && rev > before) this.#ask(conversation, rev + 1);
      }
    } catch (thrown) {
      const error = thrown as ChatError;
      // Either the gateway refused for good, or `disconnect()` was called: the next event or connection asks again.
      const isOver = !error.temporary || (failures > 0 && error.closeCode === BAD_FRAME);
      if (isOver || this.#places.get(conversation) !== place) return;
      this.#ask(conversation, wanted, retryDelay(error, failures), failures + 1);
    } finally {
      this.#asked.delete(conversation);
      this.#askAll();
    }
  }
}
