/** A frame: a map with a `type`, and with the `id` of the request it belongs to, if any. */
export type Frame = { type: string; id?: number } & Record<string, unknown>;

/** An encoding of frames. */
export interface Codec {
  /** The WebSocket subprotocol of the encoding. */
  readonly subprotocol: string;
  encode(frame: Frame): string | Uint8Array<ArrayBuffer>;
  decode(data: string | ArrayBuffer): Frame;
}

/** The codec for JSON frames. */
export const json: Codec = {
  subprotocol: 'chat.v1.json',
  encode: (frame) => JSON.stringify(frame),
  decode: (data) => JSON.parse(data as string) as Frame,
};
