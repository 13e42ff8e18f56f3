import { firstOf } from '../../src/cut.js';

/** The emoji that the page offers, with their names for screen readers. Messages may have others, from other applications. */
export const EMOJI: readonly (readonly [emoji: string, name: string])[] = [
  ['👍', 'thumbs up'],
  ['❤️', 'heart'],
  ['😂', 'tears of joy'],
  ['🎉', 'party'],
  ['😮', 'surprised'],
  ['😢', 'crying'],
  ['🙏', 'folded hands'],
  ['👀', 'eyes'],
  ['👎', 'thumbs down'],
  ['😀', 'grinning'],
  ['😊', 'smiling'],
  ['😍', 'heart eyes'],
  ['🤔', 'thinking'],
  ['😅', 'relieved'],
  ['😎', 'sunglasses'],
  ['🤣', 'laughing'],
  ['😡', 'angry'],
  ['🤯', 'mind blown'],
  ['🥳', 'partying'],
  ['😴', 'sleeping'],
  ['👏', 'clapping'],
  ['🙌', 'raised hands'],
  ['💪', 'strong'],
  ['🤝', 'handshake'],
  ['👋', 'waving'],
  ['✅', 'done'],
  ['❌', 'cross'],
  ['❓', 'question'],
  ['🔥', 'fire'],
  ['⭐', 'star'],
  ['🚀', 'rocket'],
  ['💡', 'idea'],
];

/** The number of columns of the picker. */
export const COLUMNS = 8;

/** Returns an emoji without what asks for a picture in colour or for a letter. With and without it is the same for people. */
const bare = (emoji: string): string => emoji.normalize().replace(/[\ufe0e\ufe0f]/g, '');

export const isSame = (a: string, b: string): boolean => bare(a) === bare(b);

const known = new Map(EMOJI.map((one) => [bare(one[0]), one]));

/** Returns the name of an emoji, or the emoji itself, which screen readers name too. */
export const nameOf = (emoji: string): string => known.get(bare(emoji))?.[1] ?? emoji;

/** Returns an emoji as the page shows it. */
export const shownAs = (emoji: string): string => known.get(bare(emoji))?.[0] ?? emoji;

/** The largest number of emoji that are shown large. */
const LARGE_MAX = 3;
/** More UTF-16 units than any three emoji have. */
const UNITS_MAX = 100;
const PARTS = /^[\p{Emoji}\p{Emoji_Component}\s]+$/u;
/** Some characters are emoji only with U+FE0F, such as digits with a frame. */
const COLOURED = /^(?:\p{Emoji_Presentation}|\p{Emoji}\ufe0f)/u;

/** Whether a text is one to three emoji and nothing else. */
export function isFewEmoji(text: string): boolean {
  if (text.length > UNITS_MAX || !PARTS.test(text)) return false;
  let rest = text.trim();
  for (let i = 0; i < LARGE_MAX && COLOURED.test(rest); i++) rest = rest.slice(firstOf(rest).length).trim();
  return !rest && text.trim() !== '';
}
