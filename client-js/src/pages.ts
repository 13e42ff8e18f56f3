/** Options for reading pages. */
export interface Paging {
  /** The number of items in a page; 50 by default. */
  limit?: number | undefined;
  /** Ends the requests when it is aborted. */
  signal?: AbortSignal | undefined;
}

/** Returns an iterator over the pages of a list. After a request that failed, `next()` may be called again and asks for the
 * same page; a generator function would have ended. */
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
