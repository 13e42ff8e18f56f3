/** Drafts: unsent text of each user and conversation. They are kept in this tab and survive a reload. */
import { base } from './session.js';

const prefixOf = (user: string) => `chat-draft ${base.pathname} ${user} `;
const keyOf = (user: string, conversation: string) => prefixOf(user) + conversation;

export const draftOf = (user: string, conversation: string): string => sessionStorage.getItem(keyOf(user, conversation)) ?? '';

export function keepDraft(user: string, conversation: string, text: string): void {
  const key = keyOf(user, conversation);
  try {
    if (text) sessionStorage.setItem(key, text);
    else sessionStorage.removeItem(key);
  } catch {
    // The browser's storage is full. The text is still in the field, where an exception would lose it.
  }
}

/** Deletes all drafts of this user in this tab. */
export function deleteDrafts(user: string): void {
  for (const key of Object.keys(sessionStorage)) if (key.startsWith(prefixOf(user))) sessionStorage.removeItem(key);
}
