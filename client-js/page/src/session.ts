/** Where the gateway is, and who is signed in: in this tab, and in the next new one. */
import { UnauthorizedError } from '../../src/index.js';

export interface Session {
  user: string;
  /** Pasted in, where the gateway gives no development tokens. */
  token?: string;
}

/** The address of the page without its query. A proxy may serve the page and the gateway under a path; two of them on one
 * host do not share what the browser keeps. */
export const base = new URL('.', location.href);

/** The WebSocket of the gateway that serves this page. */
export function socketUrl(): string {
  const url = new URL('v1/ws', base);
  url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
  return url.href;
}

/** Names the gateway in what the client stores: without it, those under several paths of one host would share an outbox. */
export const scope = new URL('.', socketUrl().replace(/v1\/ws$/, '')).href.replace(/\/$/, '');

const KEY = `chat-session ${base.pathname}`;

export function remembered(): Session | undefined {
  const text = sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
  try {
    return text ? (JSON.parse(text) as Session) : undefined;
  } catch {
    return undefined;
  }
}

export function remember(session: Session): void {
  sessionStorage.setItem(KEY, JSON.stringify(session));
  // A pasted token is for this tab only.
  if (!session.token) localStorage.setItem(KEY, JSON.stringify(session));
}

/** Another tab may have another user since, whom a new tab is to find. */
export function forget(user: string): void {
  sessionStorage.removeItem(KEY);
  if (remembered()?.user === user) localStorage.removeItem(KEY);
}

/** Gateways in development give anybody's token to pages of this machine. */
export async function developmentToken(user: string, signal?: AbortSignal): Promise<string> {
  const answer = await fetch(new URL('v1/tokens', base), {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ user }),
    ...(signal && { signal }),
  }).catch((error: Error) => {
    // The browser's own words ("Failed to fetch") differ from one to the next, and help nobody.
    throw error.name === 'TypeError' ? new Error('The gateway cannot be reached.') : error;
  });
  const text = await answer.json();
  if (answer.ok) return text.token as string;
  if (answer.status === 404) throw new NoDevelopmentTokens();
  if (answer.status < 500) throw new UnauthorizedError(text.message);
  throw new Error(text.message);
}

/** Tokens come from a back end of one's own. */
export class NoDevelopmentTokens extends UnauthorizedError {}

/** Whose token it is; only to be shown, the gateway checks it. */
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
