/** What asks for pages: how long each is, and what ends it. */
export interface Paging {
  /** 50, if not given. */
  limit?: number | undefined;
  signal?: AbortSignal | undefined;
}

/** Page after page, each beginning where the one before said. A request that fails does not end it, as it would end a
 * generator function: `next()` may be called again, and asks for the same page. */
export function pages<Item, Place>(
  ask: (from: Place | undefined) => Promise<{ items: Item[]; next?: Place | undefined }>,
): AsyncGenerator<Item[]> {
  type Result = IteratorResult<Item[], void>;
  let from: Place | undefined;
  let over = false;
  let turn: Promise<unknown> = Promise.resolve();
  const page = async (): Promise<Result> => {
    while (!over) {
      const { items, next } = await ask(from);
      from = next;
      over ||= !next;
      if (items.length) return { done: false, value: items };
    }
    return { done: true, value: undefined };
  };
  const iterator = {
    next: () => (turn = turn.then(page, page)),
    return: () => {
      over = true;
      return page();
    },
    throw: async (error: unknown) => {
      over = true;
      throw error;
    },
    [Symbol.asyncIterator]: () => iterator,
  };
  return iterator as unknown as AsyncGenerator<Item[]>;
}
