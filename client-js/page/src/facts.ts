/** Facts about a conversation, from its inbox item or its details, whichever is loaded. */
import type { ChatMessage, Conversation, Kind } from '../../src/index.js';
import { now } from './clock.js';
import { faceOf, titleOf } from './words.js';

export const kindOf = ({ item, details }: Conversation): Kind | undefined => item?.kind ?? details?.kind;

/** Returns the name of a conversation; of a direct chat, the other user. Empty until it is known, and without a name. */
export const nameIn = ({ item, name }: Conversation, me: string): string => (item ? faceOf(item, me) : name);

/** Returns the title of a conversation for this user.
 * @param name What `nameIn` returns. */
export function headingOf(conversation: Conversation, me: string, name: string): string {
  const kind = kindOf(conversation);
  if (kind === 'dm') return name ? titleOf({ kind, name }, me) : 'Direct chat';
  return name || (kind ? `A ${kind}` : '…');
}

/** Whether the user reads a public conversation without being a member. False while the details are not loaded. */
export const isOutside = ({ details }: Conversation): boolean => details !== undefined && details.role === undefined;

/** Whether the user may send messages; undefined until that is known. */
export function maySend(conversation: Conversation): boolean | undefined {
  const { removed, details } = conversation;
  if (removed || isOutside(conversation)) return false;
  if (kindOf(conversation) === 'dm') return true;
  return details && (details.posting !== 'admins' || details.role !== 'member');
}

/** Whether the user may edit messages of their own, and react to all: as a member. */
export const mayChange = (conversation: Conversation): boolean =>
  !conversation.removed && conversation.item !== undefined && !isOutside(conversation);

/** Whether the user may edit this message.
 * @param windowS The time in seconds within which it is allowed; 0 is for ever. */
export function mayEdit({ sender, kind, deleted, state, at }: ChatMessage, me: string, windowS: number): boolean {
  if (sender !== me || kind !== 'text' || deleted || state === 'failed') return false;
  return !windowS || now() < at + windowS * 1000;
}

/** Whether the user may delete this message: their own, or as an admin any in a group or channel. */
export function mayDelete(conversation: Conversation, { sender, kind, deleted, seq }: ChatMessage, me: string): boolean {
  if (kind !== 'text' || deleted || seq === undefined) return false;
  const role = conversation.details?.role;
  return sender === me || (kindOf(conversation) !== 'dm' && (role === 'admin' || role === 'owner'));
}
