import { useEffect, useRef, useState } from 'react';
import type { ChatClient, PublicConversation } from '../../src/index.js';
import { Avatar, Dialog, Skeleton } from './parts.js';
import { useRoving } from './roving.js';
import { Name } from './words.js';

/** The dialog that lists public groups and channels. */
export function Browse({ chat, onOpen, onClose }: { chat: ChatClient; onOpen: (id: string) => void; onClose: () => void }) {
  const [items, setItems] = useState<PublicConversation[]>([]);
  const [state, setState] = useState<'loading' | 'more' | 'end' | string>('loading');
  const list = useRef<HTMLUListElement>(null);
  useRoving(list, 'li > button');
  const pages = useRef<AsyncGenerator<PublicConversation[]>>(undefined);

  const load = async () => {
    setState('loading');
    try {
      pages.current ??= chat.publicConversations({ limit: 50 });
      const { value, done } = await pages.current.next();
      if (value) setItems((before) => [...before, ...value]);
      setState(done || value.length < 50 ? 'end' : 'more');
    } catch (error) {
      setState((error as Error).message);
    }
  };
  // biome-ignore lint/correctness/useExhaustiveDependencies: runs once.
  useEffect(() => {
    pages.current = undefined;
    setItems([]);
    void load();
  }, []);

  return (
    <Dialog title="Public conversations" onClose={onClose}>
      <ul ref={list} className="browse" aria-busy={state === 'loading'}>
        {items.map(({ conversation, kind, name }) => (
          <li key={conversation}>
            <button type="button" onClick={() => onOpen(conversation)}>
              <Avatar name={name ?? kind} kind={kind} />
              <span className="title">
                <Name of={name ?? `A ${kind}`} />
              </span>
              <span className="preview">{kind}</span>
            </button>
          </li>
        ))}
      </ul>
      {state === 'loading' && !items.length && <Skeleton rows={4} />}
      {state === 'end' && !items.length && <p>Nothing is public here yet.</p>}
      {state === 'more' && (
        <button type="button" onClick={load}>
          More
        </button>
      )}
      {!['loading', 'more', 'end'].includes(state) && (
        <p role="alert" className="problem">
          {state}{' '}
          <button type="button" onClick={load}>
            Try again
          </button>
        </p>
      )}
    </Dialog>
  );
}
