/** Tells the gateway whose presence is followed. Loaded when an application first watches somebody. */
import type { ChatError } from './codes.js';
import type { State } from './connection.js';
import type { Connected, Presence, Replies, Request, UserId } from './types.js';

/** Users that one `watch` names, far below what a frame may have. */
const WATCHED_AT_ONCE = 100;

/** What the watcher needs of its client. */
export interface WatcherHost {
  readonly state: State;
  readonly session: Connected | undefined;
  request<R extends Request>(request: R): Promise<Replies[R['type']]>;
  emit(name: 'presence', event: Presence): void;
}

export class Watcher {
  #host: WatcherHost;
  #watches: ReadonlySet<readonly UserId[]>;
  #presence: Map<UserId, Presence>;
  #refused: (why: string) => void;
  #failed: (error: ChatError) => void;
  /** Users that the gateway has been asked to tell of, on this connection. */
  #watched = new Set<UserId>();
  /** The connection. */
  #session: Connected | undefined;
  #surplus = 0;
  #isTelling = false;

  /** @param presence Is kept up to date.
   * @param refused Is told that there are more users than the gateway watches.
   * @param failed Is told why the gateway does not watch somebody. */
  constructor(
    host: WatcherHost,
    watches: ReadonlySet<readonly UserId[]>,
    presence: Map<UserId, Presence>,
    refused: (why: string) => void,
    failed: (error: ChatError) => void,
  ) {
    this.#host = host;
    this.#watches = watches;
    this.#presence = presence;
    this.#refused = refused;
    this.#failed = failed;
  }

  /** Brings the gateway up to date, in parts; users above its limit are refused here. */
  async tell(): Promise<void> {
    if (this.#isTelling) return;
    this.#isTelling = true;
    while (this.#host.state.at === 'connected') {
      const session = this.#host.session!;
      if (this.#session !== session) {
        this.#session = session;
        this.#watched.clear();
        this.#surplus = 0;
      }
      const all = [...new Set([...this.#watches].flat())];
      const { watchedUsers: max = Infinity } = session.limits;
      const surplus = all.splice(max).length;
      const before = this.#surplus;
      this.#surplus = surplus;
      if (surplus > before) this.#refused(`${surplus} users are not watched: the limit is ${max}`);
      const former = [...this.#watched].filter((user) => !all.includes(user));
      const type = former.length ? 'unwatch' : 'watch';
      const users = (former.length ? former : all.filter((user) => !this.#watched.has(user))).slice(0, WATCHED_AT_ONCE);
      if (!users.length) break;
      for (const user of users) {
        if (type === 'watch') this.#watched.add(user);
        else for (const known of [this.#watched, this.#presence]) known.delete(user);
      }
      const known = new Map(this.#presence);
      try {
        for (const item of (await this.#host.request({ type, users })).items) {
          const { user } = item;
          // An event that came meanwhile is newer than the answer.
          if (!this.#watched.has(user) || known.get(user) !== this.#presence.get(user)) continue;
          const event = { type: 'presence', ...item };
          this.#presence.set(user, event);
          this.#host.emit('presence', event);
        }
      } catch (error) {
        // Not asked again before the next connection.
        if ((error as ChatError).code !== 'closed') this.#failed(error as ChatError);
      }
    }
    this.#isTelling = false;
  }
}
