/** Every way to be refused or closed; no other file names a number. */

/** Why a request failed: the gateway's codes, and six of the client's own. */
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
  /** There is no connection to the gateway, or no token at the moment. The client goes on trying. */
  | 'unreachable'
  /** What the client was made with cannot work: its URL, or a WebSocket implementation that is missing. */
  | 'invalid'
  /** It waited in the outbox for longer than the gateway remembers: whether it was stored is not known. */
  | 'expired';

export class ChatError extends Error {
  override name = 'ChatError';
  readonly code: ErrorCode;
  readonly retryAfterMs: number | undefined;
  /** What the gateway closed the connection with, if it did. */
  readonly closeCode: number | undefined;

  constructor(code: ErrorCode, message: string, more: { cause?: unknown; closeCode?: number; retryAfterMs?: number | undefined } = {}) {
    super(message, more);
    this.code = code;
    this.retryAfterMs = more.retryAfterMs;
    this.closeCode = more.closeCode;
  }

  /** Trying the same again may help. */
  get temporary(): boolean {
    return ['rate_limited', 'unavailable', 'timeout', 'lost', 'unreachable'].includes(this.code);
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
/** Not a frame of the protocol, or too large: because of something that this client has just sent. */
export const BAD_FRAME = 4500;
/** From here on, reconnecting is pointless until something has changed. */
export const FINAL = 4500;

/** Why a connection ended. A request that it interrupted may be repeated, whatever the code. */
export function lost(closeCode = 1006, reason = '', why: ErrorCode = closeCode >= FINAL ? 'closed' : 'lost'): ChatError {
  const message = closeCode === 1006 ? 'The connection broke.' : `The gateway closed the connection: ${reason} (${closeCode}).`;
  // Soon, and not at once: a socket that is just closing may still be the one there is.
  return new ChatError(why, message, { retryAfterMs: 10, closeCode });
}
