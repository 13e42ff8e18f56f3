/** A fake gateway with one group, whose messages can be edited and deleted and get reactions. It keeps two logs, messages and
 * changes, and answers as docs/protocol.md says. A test decides which events are lost. */
import { FakeServer } from './fake-server.js';

type Fields = Record<string, unknown>;
type Request = Fields & { type: string; id?: number };

interface Entry {
  seq: number;
  sender: string;
  kind: 'text' | 'system';
  client_id: string;
  body: string;
  attachments: object[];
  at: number;
  edited_at?: number;
  deleted?: { by: string; at: number };
  /** By emoji: the users. */
  who: Map<string, Set<string>>;
  rev: number;
  contentRev: number;
}
interface Change {
  rev: number;
  user: string;
  op: { type: string; seq?: number; seqs?: number[]; body?: string; attachments?: object[]; emoji?: string };
}

const refused = (code: string) => ({ type: 'error', code, message: code });

export class ChangingServer extends FakeServer {
  id = 'c';
  entries: Entry[] = [];
  log: Change[] = [];
  /** The user of the clients. */
  me = 'alice';
  readSeq = 0;
  /** Above this number of missed changes, `changes` answers `reset`. */
  resetAfter = Infinity;
  /** The number of changes in an answer to `changes`. */
  pageRevs = 256;
  /** The number of missed changes above which a new connection gets an event without items, and that in one event below. */
  gapAbove = 20;
  eventRevs = 256;
  /** Whether the events of changes are lost. */
  isDeaf = false;
  /** Whether the gateway lacks changes, as an older one. */
  isOld = false;
  now = 1_000;
  /** Whether the gateway pushes what a new connection missed. A subscription gets it always. */
  isResuming = false;

  constructor() {
    super();
    const hello = this.answers.connect!;
    Object.assign(this.answers, {
      connect: (request: Request) => {
        if (this.isResuming) queueMicrotask(() => this.#resume((request.cursors as Record<string, [number, number]>)[this.id]));
        return hello(request);
      },
      inbox: () => ({ type: 'inbox', items: this.entries.length ? [this.item()] : [] }),
      subscribe: ({ after, rev }: Request) => {
        if (after !== undefined) this.#resume([after as number, rev as number]);
        return { type: 'ok', head: this.entries.length, rev: this.rev };
      },
      conversation: () => ({ type: 'conversation', conversation: this.id, kind: 'group', participant_count: 2, role: 'member' }),
      participants: () => ({ type: 'participants', items: [{ user: 'alice' }, { user: 'bob' }] }),
      history: (request: Request) => this.history(request),
      send: (request: Request) => this.#send(request),
      read: ({ seq }: Request) => {
        this.readSeq = Math.max(this.readSeq, seq as number);
        return { type: 'ok' };
      },
      changes: ({ after, limit }: Request) => this.changesAfter(after as number, (limit as number) ?? this.pageRevs),
      reactions: ({ seq, emoji: only }: Request) => {
        const { who } = this.entries[(seq as number) - 1]!;
        const items = [...who].flatMap(([emoji, users]) => [...users].map((user) => ({ user, emoji, at: 1 })));
        return { type: 'reactions', items: items.filter(({ emoji }) => !only || emoji === only) };
      },
    });
    for (const type of ['edit', 'delete', 'react', 'unreact'])
      this.answers[type] = (request) => (this.isOld ? refused('bad_request') : this.change(this.me, request));
  }

  get rev(): number {
    return this.log.length;
  }

  /** Stores a message of a user and pushes it. */
  write(sender: string, body: string, kind: 'text' | 'system' = 'text', client_id = `${sender} ${this.entries.length + 1}`): Entry {
    const seq = this.entries.length + 1;
    const at = this.now++;
    const entry: Entry = { seq, sender, kind, client_id, body, attachments: [], at, who: new Map(), rev: 0, contentRev: 0 };
    this.entries.push(entry);
    if (sender === this.me) this.readSeq = seq;
    this.push(this.message(entry, false));
    return entry;
  }

  /** Applies a change of a user and pushes its event. Returns the answer. */
  change(user: string, op: Fields & { type: string }): object {
    const result = this.#apply(user, op as Change['op'] & { base_rev?: number });
    if (typeof result === 'string') return refused(result);
    if (result) {
      this.push({ type: 'changed', conversation: this.id, after: this.rev - 1, rev: this.rev, items: this.items(this.rev - 1, this.rev) });
      if (user === this.me && 'emoji' in op)
        this.push({ type: 'reacted', conversation: this.id, seq: op.seq, emoji: op.emoji, on: op.type === 'react', rev: this.rev });
    }
    return { type: 'ok', rev: this.rev };
  }

  /** Pushes what was missed since a cursor, with the user's own reactions: the messages, and the changes in consecutive events,
   * or in one that only says that something was missed. */
  #resume([seq, rev]: [number, number] = [this.entries.length, this.rev]): void {
    for (const entry of this.entries.slice(seq)) this.push(this.message(entry, true));
    const event = { type: 'changed', conversation: this.id };
    if (this.rev - rev > this.gapAbove) return this.push({ ...event, after: this.rev, rev: this.rev, items: [] });
    for (let after = rev; after < this.rev; after += this.eventRevs) {
      const to = Math.min(this.rev, after + this.eventRevs);
      this.push({ ...event, after, rev: to, items: this.items(after, to, true) });
    }
  }

  push(event: object): void {
    if (!this.isDeaf && this.sockets.length && this.socket.readyState === 1) this.socket.say(event);
  }

