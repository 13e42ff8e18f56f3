/** The connection to a gateway, made again whenever it breaks. The pure function `next` has the states and the steps between
 * them; the class `Connection` carries them out. */
import { backoff, delay, SOURCE_TIMEOUT_MS, within } from './backoff.js';
import type { Codec, Frame } from './codec.js';
import {
  BAD_FRAME,
  ChatError,
  type ErrorCode,
  FINAL,
  lost,
  RESTART,
  TOKEN_EXPIRED,
  textOf,
  UNAUTHORIZED,
  UnauthorizedError,
} from './codes.js';
import type { Connected, ConversationId, Limits, Millis, Replies, Request, Seq, ServerEvent } from './types.js';
import { fromWire, toWire } from './wire.js';

/** Why a token is needed: there is none, the current one is about to expire, or the gateway refused it. */
export type TokenReason = 'initial' | 'expiring' | 'rejected';
/** Returns a token. The signal is aborted after 30 s. */
export type TokenSource = (why: { reason: TokenReason; signal: AbortSignal }) => Promise<string> | string;

/** The state of the connection. */
export type State =
  | { at: 'idle'; error?: undefined }
  /** Fetches a token, then opens a socket. `error` is why the last attempt failed or the last connection ended. */
  | { at: 'connecting'; attempt: number; token: TokenReason; error?: ChatError | undefined }
  | { at: 'connected'; attempt: number; since: Millis; error?: undefined }
  /** Waits before the next attempt. */
  | { at: 'waiting'; attempt: number; until: Millis; error?: ChatError | undefined }
  /** Gave up. Only `connect()` leads to another state. */
  | { at: 'closed'; error: ChatError };

/** An event that may change the state. */
export type Step =
  | { on: 'connect' | 'disconnect' | 'opened' | 'time' }
  /** The connection or the attempt ended. `fresh`: its token had just been fetched. `asking`: requests were in flight. */
  | { on: 'lost'; code: number; reason?: string | undefined; fresh: boolean; asking?: boolean; error?: ChatError | undefined }
  /** No token was returned, or no socket can be opened. */
  | { on: 'no_token'; error: Error };

/** The time limit for the socket and the answer to `connect` together. */
const CONNECT_TIMEOUT_MS = 10_000;
/** The number of cursors in one frame. */
const CURSORS_AT_ONCE = 200;
/** The time limit for any frame after a ping. It is longer than a gateway delays a user who asked for too many bytes. */
const PROBE_TIMEOUT_MS = 6_000;
/** The least time between two attempts to connect that events of the page cause. */
const AWAKE_EVERY_MS = 2_000;
/** The duration after which a connection resets the count of failures. */
const HEALTHY_MS = 30_000;
/** How often in a row a shorter connection is made again at once after a restart of the gateway. */
const RESTARTS_AT_ONCE = 1;
/** How long before its expiry a token is renewed. */
const EXPIRING_MS = 30_000;
/** The longest timer. Longer ones fire at once. */
const TIMER_MAX_MS = 2 ** 31 - 1;
/** The greatest number of unanswered requests. */
const ASKED_MAX = 1_000;
/** The part of the gateway's rate limit that this client uses. Pongs and other sessions of the user count too. */
const RATE_PART = 0.8;
/** The part of the gateway's burst limit that this client uses. */
const BURST_PART = 0.5;
/** The number of connections in a row that end with 4500 after which the client gives up. */
const BAD_FRAMES_MAX = 10;

