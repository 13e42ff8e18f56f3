/** Milliseconds before a try, drawn from all of them: where many clients lose the same gateway, they do not come
 * back together ("full jitter", AWS Architecture Blog 2015). */
export const BACKOFF_FIRST_MS = 500;
export const BACKOFF_MAX_MS = 20_000;

export function backoff(attempt: number, random: () => number = Math.random): number {
  return Math.round(random() * Math.min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** attempt));
}

/** Milliseconds before a request is repeated: never sooner than the gateway asked for, and not all requests together. */
export function retryDelay(error: { retryAfterMs: number | undefined }, attempt: number): number {
  const { retryAfterMs } = error;
  return retryAfterMs === undefined ? backoff(attempt) : retryAfterMs * (1 + Math.random());
}

/** Waits; rejects with the signal's reason when that is aborted. */
export function delay(ms: number, signal: AbortSignal): Promise<void> {
  let timer: ReturnType<typeof setTimeout>;
  const time = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, ms);
  });
  return unless(signal, time).finally(() => clearTimeout(timer));
}

/** The promise, or the signal's reason when that is aborted before. */
export function unless<T>(signal: AbortSignal | undefined, promise: Promise<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    // React Native has no reasons.
    const stop = () => reject(signal?.reason ?? new Error('aborted'));
    if (signal?.aborted) stop();
    signal?.addEventListener('abort', stop);
    promise.then(resolve, reject).finally(() => signal?.removeEventListener('abort', stop));
  });
}

/** Calls `work` with a signal that is aborted after `ms`, or together with `signal`, and rejects then. Not every
 * environment has `AbortSignal.timeout` and `AbortSignal.any`. */
export async function within<T>(ms: number, work: (over: AbortSignal) => Promise<T>, signal?: AbortSignal): Promise<T> {
  const over = new AbortController();
  const stop = () => over.abort(signal?.reason);
  // A timer of more than 2^31 ms would fire at once.
  const timer = ms < 2 ** 31 ? setTimeout(() => over.abort(new Error(`no answer within ${ms} ms`)), ms) : undefined;
  if (signal?.aborted) stop();
  signal?.addEventListener('abort', stop);
  try {
    return await unless(over.signal, work(over.signal));
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener('abort', stop);
  }
}
