/** The users who are typing in a conversation. */
import type { UserId } from './types.js';

/** The time after the last `typing` event until a user counts as not typing. */
const TYPING_MS = 6_000;

export class Typists {
  #timers = new Map<UserId, ReturnType<typeof setTimeout>>();
  #changed: () => void;

  constructor(changed: () => void) {
    this.#changed = changed;
  }

  get users(): UserId[] {
    return [...this.#timers.keys()];
  }

  typed(user: UserId): void {
    clearTimeout(this.#timers.get(user));
    this.#timers.set(
      user,
      setTimeout(() => this.stopped(user), TYPING_MS),
    );
    this.#changed();
  }

  stopped(user: UserId): void {
    clearTimeout(this.#timers.get(user));
    if (this.#timers.delete(user)) this.#changed();
  }

  clear(): void {
    for (const user of this.users) this.stopped(user);
  }
}
