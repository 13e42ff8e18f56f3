/** Compares texts as people see them: without case, accents and the forms in which one character may be written. */

const graphemes = globalThis.Intl?.Segmenter && new Intl.Segmenter();
const collator = new Intl.Collator(undefined, { usage: 'search', sensitivity: 'base' });

/** Returns the characters of a text as readers see them. */
const split = (text: string): string[] => (graphemes ? Array.from(graphemes.segment(text), ({ segment }) => segment) : [...text]);

/** Whether a text contains what somebody looks for. */
export function has(text: string, wanted: string): boolean {
  const all = split(text);
  const { length } = split(wanted);
  // A letter may be the same as two, such as ß and ss.
  return all.some((_, start) =>
    [length, length - 1, length + 1].some((size) => size > 0 && !collator.compare(all.slice(start, start + size).join(''), wanted)),
  );
}
