/** Small pieces that several places use. */
import { type ReactNode, useEffect, useRef } from 'react';
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
  close: 'M6 6l12 12M18 6L6 18',
  out: 'M10 5H5v14h5M14 8l4 4-4 4M9 12h9',
  compass: 'M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM15.5 8.500l-2 5-5 2 2-5z',
  clock: 'M12 7v5l3 2M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z',
  check: 'M5 13l4 4L19 7',
  checks: 'M2 13l4 4L15 8M10 16l1 1L21 7',
  alert: 'M12 8v5M12 16.500v.01M12 3l10 18H2z',
};

export function Icon({ name }: { name: keyof typeof paths }) {
  return (
    <svg className="icon" viewBox="0 0 24 24" width="20" height="20" aria-hidden="true">
      <path d={paths[name]} />
    </svg>
  );
}

/** A modal window: the browser's own, which holds the focus and closes with Escape. */
export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ReactNode }) {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = ref.current!;
    if (!dialog.open) dialog.showModal();
    return () => dialog.close();
  }, []);
  return (
    // biome-ignore lint/a11y/useKeyWithClickEvents: Escape closes it.
    <dialog
      ref={ref}
      aria-labelledby="dialog-title"
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onClick={(event) => event.target === ref.current && onClose()}
    >
      <div className="dialog">
        <header>
          <h2 id="dialog-title">{title}</h2>
          <button type="button" className="quiet" aria-label="Close" onClick={onClose}>
            <Icon name="close" />
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}
