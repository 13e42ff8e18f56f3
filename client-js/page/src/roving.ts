/** Lists that are one stop of the Tab key. Up and Down move between the rows, Right and Left to the controls of a row. */
import { type RefObject, useCallback, useEffect, useRef } from 'react';

/** Dialogs and menus in a row have keys of their own. */
const OTHERS = 'dialog, [popover]';
/** Players, in which the arrow keys wind and Escape leads back to the row. They come last, so that they keep nobody from a button. */
const PLAYERS = 'video, audio';
/** What the arrow keys reach in a row. Buttons that show only under a mouse are in the menu, too. */
const CONTROLS = `a[href], ${PLAYERS}, button:not(.hovered:not(:only-child))`;

/** Makes a list one stop.
 * @param selector Which elements are the rows.
 * @returns A function that moves the stop to a row while the focus is elsewhere. */
export function useRoving(box: RefObject<HTMLElement | null>, selector: string): (row: HTMLElement | undefined) => void {
  const stop = useRef<HTMLElement>(undefined);
  const rowsOf = useCallback(() => [...box.current!.querySelectorAll<HTMLElement>(selector)], [box, selector]);
  const mark = useCallback(() => {
    const all = rowsOf();
    if (!stop.current || !all.includes(stop.current)) stop.current = all.find((row) => row.ariaCurrent) ?? all[0];
    for (const element of [...all, ...box.current!.querySelectorAll<HTMLElement>(CONTROLS)]) {
      const index = element === stop.current ? 0 : -1;
      if (element.tabIndex !== index && !element.closest(OTHERS)) element.tabIndex = index;
    }
  }, [box, rowsOf]);

  useEffect(() => {
    const list = box.current!;
    const focused = ({ target }: FocusEvent) => {
      stop.current = (target as HTMLElement).closest<HTMLElement>(selector) ?? stop.current;
      mark();
    };
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || target.closest(OTHERS)) return;
      const row = target.closest<HTMLElement>(selector) ?? stop.current;
      const leaves = event.key === 'Escape' ? row : undefined;
      const to = target.matches(PLAYERS) ? leaves : nextOf(event.key, target, row, rowsOf(), list);
      if (!to) return;
      event.preventDefault();
      to.focus();
    };
    const changes = new MutationObserver(mark);
    mark();
    changes.observe(list, { childList: true, subtree: true });
    list.addEventListener('focusin', focused);
    list.addEventListener('keydown', pressed);
    return () => {
      changes.disconnect();
      list.removeEventListener('focusin', focused);
      list.removeEventListener('keydown', pressed);
    };
  }, [box, selector, rowsOf, mark]);

  return useCallback(
    (row) => {
      if (!row || row === stop.current || box.current!.contains(document.activeElement)) return;
      if (stop.current) stop.current.tabIndex = -1;
      row.tabIndex = 0;
      stop.current = row;
    },
    [box],
  );
}

/** Returns what a key moves the focus to. Nothing if it has another meaning, such as scrolling on in a row that is higher than the list. */
function nextOf(key: string, target: HTMLElement, row: HTMLElement | undefined, rows: HTMLElement[], list: HTMLElement) {
  if (!row) return;
  if (key === 'Home' || key === 'End') return rows.at(key === 'Home' ? 0 : -1);
  if (key === 'ArrowDown' || key === 'ArrowUp') {
    if (target === list) return row;
    const [inner, outer] = [row.getBoundingClientRect(), list.getBoundingClientRect()];
    if (key === 'ArrowDown' ? inner.bottom > outer.bottom + 1 : inner.top < outer.top - 1) return;
    return rows[rows.indexOf(row) + (key === 'ArrowDown' ? 1 : -1)];
  }
  if (key !== 'ArrowRight' && key !== 'ArrowLeft') return;
  const controls = [...row.querySelectorAll<HTMLElement>(CONTROLS)].filter(
    (control) => !control.closest(OTHERS) && (control.checkVisibility?.() ?? control.offsetParent !== null),
  );
  controls.sort((a, b) => Number(a.matches(PLAYERS)) - Number(b.matches(PLAYERS)));
  const all = [row, ...controls];
  return all[all.indexOf(target) + (key === 'ArrowRight' ? 1 : -1)];
}
