/** Gathers changes, so that a burst of them is looked at once. */

/** A change is told at most this often: once a frame. */
const FRAME_MS = 16;

/** Returns a function that has `tell` called soon: as a microtask after the first change, once a frame after many. */
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

/** Compares plain data by its content. */
export function isSame(a: unknown, b: unknown): boolean {
  if (a === b) return true;
  if (!a || !b || typeof a !== 'object' || typeof b !== 'object') return false;
  const names = Object.keys(a) as never[];
  return names.length === Object.keys(b).length && names.every((name) => isSame(a[name], b[name]));
}
