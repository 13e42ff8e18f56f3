/** What was begun and not sent: by user and conversation, in this tab, also over a reload. */
import { base } from './session.js';

const keyOf = (user: string, conversation: string) => `chat-draft ${base.pathname} ${user} ${conversation}`;

export const draftOf = (user: string, conversation: string): string => sessionStorage.getItem(keyOf(user, conversation)) ?? '';

export function keepDraft(user: string, conversation: string, text: string): void {
  const key = keyOf(user, conversation);
  try {
    if (text) sessionStorage.setItem(key, text);
    else sessionStorage.removeItem(key);
  } catch {
    // The browser's storage is full. The text is still in the field, and must not be lost by an exception here.
  }
}
