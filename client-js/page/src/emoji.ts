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

const names = new Map(EMOJI);

/** Returns the name of an emoji, or the emoji itself, which screen readers name too. */
export const nameOf = (emoji: string): string => names.get(emoji) ?? emoji;
