/** The messages that the user deleted here. The gateway may hear of it later, and until then the list of conversations must not show
 * their text. */
import { useSyncExternalStore } from 'react';
import type { Conversation, Seq } from '../../src/index.js';

const deleted = new Set<string>();
const watchers = new Set<() => void>();
const tell = () => {
  for (const watcher of watchers) watcher();
};
const watch = (watcher: () => void) => {
  watchers.add(watcher);
  return () => void watchers.delete(watcher);
};
const keyOf = (conversation: string, seq: Seq | undefined) => `${conversation}/${seq}`;

/** Deletes a message, without a connection later. A refusal is shown at the message, and undoes it. */
export function deleteMessage(conversation: Conversation, seq: Seq): void {
  const key = keyOf(conversation.id, seq);
  deleted.add(key);
  tell();
  conversation.delete(seq).catch(() => {
    deleted.delete(key);
    tell();
  });
}

/** Whether the user deleted a message here. */
export const useDeleted = (conversation: string, seq: Seq | undefined): boolean =>
  useSyncExternalStore(watch, () => deleted.has(keyOf(conversation, seq)));
