/** Components and hooks that several views use. */
import { type ReactNode, useCallback, useId, useLayoutEffect, useRef, useState, useSyncExternalStore } from 'react';
import { hueOf, initialsOf } from './words.js';

export function Avatar({ name, kind, online }: { name: string; kind: 'dm' | 'group' | 'channel'; online?: boolean | undefined }) {
  return (
    <span className="avatar" data-hue={hueOf(name)} data-kind={kind} aria-hidden="true">
      {kind === 'channel' ? '#' : initialsOf(name)}
      {online && <span className="dot" />}
    </span>
  );
}

const paths = {
  plus: 'M12 5v14M5 12h14',
  back: 'M15 5l-7 7 7 7',
  down: 'M12 5v13M6 12l6 6 6-6',
  up: 'M12 19V6M6 12l6-6 6 6',
  send: 'M4 12l16-7-5 16-3.5-6.500z',
  info: 'M12 11v6M12 7.500v.01M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z',
  reply: 'M9 7L4 12l5 5M4 12h9a7 7 0 0 1 7 7',
  smile: 'M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM8 14.500a5 5 0 0 0 8 0M9 9.500v.01M15 9.500v.01',
  more: 'M5 12v.01M12 12v.01M19 12v.01',
  pen: 'M4 20l1-4L16 5l3 3L8 19zM14 7l3 3',
  close: 'M6 6l12 12M18 6L6 18',
  out: 'M10 5H5v14h5M14 8l4 4-4 4M9 12h9',
  compass: 'M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM15.5 8.500l-2 5-5 2 2-5z',
  clock: 'M12 7v5l3 2M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z',
  check: 'M5 13l4 4L19 7',
  checks: 'M2 13l4 4L15 8M10 16l1 1L21 7',
  // A filled circle with the check cut out: it differs from the others by its shape, not only by its colour.
  seen: 'M12 2a10 10 0 1 0 0 20 10 10 0 0 0 0-20zM10.500 16.800l-4.400-4.400 1.700-1.700 2.700 2.700 5.700-5.700 1.700 1.700z',
  bell: 'M6 16v-5a6 6 0 0 1 12 0v5l1.500 2h-15zM10 21h4',
  quiet: 'M6 16v-5a6 6 0 0 1 12 0v5l1.500 2h-15zM10 21h4M3 3l18 18',
  clip: 'M20 11l-8.500 8.500a5 5 0 0 1-7-7L13 4a3.500 3.500 0 0 1 5 5l-8.500 8.500a2 2 0 0 1-3-3L14 7',
  again: 'M20 5v5h-5M19.500 10a8 8 0 1 0 .5 4',
  alert: 'M12 8v5M12 16.500v.01M12 3l10 18H2z',
};

export function Icon({ name }: { name: keyof typeof paths }) {
  return (
    <svg className={`icon ${name}`} viewBox="0 0 24 24" width="20" height="20" aria-hidden="true">
      <path d={paths[name]} />
    </svg>
  );
}

/** A modal dialog. It is the browser's own, which keeps the focus inside and closes with Escape. */
export function Dialog({
  title,
  className,
  onClose,
  children,
}: {
  title: string;
  className?: string;
  onClose: () => void;
  children: ReactNode;
}) {
  const ref = useRef<HTMLDialogElement>(null);
  /** Whether the pointer went down outside of what the dialog shows. */
  const isOutside = useRef(false);
  const id = useId();
  // A layout effect closes it before it leaves the document. Otherwise the browser would not restore the focus.
  useLayoutEffect(() => {
    const dialog = ref.current!;
    if (!dialog.open) dialog.showModal();
    // The browser would focus the first button, which closes. React's `autoFocus` acts before the dialog is shown.
    dialog.querySelector<HTMLElement>('[data-first]')?.focus();
    return () => dialog.close();
  }, []);
  return (
    // biome-ignore lint/a11y/useKeyWithClickEvents: Escape closes it too.
    <dialog
      ref={ref}
      className={className}
      aria-labelledby={id}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onPointerDown={(event) => {
        isOutside.current = event.target === ref.current;
      }}
      // Selecting text may end outside.
      onClick={(event) => event.target === ref.current && isOutside.current && onClose()}
    >
      <div className="dialog">
        <header>
          <h2 id={id}>{title}</h2>
          <button type="button" className="quiet" aria-label="Close" onClick={onClose}>
            <Icon name="close" />
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}

interface ConfirmProps {
  title: string;
  /** The consequence of the action. */
  children: ReactNode;
  /** The label of the button. */
  action: string;
  onConfirm: () => Promise<unknown>;
  onClose: () => void;
}

/** The question before an action that is hard to undo. If the action fails, it stays open and shows why. */
export function Confirm({ title, children, action, onConfirm, onClose }: ConfirmProps) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<string>();
  const confirm = async () => {
    setBusy(true);
    setProblem(undefined);
    try {
      await onConfirm();
      onClose();
    } catch (error) {
      setProblem((error as Error).message);
      setBusy(false);
    }
  };
  return (
    <Dialog title={title} onClose={onClose}>
      <p>{children}</p>
      {problem && (
        <p role="alert" className="problem">
          {problem}
        </p>
      )}
      <div className="choices">
        <button type="button" data-first onClick={onClose}>
          Cancel
        </button>
        <button type="button" className="danger" disabled={busy} onClick={confirm}>
          {action}
        </button>
      </div>
    </Dialog>
  );
}

/** Grey shapes in the place of rows that are being loaded. Screen readers use `aria-busy` of the list instead. */
export function Skeleton({ rows }: { rows: number }) {
  return (
    <div className="skeleton" aria-hidden="true">
      {Array.from({ length: rows }, (_, i) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: all items are the same.
        <span key={i} className="bone" />
      ))}
    </div>
  );
}

/** Returns whether a media query matches, and renders again when that changes. */
export function useMedia(query: string): boolean {
  return useSyncExternalStore(
    useCallback(
      (show) => {
        const media = matchMedia(query);
        media.addEventListener('change', show);
        return () => media.removeEventListener('change', show);
      },
      [query],
    ),
    () => matchMedia(query).matches,
  );
}
