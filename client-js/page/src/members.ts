/** The members of a conversation, page by page. */
import { useCallback, useEffect, useRef, useState } from 'react';
import type { Conversation, Participant } from '../../src/index.js';

const PAGE = 50;

/** Returns the members that are loaded, whether there are more, why some could not be loaded, and a function that loads the next page.
 * @param version The list begins again when this changes. */
export function useMembers(conversation: Conversation, version: unknown) {
  const [members, setMembers] = useState<Participant[]>();
  const [hasMore, setHasMore] = useState(false);
  const [problem, setProblem] = useState<string>();
  const pages = useRef<AsyncGenerator<Participant[]>>(undefined);
  const load = useCallback(
    async (again = false) => {
      if (again || !pages.current) pages.current = conversation.participants({ limit: PAGE });
      const from = pages.current;
      try {
        const { value = [], done } = await from.next();
        // The list began again meanwhile, so this page is outdated.
        if (from !== pages.current) return;
        setMembers((before = []) => (again ? value : [...before, ...value]));
        setHasMore(!done && value.length === PAGE);
      } catch (error) {
        if (from === pages.current) setProblem((error as Error).message);
      }
    },
    [conversation],
  );
  // biome-ignore lint/correctness/useExhaustiveDependencies: loads again when the version changes.
  useEffect(() => {
    void load(true);
  }, [load, version]);
  const loadMore = () => {
    setProblem(undefined);
    void load();
  };
  return { members, hasMore, problem, setProblem, loadMore };
}
