/** Facts about a conversation, from its inbox item or its details, whichever is loaded. */
import type { Conversation, Kind } from '../../src/index.js';
import { titleOf } from './words.js';

export const kindOf = ({ item, details }: Conversation): Kind | undefined => item?.kind ?? details?.kind;

/** Returns the title of a conversation for this user. */
export function headingOf(conversation: Conversation, me: string): string {
  const { item, details } = conversation;
  if (item) return titleOf(item, me);
  return details?.name || (details ? `A ${details.kind}` : '…');
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
