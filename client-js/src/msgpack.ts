/** The MessagePack codec. Loaded when a client uses it. */
import { decode, encode } from '@msgpack/msgpack';
import type { Codec, Frame } from './codec.js';

/** What the decoder reads instead of the key `__proto__`, which it refuses. An emoji may be called so, and contains no zero byte. */
const PROTO = '\0__proto__';

/** The decoder of keys that are as long as `__proto__`. */
const keyDecoder = {
  canBeCached: (length: number) => length === PROTO.length - 1,
  decode: (bytes: Uint8Array, offset: number, length: number) => {
    const key = new TextDecoder().decode(bytes.subarray(offset, offset + length));
    return key === PROTO.slice(1) ? PROTO : key;
  },
};

/** Converts the ids in a decoded value from 16 bytes to text. The protocol has no other byte strings. */
function readable(value: unknown): unknown {
  if (value instanceof Uint8Array) {
    const hex = Array.from(value, (byte) => byte.toString(16).padStart(2, '0')).join('');
    return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
  }
  if (Array.isArray(value)) return value.map(readable);
  if (value && typeof value === 'object') {
    return Object.fromEntries(Object.entries(value).map(([name, field]) => [name === PROTO ? PROTO.slice(1) : name, readable(field)]));
  }
  return value;
}

/** The codec for MessagePack frames. */
export const msgpack: Codec = {
  subprotocol: 'chat.v1.msgpack',
  encode: (frame) => encode(frame, { ignoreUndefined: true }),
  decode: (data) => readable(decode(data as ArrayBuffer, { keyDecoder })) as Frame,
};
