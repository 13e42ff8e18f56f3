/** The address of the gateway, and the user who is signed in. */
import { UnauthorizedError } from '../../src/index.js';
import { ofBrowser, ofTab } from './store.js';

/** The user who is signed in. */
export interface Session {
  user: string;
  /** The name that the user typed, if it is not the id. */
  name?: string;
  /** The token that the user pasted, if the gateway issues no development tokens. */
  token?: string;
}

/** Returns what the page calls the user. */
export const nameOf = (session: Session | undefined): string => session?.name ?? session?.user ?? '';

/** The address of the page without its file name and query. A proxy may serve several gateways of one host under paths, so
 * storage keys contain the path. */
export const base = new URL('.', location.href);

/** Returns the WebSocket URL of the gateway that serves this page. */
export function socketUrl(): string {
  const url = new URL('v1/ws', base);
  url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
  return url.href;
}

/** The scope of the outbox. It contains the path, so that gateways under several paths of one host have separate outboxes. */
export const scope = new URL('.', socketUrl().replace(/v1\/ws$/, '')).href.replace(/\/$/, '');

const KEY = `chat-session ${base.pathname}`;

function parsed(text: string | null): Session | undefined {
  try {
    return text ? (JSON.parse(text) as Session) : undefined;
  } catch {
    return undefined;
  }
}

/** Returns the newest session of the browser. */
export const newest = (): Session | undefined => parsed(ofBrowser.get(KEY));

/** Returns the session of this tab. A new tab asks who uses it, except with the address of a conversation, as a notification opens it:
 * then it has the newest session. */
export function remembered(): Session | undefined {
  const own = parsed(ofTab.get(KEY));
  if (own || !/^#\/./.test(location.hash)) return own;
  const session = newest();
  // Otherwise it would be another user's after a reload, if one signs in meanwhile.
  if (session) ofTab.set(KEY, JSON.stringify(session));
  return session;
}

/** Stores a session for this tab and for new tabs. */
export function remember(session: Session): void {
  ofTab.set(KEY, JSON.stringify(session));
  // A pasted token is a secret and stays in this tab.
  if (!session.token) ofBrowser.set(KEY, JSON.stringify(session));
}

/** Deletes the session of this tab. The one for new tabs stays if another user signed in meanwhile. */
export function forget(user: string): void {
  ofTab.remove(KEY);
  if (newest()?.user === user) ofBrowser.remove(KEY);
}

/** Returns a token of any user. Only a gateway in development issues them, to pages of the same machine. */
export async function developmentToken(user: string, signal?: AbortSignal): Promise<string> {
  const answer = await fetch(new URL('v1/tokens', base), {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ user }),
    ...(signal && { signal }),
  }).catch((error: Error) => {
    // Each browser has another text for this ("Failed to fetch"), and none helps the user.
    throw error.name === 'TypeError' ? new Error('The gateway cannot be reached.') : error;
  });
  const text = await answer.json();
  if (answer.ok) return text.token as string;
  if (answer.status === 404) throw new NoDevelopmentTokens();
  if (answer.status < 500) throw new UnauthorizedError(text.message);
  throw new Error(text.message);
}

/** The error of a gateway that issues no development tokens: the application's back end issues them. */
export class NoDevelopmentTokens extends UnauthorizedError {}

/** Returns the user of a token, for display only: the gateway checks the token. */
export function userOf(token: string): string | undefined {
  try {
    const part = token.split('.')[1]!.replace(/-/g, '+').replace(/_/g, '/');
    const text = new TextDecoder().decode(Uint8Array.from(atob(part), (c) => c.charCodeAt(0)));
    const { sub } = JSON.parse(text);
    return typeof sub === 'string' ? sub : undefined;
  } catch {
    return undefined;
  }
}
