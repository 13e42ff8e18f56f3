/** The live list of a conversation: messages without a gap, up to the newest one while the list follows it. Pages are
 * loaded one at a time, and loading is retried with back-off. */
import { backoff, persist } from './backoff.js';
import type { ChatError } from './codes.js';
import { type Dispose, Emitter } from './emitter.js';
import { asOf } from './feed.js';
import { Timeline } from './timeline.js';
import type { HistoryPage, Message, Rev, Seq } from './types.js';

/** The state of one's own message. `sending` includes the wait for a connection. `delivered` and `read` mean by all other
 * participants; in channels a message stays `sent`. */
export type MessageState = 'sending' | 'sent' | 'delivered' | 'read' | 'failed';

/** A message as the list shows it: stored or pending. */
export interface ChatMessage extends Omit<Message, 'seq' | 'messageId' | 'rev'> {
  /** The identity of the message, the same before and after it is stored. */
  key: string;
  /** The seq; undefined while the message is pending. */
  seq?: Seq | undefined;
  /** The state; only the user's own text messages have one. */
  state?: MessageState | undefined;
  /** Why the message failed. */
  error?: { code: string; message: string } | undefined;
  /** The changes that the gateway did not acknowledge yet. The message is shown as it will be afterwards. */
  pending?: readonly ChangeType[];
  /** The newest change that the gateway refused. It was undone. `retry(key)` requests it again, `discard(key)` drops it. */
  failedChange?: FailedChange;
}

/** What a change does to a message. */
export type ChangeType = 'edit' | 'delete' | 'react' | 'unreact';

/** A change that the gateway refused. */
export interface FailedChange {
  key: string;
  type: ChangeType;
  error: { code: string; message: string };
  /** The text of a refused edit. */
  body?: string;
}

/** Which changes an entry contains. */
export interface EntryState {
  /** All changes of the entry up to this rev; Infinity if that is not known any more. */
  rev: Rev;
  /** The rev of this device's newest edit, if that is higher. */
  content: Rev;
  /** The reactions at `rev`, and the user's own ones at `mineRev`. */
  counts: Readonly<Record<string, number>>;
  mine: readonly string[];
  mineRev: Rev;
  /** The user's own reactions after `mineRev`, the newest one of each emoji. */
  toggles: Readonly<Record<string, { rev: Rev; on: boolean }>>;
}

/** A stored message as the list shows it. */
export type Stored = ChatMessage & {
  seq: Seq;
  /** The state; absent if the entry never changed. */
  revs?: EntryState;
};

/** Reads one page of the log. Throws if the list was released meanwhile. */
type ReadPage = (where: { before?: Seq; after?: Seq; around?: Seq | undefined; limit: number }) => Promise<Stored[]>;

const FIRST_PAGE = 30;
const PAGE = 10;
const FILL_PAGE = 200;
/** The time until an unused list is released. A component that is mounted again at once finds it loaded. */
const RELEASE_MS = 2_500;

/** The part of a conversation that loads messages and keeps them in order. */
export abstract class List<Events> extends Emitter<Events> {
  /** The error of the last page, if it failed to load. */
  error: ChatError | undefined;
  /** @internal */
  protected readonly timeline: Timeline<Stored>;
  /** @internal Whether the list follows the newest message: it loads pages until it contains it. */
  protected following = false;
  /** @internal How many callers have the list open. */
  users = 0;
  /** The newest messages, without a gap, that arrived while the list did not reach up to them. */
  #ahead: Timeline<Stored>;
  #begun = false;
  /** Set if the next page is to replace the list: the newest page, or the one around `at`. */
  #anew: { at?: Seq | undefined } | undefined;
  #releasing: ReturnType<typeof setTimeout> | undefined;
  /** Resolves when the pages requested so far are loaded. */
  #pages: Promise<unknown> = Promise.resolve();
  #pending = 0;
  #failures = 0;
  #retrying: ReturnType<typeof setTimeout> | undefined;
  /** @internal The number of times the list was released. */
  protected epoch = 0;

  /** @internal */
  constructor(window: number) {
    super();
    this.timeline = new Timeline(window);
    this.#ahead = new Timeline(window);
  }

