/** Milliseconds before a try, drawn from all of them: where many clients lose the same gateway, they do not come
 * back together ("full jitter", AWS Architecture Blog 2015). */
export const BACKOFF_FIRST_MS = 500;
export const BACKOFF_MAX_MS = 20_000;

export function backoff(attempt: number, random: () => number = Math.random): number {
  return Math.round(random() * Math.min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** attempt));
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
    const stop = () => reject(signal?.reason);
    if (signal?.aborted) stop();
    signal?.addEventListener('abort', stop);
    promise.then(resolve, reject).finally(() => signal?.removeEventListener('abort', stop));
  });
}
