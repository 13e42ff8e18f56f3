/** The files that the user attaches to the next message of a conversation. They are kept while the page is open. */
import { type DragEvent, useCallback, useEffect, useReducer, useState } from 'react';
import type { Conversation, Upload } from '../../src/index.js';
import { noteKept } from './kept.js';

/** The files of messages that are being written, by user and conversation. */
const attached = new Map<string, readonly Upload[]>();

/** Numbers that tell files with the same name apart. */
const numbers = new WeakMap<Upload, number>();
let last = 0;

/** Returns a number that no other upload has. */
export function numberOf(file: Upload): number {
  const number = numbers.get(file) ?? ++last;
  numbers.set(file, number);
  return number;
}

/** The files of the next message, and what the user can do with them. */
export interface Attaching {
  files: readonly Upload[];
  /** Begins to upload files. Those above the limit are left out. */
  attach: (files: Iterable<File>) => void;
  /** Gives a file up. */
  remove: (file: Upload) => void;
  /** Returns the files, which now belong to a message. */
  take: () => Upload[];
  /** Why files were left out. */
  notice: string | undefined;
}

/** Begins to upload a file. */
function attachTo(conversation: Conversation, file: File): Upload {
  const upload = conversation.attach(file);
  // The gateway tells it by an event too, which may be missed.
  const note = (id: string) => upload.metadata === 'kept' && noteKept(id);
  upload.on('state', (state) => state === 'ready' && void upload.done.then(note));
  return upload;
}

/** Returns the files that the user attaches.
 * @param max The number of files that a message may have. */
export function useAttaching(user: string, conversation: Conversation, max: number): Attaching {
  const key = `${user} ${conversation.id}`;
  const [files, setFiles] = useState(() => attached.get(key) ?? []);
  const [notice, setNotice] = useState<string>();
  const keep = useCallback(
    (now: readonly Upload[]) => {
      if (now.length) attached.set(key, now);
      else attached.delete(key);
      setFiles(now);
      setNotice(undefined);
    },
    [key],
  );
  const attach = (added: Iterable<File>) => {
    const all = [...added];
    const room = Math.max(0, max - files.length);
    keep([...files, ...all.slice(0, room).map((file) => attachTo(conversation, file))]);
    if (all.length > room) setNotice(`A message has at most ${max} files.`);
  };
  const remove = (file: Upload) => {
    file.abort();
    keep(files.filter((other) => other !== file));
  };
  const take = () => {
    keep([]);
    return [...files];
  };
  return { files, attach, remove, take, notice };
}

const hasFiles = ({ dataTransfer }: Pick<DragEvent, 'dataTransfer'>): boolean => !!dataTransfer?.types.includes('Files');

/** Returns the handlers of an area onto which files are dropped, and whether the user drags files over it. Elsewhere the browser
 * would leave the page and open the file. */
export function useDrop(drop: (files: FileList) => void) {
  const [isOver, setIsOver] = useState(false);
  useEffect(() => {
    const stay = (event: Event) => hasFiles(event as unknown as DragEvent) && event.preventDefault();
    for (const name of ['dragover', 'drop']) addEventListener(name, stay);
    return () => {
      for (const name of ['dragover', 'drop']) removeEventListener(name, stay);
    };
  }, []);
  return {
    isOver,
    onDragOver: (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setIsOver(true);
    },
    onDragLeave: ({ currentTarget, relatedTarget }: DragEvent) => currentTarget.contains(relatedTarget as Node | null) || setIsOver(false),
    onDrop: (event: DragEvent) => {
      setIsOver(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      drop(event.dataTransfer.files);
    },
  };
}

/** Renders again when an upload changes. */
export function useUploads(files: readonly Upload[]): void {
  const [, show] = useReducer((count: number) => count + 1, 0);
  useEffect(() => {
    const ends = files.flatMap((file) => [file.on('state', show), file.on('progress', show)]);
    return () => {
      for (const end of ends) end();
    };
  }, [files]);
}

/** Forgets the files of a user who signs out. */
export function forgetAttached(user: string): void {
  for (const [key, files] of attached) {
    if (!key.startsWith(`${user} `)) continue;
    attached.delete(key);
    for (const file of files) file.abort();
  }
}
