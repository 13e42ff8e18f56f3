/** A frame: a map with a `type`, and an `id` where it belongs to a request. */
export type Frame = { type: string; id?: number } & Record<string, unknown>;

export interface Codec {
  /** The WebSocket subprotocol that means it. */
  readonly subprotocol: string;
  encode(frame: Frame): string | Uint8Array<ArrayBuffer>;
  decode(data: string | ArrayBuffer): Frame;
}

export const json: Codec = {
  subprotocol: 'chat.v1.json',
  encode: (frame) => JSON.stringify(frame),
  decode: (data) => JSON.parse(data as string) as Frame,
};
