/** Random edits, deletions and reactions on several devices, over lost events, late answers and broken connections: in the end
 * a client shows exactly what the server has. `SEED` runs one case, `SEEDS` that many. */
import { afterEach, expect, test, vi } from 'vitest';
import { ChatClient, type Conversation, memoryStorage } from '../src/index.js';
import { ChangingServer } from './support/changing-server.js';

const EMOJI = ['👍', '🎉', ':tada_2:'];
const pause = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

/** Returns a function that returns the same numbers for each seed (mulberry32). */
function numbers(seed: number): () => number {
  let state = seed * 0x9e3779b9;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

afterEach(() => {
  vi.restoreAllMocks();
});

class World {
  server = new ChangingServer();
  client!: ChatClient;
  list!: Conversation;
  storage = memoryStorage();
  #next: () => number;
  /** Each change that was reported to the application, as `seq rev`. */
  told: string[] = [];

  constructor(seed: number) {
    this.#next = numbers(seed);
    this.server.isResuming = true;
    this.server.resetAfter = this.below(3) ? 1_000 : 8;
    this.server.pageRevs = this.below(2) ? 256 : 3;
    this.server.eventRevs = this.below(2) ? 256 : 2;
    this.server.gapAbove = this.below(2) ? 20 : 1;
    for (let i = 0; i < 45; i++) this.server.write(this.below(2) ? 'bob' : 'alice', `${i + 1}`);
    for (const type of ['history', 'changes', 'inbox', 'edit', 'delete', 'react', 'unreact', 'send']) this.#delay(type);
  }

  below(limit: number): number {
    return Math.floor(this.#next() * limit);
  }

  /** Delays some answers, or loses them with the connection. Each is computed before. */
  #delay(type: string): void {
    const answer = this.server.answers[type]!;
    this.server.answers[type] = (request) => {
      const chance = this.below(40);
      if (chance === 0) return { type: 'error', code: 'unavailable', message: 'later', retry_after_ms: 1 };
      const { socket } = this.server;
      const now = answer(request) as object;
      if (chance === 1) return void socket.end(1006);
      if (chance < 15) return now;
      setTimeout(() => socket.readyState === 1 && socket.say({ ...now, id: request.id }), this.below(6));
      return undefined;
    };
  }

  async connect(): Promise<void> {
    const { server, storage } = this;
    this.client?.disconnect();
    this.client = new ChatClient('ws://fake', { token: 't', user: 'alice', WebSocket: server.WebSocket, storage });
    this.client.on('changed', ({ items }) => {
      for (const { seq, rev } of items) this.told.push(`${seq} ${rev}`);
    });
    this.told = [];
    this.client.connect().catch(() => {});
    this.list = this.client.conversation('c');
    this.list.open();
  }

  /** One change of somebody else, or of another device of the user. */
  elsewhere(): void {
    const { server } = this;
    const who = this.below(2) ? 'bob' : 'alice';
    const seq = server.entries.length - this.below(this.below(4) ? 6 : 40);
    const emoji = EMOJI[this.below(3)]!;
    const kind = this.below(12);
    if (kind < 2) server.write(who, `by ${who} ${server.now}`);
    else if (kind === 2) server.write('bob', '', 'system');
    else if (kind < 6) server.change(who, { type: 'edit', seq, body: `edit ${server.now}` });
    else if (kind === 6) server.change(who, { type: 'delete', seqs: [seq] });
    else server.change(who, { type: this.below(3) ? 'react' : 'unreact', seq, emoji });
  }

  /** One thing that the user does. */
  here(): void {
    const { list } = this;
    const message = list.messages[list.messages.length - 1 - this.below(8)];
    if (!message) return;
    const { seq } = message;
    const target = seq ?? message.key;
    const kind = this.below(10);
    if (kind === 0) list.send(`mine ${this.server.now}`).catch(() => {});
    else if (kind < 4) list.edit(target, `mine ${this.server.now}`).catch(() => {});
    else if (kind === 4 && seq) list.delete(seq).catch(() => {});
    else if (kind === 5 && seq) list.read(seq);
    else if (kind === 6) void list.loadOlder(7).catch(() => {});
    else if (kind === 7) void this.client.inbox.refresh().catch(() => {});
    else list[this.below(3) ? 'react' : 'unreact'](target, EMOJI[this.below(3)]!).catch(() => {});
  }

  async step(): Promise<void> {
    const { server } = this;
    const kind = this.below(30);
    if (kind === 0) server.socket?.end(1006);
    else if (kind === 1) await this.connect();
    else if (kind === 2) server.isDeaf = true;
    else if (kind < 6) server.isDeaf = false;
    else if (kind < 18) this.elsewhere();
    else this.here();
    if (this.below(3) === 0) await pause(this.below(5));
  }

  /** Waits until nothing is left to do, and compares. */
  async finish(): Promise<void> {
    const { server } = this;
    server.isDeaf = false;
    server.write('bob', 'the last one');
    const isQuiet = async () => {
      if (this.client.state.at !== 'connected') return false;
      server.push(server.message(server.entries.at(-1)!, false));
      server.push({ type: 'changed', conversation: 'c', after: server.rev, rev: server.rev, items: [] });
      const { item } = this.list;
      const waiting = await this.storage.entries('alice');
      if (!this.list.atEnd && !this.list.loading) await this.list.loadNewer(200).catch(() => {});
      return (
        waiting.every(({ failed }) => failed) &&
        this.list.messages.every(({ pending, state }) => !pending && state !== 'sending') &&
        this.list.atEnd &&
        !this.list.loading &&
        this.client.cursors().c?.[1] === server.rev &&
        item?.rev === server.rev &&
        item.readSeq === server.readSeq &&
        item.lastSeq === server.entries.length
      );
    };
    await vi.waitUntil(isQuiet, { timeout: 10_000, interval: 10 });
    await pause(20);
  }

  check(seed: number): void {
    const { server, list } = this;
    const pages = (server.history({ limit: 1_000 }) as { messages: Record<string, unknown>[] }).messages;
    const of = new Map(pages.map((message) => [message.seq, message]));
    for (const { seq, body, deleted, reactions = {}, mine = [], editedAt } of list.messages) {
      const stored = of.get(seq)!;
      const { body: text, deleted: gone, reactions: counts = {}, mine: own = [], edited_at: edited } = stored as never;
      const is = { seq, body, deleted: deleted?.by, reactions, mine: [...mine].sort(), edited: deleted ? undefined : editedAt };
      const by = (gone as { by: string } | undefined)?.by;
      const want = {
        seq,
        body: text,
        deleted: by,
        reactions: counts,
        mine: [...(own as string[])].sort(),
        edited: by ? undefined : edited,
      };
      expect(is, `seed ${seed}`).toEqual(want);
    }
    expect(list.messages.length).toBeGreaterThan(20);
    const { unread, last_message: last } = server.item() as { unread: number; last_message: { preview: string } };
    expect({ unread: list.unread, preview: list.item!.lastMessage!.preview }, `seed ${seed}`).toEqual({ unread, preview: last.preview });
    expect(new Set(this.told).size, `seed ${seed}: each change is reported once`).toBe(this.told.length);
  }
}

const one = Number(process.env.SEED);
const seeds = one ? [one] : Array.from({ length: Number(process.env.SEEDS ?? 40) }, (_, i) => i + 1);

test(`${seeds.length} random histories`, async () => {
  vi.spyOn(Math, 'random').mockReturnValue(0.005);
  const run = async (seed: number) => {
    const world = new World(seed);
    await world.connect();
    for (let i = 0; i < 120; i++) await world.step();
    await world.finish().catch(async (error) => {
      const { item } = world.list;
      const cursor = world.client.cursors().c;
      throw new Error(
        `seed ${seed} does not come to rest: ${JSON.stringify({ waiting: await world.storage.entries('alice'), end: world.list.atEnd, load: world.list.loading, pending: world.list.messages.filter((m) => m.pending || m.state === 'sending'), item, cursor, rev: world.server.rev, read: world.server.readSeq })} ${error}`,
      );
    });
    world.check(seed);
    world.client.disconnect();
  };
  for (let i = 0; i < seeds.length; i += 10) await Promise.all(seeds.slice(i, i + 10).map(run));
});
