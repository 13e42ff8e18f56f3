/** The live list of a conversation: messages without a gap, up to the newest where its reader follows. Pages are loaded one
 * at a time; what could not be loaded is tried again. */
import { backoff } from './backoff.js';
import type { ChatError } from './codes.js';
import { type Dispose, Emitter } from './emitter.js';
import { Timeline } from './timeline.js';
import type { HistoryPage, Message, Seq } from './types.js';

/** `sending` includes waiting for a connection. `delivered` and `read` mean by everyone else; in channels a message
 * stays `sent`. */
export type MessageState = 'sending' | 'sent' | 'delivered' | 'read' | 'failed';

/** A message as it is shown: stored, or on its way. */
export interface ChatMessage extends Omit<Message, 'seq' | 'messageId'> {
  /** The same before and after it is stored. */
  key: string;
  /** Its place; not there yet while it is on its way. */
  seq?: Seq | undefined;
  /** Of one's own text messages. */
  state?: MessageState | undefined;
  /** Why it failed. */
  error?: { code: string; message: string } | undefined;
}

/** A stored message as it is shown. */
export type Stored = ChatMessage & { seq: Seq };

/** One page of the log, for the list as it was when it was asked for. */
type ReadPage = (where: { before?: Seq; after?: Seq; around?: Seq | undefined; limit: number }) => Promise<Stored[]>;

const FIRST_PAGE = 30;
const PAGE = 10;
const FILL_PAGE = 200;
/** A list that nobody uses is let go then: a component may be mounted again at once. */
const RELEASE_MS = 2_500;

export abstract class List<Events> extends Emitter<Events> {
  /** Why the last page could not be loaded. */
  error: ChatError | undefined;
  /** @internal */
  protected readonly timeline: Timeline<Stored>;
  /** @internal The list is to reach the newest message; it is filled until it does. */
  protected following = false;
  /** @internal How many have it open. */
  protected users = 0;
  /** Messages that came while the list did not reach up to them: the newest, without gaps. */
  #ahead: Timeline<Stored>;
  #begun = false;
  /** Where it is to begin, or to begin anew, with the next page. */
  #anew: { at?: Seq | undefined } | undefined;
  #releasing: ReturnType<typeof setTimeout> | undefined;
  /** The pages that are on their way, one after the other. */
  #pages: Promise<unknown> = Promise.resolve();
  #pending = 0;
  #failures = 0;
  #retrying: ReturnType<typeof setTimeout> | undefined;
  /** @internal How often the list was let go. */
  protected epoch = 0;

  /** @internal */
  constructor(window: number) {
    super();
    this.timeline = new Timeline(window);
    this.#ahead = new Timeline(window);
  }

  /** The newest message known of. */
  abstract get head(): Seq;
  /** One page: the newest, or before, after or around a place. */
  abstract history(where: { before?: Seq; after?: Seq; around?: Seq; limit?: number }, signal?: AbortSignal): Promise<HistoryPage>;
  /** @internal */
  abstract changed(): void;
  /** @internal Asks what the conversation is. */
  protected abstract meet(): Promise<void>;
  /** @internal The list was opened, or let go. */
  protected abstract hold(): void;
  /** @internal The list was let go. */
  protected abstract released(): void;
  /** @internal */
  protected abstract reaches(head: Seq): void;
  /** @internal */
  protected abstract stored(message: Message): Stored;

  /** A page is on its way. */
  get loading(): boolean {
    return this.#pending > 0;
  }

  /** The first message of all is in the list. */
  get atStart(): boolean {
    return this.#begun && (this.timeline.first === 1 || !this.head);
  }

  /** The newest message is in the list: it is live. */
  get atEnd(): boolean {
    return this.#begun && (this.timeline.last ?? 0) >= this.head;
  }

