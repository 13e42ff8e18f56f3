/** Whether a conversation is muted. */
import type { InboxItem, Millis } from './types.js';

/** The time until which a conversation is muted that is muted for ever: the last one that a `Date` can hold. */
export const FOR_EVER: Millis = 8.64e15;

/** @param now The time of the gateway. */
export const isMuted = ({ mutedUntil }: Pick<InboxItem, 'mutedUntil'>, now: Millis): boolean => (mutedUntil ?? 0) > now;
