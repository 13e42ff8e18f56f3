/** Every way to be refused or closed; no other file names a number. */

/** Why a request failed: the gateway's codes, and four of the client's own. */
export type ErrorCode =
  | 'bad_request'
  | 'unauthorized'
  | 'forbidden'
  | 'not_found'
  | 'conflict'
  | 'too_large'
  | 'rate_limited'
  | 'unavailable'
  | 'internal'
  /** No answer in time; what was asked for may have happened. */
  | 'timeout'
  /** The client was closed, by `disconnect()` or for good. */
  | 'closed'
  /** The connection broke before the answer came. Requests and the outbox try again by themselves. */
  | 'lost'
  /** It waited in the outbox for longer than the gateway remembers: whether it was stored is not known. */
  | 'expired';

export class ChatError extends Error {
  override name = 'ChatError';
  readonly code: ErrorCode;
  readonly retryAfterMs: number | undefined;

  constructor(code: ErrorCode, message: string, retryAfterMs?: number) {
    super(message);
    this.code = code;
    this.retryAfterMs = retryAfterMs;
  }

  /** Trying the same again may help. */
  get temporary(): boolean {
    return ['rate_limited', 'unavailable', 'timeout', 'lost'].includes(this.code);
  }
}

/** To be thrown by `token()`: this user may not connect, and asking again is pointless. */
export class UnauthorizedError extends ChatError {
  constructor(message = 'no token') {
    super('unauthorized', message);
  }
}

/** Close codes of the gateway that mean more than "reconnect with back-off". */
export const RESTART = 1012;
export const TOKEN_EXPIRED = 4002;
export const UNAUTHORIZED = 4501;
/** From here on, reconnecting is pointless until something has changed. */
export const FINAL = 4500;
