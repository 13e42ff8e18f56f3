/** Which conversations are muted. */
import { useEffect, useState } from 'react';
import type { InboxItem } from '../../src/index.js';
import { isMuted as isMutedAt } from '../../src/muting.js';
import { now } from './clock.js';

/** The longest time that a timer can wait. */
const TIMER_MAX_MS = 2 ** 31 - 1;

export const isMuted = (item: InboxItem): boolean => isMutedAt(item, now());

/** Renders again when a muted conversation is not muted any more. */
export function useMuting(items: readonly InboxItem[]): void {
  const [over, setOver] = useState(0);
  useEffect(() => {
    const next = Math.min(...items.filter(isMuted).map(({ mutedUntil }) => mutedUntil!)) - now();
    if (next === Infinity) return;
    const timer = setTimeout(() => setOver(over + 1), Math.min(next, TIMER_MAX_MS));
    return () => clearTimeout(timer);
  }, [items, over]);
}
