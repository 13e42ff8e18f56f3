/** When entries of the outbox are sent, and how they replace each other. No I/O. */
import { keysOf, sameText } from './changes.js';
import { type Local, type Pending, type Text, WATCH_MS } from './outbox-entry.js';
import type { OutboxChange, OutboxEntry } from './storage.js';
import type { Rev } from './types.js';

/** The time within which the note of another tab comes. The storage may show earlier what the note tells. */
export const NOTE_MS = 1_000;

/** Returns an entry of the storage with what this tab knows of it.
 * @param isTried Whether another tab may have sent it. */
export function merged(known: Local | undefined, entry: OutboxEntry, isTried: boolean): Local {
  if (!known || (!known.unsaved && !known.failed !== !entry.failed))
    return { ...known, ...entry, failed: entry.failed, files: undefined, tried: true };
  if (!known.unsaved) {
    // Another tab uploads its files.
    if (known.uploads && !known.files) Object.assign(known, { attachments: entry.attachments, uploads: entry.uploads, kept: entry.kept });
    // Another tab may have changed it. Its own last change may not be in the storage yet.
    if (entry.change) known.change = entry.change;
  }
  if (isTried) known.tried = true;
  return known;
}

/** Whether an entry can be sent: it waits neither for files, nor for the note of another tab, nor for the seq of its message. */
export function isReady({ failed, sent, missingTimer, change, files, uploads }: Local): boolean {
  return !failed && !sent && !files && !uploads && !missingTimer && !(change && 'of' in change);
}

/** Whether an entry waits for too long for the tab with the lock. */
export const isLate = (entry: Local): boolean => !entry.alone && isReady(entry) && Math.abs(Date.now() - entry.at) > 2 * WATCH_MS;

/** Returns the client id of the last waiting edit of the same message, with the text `from`; empty if there is none.
 * @param waiting The changes in the outbox. */
export function editBefore(waiting: readonly Pending[], change: OutboxChange, from?: Text): string {
  const [key] = keysOf(change);
  // An edit without attachments kept those of the message.
  const isBefore = ({ failed, change: other }: Pending) =>
    !failed &&
    other?.type === 'edit' &&
    keysOf(other)[0] === key &&
    (!from || sameText({ ...other, attachments: other.attachments ?? from.attachments }, from));
  return waiting.filter(isBefore).at(-1)?.clientId ?? '';
}

/** Returns the edits that were written over an edit, and those over them.
 * @param changes The changes in the outbox. */
export function editsOver(changes: readonly Local[], { clientId }: Local): Local[] {
  const before = new Set([clientId]);
  return changes.filter(({ clientId: id, over }) => id !== clientId && before.has(over!) && before.add(id));
}

/** Returns an edit whose base is at least `rev`. */
export function raised(edit: OutboxChange & { type: 'edit' }, rev: Rev = 0): OutboxChange {
  return { ...edit, baseRev: Math.max(edit.baseRev, rev) };
}
