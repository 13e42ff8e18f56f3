/** The picker of emoji for the field. With its data it is a file of its own, which is loaded when it is opened for the first time. */

import groups from 'virtual:emoji';
import { type EmojiDataResolver, EmojiPicker as Parts, type SkinTone, useActiveEmoji, useSkinTone } from 'frimousse';
import { type AriaAttributes, type ComponentProps, useEffect, useLayoutEffect, useRef } from 'react';
import { toned } from './emoji-data.js';
import { usePlace } from './Popup.js';
import { keepTone, toneOf } from './tones.js';

const COLUMNS = 8;
const TONES = ['light', 'medium-light', 'medium', 'medium-dark', 'dark'] as const;

/** Returns whether this device has a picture for an emoji: one of its own colours, and not several beside each other. */
function isDrawn(emoji: string): boolean {
  const size = 8;
  const canvas = new OffscreenCanvas(size, size).getContext('2d', { willReadFrequently: true })!;
  canvas.font = `${size}px "Apple Color Emoji", "Segoe UI Emoji", "Noto Color Emoji", sans-serif`;
  canvas.textBaseline = 'top';
  if (canvas.measureText(emoji).width >= 2 * size) return false;
  const drawn = (colour: string) => {
    canvas.clearRect(0, 0, size, size);
    canvas.fillStyle = colour;
    canvas.fillText(emoji, 0, 0);
    return canvas.getImageData(0, 0, size, size).data.join();
  };
  return drawn('#f00') === drawn('#00f');
}

/** Returns the emoji that this device can show: those up to the newest version of which it has one. */
const resolve: EmojiDataResolver = (locale) => {
  // The first of each version: the last ones are flags, which Windows has not.
  const samples = new Map(groups.flatMap(({ emoji }) => emoji.map(([emoji, , , version]) => [version, emoji] as const)).reverse());
  const newest = [...samples].sort(([a], [b]) => b - a).find(([, emoji]) => isDrawn(emoji))?.[0] ?? Number.POSITIVE_INFINITY;
  // Windows shows the letters of countries in the place of their flags.
  const hasCountries = isDrawn('🇪🇺');
  const skinsOf = (emoji: string) => Object.fromEntries(TONES.map((tone, i) => [tone, toned(emoji, i + 1)]));
  return {
    locale,
    categories: groups.map(({ label }, index) => ({ label, index })),
    skinTones: Object.fromEntries(TONES.map((tone) => [tone, tone])) as Record<(typeof TONES)[number], string>,
    emojis: groups.flatMap(({ emoji }, category) =>
      emoji
        .filter(([emoji, , , version]) => version <= newest && (hasCountries || !/^\p{RI}/u.test(emoji)))
        .map(([emoji, label, words, version, hasTones]) => ({
          emoji,
          category,
          label,
          version,
          tags: [words],
          ...(hasTones && { skins: skinsOf(emoji) as Record<(typeof TONES)[number], string> }),
        })),
    ),
  };
};

/** Returns the attributes of a row or an emoji with ARIA's numbers, which begin at 1. The library begins at 0. */
function numbered<P extends AriaAttributes>(props: P): P {
  const { 'aria-rowindex': row, 'aria-colindex': column } = props;
  return {
    ...props,
    ...(row !== undefined && { 'aria-rowindex': row + 1 }),
    ...(column !== undefined && { 'aria-colindex': column + 1 }),
  };
}

const components: ComponentProps<typeof Parts.List>['components'] = {
  Row: (props) => <div {...numbered(props)} />,
  Emoji: ({ emoji, ...props }) => (
    <button type="button" {...numbered(props)}>
      {emoji.emoji}
    </button>
  ),
};

interface Props {
  user: string;
  /** The button that opened it. */
  anchor: HTMLElement;
  onChoose: (emoji: string) => void;
  /** @param hadFocus Whether the focus was inside, and is nowhere now. */
  onClose: (hadFocus: boolean) => void;
}

export function EmojiPicker({ user, anchor, onChoose, onClose }: Props) {
  const box = usePlace(anchor);
  const close = useRef(onClose);
  useEffect(() => {
    close.current = onClose;
  });
  useLayoutEffect(() => {
    const picker = box.current!;
    // On a phone the field would open the keyboard.
    const first = matchMedia('(hover: hover)').matches ? 'input' : '.emoji-list';
    picker.querySelector<HTMLElement>(first)!.focus({ preventScroll: true });
    let hadFocus = false;
    const closes = (event: Event) => {
      if ((event as ToggleEvent).newState === 'closed') hadFocus = picker.contains(document.activeElement);
    };
    const toggled = (event: Event) => (event as ToggleEvent).newState === 'closed' && close.current(hadFocus);
    // Tab left it. A click elsewhere closes it anyway, and a click on the button is that of the button.
    const left = ({ relatedTarget }: FocusEvent) => {
      const to = relatedTarget as Node | null;
      if (to && !picker.contains(to) && !anchor.contains(to)) picker.hidePopover?.();
    };
    picker.addEventListener('focusout', left);
    picker.addEventListener('beforetoggle', closes);
    picker.addEventListener('toggle', toggled);
    return () => {
      picker.removeEventListener('focusout', left);
      picker.removeEventListener('beforetoggle', closes);
      picker.removeEventListener('toggle', toggled);
    };
  }, [anchor, box]);
  return (
    <div ref={box} popover="auto" role="dialog" aria-label="Emoji" className="emoji-picker">
      <Parts.Root
        columns={COLUMNS}
        skinTone={(toneOf(user) ?? 'none') as SkinTone}
        resolveEmojiData={resolve}
        onEmojiSelect={({ emoji }) => onChoose(emoji)}
      >
        <div className="find">
          {/* It belongs to no form, so that Enter does not send the message. Escape would empty a field of the type `search` first. */}
          <Parts.Search form="none" type="text" role="searchbox" aria-label="Find an emoji" placeholder="Find an emoji" />
          <Tone user={user} />
        </div>
        <Parts.Viewport className="emoji-list" tabIndex={0}>
          <Parts.Empty>No emoji found</Parts.Empty>
          <Parts.List aria-label="Emoji" components={components} />
        </Parts.Viewport>
        <Chosen />
      </Parts.Root>
    </div>
  );
}

/** The button that changes the skin tone to the next one. */
function Tone({ user }: { user: string }) {
  const [tone, setTone, all] = useSkinTone('✋');
  const at = all.findIndex(({ skinTone }) => skinTone === tone);
  const { skinTone: next = 'none' } = all[(at + 1) % all.length] ?? {};
  return (
    <button
      type="button"
      className="quiet"
      aria-label={`Skin tone: ${tone}`}
      title="Change the skin tone"
      onClick={() => {
        setTone(next);
        keepTone(user, next);
      }}
    >
      {all[at]?.emoji}
    </button>
  );
}

/** The name of the emoji under the mouse, or that the arrow keys reached. The list tells it to screen readers itself. */
function Chosen() {
  const active = useActiveEmoji();
  return (
    <p className="chosen" aria-hidden="true">
      <span>{active?.emoji}</span> {active?.label}
    </p>
  );
}