  /** Begins the live list, at the newest message or around `at`; to be disposed of when it is not looked at any more. */
  open({ at }: { at?: Seq } = {}): Dispose {
    clearTimeout(this.#releasing);
    if (++this.users === 1 && !this.timeline.entries.length) {
      this.#beginAt(at);
      void this.meet();
    }
    // What came while nobody used it.
    this.fill();
    this.hold();
    let open = true;
    return () => {
      if (!open) return;
      open = false;
      if (!--this.users) this.#releasing = setTimeout(() => this.#release(), RELEASE_MS);
    };
  }

  /** Until the pages asked for are there. */
  async loaded(): Promise<this> {
    await this.#pages;
    if (this.error) throw this.error;
    return this;
  }

  /** Extends the list at its older end. */
  loadOlder(limit = PAGE): Promise<void> {
    return this.#page(async (read) => {
      const before = this.timeline.first;
      if (!before || this.atStart) return;
      this.timeline.prepend(await read({ before, limit }));
      this.timeline.reader = before;
      this.following = this.atEnd;
    });
  }

  /** Extends the list at its newer end, where that is not live. */
  loadNewer(limit = PAGE): Promise<void> {
    return this.#page(async (read) => {
      this.timeline.reader = undefined;
      await this.#newer(read, limit);
    });
  }

  /** The list begins anew around this place; without one, at the newest message. */
  jumpTo(seq?: Seq, limit = FIRST_PAGE): Promise<void> {
    const { first = 0, last = 0 } = this.timeline;
    this.timeline.reader = seq;
    if (seq === undefined ? this.atEnd : first <= seq && seq <= last) return Promise.resolve();
    return this.#page((read) => this.#load(read, seq, limit));
  }

  /** @internal A message came. */
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

  /** @internal Too much was missed: the list begins anew where it was live. */
  resync(head: Seq): void {
    const live = this.atEnd;
    this.reaches(head);
    if (live || this.following) this.#beginAt();
  }

  #beginAt(at?: Seq): void {
    this.following = at === undefined;
    this.#anew = { at };
    this.fill();
  }

  /** @internal A list that was not loaded is loaded; one that follows and does not reach the newest message is continued. */
  protected fill(): void {
    if (!this.users || this.#pending) return;
    const anew = this.#anew;
    if (!anew && (!this.following || this.atEnd)) return;
    const isNew = anew || !this.timeline.last;
    void this.#page((read) => (isNew ? this.#load(read, anew?.at) : this.#newer(read, FILL_PAGE))).catch(() => {});
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

  /** Reads on until the list is as long as was asked for, and up to the newest message if that is near or followed. */
  async #newer(read: ReadPage, limit: number): Promise<void> {
    this.#catchUp();
    for (let after: Seq | undefined; (after = this.timeline.last) && !this.atEnd; ) {
      const page = await read({ after, limit });
      this.timeline.append(page);
      this.#catchUp();
      if (this.timeline.last === after) {
        // The list is full and its reader is elsewhere; else what lies between cannot be read, and it begins anew behind it.
        if (!this.following || page[0]?.seq === after + 1) break;
        this.timeline.reset(await read({ limit: FIRST_PAGE }));
        this.#catchUp();
        break;
      }
      // A short page is the last one; what came meanwhile follows it.
      if (!this.following && page.length >= limit) break;
    }
    this.following = this.atEnd;
  }

  /** Takes over what came meanwhile. */
  #catchUp(): void {
    this.timeline.append(this.#ahead.entries);
    if ((this.#ahead.last ?? 0) <= (this.timeline.last ?? 0)) this.#ahead.reset([]);
  }

  /** Pages are loaded one at a time. What was begun for an earlier list is over. */
  #page(load: (read: ReadPage) => Promise<void>): Promise<void> {
    const { epoch } = this;
    const isOver = () => epoch !== this.epoch;
    const read: ReadPage = async (where) => {
      const { messages, head } = await this.history(where);
      // Nobody waits for it any more.
      if (isOver()) throw head;
      this.reaches(head);
      return messages.map((message) => this.stored(message));
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