/** Returns the state that follows a step. */
export function next(state: State, step: Step, now: Millis, random: () => number = Math.random): State {
  let { error }: { error?: ChatError | undefined } = state;
  const wait = (attempt: number): State => ({ at: 'waiting', attempt, until: now + backoff(attempt, random), error });
  const open = (attempt: number, token: TokenReason = 'initial'): State => ({ at: 'connecting', attempt, token, error });
  const isOpening = state.at === 'connecting';
  const isOpen = state.at === 'connected';
  switch (step.on) {
    case 'connect':
      return isOpening || isOpen ? state : open(0);
    case 'disconnect':
      return { at: 'idle' };
    case 'opened':
      return isOpening ? { at: 'connected', attempt: state.attempt, since: now } : state;
    case 'time':
      return state.at === 'waiting' ? open(state.attempt) : state;
    case 'no_token':
      if (!isOpening) return state;
      error = asChatError(step.error);
      return error.temporary ? wait(state.attempt + 1) : { at: 'closed', error };
    case 'lost': {
      if (!isOpening && !isOpen) return state;
      const { code, reason, fresh, asking } = step;
      error = step.error ?? lost(code, reason);
      if (code === UNAUTHORIZED || code === TOKEN_EXPIRED) {
        if (!fresh) return open(state.attempt, 'rejected');
        return { at: 'closed', error: new UnauthorizedError(reason || error.message) };
      }
      // One of the requests caused it. The outbox finds out which one, and the others need a connection.
      const isFault = code === BAD_FRAME && asking && isOpen && state.attempt < BAD_FRAMES_MAX;
      if (code >= FINAL && !isFault) return { at: 'closed', error };
      const attempt = isOpen && now - state.since >= HEALTHY_MS ? 0 : state.attempt + 1;
      // A restart tells clients to connect to another gateway at once. Repeated restarts are a failure, so they wait.
      if (code === RESTART && isOpen && attempt <= RESTARTS_AT_ONCE) return open(attempt);
      return wait(attempt);
    }
  }
}

/** What the connection needs of the client. */
export interface Hooks {
  /** Has a time limit of its own. */
  url(): Promise<string> | string;
  codec(): Promise<Codec>;
  token: TokenSource;
  WebSocket: typeof WebSocket | undefined;
  device: string | undefined;
  cursors(): Record<ConversationId, [Seq, number]>;
  /** Called before any other frame of a new connection. Returns an error if the connection must not be used. */
  connected(hello: Connected): Error | undefined;
  /** Called after each change of state. The signal is aborted at the next one. */
  changed(state: State, over: AbortSignal): void;
  event(event: ServerEvent): void;
}

/** A request that waits for its answer. */
interface Asked {
  resolve(reply: never): void;
  reject(error: ChatError): void;
}

/** The limits that apply if the gateway states none. */
const NO_LIMITS = { frameBytes: 1e9, requestsPerSecond: 1e9, requestsBurst: 1e9 };

type Encoded = ReturnType<Codec['encode']>;

/** The connection of one client. */
export class Connection {
  state: State = { at: 'idle' };
  #hooks: Hooks;
  #socket: WebSocket | undefined;
  #codec!: Codec;
  /** Requests in flight, by id. */
  #asked = new Map<number, Asked>();
  /** Requests that wait for the rate limit. */
  #queue: { send(): void; reject(error: ChatError): void }[] = [];
  #limits: typeof NO_LIMITS & Partial<Limits> = NO_LIMITS;
  /** The number of requests that the rate limit allowed at `#filledAt`. The gateway counts all connections of a user. */
  #tokens = 0;
  #filledAt = -Infinity;
  #pumping = false;
  #nextId = 1;
  /** The number of frames received on this socket. It grows while the connection lives. */
  #heard = 0;
  /** The value of `#heard` at the last ping. */
  #probed = -1;
  /** The time of the last attempt to connect. */
  #triedAt = -Infinity;
  /** Aborted when the state changes. */
  #over = new AbortController();
  #token: { text: string; expires: Millis } | undefined;
  #fetched: Promise<string> | undefined;
  /** How far the gateway's clock is ahead of this one, in milliseconds. */
  ahead = 0;
  /** Whether the token was fetched for this attempt. */
  #fresh = false;

  constructor(hooks: Hooks) {
    this.#hooks = hooks;
  }

