/** Coalesces changes, so that a burst of them is rendered once. */

/** The least time between two calls: one frame of the display. */
const FRAME_MS = 16;

/** Returns a function that calls `tell` soon: in a microtask after the first change, at most once a frame after many. */
export function gathered(tell: () => void): () => void {
  let waiting = false;
  let last = -FRAME_MS;
  const now = () => {
    waiting = false;
    last = performance.now();
    tell();
  };
  return () => {
    if (waiting) return;
    waiting = true;
    const since = performance.now() - last;
    if (since >= FRAME_MS) queueMicrotask(now);
    else setTimeout(now, FRAME_MS - since);
  };
}

/** Whether two values of plain data have the same content. */
export function isSame(a: unknown, b: unknown): boolean {
  if (a === b) return true;
  if (!a || !b || typeof a !== 'object' || typeof b !== 'object') return false;
  const names = Object.keys(a) as never[];
  return names.length === Object.keys(b).length && names.every((name) => isSame(a[name], b[name]));
}
