/** The files that the user attaches to the next message of a conversation. They are kept while the page is open. */
import { type DragEvent, useCallback, useEffect, useReducer, useState } from 'react';
import type { Conversation, Upload } from '../../src/index.js';
import { noteKept } from './kept.js';

/** The files of messages that are being written, by user and conversation. */
const attached = new Map<string, readonly Upload[]>();

const NONE: readonly Upload[] = [];

const stay = (event: Event) => event.preventDefault();

/** Has the browser ask before it leaves the page while there are files: unlike texts, they would be lost. */
function guard(): void {
  if (attached.size) addEventListener('beforeunload', stay);
  else removeEventListener('beforeunload', stay);
}

/** Numbers that tell files with the same name apart. */
const numbers = new WeakMap<Upload, number>();
let last = 0;

/** Returns a number that no other upload has. */
export function numberOf(file: Upload): number {
  const number = numbers.get(file) ?? ++last;
  numbers.set(file, number);
  return number;
}

/** Files that the user chose, dropped or pasted. */
export interface Chosen {
  files: readonly File[];
  /** Whether there are folders too. Browsers have no bytes of them. */
  withFolders?: boolean;
}

/** Returns the files of what was dropped or pasted. */
export function filesOf({ items }: DataTransfer): Chosen {
  const all = [...items].filter(({ kind }) => kind === 'file');
  const isFolder = (item: DataTransferItem) => !!item.webkitGetAsEntry?.()?.isDirectory;
  const files = all.filter((item) => !isFolder(item)).map((item) => item.getAsFile());
  return { files: files.filter((file) => file !== null), withFolders: all.some(isFolder) };
}

/** Whether the files are pictures that a program added to the text that it copied. A file manager adds the names of the files. */
export function isPictureOfText(data: DataTransfer): boolean {
  const names = new Set([...data.files].map(({ name }) => name.normalize()));
  const lines = data.getData('text/plain').split(/\r?\n/).filter(Boolean);
  return !lines.every((line) => names.has(line.normalize().split(/[\\/]/).at(-1)!));
}

/** The files of the next message, and what the user can do with them. */
export interface Attaching {
  files: readonly Upload[];
  /** Begins to upload files. Those above the limit are left out. */
  attach: (files: Chosen) => void;
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
  const [, show] = useReducer((count: number) => count + 1, 0);
  const files = attached.get(key) ?? NONE;
  const [notice, setNotice] = useState<string>();
  const keep = useCallback(
    (now: readonly Upload[]) => {
      if (now.length) attached.set(key, now);
      else attached.delete(key);
      guard();
      show();
      setNotice(undefined);
    },
    [key],
  );
  const attach = ({ files: added, withFolders }: Chosen) => {
    const room = Math.max(0, max - files.length);
    keep([...files, ...added.slice(0, room).map((file) => attachTo(conversation, file))]);
    const why = [
      withFolders && 'A folder cannot be attached. Choose the files in it.',
      added.length > room && `A message has at most ${max} files.`,
    ];
    setNotice(why.filter(Boolean).join(' ') || undefined);
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

export const hasFiles = (data: DataTransfer | null): boolean => !!data?.types.includes('Files');

/** Returns the handlers of an area onto which files are dropped, and whether the user drags files over it. Elsewhere the browser
 * would leave the page and open the file. */
export function useDrop(drop: (files: Chosen) => void) {
  const [isOver, setIsOver] = useState(false);
  useEffect(() => {
    const stay = (event: Event) => hasFiles((event as globalThis.DragEvent).dataTransfer) && event.preventDefault();
    for (const name of ['dragover', 'drop']) addEventListener(name, stay);
    return () => {
      for (const name of ['dragover', 'drop']) removeEventListener(name, stay);
    };
  }, []);
  return {
    isOver,
    onDragOver: (event: DragEvent) => {
      if (!hasFiles(event.dataTransfer)) return;
      event.preventDefault();
      setIsOver(true);
    },
    onDragLeave: ({ currentTarget, relatedTarget }: DragEvent) => currentTarget.contains(relatedTarget as Node | null) || setIsOver(false),
    onDrop: (event: DragEvent) => {
      setIsOver(false);
      if (!hasFiles(event.dataTransfer)) return;
      event.preventDefault();
      drop(filesOf(event.dataTransfer));
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

/** Returns the number of a user's attached files that are not sent. */
export const countAttached = (user: string): number =>
  [...attached].reduce((sum, [key, files]) => sum + (key.startsWith(`${user} `) ? files.length : 0), 0);

/** Forgets the files of a user who signs out, or those for a conversation that the user is no longer in. */
export function forgetAttached(user: string, conversation = ''): void {
  for (const [key, files] of attached) {
    if (!key.startsWith(`${user} ${conversation}`)) continue;
    attached.delete(key);
    for (const file of files) file.abort();
  }
  guard();
}
