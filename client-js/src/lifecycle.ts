/** When a page may have slept, or the network changed. Timers and sockets cannot be trusted to notice. */
import type { Dispose } from './emitter.js';

/** `pageshow`: from the browser's back-and-forward cache too. */
const EVENTS = ['online', 'offline', 'pageshow', 'visibilitychange'];

export function watchLifecycle(awake: () => void): Dispose {
  const page = globalThis.document;
  const changed = () => page?.visibilityState !== 'hidden' && awake();
  const over = new AbortController();
  // `visibilitychange` is sent to the document, and rises.
  for (const name of EVENTS) globalThis.addEventListener?.(name, changed, over);
  return () => over.abort();
}
