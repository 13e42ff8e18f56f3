/** Days and times as the user has them: by their zone, the changes of its clocks, and their locale. No other file counts days. */
import { useSyncExternalStore } from 'react';
import { onAttention } from './attention.js';
import { now as time } from './clock.js';

const DAY_MS = 24 * 3600 * 1000;
/** A time that is further away is for ever. */
const FOR_EVER_DAYS = 50 * 365;

const zoneNow = () => new Intl.DateTimeFormat().resolvedOptions().timeZone;

/** Formats have the zone of when they were made. */
function makeFormats() {
  const format = (options: Intl.DateTimeFormatOptions) => new Intl.DateTimeFormat(undefined, options);
  return {
    clock: format({ hour: '2-digit', minute: '2-digit' }),
    weekday: format({ weekday: 'short' }),
    date: format({ day: 'numeric', month: 'short' }),
    dateOfYear: format({ dateStyle: 'short' }),
    fullDate: format({ day: 'numeric', month: 'long', year: 'numeric', weekday: 'long' }),
    fullDateOnly: format({ dateStyle: 'long' }),
    // It names the zone, as one hour of a year is there twice.
    exact: format({ dateStyle: 'full', timeStyle: 'long' }),
  };
}
let formats = makeFormats();

/** Returns the number of the local day. The numbers of two days differ by the days between them, however many hours those have. */
export function dayOf(at: number): number {
  const day = new Date(at);
  return Date.UTC(day.getFullYear(), day.getMonth(), day.getDate()) / DAY_MS;
}

/** Returns the milliseconds until the next local day begins. */
export function untilTomorrow(now: number): number {
  const day = new Date(now);
  return new Date(day.getFullYear(), day.getMonth(), day.getDate() + 1).getTime() - now;
}

export const timeOf = (at: number): string => formats.clock.format(at);
export const dateOf = (at: number): string => formats.fullDateOnly.format(at);
export const exactly = (at: number): string => formats.exact.format(at);

export function dayName(at: number, now = time()): string {
  const days = dayOf(now) - dayOf(at);
  return days === 0 ? 'Today' : days === 1 ? 'Yesterday' : formats.fullDate.format(at);
}

/** Returns a date without its weekday, as short as it can be. */
const shortDate = (at: number, now: number): string =>
  (new Date(at).getFullYear() === new Date(now).getFullYear() ? formats.date : formats.dateOfYear).format(at);

/** Returns a short time or date, for the inbox. */
export function shortTime(at: number, now = time()): string {
  const days = dayOf(now) - dayOf(at);
  if (days === 0) return timeOf(at);
  if (days === 1) return 'Yesterday';
  return days > 1 && days < 7 ? formats.weekday.format(at) : shortDate(at, now);
}

/** Returns until when a conversation is muted. */
export function mutedText(until: number, now = time()): string {
  const days = dayOf(until) - dayOf(now);
  if (!(days < FOR_EVER_DAYS)) return 'muted for ever';
  const day = days === 0 ? '' : days < 7 ? `${formats.weekday.format(until)} ` : `${shortDate(until, now)} `;
  return `muted until ${day}${timeOf(until)}`;
}

const todayNow = () => `${zoneNow()} ${dayOf(time())}`;
let today = todayNow();
let timer: ReturnType<typeof setTimeout> | undefined;
const watchers = new Set<() => void>();
let offAttention: (() => void) | undefined;

/** Sees whether it is another day, or the user is in another zone. */
export function lookAtClock(): void {
  const now = todayNow();
  if (now !== today) {
    today = now;
    formats = makeFormats();
    for (const watcher of watchers) watcher();
  }
  clearTimeout(timer);
  if (watchers.size) timer = setTimeout(lookAtClock, untilTomorrow(time()));
}

function watch(watcher: () => void): () => void {
  watchers.add(watcher);
  // While the computer sleeps, no timer runs.
  offAttention ??= onAttention(lookAtClock);
  lookAtClock();
  return () => {
    watchers.delete(watcher);
    if (watchers.size) return;
    clearTimeout(timer);
    offAttention?.();
    offAttention = undefined;
  };
}

/** Returns a text that changes with the day and the zone, and renders again then. */
export const useToday = (): string => useSyncExternalStore(watch, () => today);
