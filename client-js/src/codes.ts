/** Error codes and close codes. No other file contains their numbers. */

/** Why a request failed: the codes of the gateway, and six that only the client uses. */
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
  /** No answer came in time. The request may have taken effect. */
  | 'timeout'
  /** The client was disconnected by `disconnect()`, or closed for good. */
  | 'closed'
  /** The connection broke before the answer came. Requests and the outbox retry by themselves. */
  | 'lost'
  /** The gateway or the token source cannot be reached. The client keeps trying. */
  | 'unreachable'
  /** The client's options cannot work: the URL is invalid, or there is no WebSocket class. */
  | 'invalid'
  /** The message was in the outbox for longer than the gateway remembers client ids. It may have been stored. */
  | 'expired';

/** The error of a failed request or message. */
export class ChatError extends Error {
  override name = 'ChatError';
  readonly code: ErrorCode;
  /** The least time before a retry, if the gateway gave one. */
  readonly retryAfterMs: number | undefined;
  /** The close code of the connection, if the connection ended. */
  readonly closeCode: number | undefined;

  constructor(code: ErrorCode, message: string, more: { cause?: unknown; closeCode?: number; retryAfterMs?: number | undefined } = {}) {
    super(message, more);
    this.code = code;
    this.retryAfterMs = more.retryAfterMs;
    this.closeCode = more.closeCode;
  }

  /** Whether a retry may succeed. */
  get temporary(): boolean {
    return ['rate_limited', 'unavailable', 'timeout', 'lost', 'unreachable'].includes(this.code);
  }
}

/** The error for `token()` to throw when this user may not connect. The client then stops trying. */
export class UnauthorizedError extends ChatError {
  constructor(message = 'no token') {
    super('unauthorized', message);
  }
}

/** The gateway shuts down: reconnect at once. */
export const RESTART = 1012;
/** The token expired: reconnect with a new one. */
export const TOKEN_EXPIRED = 4002;
/** The gateway does not accept the token. */
export const UNAUTHORIZED = 4501;
/** This client sent a frame that is too large or not of the protocol. */
export const BAD_FRAME = 4500;
/** The lowest close code after which reconnecting is pointless. */
export const FINAL = 4500;

/** Returns the error for a connection that ended. The requests it interrupted are idempotent, so they may be retried. */
export function lost(closeCode = 1006, reason = '', why: ErrorCode = closeCode >= FINAL ? 'closed' : 'lost'): ChatError {
  const message = closeCode === 1006 ? 'The connection broke.' : `The gateway closed the connection: ${reason} (${closeCode}).`;
  // Not at once: the closing socket may still be the current one.
  return new ChatError(why, message, { retryAfterMs: 10, closeCode });
}

/** Returns what a function of the application gave, if it is a text. If it is not, the client asks again later.
 * @param name The name of the function. */
export function textOf(given: unknown, name: string): string {
  if (typeof given === 'string' && given) return given;
  throw new ChatError('unreachable', `${name}() gave no text: ${typeof given}`);
}
