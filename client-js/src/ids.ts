/** Ids that a client makes: of messages and conversations, and of direct chats, also without a connection. */
import type { ConversationId, UserId } from './types.js';

const DM_NAMESPACE = '6d9c5d0e0b0f4a538a0e6d2f3c4177d1';

const toHex = (bytes: Uint8Array) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');

function toUuid(bytes: Uint8Array, version: number): string {
  bytes[6] = (bytes[6]! & 15) | (version << 4);
  bytes[8] = (bytes[8]! & 63) | 0x80;
  return toHex(bytes).replace(/^(.{8})(.{4})(.{4})(.{4})(.{12}).*/, '$1-$2-$3-$4-$5');
}

/** Version 4. `crypto.randomUUID` is there on secure pages only, and React Native has no `crypto`. */
export function uuid(): string {
  const bytes = new Uint8Array(16).map(() => Math.random() * 256);
  globalThis.crypto?.getRandomValues(bytes);
  return toUuid(bytes, 4);
}

/** The id of a direct chat is computed from its two users (docs/protocol.md): a UUID of version 5. Nothing where the platform
 * computes no hashes, as on pages that are not secure. */
export async function dmId(...users: [UserId, UserId]): Promise<ConversationId | undefined> {
  const subtle = globalThis.crypto?.subtle;
  if (!subtle) return undefined;
  // The order is that of UTF-8 bytes, which is that of code points; JavaScript compares UTF-16.
  const [low, high] = users.map((user) => toHex(new TextEncoder().encode(user))).sort();
  const name = `${DM_NAMESPACE}${low}00${high}`.match(/../g)!.map((byte) => Number.parseInt(byte, 16));
  return toUuid(new Uint8Array(await subtle.digest('SHA-1', new Uint8Array(name))), 5);
}
