/** Translates field names between `snake_case` on the wire (docs/protocol.md) and `camelCase` in the API. */
import type { Frame } from './codec.js';

/** The fields whose keys are ids or emoji, not names. */
const KEYED_BY_VALUE = ['cursors', 'reactions'];

const toCamel = (name: string) => name.replace(/_./g, ([, letter]) => letter!.toUpperCase());
const toSnake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

function renamed(value: unknown, rename: (name: string) => string): unknown {
  if (Array.isArray(value)) return value.map((item) => renamed(item, rename));
  if (!value || typeof value !== 'object') return value;
  const fields: Record<string, unknown> = {};
  for (const [name, field] of Object.entries(value)) fields[rename(name)] = KEYED_BY_VALUE.includes(name) ? field : renamed(field, rename);
  return fields;
}

/** Returns a frame with the names of the wire. */
export const toWire = (frame: object): Frame => renamed(frame, toSnake) as Frame;

/** Returns a frame with the names of the API. */
export const fromWire = (frame: Frame): Frame => renamed(frame, toCamel) as Frame;
