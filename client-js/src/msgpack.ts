/** The MessagePack codec; loaded only when a client asks for it. */
import { decode, encode } from '@msgpack/msgpack';
import type { Codec, Frame } from './codec.js';

/** Ids are 16 bytes on the wire; in the API they are text in either encoding. There are no other bytes. */
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

export const msgpack: Codec = {
  subprotocol: 'chat.v1.msgpack',
  encode: (frame) => encode(frame, { ignoreUndefined: true }),
  decode: (data) => readable(decode(data as ArrayBuffer)) as Frame,
};
