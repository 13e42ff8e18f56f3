/** Days of the chat page in zones whose clocks change. */
import { afterAll, expect, test } from 'vitest';
import { dayName, dayOf, lookAtClock, mutedText, shortTime, timeOf, untilTomorrow } from '../page/src/days.js';

const HOUR = 3600 * 1000;
const YEAR = [Date.UTC(2026, 0), Date.UTC(2027, 0)] as const;
const zoneBefore = process.env.TZ;
afterAll(() => {
  if (zoneBefore === undefined) delete process.env.TZ;
  else process.env.TZ = zoneBefore;
});

/** Returns when the clocks of this year change. */
function changes(): number[] {
  const found: number[] = [];
  for (let at: number = YEAR[0]; at < YEAR[1]; at += HOUR / 2)
    if (new Date(at).getTimezoneOffset() !== new Date(at - HOUR / 2).getTimezoneOffset()) found.push(at);
  return found;
}

// The clocks change at night, by half an hour, and at midnight: then a day begins at one o'clock, or has 25 hours.
for (const [zone, offsets] of [
  ['Europe/Berlin', [-60, -120]],
  ['Australia/Lord_Howe', [-660, -630]],
  ['America/Santiago', [180, 240]],
] as const)
  test(`days are right around each change of the clocks of ${zone}`, () => {
    process.env.TZ = zone;
    lookAtClock();
    const calendar = new Intl.DateTimeFormat('en-CA', { timeZone: zone, dateStyle: 'short' });
    const clock = new Intl.DateTimeFormat(undefined, { timeZone: zone, hour: '2-digit', minute: '2-digit' });
    /** The day by the calendar of the zone, not by this process's. */
    const dates = new Map<number, number>();
    const dateOf = (at: number) => {
      const known = dates.get(at) ?? Date.parse(`${calendar.format(at)}T00:00:00Z`) / (24 * HOUR);
      dates.set(at, known);
      return known;
    };
    expect(changes().length).toBe(2);
    expect(new Set([YEAR[0], Date.UTC(2026, 6)].map((at) => new Date(at).getTimezoneOffset()))).toEqual(new Set(offsets));
    for (const change of changes())
      for (let now = change - 30 * HOUR; now <= change + 60 * HOUR; now += HOUR / 2) {
        const wrong: string[] = [];
        for (let at = now - 60 * HOUR; at <= now; at += HOUR / 2) {
          const days = dateOf(now) - dateOf(at);
          const name = dayName(at, now);
          const isNamed = days === 0 ? name === 'Today' : days === 1 ? name === 'Yesterday' : name.includes('2026');
          if (!isNamed || dayOf(now) - dayOf(at) !== days || (shortTime(at, now) === 'Yesterday') !== (days === 1))
            wrong.push(`${new Date(at)} on ${new Date(now)}: ${name}`);
        }
        expect(wrong).toEqual([]);
        expect(timeOf(now)).toBe(clock.format(now));
        const tomorrow = now + untilTomorrow(now);
        expect(dateOf(tomorrow)).toBe(dateOf(now) + 1);
        expect(dateOf(tomorrow - 1)).toBe(dateOf(now));
      }
  });

test('short times name the day as exactly as it has to be', () => {
  process.env.TZ = 'Europe/Berlin';
  lookAtClock();
  const now = new Date(2026, 5, 15, 0, 30).getTime();
  const format = (options: Intl.DateTimeFormatOptions, at: number) => new Intl.DateTimeFormat(undefined, options).format(at);
  const weekday = (at: number) => format({ weekday: 'short' }, at);
  // A weekday is one of the last six days: the one before has the name of today.
  const [sixth, seventh] = [new Date(2026, 5, 9, 0, 10).getTime(), new Date(2026, 5, 8, 23, 50).getTime()];
  expect(shortTime(sixth, now)).toBe(weekday(sixth));
  expect(shortTime(seventh, now)).toBe(format({ day: 'numeric', month: 'short' }, seventh));
  expect(mutedText(now + HOUR, now)).toBe(`muted until ${timeOf(now + HOUR)}`);
  const later = now + 48 * HOUR;
  expect(mutedText(later, now)).toBe(`muted until ${weekday(later)} ${timeOf(later)}`);
  const far = now + 21 * 24 * HOUR;
  expect(mutedText(far, now)).toBe(`muted until ${format({ day: 'numeric', month: 'short' }, far)} ${timeOf(far)}`);
  for (const never of [Infinity, Number.MAX_SAFE_INTEGER, Date.UTC(2400, 0)]) expect(mutedText(never, now)).toBe('muted for ever');
});
