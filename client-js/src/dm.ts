/** The id of a direct chat is computed from its two users (docs/protocol.md), also without a connection. */
import type { ConversationId, UserId } from './types.js';

const DM_NAMESPACE = '6d9c5d0e0b0f4a538a0e6d2f3c4177d1';

/** A UUID of version 5; nothing where the platform computes no hashes, as on pages that are not secure. */
export async function dmId(...users: [UserId, UserId]): Promise<ConversationId | undefined> {
  if (!globalThis.crypto?.subtle) return undefined;
  // The order is that of UTF-8 bytes, which is that of code points; JavaScript compares UTF-16.
  const toHex = (bytes: Iterable<number>) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
  const [low, high] = users.map((user) => toHex(new TextEncoder().encode(user))).sort();
  const name = `${DM_NAMESPACE}${low}00${high}`.match(/../g)!.map((byte) => Number.parseInt(byte, 16));
  const hash = new Uint8Array(await crypto.subtle.digest('SHA-1', new Uint8Array(name)));
  hash[6] = (hash[6]! & 15) | 0x50;
  hash[8] = (hash[8]! & 63) | 0x80;
  return toHex(hash).replace(/^(.{8})(.{4})(.{4})(.{4})(.{12}).*/, '$1-$2-$3-$4-$5');
}
