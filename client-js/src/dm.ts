/** The id of a direct chat is computed from its two users (docs/protocol.md), also without a connection. */
import type { ConversationId, UserId } from './types.js';

const DM_NAMESPACE = '6d9c5d0e0b0f4a538a0e6d2f3c4177d1';

/** A UUID of version 5. `crypto.subtle` would be there on secure pages only. */
export function dmId(one: UserId, other: UserId): ConversationId {
  const utf8 = (text: string) => new TextEncoder().encode(text);
  // The order is that of bytes; JavaScript compares UTF-16.
  const inOrder = [one, other].sort((a, b) => {
    const [left, right] = [utf8(a), utf8(b)];
    const at = left.findIndex((byte, i) => byte !== right[i]);
    return at < 0 ? left.length - right.length : left[at]! - (right[at] ?? -1);
  });
  const namespace = DM_NAMESPACE.match(/../g)!.map((byte) => Number.parseInt(byte, 16));
  const hash = sha1([...namespace, ...utf8(inOrder.join('\0'))]).slice(0, 16);
  hash[6] = (hash[6]! & 15) | 0x50;
  hash[8] = (hash[8]! & 63) | 0x80;
  const hex = hash.map((byte) => byte.toString(16).padStart(2, '0')).join('');
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
}

/** FIPS 180-4. Nothing here depends on its strength. */
function sha1(bytes: number[]): number[] {
  const bits = bytes.length * 8;
  const padded = [...bytes, 0x80];
  while (padded.length % 64 !== 60) padded.push(0);
  const toBytes = (word: number) => [word >>> 24, (word >>> 16) & 255, (word >>> 8) & 255, word & 255];
  padded.push(...toBytes(bits));
  const rotate = (word: number, by: number) => (word << by) | (word >>> (32 - by));
  const sum = [0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0];
  for (let block = 0; block < padded.length; block += 64) {
    const words: number[] = [];
    let [a, b, c, d, e] = sum as [number, number, number, number, number];
    for (let i = 0; i < 80; i++) {
      const at = block + i * 4;
      words[i] =
        i < 16
          ? (padded[at]! << 24) | (padded[at + 1]! << 16) | (padded[at + 2]! << 8) | padded[at + 3]!
          : rotate(words[i - 3]! ^ words[i - 8]! ^ words[i - 14]! ^ words[i - 16]!, 1);
      const [f, k] =
        i < 20
          ? [(b & c) | (~b & d), 0x5a827999]
          : i < 40
            ? [b ^ c ^ d, 0x6ed9eba1]
            : i < 60
              ? [(b & c) | (b & d) | (c & d), 0x8f1bbcdc]
              : [b ^ c ^ d, 0xca62c1d6];
      const next = (rotate(a, 5) + f + e + k + words[i]!) | 0;
      [a, b, c, d, e] = [next, a, rotate(b, 30), c, d];
    }
    [a, b, c, d, e].forEach((word, i) => {
      sum[i] = (sum[i]! + word) | 0;
    });
  }
  return sum.flatMap(toBytes);
}
