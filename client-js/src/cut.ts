/** Cuts texts between grapheme clusters, which are what readers see as characters. */

/** Absent where the platform has none, such as React Native. */
const graphemes = globalThis.Intl?.Segmenter && new Intl.Segmenter();

/** Returns the beginning of a text with at most `max` code points, by the rule of the gateway: no grapheme cluster is cut, unless
 * the first one alone is longer. Without `Intl.Segmenter`, it cuts between code points. */
export function cut(text: string, max: number): string {
  // A code point has at most two UTF-16 units.
  const end = [...text.slice(0, 2 * max)].slice(0, max).join('').length;
  // The cluster that contains the first code point beyond `end` is left out, if it begins before.
  return text.slice(0, graphemes?.segment(text).containing(end)?.index || end);
}

/** Returns the first grapheme cluster of a text. */
export const firstOf = (text: string): string => graphemes?.segment(text).containing(0)?.segment ?? [...text][0] ?? '';
