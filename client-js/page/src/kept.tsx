/** The note at the user's own files that still have their metadata, because the gateway could not remove it. Only the user who
 * uploaded a file is told. */
import type { AttachmentId, ChatClient } from '../../src/index.js';
import { Noted } from './noted.js';
import { Icon } from './parts.js';

const kept = new Noted();

/** Remembers that a file has its metadata. */
export function noteKept(id: AttachmentId): void {
  kept.add(id);
}

/** Remembers what the gateway tells, also of files that another tab or device uploads. Returns a function that ends it. */
export function watchKept(chat: ChatClient): () => void {
  const off = chat.on('attachment', ({ file, metadata }) => metadata === 'kept' && noteKept(file));
  return () => {
    off();
    kept.clear();
  };
}

/** The note at a file of a message, if there is one. */
export function KeptNoteOf({ id }: { id: AttachmentId }) {
  return kept.useHas(id) && <KeptNote />;
}

/** Says what a file may tell about its user.
 * @param name The name of the file, for screen readers, where the note is announced. */
export function KeptNote({ name }: { name?: string }) {
  return (
    <p className="kept">
      <Icon name="alert" />
      <span>
        {name && <span className="sr-only">{name}: </span>}
        May say where it was made: its metadata could not be removed.
      </span>
    </p>
  );
}
