import type { ChatError } from './codes.js';

/** Milliseconds before a try, drawn from all of them: where many clients lose the same gateway, they do not come
 * back together ("full jitter", AWS Architecture Blog 2015). */
export const BACKOFF_FIRST_MS = 500;
export const BACKOFF_MAX_MS = 20_000;

export function backoff(attempt: number, random: () => number = Math.random): number {
  return Math.round(random() * Math.min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** attempt));
}

/** Milliseconds before a request is repeated: never sooner than the gateway asked for, and not all requests together. */
export function retryDelay({ retryAfterMs }: { retryAfterMs: number | undefined }, attempt: number): number {
  return retryAfterMs === undefined ? backoff(attempt) : retryAfterMs * (1 + Math.random());
}

/** A promise that rejects with the signal's reason when that is aborted. `begin` returns what cleans up after it. */
export function abortable<T>(
  signal: AbortSignal | undefined,
  begin: (resolve: (value: T) => void, reject: (error: unknown) => void) => (() => void) | undefined,
): Promise<T> {
  let cleanUp: (() => void) | undefined;
  let stop: () => void;
  return new Promise<T>((resolve, reject) => {
    stop = () => {
      cleanUp?.();
      // React Native has no reasons.
      reject(signal?.reason ?? new Error('aborted'));
    };
    if (signal?.aborted) stop();
    signal?.addEventListener('abort', stop);
    cleanUp = begin(resolve, reject);
  }).finally(() => {
    cleanUp?.();
    signal?.removeEventListener('abort', stop);
  });
}

/** Waits; rejects with the signal's reason when that is aborted. */
export function delay(ms: number, signal?: AbortSignal): Promise<void> {
  return abortable(signal, (resolve) => {
    const timer = setTimeout(resolve, ms);
    return () => clearTimeout(timer);
  });
}

/** The promise, or the signal's reason when that is aborted before. */
export function unless<T>(signal: AbortSignal | undefined, promise: Promise<T>): Promise<T> {
  return abortable(signal, (resolve, reject) => void promise.then(resolve, reject));
}

/** Calls `work` with a signal that is aborted after `ms`, or together with `signal`, and rejects then. Not every
 * environment has `AbortSignal.timeout` and `AbortSignal.any`. */
export function within<T>(ms: number, work: (over: AbortSignal) => Promise<T>, signal?: AbortSignal): Promise<T> {
  const over = new AbortController();
  return abortable<T>(signal, (resolve, reject) => {
    // A timer of more than 2^31 ms would fire at once.
    const timer = ms < 2 ** 31 ? setTimeout(reject, ms, new Error(`no answer within ${ms} ms`)) : undefined;
    work(over.signal).then(resolve, reject);
    return () => clearTimeout(timer);
  }).catch((error) => {
    over.abort(error);
    throw error;
  });
}

/** Repeats `work` until it succeeds, fails for good, or the signal is aborted. */
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
