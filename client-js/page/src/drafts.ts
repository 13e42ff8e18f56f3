/** Drafts: unsent text of each user and conversation. They are kept in this tab and survive a reload. */
import { base } from './session.js';
import { ofTab } from './store.js';

const prefixOf = (user: string) => `chat-draft ${base.pathname} ${user} `;
const keyOf = (user: string, conversation: string) => prefixOf(user) + conversation;

export const draftOf = (user: string, conversation: string): string => ofTab.get(keyOf(user, conversation)) ?? '';

export function keepDraft(user: string, conversation: string, text: string): void {
  const key = keyOf(user, conversation);
  if (text) ofTab.set(key, text);
  else ofTab.remove(key);
}

/** Deletes all drafts of this user in this tab. */
export function deleteDrafts(user: string): void {
  for (const key of ofTab.keys()) if (key.startsWith(prefixOf(user))) ofTab.remove(key);
}