  /** The highest known seq. */
  abstract get head(): Seq;
  /** Returns one page: the newest, or the one before, after or around a seq. */
  abstract history(where: { before?: Seq; after?: Seq; around?: Seq; limit?: number }, signal?: AbortSignal): Promise<HistoryPage>;
  /** @internal */
  abstract changed(): void;
  /** @internal Loads the details of the conversation. */
  protected abstract meet(): Promise<void>;
  /** @internal Has the client keep the conversation while it is in use. */
  protected abstract hold(): void;
  /** @internal Called after the list was released. */
  protected abstract released(): void;
  /** @internal */
  protected abstract reaches(head: Seq): void;
  /** @internal */
  protected abstract stored(message: Message, isPage?: boolean): Stored;

  /** Whether a page is being loaded. */
  get loading(): boolean {
    return this.#pending > 0;
  }

  /** Whether the list contains the first message of the conversation. */
  get atStart(): boolean {
    return this.#begun && (this.timeline.first === 1 || !this.head);
  }

  /** Whether the list contains the newest message, and so is live. */
  get atEnd(): boolean {
    return this.#begun && (this.timeline.last ?? 0) >= this.head;
  }

  /** Opens the live list, at the newest message or around the seq `at`. Returns a function that closes it. A list that is open
   * already jumps to `at`. */
  open({ at }: { at?: Seq } = {}): Dispose {
    clearTimeout(this.#releasing);
    if (++this.users === 1 && !this.timeline.entries.length) {
      this.#beginAt(at);
      void this.meet();
    } else if (at !== undefined) this.#show(at);
    // Messages may have arrived while the list was not open.
    this.fill();
    this.hold();
    let open = true;
    return () => {
      if (!open) return;
      open = false;
      if (!--this.users) this.#releasing = setTimeout(() => this.#release(), RELEASE_MS);
    };
  }

  /** Whether the first page was loaded. */
  get loaded(): boolean {
    return this.#begun;
  }

  /** Resolves when the requested pages are loaded; rejects with the error of the last one. */
  async whenLoaded(): Promise<this> {
    await this.#pages;
    if (this.error) throw this.error;
    return this;
  }

  /** Loads a page at the older end. */
  loadOlder(limit = PAGE): Promise<void> {
    return this.#page(async (read) => {
      const before = this.timeline.first;
      if (!before || this.atStart) return;
      this.timeline.prepend(await read({ before, limit }));
      this.timeline.reader = before;
      this.following = this.atEnd;
    });
  }

  /** Loads a page at the newer end, if that is not live. */
  loadNewer(limit = PAGE): Promise<void> {
    return this.#page(async (read) => {
      this.timeline.reader = undefined;
      await this.#newer(read, limit);
    });
  }

  /** Makes the list contain this seq, or without one the newest message. Loads another page if it does not yet. */
  jumpTo(seq?: Seq, limit = FIRST_PAGE): Promise<void> {
    const { first = 0, last = 0 } = this.timeline;
    this.timeline.reader = seq;
    if (seq === undefined ? this.atEnd : first <= seq && seq <= last) return Promise.resolve();
    return this.#page((read) => this.#load(read, seq, limit));
  }

  /** @internal Adds a message that the gateway pushed. */
  protected arrived(stored: Stored): void {
    const { seq } = stored;
    const { last = 0 } = this.timeline;
    if (!this.users || seq <= last) return;
    if (this.following && this.#begun && seq === last + 1) {
      this.timeline.append([stored]);
      this.following = this.timeline.last === seq;
    } else {
      if (seq !== (this.#ahead.last ?? seq) + 1) this.#ahead.reset([stored]);
      else this.#ahead.append([stored]);
      this.fill();
    }
  }

  /** @internal Restarts a live list at the newest message, because the client missed too many. */
  resync(head: Seq): void {
    const live = this.atEnd;
    this.reaches(head);
    if (live || this.following) this.#beginAt();
  }

  /** @internal Replaces stored entries: the one with this seq, or without a seq all. */
  protected replace(change: (entry: Stored) => Stored, seq?: Seq): void {
    for (const { entries } of [this.timeline, this.#ahead]) {
      const first = entries[0]?.seq ?? 1;
      const [from, to] = seq === undefined ? [0, entries.length] : [seq - first, seq - first + 1];
      for (let i = Math.max(0, from); i < to && i < entries.length; i++) entries[i] = change(entries[i]!);
    }
  }

  /** @internal Reads the entries of the list again, and keeps it where it is. Releases a list that is not open.
   * @param isNewer Says whether an entry of a page replaces the known one. */
  protected reread(isNewer: (page: Stored, known: Stored) => boolean): void {
    // A list that nobody looks at is loaded when it is opened again.
    if (!this.users) return this.#release();
    if (!this.timeline.last) return;
    const again = async (read: ReadPage) => {
      for (let after = (this.timeline.first ?? 1) - 1; after < (this.timeline.last ?? 0); ) {
        const page = await read({ after, limit: FILL_PAGE });
        for (const entry of page) this.replace((known) => (isNewer(entry, known) ? entry : known), entry.seq);
        after = page.at(-1)?.seq ?? Infinity;
      }
    };
    persist(() => this.#page(again)).catch(() => {});
  }

  /** Moves a list that has begun, or is about to, to a seq. */
  #show(at: Seq): void {
    const { first = 0, last = 0 } = this.timeline;
    if (this.#anew ? this.#anew.at === at : at >= first && (at <= last || this.following)) this.timeline.reader = at;
    else this.#beginAt(at);
  }

  #beginAt(at?: Seq): void {
    this.following = at === undefined;
    this.#anew = { at };
    this.fill();
  }

  /** @internal Loads pages if the list has to begin, or if it follows the newest message and does not contain it. */
  protected fill(): void {
    if (!this.users || this.#pending) return;
    if (!this.#anew && (!this.following || this.atEnd)) return;
    // What it begins at may change until the page is requested.
    const work = (read: ReadPage) => (this.#anew || !this.timeline.last ? this.#load(read, this.#anew?.at) : this.#newer(read, FILL_PAGE));
    void this.#page(work).catch(() => {});
  }

  /** @internal Ends the wait before a page is requested again. The next connection requests it. */
  protected pause(): void {
    clearTimeout(this.#retrying);
  }

  async #load(read: ReadPage, around?: Seq, limit = FIRST_PAGE): Promise<void> {
    const anew = this.#anew;
    this.timeline.reset(await read({ limit, around }));
    this.timeline.reader = around;
    if (this.#anew === anew) this.#anew = undefined;
    this.#begun = true;
    this.following = around === undefined;
    if (this.following || this.atEnd) await this.#newer(read, FILL_PAGE);
  }

  /** Reads one newer page, and further ones up to the newest message if that is near or the list follows it. */
  async #newer(read: ReadPage, limit: number): Promise<void> {
    this.#catchUp();
    for (let after: Seq | undefined; (after = this.timeline.last) && !this.atEnd; ) {
      const page = await read({ after, limit });
      this.timeline.append(page);
      this.#catchUp();
      if (this.timeline.last === after) {
        // Either the list is full and its reader is elsewhere, or the messages between cannot be read: then it restarts after them.
        if (!this.following || page[0]?.seq === after + 1) break;
        this.timeline.reset(await read({ limit: FIRST_PAGE }));
        this.#catchUp();
        break;
      }
      // After a short page the newest message is near: read on, because messages may have come meanwhile.
      if (!this.following && page.length >= limit) break;
    }
    this.following = this.atEnd;
  }

  /** Appends the messages that were pushed meanwhile. */
  #catchUp(): void {
    this.timeline.append(this.#ahead.entries);
    if ((this.#ahead.last ?? 0) <= (this.timeline.last ?? 0)) this.#ahead.reset([]);
  }

  /** Queues the loading of a page. It does nothing if the list is released before. */
  #page(load: (read: ReadPage) => Promise<void>): Promise<void> {
    const { epoch } = this;
    const isOver = () => epoch !== this.epoch;
    const read: ReadPage = async (where) => {
      const { messages, head, rev } = await this.history(where);
      // Ends `load`; `work` drops the thrown value.
      if (isOver()) throw head;
      this.reaches(head);
      return messages.map((message) => this.stored(asOf(message, rev), true));
    };
    const work = async () => {
      if (isOver()) return;
      try {
        await load(read);
        this.error = undefined;
        this.#failures = 0;
      } catch (error) {
        if (isOver()) return;
        this.error = error as ChatError;
        throw error;
      }
    };
    this.#pending++;
    this.changed();
    const page = this.#pages.then(work).finally(() => {
      this.#pending--;
      this.changed();
    });
    this.#pages = page.catch(() => {});
    void this.#pages.then(() => {
      clearTimeout(this.#retrying);
      if (!this.error) this.fill();
      else if (this.error.temporary && this.users) this.#retrying = setTimeout(() => this.fill(), backoff(this.#failures++));
    });
    return page;
  }

  #release(): void {
    this.epoch++;
    this.timeline.reset([]);
    this.#ahead.reset([]);
    this.#begun = this.following = false;
    this.#anew = undefined;
    clearTimeout(this.#retrying);
    this.released();
  }
}
