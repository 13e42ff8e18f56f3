/** The data of the emoji picker, as `page/emoji-data.ts` makes it. */

/** An emoji with its name, words that find it, the version of Emoji that has it, and whether it has skin tones: 0 or 1. */
export type EmojiEntry = readonly [emoji: string, label: string, words: string, version: number, hasTones: number];

export interface EmojiGroup {
  label: string;
  emoji: EmojiEntry[];
}

/** The first of the five modifiers of skin tones. */
const LIGHT = 0x1f3fb;

/** Returns an emoji with a skin tone, from 1 (light) to 5 (dark): its modifier is after the first character. */
export function toned(emoji: string, tone: number): string {
  const [first = '', ...rest] = emoji.replace(/^(.)\ufe0f/u, '$1');
  return first + String.fromCodePoint(LIGHT - 1 + tone) + rest.join('');
}
