/** Ids that the client computes: of messages, conversations and direct chats. */
import type { ConversationId, UserId } from './types.js';

const DM_NAMESPACE = '6d9c5d0e0b0f4a538a0e6d2f3c4177d1';

const toHex = (bytes: Uint8Array) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');

function toUuid(bytes: Uint8Array, version: number): string {
  bytes[6] = (bytes[6]! & 15) | (version << 4);
  bytes[8] = (bytes[8]! & 63) | 0x80;
  return toHex(bytes).replace(/^(.{8})(.{4})(.{4})(.{4})(.{12}).*/, '$1-$2-$3-$4-$5');
}

/** Returns a random UUID of version 4. Pages that are not secure lack `crypto.randomUUID`, and React Native lacks `crypto`. */
export function uuid(): string {
  const bytes = new Uint8Array(16).map(() => Math.random() * 256);
  globalThis.crypto?.getRandomValues(bytes);
  return toUuid(bytes, 4);
}

/** Returns the id of the direct chat of two users (docs/protocol.md), a UUID of version 5. Returns undefined on a platform
 * without hash functions, as on a page that is not secure. */
export async function dmId(...users: [UserId, UserId]): Promise<ConversationId | undefined> {
  const subtle = globalThis.crypto?.subtle;
  if (!subtle) return undefined;
  // Users are ordered by their UTF-8 bytes. JavaScript would compare UTF-16 units.
  const [low, high] = users.map((user) => toHex(new TextEncoder().encode(user))).sort();
  const name = `${DM_NAMESPACE}${low}00${high}`.match(/../g)!.map((byte) => Number.parseInt(byte, 16));
  return toUuid(new Uint8Array(await subtle.digest('SHA-1', new Uint8Array(name))), 5);
}
