/** What the user writes in each conversation. It is kept in this tab, and survives a reload and a look at another conversation. */
import type { ChatMessage, Seq } from '../../src/index.js';
import { base } from './session.js';
import { ofTab } from './store.js';

/** A text that is not sent, the message that it answers, and an edit that was begun. */
export interface Writing {
  text: string;
  replyTo?: Seq | undefined;
  /** `from` is the message as it was when the edit began. */
  edit?: { from: ChatMessage; text: string } | undefined;
}

const prefixOf = (user: string) => `chat-writing ${base.pathname} ${user} `;
const keyOf = (user: string, conversation: string) => prefixOf(user) + conversation;

/** JSON has no Infinity. It stands for a rev that is not known any more. */
const revive = (key: string, value: unknown) => (value === null && /^(rev|mineRev)$/.test(key) ? Infinity : value);

export function writingOf(user: string, conversation: string): Writing {
  const kept = ofTab.get(keyOf(user, conversation));
  return kept ? (JSON.parse(kept, revive) as Writing) : { text: '' };
}

/** Keeps a part of what is written. */
export function keepWriting(user: string, conversation: string, part: Partial<Writing>): void {
  const key = keyOf(user, conversation);
  const now = { ...writingOf(user, conversation), ...part };
  if (now.text || now.replyTo || now.edit) ofTab.set(key, JSON.stringify(now));
  else ofTab.remove(key);
}

/** Deletes all drafts of this user in this tab. */
export function deleteDrafts(user: string): void {
  for (const key of ofTab.keys()) if (key.startsWith(prefixOf(user))) ofTab.remove(key);
}

/** Returns a text as it is sent: without empty lines around it. The first line keeps its indentation. */
export const asBody = (text: string): string => text.replace(/^\s*\n/, '').trimEnd();
