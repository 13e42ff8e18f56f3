import { ChatError } from './codes.js';

/** The upper bound of the first delay, in milliseconds. It doubles with each attempt. */
export const BACKOFF_FIRST_MS = 500;
/** The upper bound of any delay, in milliseconds. */
export const BACKOFF_MAX_MS = 20_000;
/** The time limit for a token, and for a URL. */
export const SOURCE_TIMEOUT_MS = 30_000;

/** Returns the milliseconds to wait before an attempt: a random part of its upper bound, so that clients that lost the
 * same gateway do not come back together ("full jitter", AWS Architecture Blog 2015). */
export function backoff(attempt: number, random: () => number = Math.random): number {
  return Math.round(random() * Math.min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** attempt));
}

/** Returns the milliseconds to wait before a retry: at least what the gateway asked for, and random so that requests spread. */
export function retryDelay({ retryAfterMs }: { retryAfterMs: number | undefined }, attempt: number): number {
  return retryAfterMs === undefined ? backoff(attempt) : retryAfterMs * (1 + Math.random());
}

/** What is to be called when a signal is aborted. A signal has one listener for all of it: Node warns of more than ten. */
const stopsOf = new WeakMap<AbortSignal, Set<() => void>>();

/** Calls `stop` when the signal is aborted. Returns a function that ends that. */
export function onAbort(signal: AbortSignal, stop: () => void): () => void {
  const stops = stopsOf.get(signal) ?? new Set();
  if (!stopsOf.has(signal)) signal.addEventListener('abort', () => stops.forEach((stop) => stop()));
  stopsOf.set(signal, stops.add(stop));
  return () => stops.delete(stop);
}

/** Returns a promise that rejects with the signal's reason when the signal is aborted. `begin` returns a function that cleans up. */
export function abortable<T>(
  signal: AbortSignal | undefined,
  begin: (resolve: (value: T) => void, reject: (error: unknown) => void) => (() => void) | undefined,
): Promise<T> {
  let cleanUp: (() => void) | undefined;
  let off: (() => void) | undefined;
  return new Promise<T>((resolve, reject) => {
    const stop = () => {
      cleanUp?.();
      // React Native does not set `reason`.
      reject(signal?.reason ?? new Error('aborted'));
    };
    if (signal?.aborted) stop();
    else if (signal) off = onAbort(signal, stop);
    cleanUp = begin(resolve, reject);
  }).finally(() => {
    cleanUp?.();
    off?.();
  });
}

/** Resolves after `ms`; rejects with the signal's reason when the signal is aborted. */
export function delay(ms: number, signal?: AbortSignal): Promise<void> {
  return abortable(signal, (resolve) => {
    const timer = setTimeout(resolve, ms);
    return () => clearTimeout(timer);
  });
}

/** Returns a promise that settles as `promise` does, or rejects when the signal is aborted before. */
export function unless<T>(signal: AbortSignal | undefined, promise: Promise<T>): Promise<T> {
  return abortable(signal, (resolve, reject) => void promise.then(resolve, reject));
}

/** Calls `work` with a signal that is aborted after `ms` or together with `signal`; the promise then rejects, with `timeout` after
 * `ms`. It replaces `AbortSignal.timeout` and `AbortSignal.any`, which not every environment has. */
export function within<T>(ms: number, work: (over: AbortSignal) => Promise<T>, signal?: AbortSignal): Promise<T> {
  const over = new AbortController();
  return abortable<T>(signal, (resolve, reject) => {
    // A timer of 2^31 ms or more would fire at once.
    const late = () => reject(new ChatError('timeout', `no answer within ${ms} ms`));
    const timer = ms < 2 ** 31 ? setTimeout(late, ms) : undefined;
    // An application's function may throw, or return no promise.
    void (async () => work(over.signal))().then(resolve, reject);
    return () => clearTimeout(timer);
  }).catch((error) => {
    over.abort(error);
    throw error;
  });
}

/** Calls `work` until it succeeds or fails for good, with back-off after a temporary error. Rejects when the signal is aborted. */
export async function persist<T>(work: () => Promise<T>, signal?: AbortSignal): Promise<T> {
  for (let attempt = 0; ; attempt++) {
    try {
      return await work();
    } catch (error) {
      if (!(error as ChatError).temporary) throw error;
      await delay(retryDelay(error as ChatError, attempt), signal);
    }
  }
}