  /** Returns the items of all entries that changed in (after, to], as they were at `to`. */
  items(after: number, to: number, withMine = false): Fields[] {
    const changed = new Map<number, Change[]>();
    for (const change of this.log.slice(after, to))
      for (const seq of change.op.seqs ?? [change.op.seq!]) changed.set(seq, [...(changed.get(seq) ?? []), change]);
    return [...changed].map(([seq, changes]) => {
      const entry = this.entries[seq - 1]!;
      const has = (...types: string[]) => changes.filter(({ op }) => types.includes(op.type));
      const item: Fields = { seq, rev: changes.at(-1)!.rev };
      const { body, attachments, edited_at, deleted } = entry;
      if (has('edit').length && !deleted) Object.assign(item, { body, attachments, edited_at });
      if (has('delete').length) item.deleted = deleted;
      const reactions = has('react', 'unreact');
      if (reactions.length) {
        item.reactions = this.#counts(entry);
        const [{ user, op }] = reactions as [Change];
        if (reactions.length === 1) item.by = { user, emoji: op.emoji, on: op.type === 'react' };
        if (withMine) item.mine = this.#mine(entry);
      }
      return item;
    });
  }

  changesAfter(after: number, limit: number): object {
    if (this.rev - after > this.resetAfter) return { type: 'changes', after, rev: this.rev, items: [], reset: true };
    const to = Math.min(this.rev, after + limit);
    return { type: 'changes', after, rev: to, items: this.items(after, to, true), ...(to < this.rev && { more: true }) };
  }

  history({ before, after, around, limit = 50 }: Fields): object {
    const head = this.entries.length;
    const count = limit as number;
    let from = head - count + 1;
    if (before !== undefined) from = (before as number) - count;
    if (after !== undefined) from = (after as number) + 1;
    if (around !== undefined) from = (around as number) - Math.floor(count / 2);
    const to = Math.min(before === undefined ? head : (before as number) - 1, from + count - 1);
    const messages = this.entries.slice(Math.max(0, from - 1), Math.max(0, to)).map((entry) => this.message(entry, true));
    return { type: 'history', messages, rev: this.isOld ? 0 : this.rev, head };
  }

  message({ who: _, contentRev: __, attachments, rev, ...entry }: Entry, withMine: boolean): Fields {
    const { seq } = entry;
    const stored = this.entries[seq - 1]!;
    const message: Fields = { type: 'message', conversation: this.id, message_id: `m${seq}`, ...entry };
    if (attachments.length) message.attachments = attachments;
    if (this.isOld) return message;
    if (rev) message.rev = rev;
    if (stored.who.size && !stored.deleted) message.reactions = this.#counts(stored);
    if (withMine && this.#mine(stored).length && !stored.deleted) message.mine = this.#mine(stored);
    return message;
  }

  item(): Fields {
    const last = this.entries.at(-1)!;
    const { seq, at, sender, kind, body, deleted } = last;
    const counted = this.entries.filter(({ seq, kind, deleted }) => seq > this.readSeq && kind === 'text' && !deleted);
    return {
      ...{ conversation: this.id, kind: 'group', name: 'Group', last_seq: seq, read_seq: this.readSeq, joined_seq: 1 },
      ...{ rev: this.isOld ? 0 : this.rev, unread: counted.length },
      last_message: { seq, message_id: `m${seq}`, at, sender, kind, preview: body, ...(deleted && { deleted: true }) },
    };
  }

  #counts({ who }: Entry): Record<string, number> {
    return Object.fromEntries([...who].filter(([, users]) => users.size).map(([emoji, users]) => [emoji, users.size]));
  }

  #mine({ who }: Entry): string[] {
    return [...who].filter(([, users]) => users.has(this.me)).map(([emoji]) => emoji);
  }

  /** Returns an error code, or whether anything changed. */
  #apply(user: string, { base_rev, ...op }: Change['op'] & { base_rev?: number }): string | boolean {
    const entries = (op.seqs ?? [op.seq!]).map((seq) => this.entries[seq - 1]);
    const rev = this.rev + 1;
    if (!entries.length || entries.some((entry) => entry?.kind !== 'text')) return 'bad_request';
    const [entry] = entries as [Entry];
    if (op.type === 'delete') {
      if (entries.some((entry) => entry!.sender !== user)) return 'forbidden';
      const left = entries.filter((entry) => !entry!.deleted) as Entry[];
      for (const entry of left) Object.assign(entry, { body: '', attachments: [], deleted: { by: user, at: this.now++ }, rev });
      op = { ...op, seqs: left.map(({ seq }) => seq) };
      if (!left.length) return false;
    } else if (entry.deleted) return 'conflict';
    else if (op.type === 'edit') {
      if (entry.sender !== user) return 'forbidden';
      const { body = '', attachments = entry.attachments } = op;
      if (entry.body === body && JSON.stringify(entry.attachments) === JSON.stringify(attachments)) return false;
      if (base_rev !== undefined && entry.contentRev > base_rev) return 'conflict';
      Object.assign(entry, { body, attachments, edited_at: this.now++, rev, contentRev: rev });
    } else {
      const users = entry.who.get(op.emoji!) ?? new Set();
      entry.who.set(op.emoji!, users);
      if (users.has(user) === (op.type === 'react')) return false;
      users[op.type === 'react' ? 'add' : 'delete'](user);
      entry.rev = rev;
    }
    const { type, seq, seqs, body, emoji } = op;
    this.log.push({
      rev,
      user,
      op: { type, ...(seqs ? { seqs } : { seq: seq! }), ...(body !== undefined && { body }), ...(emoji && { emoji }) },
    });
    return true;
  }

  #send({ client_id, body }: Request): object {
    const known = this.entries.find((entry) => entry.client_id === client_id);
    const { seq, at } = known ?? this.write(this.me, body as string, 'text', client_id as string);
    return { type: 'sent', seq, message_id: `m${seq}`, at, duplicate: known !== undefined };
  }
}
