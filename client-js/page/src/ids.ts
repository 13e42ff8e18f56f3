/** Ids of users that somebody types. An id has only visible characters. */

const HIDDEN = /[\s\p{C}\p{DI}\u2800\ufffc]+/gu;

/** Returns the id for a name: the name itself if it may be one. Empty for a name without visible characters. */
export function idOf(name: string): string {
  const text = name.trim();
  return text.search(HIDDEN) < 0
    ? text
    : text
        .normalize()
        .replace(HIDDEN, '-')
        .replace(/^-+|-+$/g, '');
}

/** Whether the gateway takes an id of this length. */
export const isShort = (id: string): boolean => new TextEncoder().encode(id).length <= 64;

/** Returns the ids for names with commas between. A name may have spaces. */
export const idsOf = (names: string): string[] =>
  names
    .split(/[,;،؛、，；\n]/)
    .map(idOf)
    .filter(Boolean);
