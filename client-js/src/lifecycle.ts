/** Notices that a page slept or the network changed, which timers and sockets may miss. */
import type { Dispose } from './emitter.js';

/** The events to watch. `pageshow` also comes when a page leaves the back/forward cache. */
const EVENTS = ['online', 'offline', 'pageshow', 'visibilitychange'];

/** Calls `awake` when a visible page may have slept or its network changed, with whether the network is away, and `hidden` with
 * whether the page is hidden: now, and after each change. Returns a function that ends it. */
export function watchLifecycle(awake: (isOffline: boolean) => void, hidden: (isHidden: boolean) => void): Dispose {
  const page = globalThis.document;
  const isHidden = () => page?.visibilityState === 'hidden';
  const changed = ({ type }: Event) => {
    if (type === 'visibilitychange') hidden(isHidden());
    // While the network is away, an attempt would fail. A connection that is there has to be probed, in any case.
    if (!isHidden()) awake(type === 'offline');
  };
  // Elsewhere the application says whether somebody looks.
  if (page) hidden(isHidden());
  const over = new AbortController();
  // `visibilitychange` bubbles from the document to the window.
  for (const name of EVENTS) globalThis.addEventListener?.(name, changed, over);
  return () => over.abort();
}
