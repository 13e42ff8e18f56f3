/** What the page asks about a conversation, from the inbox and from its details, whichever is there. */
import type { Conversation, Kind } from '../../src/index.js';
import { titleOf } from './words.js';

export const kindOf = ({ item, details }: Conversation): Kind | undefined => item?.kind ?? details?.kind;

/** The name that heads it, for this user. */
export function headingOf(conversation: Conversation, me: string): string {
  const { item, details } = conversation;
  if (item) return titleOf(item, me);
  return details?.name || (details ? `A ${details.kind}` : '…');
}

/** Its details are there, and this user is not in it: it is public, and may be looked into. */
export const isOutside = ({ details }: Conversation): boolean => details !== undefined && details.role === undefined;

/** Whether this user may write here; undefined until that is known. */
export function maySend(conversation: Conversation): boolean | undefined {
  const { removed, details } = conversation;
  if (removed || isOutside(conversation)) return false;
  if (kindOf(conversation) === 'dm') return true;
  return details && (details.posting !== 'admins' || details.role !== 'member');
}
