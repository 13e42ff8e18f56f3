/** Boxes above the page: menus, the emoji picker, and notes. They are popovers of the browser, which no scrolling box cuts off. */
import { type KeyboardEvent, type ReactNode, useEffect, useLayoutEffect, useRef } from 'react';

/** The distance to the anchor and to the edges of the window, in pixels. */
const GAP = 6;

/** Moves a box above its anchor, or below it where there is no room. */
function place(box: HTMLElement, anchor: HTMLElement): void {
  const { left, top, bottom, width } = anchor.getBoundingClientRect();
  // What is in sight: the keyboard of some phones covers a part of the window without making it smaller.
  const { offsetLeft: x, offsetTop: y, width: w, height: h } = visualViewport!;
  box.style.maxHeight = `${h - 2 * GAP}px`;
  const { offsetWidth, offsetHeight } = box;
  const centred = Math.min(left + width / 2 - offsetWidth / 2, x + w - offsetWidth - GAP);
  const above = Math.min(top, y + h) - offsetHeight - GAP;
  box.style.left = `${Math.max(x + GAP, centred)}px`;
  box.style.top = `${above >= y + GAP ? above : Math.max(y + GAP, Math.min(bottom + GAP, y + h - offsetHeight - GAP))}px`;
}

/** Shows a box while the component is mounted, and keeps it at its anchor. */
export function usePlace(anchor: HTMLElement) {
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const shown = box.current!;
    shown.showPopover?.();
    const move = () => place(shown, anchor);
    move();
    addEventListener('scroll', move, true);
    addEventListener('resize', move);
    for (const type of ['resize', 'scroll']) visualViewport!.addEventListener(type, move);
    return () => {
      removeEventListener('scroll', move, true);
      removeEventListener('resize', move);
      for (const type of ['resize', 'scroll']) visualViewport!.removeEventListener(type, move);
    };
  }, [anchor]);
  return box;
}

interface MenuProps {
  /** The button that opened it. It gets the focus back. */
  anchor: HTMLElement;
  label: string;
  /** The number of items in a row. */
  columns?: number;
  onClose: () => void;
  children: ReactNode;
}

/** A menu of buttons. The arrow keys move the focus, Enter chooses, and Escape closes it. */
export function Menu({ anchor, label, columns = 1, onClose, children }: MenuProps) {
  const box = usePlace(anchor);
  const close = useRef(onClose);
  useEffect(() => {
    close.current = onClose;
  });
  useLayoutEffect(() => {
    const menu = box.current!;
    menu.querySelector('button')?.focus();
    const toggled = (event: Event) => (event as ToggleEvent).newState === 'closed' && close.current();
    menu.addEventListener('toggle', toggled);
    return () => {
      menu.removeEventListener('toggle', toggled);
      // Otherwise the focus would be nowhere. A click elsewhere has moved it already.
      if (menu.contains(document.activeElement)) anchor.focus({ preventScroll: true });
    };
  }, [anchor, box]);
  const pressed = (event: KeyboardEvent) => {
    const items = [...box.current!.querySelectorAll('button')];
    const at = items.indexOf(document.activeElement as HTMLButtonElement);
    const steps: Record<string, number> = { ArrowUp: -columns, ArrowDown: columns, ArrowLeft: -1, ArrowRight: 1 };
    const step = steps[event.key];
    if (event.key === 'Tab') close.current();
    const { length } = items;
    const to = event.key === 'Home' ? 0 : event.key === 'End' ? length - 1 : step === undefined ? undefined : (at + step + length) % length;
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    items[to]?.focus();
  };
  return (
    <div ref={box} popover="auto" role="menu" aria-label={label} className={columns > 1 ? 'menu grid' : 'menu'} onKeyDown={pressed}>
      {children}
    </div>
  );
}

/** A short text above its anchor. */
export function Note({ anchor, id, children }: { anchor: HTMLElement; id: string; children: ReactNode }) {
  const box = usePlace(anchor);
  // Its size changes with its text.
  useLayoutEffect(() => place(box.current!, anchor));
  return (
    <div ref={box} id={id} popover="manual" role="tooltip" className="note">
      {children}
    </div>
  );
}
