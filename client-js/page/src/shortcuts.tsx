/** The keys that the page has beside those of its controls, and the window that lists all of them. */
import { type ReactNode, useEffect, useState } from 'react';
import type { InboxItem } from '../../src/index.js';
import { Dialog } from './parts.js';

const isApple = /Mac|iPhone|iPad/.test(navigator.userAgent);

const KEYS: readonly (readonly [keys: string, does: string])[] = [
  [isApple ? '⌘ K' : 'Ctrl K', 'Find a conversation'],
  [isApple ? '⌥ ↑ or ⌥ ↓' : 'Alt ↑ or Alt ↓', 'Go to the previous or next conversation'],
  ['↑ or ↓', 'Move between messages, or between conversations'],
  ['→ or ←', 'Move to the buttons of a message, and back'],
  ['Enter', 'Send the message'],
  ['Shift Enter', 'Begin a new line'],
  ['↑ in an empty field', 'Edit your last message'],
  ['Esc', 'Stop editing or replying; close a window'],
  [isApple ? '⌘ /' : 'Ctrl /', 'Show this list'],
];

/** Returns the window that lists the keys while it is open, and a function that opens it. */
export function useShortcuts(
  items: readonly InboxItem[],
  selected: string | undefined,
  select: (id: string | undefined) => void,
): { list: ReactNode; show: () => void } {
  const [isShown, setIsShown] = useState(false);
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const { key, altKey, ctrlKey, metaKey, shiftKey, target } = event;
      if ((target as Element).closest('dialog')) return;
      const isCommand = (isApple ? metaKey && !ctrlKey : ctrlKey && !metaKey) && !altKey;
      if (isCommand && key?.toLowerCase() === 'k' && !shiftKey) {
        event.preventDefault();
        find(select);
      }
      // A key alone would be in the way of those who speak to their computer. Some keyboards have the slash above a digit.
      if (isCommand && key === '/') {
        event.preventDefault();
        setIsShown(true);
      }
      if ((target as Element).closest('input, textarea, select')) return;
      // In a field the arrow keys move the cursor.
      if (!altKey || (key !== 'ArrowUp' && key !== 'ArrowDown')) return;
      event.preventDefault();
      const at = items.findIndex((item) => item.conversation === selected);
      const next = items[at + (key === 'ArrowUp' ? -1 : 1)];
      if (next) select(next.conversation);
    };
    addEventListener('keydown', pressed);
    return () => removeEventListener('keydown', pressed);
  });
  const list = isShown && (
    <Dialog title="Keyboard shortcuts" onClose={() => setIsShown(false)}>
      <dl className="keys">
        {KEYS.map(([keys, does]) => (
          <div key={keys}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{does}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
  return { list, show: () => setIsShown(true) };
}

/** Moves the focus to the field that filters the conversations. In a narrow window, an open conversation hides it. */
function find(select: (id: string | undefined) => void): void {
  const field = () => document.querySelector<HTMLInputElement>('.filter')!;
  const focus = () => {
    field().focus();
    field().select();
  };
  if (field().offsetParent) return focus();
  addEventListener('hashchange', () => requestAnimationFrame(focus), { once: true });
  select(undefined);
}
