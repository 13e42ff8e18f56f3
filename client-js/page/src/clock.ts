/** The clock of the gateway, to compare with the times that it gives. The one of the device may be wrong. */
import type { ChatClient } from '../../src/index.js';

let clock: Pick<ChatClient, 'now'> = Date;

/** Has the page use the clock of this client's gateway. */
export function setClock(chat: ChatClient): void {
  clock = chat;
}

/** Returns the time in milliseconds. */
export const now = (): number => clock.now();
