/** The skin tone that a user chose for emoji. */
import { base } from './session.js';
import { ofBrowser } from './store.js';

const keyOf = (user: string) => `chat-tone ${base.pathname} ${user}`;

export const toneOf = (user: string): string | null => ofBrowser.get(keyOf(user));
export const keepTone = (user: string, tone: string): void => ofBrowser.set(keyOf(user), tone);
/** Deletes this user's choice. */
export const forgetTone = (user: string): void => ofBrowser.remove(keyOf(user));
