/** Makes the data of the emoji picker when the page is built: what it needs of `emojibase-data`, which is six times as large. */
import { join } from 'node:path';
import type { Emoji } from 'emojibase';
import emoji from 'emojibase-data/en/data.json' with { type: 'json' };
import messages from 'emojibase-data/en/messages.json' with { type: 'json' };
import type { Plugin } from 'vite';
import { type EmojiGroup, toned } from './src/emoji-data.js';

const NAME = 'virtual:emoji';
/** In the package that the data is from, so that its licence is listed with the others. */
const ID = join(import.meta.dirname, '../node_modules/emojibase-data', NAME);
/** The group of parts of emoji, such as hair, which nobody writes alone. */
const PARTS = 'component';

/** Whether a modifier after the first character makes all skin tones of an emoji. Those of two people have more. */
const hasTones = ({ emoji, skins = [] }: Emoji): boolean => {
  const tones = skins.filter(({ tone }) => typeof tone === 'number');
  return tones.length > 0 && tones.every((skin) => skin.emoji === toned(emoji, Number(skin.tone)));
};

/** Returns the emoji in groups, in the order of Unicode. */
function groups(): EmojiGroup[] {
  const all = [...(emoji as Emoji[])].sort((a, b) => (a.order ?? 0) - (b.order ?? 0));
  return messages.groups
    .filter(({ key }) => key !== PARTS)
    .map(({ message, order }) => ({
      label: message,
      emoji: all
        .filter(({ group }) => group === order)
        .map((one) => {
          const { emoji, label, version, tags = [] } = one;
          return [emoji, label, tags.filter((tag) => !label.includes(tag)).join(' '), version, Number(hasTones(one))];
        }),
    }));
}

/** Provides the module `virtual:emoji`. */
export const emojiData: Plugin = {
  name: 'emoji-data',
  resolveId: (id) => (id === NAME ? ID : undefined),
  load: (id) => (id === ID ? `export default JSON.parse(${JSON.stringify(JSON.stringify(groups()))})` : undefined),
};
