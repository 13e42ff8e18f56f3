/** The MessagePack codec. Loaded when a client uses it. */
import { decode, encode } from '@msgpack/msgpack';
import type { Codec, Frame } from './codec.js';

/** Converts the ids in a decoded value from 16 bytes to text. The protocol has no other byte strings. */
function readable(value: unknown): unknown {
  if (value instanceof Uint8Array) {
    const hex = Array.from(value, (byte) => byte.toString(16).padStart(2, '0')).join('');
    return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
  }
  if (Array.isArray(value)) return value.map(readable);
  if (value && typeof value === 'object') {
    return Object.fromEntries(Object.entries(value).map(([name, field]) => [name, readable(field)]));
  }
  return value;
}

/** The codec for MessagePack frames. */
export const msgpack: Codec = {
  subprotocol: 'chat.v1.msgpack',
  encode: (frame) => encode(frame, { ignoreUndefined: true }),
  decode: (data) => readable(decode(data as ArrayBuffer)) as Frame,
};
