/** What asks for pages: how long each is, and what ends it. */
export interface Paging {
  /** 50, if not given. */
  limit?: number | undefined;
  signal?: AbortSignal | undefined;
}

/** Page after page, each beginning where the one before said. */
export async function* pages<Item, Place>(
  ask: (from: Place | undefined) => Promise<{ items: Item[]; next?: Place | undefined }>,
): AsyncGenerator<Item[]> {
  let from: Place | undefined;
  do {
    const { items, next } = await ask(from);
    if (items.length) yield items;
    from = next;
  } while (from);
}
