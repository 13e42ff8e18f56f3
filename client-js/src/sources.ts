/** What an application passes to a client, URLs and tokens or functions that return them, and what takes its place. */
import { SOURCE_TIMEOUT_MS, within } from './backoff.js';
import { indexedDbStorage } from './browser-storage.js';
import { ChatError, textOf, UnauthorizedError } from './codes.js';
import type { TokenSource } from './connection.js';
import { memoryStorage, type OutboxStorage } from './storage.js';

/** Returns the origin with `ws:` for `http:`, which is the same gateway. */
export function originOf(url: string): string {
  try {
    // React Native knows no origin of a `ws:` URL.
    return new URL(url, globalThis.location?.href).origin.replace(/^http/, 'ws') || url;
  } catch {
    // `connect()` reports an invalid URL.
    return url;
  }
}

/** Returns a source of URLs from one of the application. After a value that is no URL, or none in time, the client asks again. */
export function urlsOf(source: () => Promise<string> | string): () => Promise<string> {
  return () =>
    within(SOURCE_TIMEOUT_MS, async () => {
      const url = textOf(await source(), 'url');
      // Throws if it is none.
      new URL(url, globalThis.location?.href);
      return url;
    });
}

/** Parts of a client that are loaded once they are needed. */
export type Parts<P> = { [name in keyof P]?: Promise<P[name]> };

/** Returns a part of the client. It is loaded once, and again after a failure. */
export async function loadedOnce<P, K extends keyof P>(parts: Parts<P>, name: K, load: () => Promise<P[K]>): Promise<P[K]> {
  try {
    return await (parts[name] ??= load());
  } catch (cause) {
    delete parts[name];
    throw new ChatError('unreachable', `a part of the client was not loaded: ${(cause as Error).message}`, { cause });
  }
}

/** Returns a source for a token that cannot be renewed. */
export function fixed(token: string): TokenSource {
  return ({ reason }) => {
    if (reason !== 'initial') throw new UnauthorizedError('the token expired or was refused');
    // Such as a variable of the environment that is not set.
    if (typeof token !== 'string' || !token) throw new UnauthorizedError();
    return token;
  };
}

/** Returns IndexedDB if there is one, else memory. Some browsers throw where storage is forbidden.
 * @param failed Called with the reason if a browser has none. */
export function ownStorage(failed: (error: Error) => void): OutboxStorage {
  let reason: unknown = 'no IndexedDB';
  try {
    if (globalThis.indexedDB) return indexedDbStorage();
  } catch (error) {
    reason = error;
  }
  // Reported later, so that the application can listen first. Outside browsers memory is the expected storage.
  if (globalThis.document) queueMicrotask(() => failed(new Error(`The outbox is in memory only: ${reason}`)));
  return memoryStorage();
}
