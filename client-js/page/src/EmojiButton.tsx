/** The button beside the field that opens the picker of emoji. */
import { useRef, useState } from 'react';
import type { EmojiPicker } from './EmojiPicker.js';
import { Icon } from './parts.js';

interface Props {
  user: string;
  onChoose: (emoji: string) => void;
  /** The picker was closed, and the focus would be nowhere. */
  onLeave: () => void;
  /** Says why it cannot be opened. */
  onProblem: (problem: string | undefined) => void;
}

export function EmojiButton({ user, onChoose, onLeave, onProblem }: Props) {
  const [open, setOpen] = useState<{ anchor: HTMLElement; Picker: typeof EmojiPicker }>();
  const hasFailed = useRef(false);
  const toggle = async (anchor: HTMLElement) => {
    if (open) return setOpen(undefined);
    onProblem(undefined);
    try {
      const { EmojiPicker: Picker } = await import('./EmojiPicker.js');
      setOpen({ anchor, Picker });
    } catch {
      // Browsers may keep the failure, and after an upgrade of the gateway the files may not fit together.
      onProblem(`The emoji could not be loaded. ${hasFailed.current ? 'Reload the page.' : 'Try again.'}`);
      hasFailed.current = true;
    }
  };
  return (
    <>
      <button
        type="button"
        className="quiet"
        aria-label="Emoji"
        title="Emoji"
        aria-haspopup="dialog"
        aria-expanded={open !== undefined}
        onClick={({ currentTarget }) => toggle(currentTarget)}
      >
        <Icon name="smile" />
      </button>
      {open && (
        <open.Picker
          user={user}
          anchor={open.anchor}
          onChoose={(emoji) => {
            setOpen(undefined);
            onChoose(emoji);
          }}
          onClose={(hadFocus) => {
            setOpen(undefined);
            if (hadFocus) onLeave();
          }}
        />
      )}
    </>
  );
}
