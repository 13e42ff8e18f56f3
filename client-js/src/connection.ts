/** One connection at a time, made again whenever it breaks. What the states are, and what leads from one to the
 * next, is the pure function `next`; the class carries it out. */
import { backoff, within } from './backoff.js';
import type { Codec, Frame } from './codec.js';
import { BAD_FRAME, ChatError, type ErrorCode, FINAL, lost, RESTART, TOKEN_EXPIRED, UNAUTHORIZED, UnauthorizedError } from './codes.js';
import type { Connected, ConversationId, Limits, Millis, Replies, Request, Seq, ServerEvent } from './types.js';
import { fromWire, toWire } from './wire.js';

/** Why a token is asked for: there is none yet, it will expire within half a minute, the gateway refused it. */
export type TokenReason = 'initial' | 'expiring' | 'rejected';
export type TokenSource = (why: { reason: TokenReason; signal: AbortSignal }) => Promise<string> | string;

export type State =
  | { at: 'idle' }
  /** A token is fetched, then a socket opened. `error`: why the last attempt failed, or the connection before ended. */
  | { at: 'connecting'; attempt: number; token: TokenReason; error?: ChatError | undefined }
  | { at: 'connected'; attempt: number; since: Millis }
  /** Between two attempts. */
  | { at: 'waiting'; attempt: number; until: Millis; error?: ChatError | undefined }
  /** For good: only `connect()` leads out of it. */
  | { at: 'closed'; error: ChatError };

export type Step =
  | { on: 'connect' | 'disconnect' | 'opened' | 'time' }
  /** `fresh`: the token it was refused with had just been fetched. `asking`: requests were under way. */
  | { on: 'lost'; code: number; reason?: string | undefined; fresh: boolean; asking?: boolean; error?: ChatError }
  /** There is no token, or no socket can be made. */
  | { on: 'no_token'; error: Error };

/** For a token; for the socket and the answer to `connect`. */
const TOKEN_TIMEOUT_MS = 30_000;
const CONNECT_TIMEOUT_MS = 10_000;
/** Cursors that a gateway uses, and that one frame has. */
const CURSORS_MAX = 5_000;
const CURSORS_AT_ONCE = 200;
/** For any frame after a ping. Longer than a gateway may let a user wait who has asked for too many bytes. */
const PROBE_TIMEOUT_MS = 6_000;
/** A connection that held so long begins to count its failures anew. */
const HEALTHY_MS = 30_000;
/** A token is replaced so long before it expires. */
const EXPIRING_MS = 30_000;
/** Longer timers fire at once. */
const TIMER_MAX_MS = 2 ** 31 - 1;
/** Requests without an answer. */
const ASKED_MAX = 1_000;
/** Part of the gateway's rate that this client uses: pongs count too, and so do other sessions of the user. */
const RATE_PART = 0.8;
const BURST_PART = 0.5;
/** After so many connections in a row that ended with 4500, reconnecting is given up. */
const BAD_FRAMES_MAX = 10;

