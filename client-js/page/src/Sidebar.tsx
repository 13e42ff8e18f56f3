import { memo, type ReactNode, useCallback, useEffect, useMemo, useRef, useState, useSyncExternalStore } from 'react';
import type { ChatClient, InboxItem } from '../../src/index.js';
import { usePresence } from '../../src/react.js';
import { Browse } from './Browse.js';
import { shortTime, useToday } from './days.js';
import { useDeleted } from './deleting.js';
import { isMuted } from './muting.js';
import { NewConversation } from './NewConversation.js';
import type { Notifying } from './notify.js';
import { Avatar, Icon, Skeleton } from './parts.js';
import { useRoving } from './roving.js';
import { has } from './search.js';
import { faceOf, Name, previewOf, titleOf, typingText } from './words.js';

/** The number of items to render at first, and to add near the end. */
const STEP = 60;

interface Props {
  chat: ChatClient;
  user: string;
  /** What the user is called here. */
  name: string;
  items: readonly InboxItem[];
  loaded: boolean;
  selected: string | undefined;
  notifying: Notifying | undefined;
  onSelect: (id: string | undefined) => void;
  onSignOut: () => void;
  children: ReactNode;
}

/** The inbox, with the buttons above it. */
export function Sidebar({ chat, user, name, items, loaded, selected, notifying, onSelect, onSignOut, children }: Props) {
  const [dialog, setDialog] = useState<'new' | 'browse'>();
  const [filter, setFilter] = useState('');
  const [shown, setShown] = useState(STEP);
  const today = useToday();
  const list = useRef<HTMLUListElement>(null);
  useRoving(list, 'li > button');
  const wanted = filter.trim();
  const found = wanted ? items.filter((item) => has(titleOf(item, user), wanted)) : items;

  const scrolled = () => {
    const { scrollTop, clientHeight, scrollHeight } = list.current!;
    if (scrollHeight - scrollTop - clientHeight > clientHeight) return;
    if (shown < items.length) setShown(shown + STEP);
    else if (chat.inbox.more) chat.inbox.loadMore().catch(() => {});
  };
  const open = (id: string) => {
    setDialog(undefined);
    onSelect(id);
  };

  return (
    <nav className="sidebar" aria-label="Conversations">
      <header>
        <Avatar name={name} kind="dm" />
        <h2 title={user}>
          <Name of={name} />
        </h2>
        {notifying && (
          <button
            type="button"
            className="quiet"
            aria-label="Notifications"
            title="Notifications"
            aria-pressed={notifying.on}
            onClick={notifying.toggle}
          >
            <Icon name={notifying.on ? 'bell' : 'quiet'} />
          </button>
        )}
        <button
          type="button"
          className="quiet"
          aria-label="Browse public conversations"
          title="Browse public conversations"
          onClick={() => setDialog('browse')}
        >
          <Icon name="compass" />
        </button>
        <button type="button" className="quiet" aria-label="New conversation" title="New conversation" onClick={() => setDialog('new')}>
          <Icon name="plus" />
        </button>
        <button type="button" className="quiet" aria-label="Sign out" title="Sign out" onClick={onSignOut}>
          <Icon name="out" />
        </button>
      </header>
      {children}
      {notifying?.problem && (
        <p role="alert" className="problem">
          {notifying.problem}
        </p>
      )}
      <input
        type="search"
        className="filter"
        aria-label="Find a conversation"
        placeholder="Find a conversation"
        value={filter}
        onChange={(event) => setFilter(event.target.value)}
      />
      <ul ref={list} onScroll={scrolled} aria-busy={!loaded}>
        {found.slice(0, shown).map((item) => (
          <Item
            key={item.conversation}
            chat={chat}
            user={user}
            item={item}
            muted={isMuted(item)}
            today={today}
            selected={item.conversation === selected}
            onSelect={onSelect}
          />
        ))}
        {!loaded && !items.length && (
          <li>
            <Skeleton rows={8} />
          </li>
        )}
        {loaded && !found.length && (
          <li className="none">
            {wanted ? 'No conversation has this name' : 'No conversations yet'}
            {!wanted && (
              <button type="button" onClick={() => setDialog('new')}>
                Start a conversation
              </button>
            )}
          </li>
        )}
      </ul>
      {dialog === 'new' && <NewConversation chat={chat} onOpen={open} onClose={() => setDialog(undefined)} />}
      {dialog === 'browse' && <Browse chat={chat} onOpen={open} onClose={() => setDialog(undefined)} />}
    </nav>
  );
}

/** Returns the other users who are typing in a conversation, without loading its messages. */
function useTyping(chat: ChatClient, id: string): string[] {
  // The client holds a conversation weakly, so the component has to hold it.
  const conversation = useMemo(() => chat.conversation(id), [chat, id]);
  const users = useSyncExternalStore(
    useCallback((show) => conversation.on('change', show), [conversation]),
    // No id has a line break.
    () => conversation.typing.join('\n'),
  );
  return users ? users.split('\n') : [];
}

const Item = memo(
  function Item({
    chat,
    user,
    item,
    muted,
    selected,
    onSelect,
  }: Pick<Props, 'chat' | 'user'> & {
    item: InboxItem;
    muted: boolean;
    today: string;
    selected: boolean;
    onSelect: (id: string) => void;
  }) {
    const title = titleOf(item, user);
    const other = item.kind === 'dm' && item.name !== user ? item.name : undefined;
    const presence = usePresence(chat, other);
    const typing = useTyping(chat, item.conversation);
    const button = useRef<HTMLButtonElement>(null);
    useEffect(() => {
      if (selected) button.current?.scrollIntoView({ block: 'nearest' });
    }, [selected]);
    const last = item.lastMessage;
    const isDeleted = useDeleted(item.conversation, last?.seq);
    return (
      <li>
        <button
          ref={button}
          type="button"
          className={muted ? 'muted' : undefined}
          aria-current={selected || undefined}
          onClick={() => onSelect(item.conversation)}
        >
          <Avatar name={faceOf(item, user)} kind={item.kind} online={presence?.online} />
          <span className="title">
            <Name of={title} />
            {muted && <Icon name="quiet" />}
            {presence?.online && <span className="sr-only">, online</span>}
            {muted && <span className="sr-only">, muted</span>}
          </span>
          {last && <time dateTime={new Date(last.at).toISOString()}>{shortTime(last.at)}</time>}
          <span className={typing.length ? 'preview typing' : 'preview'}>
            {typing.length ? typingText(typing) : previewOf(item, user, isDeleted)}
          </span>
          {item.unread > 0 && (
            <span className="badge">
              {item.unread > 999 ? '999+' : item.unread}
              <span className="sr-only"> unread</span>
            </span>
          )}
        </button>
      </li>
    );
  },
  (a, b) => a.item === b.item && a.muted === b.muted && a.today === b.today && a.selected === b.selected && a.chat === b.chat,
);
