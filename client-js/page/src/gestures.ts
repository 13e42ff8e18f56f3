/** What fingers do with a message: holding it opens its menu, and swiping it to the right replies. Everything can be reached by buttons,
 * too. */
import { type RefObject, useEffect, useRef } from 'react';

/** The time after which a finger holds a message, in milliseconds. */
const HOLD_MS = 500;
/** The distance in pixels up to which a finger is still. */
const STILL = 10;
/** The distance in pixels from which a message is swiped. */
const SWIPE = 64;
/** What has gestures of its own. */
const OTHERS = 'a, button, pre, video, audio, input';

/** @param within An element of the message.
 * @param hold What holding does, if anything. It is called when the finger has left: until then the browser would close what opens. */
export function useGestures(within: RefObject<HTMLElement | null>, hold: (() => void) | undefined, swipe: () => void): void {
  const acts = useRef({ hold, swipe });
  useEffect(() => {
    acts.current = { hold, swipe };
  });
  useEffect(() => {
    if (!matchMedia('(any-pointer: coarse)').matches) return;
    const message = within.current!.closest<HTMLElement>('.message')!;
    const listening = new AbortController();
    const { signal } = listening;
    let finger: { id: number; x: number; y: number } | undefined;
    let holding: ReturnType<typeof setTimeout> | undefined;
    let by = 0;
    const show = (held: boolean, distance: number) => {
      message.classList.toggle('held', held);
      by = distance;
      message.style.translate = by ? `${by}px` : '';
    };
    const ended = () => {
      clearTimeout(holding);
      finger = undefined;
      show(false, 0);
    };
    const on = (type: 'pointerdown' | 'pointermove' | 'pointerup' | 'pointercancel', act: (event: PointerEvent) => void) =>
      message.addEventListener(type, act, { signal });
    on('pointerdown', ({ pointerType, isPrimary, pointerId: id, clientX: x, clientY: y, target }) => {
      ended();
      if (pointerType !== 'touch' || !isPrimary || (target as Element).closest(OTHERS)) return;
      finger = { id, x, y };
      if (acts.current.hold) holding = setTimeout(() => show(true, 0), HOLD_MS);
    });
    on('pointermove', ({ pointerId, clientX, clientY }) => {
      if (pointerId !== finger?.id || message.classList.contains('held')) return;
      const [right, down] = [clientX - finger.x, Math.abs(clientY - finger.y)];
      if (Math.max(Math.abs(right), down) < STILL) return;
      clearTimeout(holding);
      show(false, right > 2 * down ? Math.min(right, SWIPE) : 0);
    });
    on('pointerup', ({ pointerId }) => {
      const isHeld = pointerId === finger?.id && message.classList.contains('held');
      const isSwiped = pointerId === finger?.id && by === SWIPE;
      ended();
      // The click that follows would take the focus.
      if (isHeld) setTimeout(() => acts.current.hold?.());
      if (isSwiped) setTimeout(() => acts.current.swipe());
    });
    on('pointercancel', ended);
    // The menu of the browser, which selects text. The message's own can copy it.
    message.addEventListener('contextmenu', (event) => finger && event.preventDefault(), { signal });
    return () => {
      listening.abort();
      ended();
    };
  }, [within]);
}
