/** Sends the gateway the users whose presence is watched. Loaded when an application first calls `watch()`. */
import type { ChatError } from './codes.js';
import type { State } from './connection.js';
import type { Connected, Presence, Replies, Request, UserId } from './types.js';

/** The number of users in one `watch` request, far below the frame limit. */
const WATCHED_AT_ONCE = 100;

/** What the watcher needs of its client. */
export interface WatcherHost {
  readonly state: State;
  readonly session: Connected | undefined;
  request<R extends Request>(request: R): Promise<Replies[R['type']]>;
  emit(name: 'presence', event: Presence): void;
}

/** The watches of one client. */
export class Watcher {
  #host: WatcherHost;
  #watches: ReadonlySet<readonly UserId[]>;
  #presence: Map<UserId, Presence>;
  #refused: (why: string) => void;
  #failed: (error: ChatError) => void;
  /** The users that the gateway watches on this connection. */
  #watched = new Set<UserId>();
  /** The session that `#watched` belongs to. */
  #session: Connected | undefined;
  /** The number of users above the gateway's limit. */
  #surplus = 0;
  #isTelling = false;

  /** @param presence The last known presence of each watched user. The watcher updates it.
   * @param refused Called when there are more users than the gateway watches.
   * @param failed Called with the error of a `watch` or `unwatch` request. */
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

  /** Sends what changed, in parts. Users above the gateway's limit are not sent. */
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
          // An event that came before the answer is newer.
          if (!this.#watched.has(user) || known.get(user) !== this.#presence.get(user)) continue;
          const event = { type: 'presence', ...item };
          this.#presence.set(user, event);
          this.#host.emit('presence', event);
        }
      } catch (error) {
        // The next connection sends them again.
        if ((error as ChatError).code !== 'closed') this.#failed(error as ChatError);
      }
    }
    this.#isTelling = false;
  }
}
