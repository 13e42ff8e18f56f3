/** One connection at a time, made again whenever it breaks. What the states are, and what leads from one to the
 * next, is the pure function `next`; the class carries it out. */
import { backoff, unless } from './backoff.js';
import type { Codec, Frame } from './codec.js';
import { ChatError, type ErrorCode, FINAL, RESTART, TOKEN_EXPIRED, UNAUTHORIZED, UnauthorizedError } from './codes.js';
import type { Connected, ConversationId, Millis, Replies, Request, Seq, ServerEvent } from './types.js';
import { fromWire, toWire } from './wire.js';

/** Why a token is asked for: there is none yet, it will expire within half a minute, the gateway refused it. */
export type TokenReason = 'initial' | 'expiring' | 'rejected';
export type TokenSource = (why: { reason: TokenReason; signal: AbortSignal }) => Promise<string> | string;

export type State =
  | { at: 'idle' }
  /** A token is fetched, then a socket opened. */
  | { at: 'connecting'; attempt: number; token: TokenReason }
  | { at: 'connected'; attempt: number; since: Millis }
  /** Between two attempts. */
  | { at: 'waiting'; attempt: number; until: Millis }
  /** For good: only `connect()` leads out of it. */
  | { at: 'closed'; error: ChatError };

export type Step =
  | { on: 'connect' | 'disconnect' | 'opened' | 'time' }
  /** `fresh`: the token it was refused with had just been fetched. */
  | { on: 'lost'; code: number; reason?: string | undefined; fresh: boolean }
  | { on: 'no_token'; error: Error };

/** For a token; for the socket and the answer to `connect`. */
const TOKEN_TIMEOUT_MS = 30_000;
const CONNECT_TIMEOUT_MS = 10_000;
/** Cursors that a gateway uses, and that one frame has. */
const CURSORS_MAX = 5_000;
const CURSORS_AT_ONCE = 500;
/** For any frame after a ping. */
const PROBE_TIMEOUT_MS = 3_000;
/** A connection that held so long begins to count its failures anew. */
const HEALTHY_MS = 30_000;
/** A token is replaced so long before it expires. */
const EXPIRING_MS = 30_000;
/** Longer timers fire at once. */
const TIMER_MAX_MS = 2 ** 31 - 1;
/** Requests without an answer. */
const ASKED_MAX = 1_000;

/** The only place where the state changes. */
export function next(state: State, step: Step, now: Millis, random: () => number = Math.random): State {
  const wait = (attempt: number): State => ({ at: 'waiting', attempt, until: now + backoff(attempt, random) });
  const open = (attempt: number, token: TokenReason = 'initial'): State => ({ at: 'connecting', attempt, token });
  switch (step.on) {
    case 'connect':
      return state.at === 'connecting' || state.at === 'connected' ? state : open(0);
    case 'disconnect':
      return { at: 'idle' };
    case 'opened':
      return state.at === 'connecting' ? { at: 'connected', attempt: state.attempt, since: now } : state;
    case 'time':
      return state.at === 'waiting' ? open(state.attempt) : state;
    case 'no_token':
      if (state.at !== 'connecting') return state;
      if (step.error instanceof UnauthorizedError) return { at: 'closed', error: step.error };
      return wait(state.attempt + 1);
    case 'lost': {
      if (state.at !== 'connecting' && state.at !== 'connected') return state;
      const { code, reason, fresh } = step;
      if (code === UNAUTHORIZED || code === TOKEN_EXPIRED) {
        if (!fresh) return open(state.attempt, 'rejected');
        return { at: 'closed', error: new UnauthorizedError(reason) };
      }
      if (code >= FINAL) return { at: 'closed', error: new ChatError('closed', `${reason} (${code})`) };
      if (state.at === 'connecting') return wait(state.attempt + 1);
      if (code === RESTART) return open(0);
      return wait(now - state.since >= HEALTHY_MS ? 0 : state.attempt + 1);
    }
  }
}