  /** Applies a step, and begins the work of the new state. */
  step(step: Step): void {
    const before = this.state;
    this.state = next(before, step, Date.now());
    if (this.state === before) return;
    const state = this.state;
    this.#over.abort();
    this.#over = new AbortController();
    this.#pumping = false;
    if (state.at !== 'connected') this.#drop(state.error?.closeCode);
    if (state.at === 'closed') this.#token = undefined;
    if (state.at === 'waiting') this.#after(state.until - Date.now(), () => this.step({ on: 'time' }));
    if (state.at === 'connecting') void this.#open(state);
    this.#hooks.changed(state, this.#over.signal);
  }

  /** Called when the network or the page may be back: probes the connection, or ends the wait for the next attempt. The back-off
   * goes on, and attempts keep a distance, because a bad network causes many such events. */
  awake(isOffline: boolean): void {
    if (this.state.at === 'connected') this.#probe();
    if (this.state.at !== 'waiting' || isOffline) return;
    const ms = this.#triedAt + AWAKE_EVERY_MS - performance.now();
    if (ms > 0) this.#after(ms, () => this.step({ on: 'time' }));
    else this.step({ on: 'time' });
  }

  /** Sends a request on this connection as soon as the rate limit allows it. Does not retry. */
  ask<R extends Request>(request: R): Promise<Replies[R['type']]> {
    return new Promise((resolve, reject) => {
      if (this.#socket?.readyState !== 1) return reject(lost());
      const asked = this.#asked.size + this.#queue.length;
      if (asked >= ASKED_MAX) return reject(new ChatError('rate_limited', `${asked} requests wait for an answer`));
      const id = this.#nextId++;
      const data = this.#encode({ ...request, id });
      const send = () => {
        this.#asked.set(id, { resolve, reject });
        this.#send(data);
      };
      // Requests that keep the connection alive must not wait.
      if (['connect', 'ping', 'refresh'].includes(request.type)) return send();
      this.#queue.push({ send, reject });
      this.#pump();
    });
  }

  /** Sends a request that has no answer. Drops it if the rate limit does not allow it now. */
  post(request: Request): void {
    if (this.#socket?.readyState !== 1) return;
    if (request.type === 'cursors' || this.#refill() >= 1) this.#send(this.#encode(request));
  }

  /** Returns the time of the gateway. */
  now(): Millis {
    return Date.now() + this.ahead;
  }

  /** Deletes the token. */
  clear(): void {
    this.#token = this.#fetched = undefined;
  }

  #encode(request: Request & { id?: number }): Encoded {
    let data: Encoded;
    let length: number;
    try {
      data = this.#codec.encode(toWire(request));
      ({ length } = typeof data === 'string' ? new TextEncoder().encode(data) : data);
    } catch (cause) {
      throw new ChatError('bad_request', `${request.type}: ${(cause as Error).message}`, { cause });
    }
    const { frameBytes } = this.#limits;
    if (length <= frameBytes) return data;
    // The gateway would close the connection because of it.
    throw new ChatError('too_large', `${request.type}: ${length} bytes, at most ${frameBytes}`);
  }

  #send(data: Encoded): void {
    this.#tokens--;
    this.#socket!.send(data);
  }

  /** Returns how many requests the rate limit allows now. */
  #refill(): number {
    const { requestsPerSecond, requestsBurst } = this.#limits;
    const now = Math.max(this.#filledAt, performance.now());
    const fresh = ((now - this.#filledAt) / 1000) * requestsPerSecond * RATE_PART;
    this.#filledAt = now;
    this.#tokens = Math.min(Math.max(1, requestsBurst * BURST_PART), this.#tokens + fresh);
    return this.#tokens;
  }

  /** Sends queued requests as the rate limit allows. */
  #pump(): void {
    while (!this.#pumping && this.#queue[0]) {
      const missing = 1 - this.#refill();
      if (missing > 0) {
        this.#pumping = true;
        const ms = (missing / (this.#limits.requestsPerSecond * RATE_PART)) * 1000 + this.#filledAt - performance.now();
        this.#after(Math.ceil(ms), () => {
          this.#pumping = false;
          this.#pump();
        });
        return;
      }
      this.#queue.shift()!.send();
    }
  }

  async #open(state: State & { at: 'connecting' }): Promise<void> {
    const isOver = () => this.state !== state;
    const known = this.#token;
    this.#triedAt = performance.now();
    let token: string;
    let url = '';
    let socket: WebSocket;
    try {
      token = await this.token(state.token);
      [url, this.#codec] = await Promise.all([this.#hooks.url(), within(SOURCE_TIMEOUT_MS, () => this.#hooks.codec())]);
      if (isOver()) return;
      this.#fresh = this.#token !== known;
      socket = this.#connect(url);
    } catch (error) {
      if (!isOver()) this.step({ on: 'no_token', error: error as Error });
      return;
    }
    socket.binaryType = 'arraybuffer';
    this.#socket = socket;
    this.#heard = 0;
    this.#probed = -1;
    let error: ChatError | undefined = unreachable(url);
    let refusal: string | undefined;
    const ended = (code: number, reason?: string) => this.#lost(code, refusal ?? reason, error);
    this.#after(CONNECT_TIMEOUT_MS, () => ended(1006));
    socket.onopen = () => {
      error = undefined;
      const { device, cursors } = this.#hooks;
      // All cursors in one frame could exceed the frame limit.
      const known = Object.entries(cursors());
      const part = () => ({
        cursors: Object.fromEntries(known.splice(0, CURSORS_AT_ONCE)),
        more: known.length > 0 || undefined,
      });
      const connect = this.ask({ type: 'connect', token, device, ...part() });
      while (known.length) this.post({ type: 'cursors', ...part() });
      connect.then(
        (hello) => this.#opened(hello),
        (refused: ChatError) => {
          // It was not even sent. After any other refusal the close code says what to do, but not why.
          if (['bad_request', 'too_large'].includes(refused.code)) this.step({ on: 'no_token', error: refused });
          refusal = refused.message;
        },
      );
    };
    socket.onmessage = ({ data }) => this.#receive(data as string | ArrayBuffer);
    socket.onclose = ({ code, reason }) => ended(code, reason);
    // `close` follows. An error event without a listener would end a Node process. Only Node gives a reason.
    socket.onerror = (event) => {
      error &&= unreachable(url, (event as Partial<ErrorEvent> | undefined)?.message);
    };
  }

  /** Opens a socket. Throws `invalid` if there is no WebSocket class or the URL is invalid. */
  #connect(url: string): WebSocket {
    try {
      return new this.#hooks.WebSocket!(url, this.#codec.subprotocol);
    } catch (cause) {
      const text = `no socket to ${url}: ${(cause as Error).message}: pass the option WebSocket`;
      throw new ChatError('invalid', text, { cause });
    }
  }

  #opened(hello: Connected): void {
    this.ahead = hello.time - Date.now();
    this.#fresh = false;
    this.#limits = { ...NO_LIMITS, ...hello.limits };
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
    } catch (cause) {
      return this.#lost(1002, '', new ChatError('lost', `a frame cannot be read: ${(cause as Error).message}`, { cause, closeCode: 1002 }));
    }
    const { id, ...rest } = frame;
    if (id === undefined) return this.#hooks.event(rest as ServerEvent);
    const asked = this.#asked.get(id);
    this.#asked.delete(id);
    if (rest.type !== 'error') return asked?.resolve(rest as never);
    const { code, message, retryAfterMs } = rest as unknown as { code: ErrorCode; message: string; retryAfterMs?: number };
    if (code === 'rate_limited') {
      // Other sessions of this user may have used the limit, so all requests wait.
      this.#tokens = Math.min(0, this.#refill());
      this.#filledAt = Math.max(this.#filledAt, performance.now() + (retryAfterMs ?? 0));
    }
    asked?.reject(new ChatError(code, message, { retryAfterMs }));
  }

  #lost(code: number, reason?: string, error?: ChatError): void {
    this.step({ on: 'lost', code, reason, fresh: this.#fresh, asking: this.#asked.size > 0, error: code < FINAL ? error : undefined });
  }

  #drop(code?: number): void {
    const socket = this.#socket;
    this.#socket = undefined;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
    for (const { reject } of this.#asked.values()) reject(lost(code, '', 'lost'));
    this.#asked.clear();
    // Unsent requests get no close code, because they did not cause it.
    for (const { reject } of this.#queue.splice(0)) reject(lost());
  }

  /** Probes the connection if no frame came for a whole interval. A page cannot see the gateway's WebSocket pings. */
  #watch(interval: number): void {
    const heard = this.#heard;
    this.#after(interval, () => {
      if (this.#heard === heard) this.#probe();
      this.#watch(interval);
    });
  }

  /** Sends a ping. The connection is lost if no frame follows. */
  #probe(): void {
    const heard = this.#heard;
    // A ping is on its way.
    if (this.#probed === heard) return;
    this.#probed = heard;
    const at = Date.now();
    this.ask({ type: 'ping' }).then(
      // A clock may be set while a connection lasts. What a device hears after it slept is of an earlier time.
      ({ time }) => Date.now() - at < PROBE_TIMEOUT_MS && (this.ahead = time - Date.now()),
      () => {},
    );
    this.#after(PROBE_TIMEOUT_MS, () => {
      if (this.#heard === heard) this.#lost(1006);
    });
  }

  /** Schedules the renewal of the token. */
  #expires(at: Millis): void {
    if (this.#token) this.#token.expires = at;
    const left = at - this.now();
    this.#after(Math.max(left - EXPIRING_MS, left / 2), () => void this.#refresh(at));
  }

  async #refresh(at: Millis): Promise<void> {
    const state = this.state;
    try {
      const token = await this.token('expiring');
      if (this.state === state) this.#expires((await this.ask({ type: 'refresh', token })).expiresAt);
    } catch {
      // If it never succeeds, the gateway closes the connection at the expiry, and the client asks for a new token.
      if (this.state === state) this.#after(EXPIRING_MS / 6, () => void this.#refresh(at));
    }
  }

  /** Returns the known token while it is valid, else a new one. Asks for one token at a time. */
  async token(reason: TokenReason): Promise<string> {
    const known = this.#token;
    if (reason === 'initial' && known && known.expires - this.now() > EXPIRING_MS) return known.text;
    if (this.#fetched) return this.#fetched;
    const why = known ? reason : 'initial';
    const fetched = within(SOURCE_TIMEOUT_MS, async (signal) => this.#hooks.token({ reason: why, signal }))
      .then((given) => {
        const text = textOf(given, 'token');
        // The gateway that accepts it tells its expiry. After `clear()` it is not kept.
        if (this.#fetched === fetched) this.#token = { text, expires: Infinity };
        return text;
      })
      .catch((cause) => {
        throw asChatError(cause, 'token() failed: ');
      })
      .finally(() => {
        if (this.#fetched === fetched) this.#fetched = undefined;
      });
    this.#fetched = fetched;
    return fetched;
  }

  /** Calls `then` after `ms`, unless the state changes before. */
  #after(ms: number, then: () => void): void {
    delay(Math.min(ms, TIMER_MAX_MS), this.#over.signal).then(then, () => {});
  }
}

function asChatError(cause: unknown, what = ''): ChatError {
  if (cause instanceof ChatError && cause.code !== 'timeout') return cause;
  return new ChatError('unreachable', what + ((cause as Error)?.message ?? cause), { cause });
}

/** Returns the error for a socket that did not open. Browsers give no reason. */
function unreachable(url: string, detail = ''): ChatError {
  return new ChatError('unreachable', `no connection to ${url} ${detail}: check the URL, the network, the certificate and client.origins`);
}
