/** The messages that the user deleted here. The gateway may hear of it later, and until then the list of conversations must not show
 * their text. */
import type { Conversation, Seq } from '../../src/index.js';
import { Noted } from './noted.js';

const deleted = new Noted();
const keyOf = (conversation: string, seq: Seq | undefined) => `${conversation}/${seq}`;

/** Deletes a message, without a connection later. A refusal is shown at the message, and undoes it. */
export function deleteMessage(conversation: Conversation, seq: Seq): void {
  const key = keyOf(conversation.id, seq);
  deleted.add(key);
  conversation.delete(seq).catch(() => deleted.delete(key));
}

/** Whether the user deleted a message here. */
export const useDeleted = (conversation: string, seq: Seq | undefined): boolean => deleted.useHas(keyOf(conversation, seq));