export interface Hooks {
  url(): Promise<string> | string;
  codec(): Promise<Codec>;
  token: TokenSource;
  WebSocket: typeof WebSocket;
  device: string | undefined;
  cursors(): Record<ConversationId, [Seq, number]>;
  /** Before anything else of the new connection is handled. Returns why it must not be used. */
  connected(hello: Connected): Error | undefined;
  changed(state: State): void;
  event(event: ServerEvent): void;
}

interface Asked {
  resolve(reply: never): void;
  reject(error: ChatError): void;
}

export class Connection {
  state: State = { at: 'idle' };
  #hooks: Hooks;
  #socket: WebSocket | undefined;
  #codec!: Codec;
  #asked = new Map<number, Asked>();
  #nextId = 1;
  /** Frames received on this socket: that there are more is the sign of life. */
  #heard = 0;
  #timers = new Set<ReturnType<typeof setTimeout>>();
  #token: { text: string; expires: Millis } | undefined;
  #fetched: Promise<string> | undefined;
  /** What the gateway's clock is ahead of ours. */
  #ahead = 0;
  #fresh = false;

  constructor(hooks: Hooks) {
    this.#hooks = hooks;
  }

  step(step: Step): void {
    const before = this.state;
    this.state = next(before, step, Date.now());
    if (this.state === before) return;
    const state = this.state;
    for (const timer of this.#timers) clearTimeout(timer);
    this.#timers.clear();
    if (state.at !== 'connected') this.#drop();
    if (state.at === 'closed') this.#token = undefined;
    if (state.at === 'waiting') this.#after(state.until - Date.now(), () => this.step({ on: 'time' }));
    if (state.at === 'connecting') void this.#open(state);
    this.#hooks.changed(state);
  }

  /** The network or the page is back: look whether the connection lives, or try again at once. */
  awake(): void {
    if (this.state.at === 'connected') this.#probe();
    else if (this.state.at === 'waiting') this.step({ on: 'connect' });
  }

  /** Asks once, on this connection. */
  ask<R extends Request>(request: R): Promise<Replies[R['type']]> {
    return new Promise((resolve, reject) => {
      if (this.#socket?.readyState !== 1) return reject(lost());
      if (this.#asked.size >= ASKED_MAX) return reject(new ChatError('rate_limited', 'too many requests'));
      const id = this.#nextId++;
      this.#asked.set(id, { resolve, reject });
      this.#socket.send(this.#codec.encode(toWire({ ...request, id })));
    });
  }

  /** Says something that has no answer. */
  post(request: Request): void {
    if (this.#socket?.readyState === 1) this.#socket.send(this.#codec.encode(toWire(request)));
  }

  async #open(state: State & { at: 'connecting' }): Promise<void> {
    const isOver = () => this.state !== state;
    const known = this.#token;
    let text: string;
    let url: string;
    try {
      text = await this.#fetchToken(state.token);
      url = await this.#hooks.url();
      this.#codec = await this.#hooks.codec();
    } catch (error) {
      if (!isOver()) this.step({ on: 'no_token', error: error as Error });
      return;
    }
    if (isOver()) return;
    this.#fresh = this.#token !== known;
    const socket = new this.#hooks.WebSocket(url, this.#codec.subprotocol);
    socket.binaryType = 'arraybuffer';
    this.#socket = socket;
    this.#heard = 0;
    this.#after(CONNECT_TIMEOUT_MS, () => this.#lost(1006));
    socket.onopen = () => {
      const { device, cursors } = this.#hooks;
      // In parts, each far smaller than a frame may be.
      const known = Object.entries(cursors()).slice(-CURSORS_MAX);
      const part = () => Object.fromEntries(known.splice(0, CURSORS_AT_ONCE));
      const more = () => (known.length > 0 ? { more: true } : {});
      const connect = this.ask({ type: 'connect', token: text, cursors: part(), device, ...more() });
      while (known.length > 0) this.post({ type: 'cursors', cursors: part(), ...more() });
      // If it is refused, the close code that follows says what to do.
      connect.then(
        (hello) => this.#opened(hello),
        () => {},
      );
    };
    socket.onmessage = ({ data }) => this.#receive(data as string | ArrayBuffer);
    socket.onclose = ({ code, reason }) => this.#lost(code, reason);
    // `close` follows; in Node an error that nobody hears ends the process.
    socket.onerror = () => {};
  }

  #opened(hello: Connected): void {
    this.#ahead = hello.time - Date.now();
    this.#fresh = false;
    const error = this.#hooks.connected(hello);
    if (error) return this.step({ on: 'no_token', error });
    this.step({ on: 'opened' });
    if (this.state.at !== 'connected') return;
    this.#watch(hello.pingIntervalMs);
    this.#expires(hello.expiresAt);
  }

  #receive(data: string | ArrayBuffer): void {
    this.#heard++;
    let frame: Frame;
    try {
      frame = fromWire(this.#codec.decode(data));
    } catch {
      return this.#lost(1002);
    }
    const { id, ...rest } = frame;
    if (id === undefined) return this.#hooks.event(rest as ServerEvent);
    const asked = this.#asked.get(id);
    this.#asked.delete(id);
    if (rest.type !== 'error') return asked?.resolve(rest as never);
    asked?.reject(new ChatError(rest.code as ErrorCode, rest.message as string, rest.retryAfterMs as number));
  }

  #lost(code: number, reason?: string): void {
    this.step({ on: 'lost', code, reason, fresh: this.#fresh });
  }

  #drop(): void {
    const socket = this.#socket;
    this.#socket = undefined;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
    for (const { reject } of this.#asked.values()) reject(lost());
    this.#asked.clear();
  }

  /** Nothing came for a whole interval: asks for a sign of life. A page cannot see the gateway's own pings. */
  #watch(interval: number): void {
    const heard = this.#heard;
    this.#after(interval, () => {
      if (this.#heard === heard) this.#probe();
      this.#watch(interval);
    });
  }

  #probe(): void {
    const heard = this.#heard;
    this.ask({ type: 'ping' }).catch(() => {});
    this.#after(PROBE_TIMEOUT_MS, () => {
      if (this.#heard === heard) this.#lost(1006);
    });
  }

  #expires(at: Millis): void {
    if (this.#token) this.#token.expires = at;
    const left = at - Date.now() - this.#ahead;
    this.#after(Math.max(left - EXPIRING_MS, left / 2), () => void this.#refresh(at));
  }

  async #refresh(at: Millis): Promise<void> {
    const state = this.state;
    try {
      const token = await this.#fetchToken('expiring');
      if (this.state === state) this.#expires((await this.ask({ type: 'refresh', token })).expiresAt);
    } catch {
      // Again soon; when it has expired, the gateway closes and a new one is asked for then.
      if (this.state === state) this.#after(EXPIRING_MS / 6, () => void this.#refresh(at));
    }
  }

  /** The token there is, unless it is of no more use; asked for once at a time. */
  async #fetchToken(reason: TokenReason): Promise<string> {
    const known = this.#token;
    if (reason === 'initial' && known && known.expires - Date.now() - this.#ahead > EXPIRING_MS) return known.text;
    const signal = AbortSignal.timeout(TOKEN_TIMEOUT_MS);
    const why = { reason: known ? reason : 'initial', signal } as const;
    this.#fetched ??= unless(signal, (async () => this.#hooks.token(why))()).finally(() => {
      this.#fetched = undefined;
    });
    const text = await this.#fetched;
    // When it expires is told by the gateway that takes it.
    this.#token = { text, expires: Infinity };
    return text;
  }

  /** Of this state: when the state changes, all its timers are gone. */
  #after(ms: number, then: () => void): void {
    const timer = setTimeout(
      () => {
        this.#timers.delete(timer);
        then();
      },
      Math.min(ms, TIMER_MAX_MS),
    );
    this.#timers.add(timer);
  }
}

function lost(): ChatError {
  // Soon, and not at once: a socket that is just closing may still be the one there is.
  return new ChatError('lost', 'connection lost', 10);
}