/** The only place where the state changes. */
export function next(state: State, step: Step, now: Millis, random: () => number = Math.random): State {
  let error = 'error' in state ? state.error : undefined;
  const wait = (attempt: number): State => ({ at: 'waiting', attempt, until: now + backoff(attempt, random), error });
  const open = (attempt: number, token: TokenReason = 'initial'): State => ({ at: 'connecting', attempt, token, error });
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
      error = asChatError(step.error);
      if (!error.temporary) return { at: 'closed', error };
      return wait(state.attempt + 1);
    case 'lost': {
      if (state.at !== 'connecting' && state.at !== 'connected') return state;
      const { code, reason, fresh, asking } = step;
      error = step.error ?? lost(code, reason);
      if (code === UNAUTHORIZED || code === TOKEN_EXPIRED) {
        if (!fresh) return open(state.attempt, 'rejected');
        return { at: 'closed', error: new UnauthorizedError(reason || error.message) };
      }
      // One of the requests is to blame, and the outbox finds out which: the others need not stay without a connection.
      const isFault = code === BAD_FRAME && asking && state.at === 'connected' && state.attempt < BAD_FRAMES_MAX;
      if (code >= FINAL && !isFault) return { at: 'closed', error };
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
  WebSocket: typeof WebSocket | undefined;
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

/** A request that waits for its turn. */
type Queued = Asked & { id: number; data: ReturnType<Codec['encode']> };

export class Connection {
  state: State = { at: 'idle' };
  #hooks: Hooks;
  #socket: WebSocket | undefined;
  #codec!: Codec;
  #asked = new Map<number, Asked>();
  /** Requests that wait until the gateway's rate allows them. */
  #queue: Queued[] = [];
  #limits: Partial<Limits> = {};
  /** Requests that may be sent at once, as of `#filledAt`. The gateway counts over all connections of a user. */
  #tokens = 0;
  #filledAt = 0;
  #pumping = false;
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
    this.#pumping = false;
    if (state.at !== 'connected') this.#drop('error' in state ? state.error?.closeCode : undefined);
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

  /** Asks once, on this connection, as soon as the gateway's rate allows it. */
  ask<R extends Request>(request: R): Promise<Replies[R['type']]> {
    return new Promise((resolve, reject) => {
      if (this.#socket?.readyState !== 1) return reject(lost());
      const asked = this.#asked.size + this.#queue.length;
      if (asked >= ASKED_MAX) return reject(new ChatError('rate_limited', `${asked} requests wait for an answer`));
      const id = this.#nextId++;
      const queued: Queued = { resolve, reject, id, data: this.#encode(request, id) };
      // What keeps the connection alive does not wait.
      if (request.type === 'connect' || request.type === 'ping' || request.type === 'refresh') return this.#send(queued);
      this.#queue.push(queued);
      this.#pump();
    });
  }

  /** Says something that has no answer; left out where requests have to wait. */
  post(request: Request): void {
    if (this.#socket?.readyState !== 1) return;
    if (request.type !== 'cursors' && this.#refill() < 1) return;
    this.#tokens--;
    this.#socket.send(this.#encode(request));
  }

  /** Nothing of the user is kept. */
  forget(): void {
    this.#token = undefined;
  }

  #encode(request: Request, id?: number): Queued['data'] {
    let data: Queued['data'];
    try {
      data = this.#codec.encode(toWire(id === undefined ? request : { ...request, id }));
    } catch (cause) {
      throw new ChatError('bad_request', `${request.type}: cannot be encoded: ${(cause as Error).message}`, undefined, { cause });
    }
    const { frameBytes = Infinity } = this.#limits;
    // A unit of a string is at most three bytes.
    if (data.length * (typeof data === 'string' ? 3 : 1) <= frameBytes) return data;
    const bytes = typeof data === 'string' ? new TextEncoder().encode(data).length : data.length;
    if (bytes <= frameBytes) return data;
    // The gateway would close the connection.
    const text = `${request.type}: ${bytes} bytes in a frame, at most ${frameBytes} allowed: send less at once`;
    throw new ChatError('too_large', text);
  }

  #send({ id, data, resolve, reject }: Queued): void {
    this.#tokens--;
    this.#asked.set(id, { resolve, reject });
    this.#socket!.send(data);
  }

  /** Returns how many requests the gateway's rate allows now. */
  #refill(): number {
    const { requestsPerSecond = Infinity, requestsBurst = Infinity } = this.#limits;
    const now = performance.now();
    const fresh = now > this.#filledAt ? ((now - this.#filledAt) / 1000) * requestsPerSecond * RATE_PART : 0;
    this.#tokens = Math.min(Math.max(1, requestsBurst * BURST_PART), requestsBurst === Infinity ? Infinity : this.#tokens + fresh);
    this.#filledAt = Math.max(now, this.#filledAt);
    return this.#tokens;
  }

  #pump(): void {
    while (!this.#pumping && this.#socket) {
      if (!this.#queue[0]) return;
      const missing = 1 - this.#refill();
      if (missing > 0) {
        this.#pumping = true;
        const ms = (missing / (this.#limits.requestsPerSecond! * RATE_PART)) * 1000 + Math.max(0, this.#filledAt - performance.now());
        this.#after(Math.ceil(ms), () => {
          this.#pumping = false;
          this.#pump();
        });
        return;
      }
      this.#send(this.#queue.shift()!);
    }
  }

  async #open(state: State & { at: 'connecting' }): Promise<void> {
    const isOver = () => this.state !== state;
    const known = this.#token;
    let text: string;
    let url: string;
    try {
      text = await this.#fetchToken(state.token);
      url = await within(TOKEN_TIMEOUT_MS, async () => this.#hooks.url());
      this.#codec = await this.#hooks.codec();
    } catch (error) {
      if (!isOver()) this.step({ on: 'no_token', error: error as Error });
      return;
    }
    if (isOver()) return;
    this.#fresh = this.#token !== known;
    let socket: WebSocket;
    try {
      const { WebSocket } = this.#hooks;
      if (!WebSocket) throw new Error('There is no WebSocket here: pass one as an option, such as that of the package ws');
      socket = new WebSocket(url, this.#codec.subprotocol);
    } catch (cause) {
      const text = `${(cause as Error).message} (URL ${url}, to be like wss://chat.example.org/v1/ws)`;
      return this.step({ on: 'no_token', error: new ChatError('invalid', text, undefined, { cause }) });
    }
    socket.binaryType = 'arraybuffer';
    this.#socket = socket;
    this.#heard = 0;
    let hasOpened = false;
    let detail = '';
    const ended = (code: number, reason?: string) => this.#lost(code, reason, hasOpened ? undefined : unreachable(url, detail));
    this.#after(CONNECT_TIMEOUT_MS, () => ended(1006));
    socket.onopen = () => {
      hasOpened = true;
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
    socket.onclose = ({ code, reason }) => ended(code, reason);
    // `close` follows; in Node an error that nobody hears ends the process. Only Node says what it was.
    socket.onerror = (event) => {
      detail = (event as Partial<ErrorEvent> | undefined)?.message ?? '';
    };
  }

  #opened(hello: Connected): void {
    this.#ahead = hello.time - Date.now();
    this.#fresh = false;
    const isFirst = !this.#filledAt;
    this.#limits = hello.limits;
    // What was sent to connect has been counted.
    if (isFirst) {
      this.#tokens += (this.#limits.requestsBurst ?? 0) * BURST_PART;
      this.#filledAt = performance.now();
    }
    const error = this.#hooks.connected(hello);
    if (error) return this.step({ on: 'no_token', error });
    this.step({ on: 'opened' });
    if (this.state.at !== 'connected') return;
    this.#pump();
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
    if (rest.code === 'rate_limited') {
      // Other sessions of this user ask too: everything rests until then.
      this.#tokens = Math.min(0, this.#refill());
      this.#filledAt = Math.max(this.#filledAt, performance.now() + ((rest.retryAfterMs as number) ?? 0));
    }
    asked?.reject(new ChatError(rest.code as ErrorCode, rest.message as string, rest.retryAfterMs as number));
  }

  #lost(code: number, reason?: string, error?: ChatError): void {
    const asking = this.#asked.size > 0;
    this.step({ on: 'lost', code, reason, fresh: this.#fresh, asking, ...(error && code < FINAL && { error }) });
  }

  #drop(code?: number): void {
    const socket = this.#socket;
    this.#socket = undefined;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
    const asked = [...this.#asked.values()];
    const queued = this.#queue.splice(0);
    this.#asked.clear();
    for (const { reject } of asked) reject(interrupted(code));
    for (const { reject } of queued) reject(interrupted());
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
    const why = { reason: known ? reason : 'initial' } as const;
    this.#fetched ??= within(TOKEN_TIMEOUT_MS, async (signal) => this.#hooks.token({ ...why, signal })).finally(() => {
      this.#fetched = undefined;
    });
    let text: string;
    try {
      text = await this.#fetched;
    } catch (cause) {
      throw asChatError(cause, 'token() failed: ');
    }
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

/** A request that a lost connection interrupted; it may be repeated, whatever closed the connection. */
function interrupted(code?: number): ChatError {
  const { message } = lost(code);
  return new ChatError('lost', message, 10, code === undefined ? {} : { closeCode: code });
}

function asChatError(cause: unknown, what = ''): ChatError {
  if (cause instanceof ChatError) return cause;
  return new ChatError('unreachable', what + ((cause as Error)?.message ?? cause), undefined, { cause });
}

/** Browsers do not say why a socket did not open. */
function unreachable(url: string, detail: string): ChatError {
  const origin = globalThis.location?.origin;
  const text = `No connection to ${url} ${detail && `(${detail})`}: check the URL, the network, the certificate, and that client.origins of the gateway has ${origin ?? 'this origin'}`;
  return new ChatError('unreachable', text);
}
