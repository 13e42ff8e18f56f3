/** The list of messages. It loads ten at a time in both directions and keeps some hundreds in the document. The messages in
 * sight do not move when others are added or removed above them. */
import { Fragment, useCallback, useEffect, useLayoutEffect, useRef, useState } from 'react';
import type { ChatMessage } from '../../src/index.js';
import type { ConversationView } from '../../src/react.js';
import { Announcements } from './Announcements.js';
import { isAttended, onAttention } from './attention.js';
import { dayName, dayOf, useToday } from './days.js';
import { Icon, Skeleton } from './parts.js';
import { type Actions, Row } from './Row.js';
import { useRoving } from './roving.js';

/** The time within which messages of one sender form a group. */
const GROUP_MS = 5 * 60 * 1000;
/** The distance from the end that still counts as being at the end, in pixels. */
const END_PX = 48;
/** The number of screens before an end at which more is loaded. */
const AHEAD = 1.5;

interface Props {
  user: string;
  view: ConversationView;
  connected: boolean;
  unreadFrom: number | undefined;
  /** Messages that were sent before this time of the gateway were missed. The list stays at their line. */
  missedBefore: number | undefined;
  /** Whether the details cover the list. */
  covered: boolean;
  withSenders: boolean;
  /** The message to scroll to. A new object scrolls to it again. */
  target: { seq: number } | undefined;
  /** Whether the user may react and edit. */
  may: boolean;
  /** The time in seconds within which a message may be edited; 0 is for ever. */
  editWindowS: number;
  actions: Actions;
  onSeenAll: () => void;
}

/** Returns the seq of the newest stored message. */
function newestOf(messages: readonly ChatMessage[]): number {
  for (let i = messages.length - 1; i >= 0; i--) if (messages[i]!.seq) return messages[i]!.seq!;
  return 0;
}

/** The messages of a conversation, in a box that scrolls. */
export function MessageList({
  user,
  view,
  connected,
  unreadFrom,
  missedBefore,
  covered,
  withSenders,
  target,
  may,
  editWindowS,
  actions,
  onSeenAll,
}: Props) {
  const { conversation, messages } = view;
  const box = useRef<HTMLDivElement>(null);
  /** The first and the last row and where they end. A row's beginning depends on the message before it, its end does not. */
  const edges = useRef<{ key: string; end: number }[]>([]);
  const atBottom = useRef(true);
  /** The seq of the newest message in the document. The list may have a newer one that is not in it yet. */
  const newest = useRef(0);
  /** The same when there was no newer one. When one becomes known, the user has not left the end. */
  const end = useRef(0);
  /** The height of the box at the last look. */
  const height = useRef(0);
  const [away, setAway] = useState(false);
  const placed = useRef(false);
  /** The seq to scroll to as soon as it is in the document. */
  const goal = useRef<number>(undefined);

  /** The load that failed. Until it succeeds, nothing else is loaded automatically. */
  const [problem, setProblem] = useState<{ message: string; again: () => void }>();
  const failing = useRef(false);
  const attempt = useCallback(async (load: () => Promise<void>): Promise<boolean> => {
    failing.current = false;
    setProblem(undefined);
    try {
      await load();
      return true;
    } catch (error) {
      failing.current = true;
      setProblem({ message: (error as Error).message, again: () => void attempt(load) });
      return false;
    }
  }, []);
  // biome-ignore lint/correctness/useExhaustiveDependencies: runs once for each connection.
  useEffect(() => {
    if (connected) problem?.again();
  }, [connected]);

  const setStop = useRoving(box, '[data-key]');
  const rows = useCallback(() => box.current!.querySelectorAll<HTMLElement>('[data-key]'), []);

  const toEnd = useCallback(() => {
    // The box is gone when its last resize is reported, or when a page arrives after the list was closed.
    const scroller = box.current;
    if (scroller) scroller.scrollTop = scroller.scrollHeight;
  }, []);

  /** Notes the position, marks messages in sight as read, and loads more near an end. */
  const look = useCallback(() => {
    const scroller = box.current;
    if (!scroller) return;
    // A box that became smaller is still at its end. A scroll event may come before its resize is reported.
    if (atBottom.current && scroller.clientHeight < height.current) toEnd();
    height.current = scroller.clientHeight;
    const { scrollTop, clientHeight, scrollHeight } = scroller;
    const all = rows();
    // Binary search for the first row that ends below the upper edge.
    let [low, high] = [0, all.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      const row = all[middle]!;
      if (row.offsetTop + row.offsetHeight <= scrollTop) low = middle + 1;
      else high = middle;
    }
    const below = scrollHeight - scrollTop - clientHeight;
    if (conversation.atEnd && newestOf(conversation.messages) === newest.current) end.current = newest.current;
    const isEnd = newest.current === end.current;
    atBottom.current = isEnd && below < END_PX;
    setAway(!isEnd || below > clientHeight);
    let seen = 0;
    let lowest = all[low];
    for (let i = low; i < all.length && all[i]!.offsetTop < scrollTop + clientHeight; i++) {
      lowest = all[i];
      seen = Number(lowest!.dataset.seq) || seen;
    }
    setStop(lowest);
    if (seen && isAttended() && conversation.item) conversation.read(atBottom.current ? Math.max(seen, newest.current) : seen);
    // The reader is at its end, so a full list drops its oldest messages, however many newer ones it has already.
    if (atBottom.current && conversation.atEnd) void conversation.jumpTo();
    if (conversation.loading || failing.current || !conversation.messages.length) return;
    if (scrollTop < clientHeight * AHEAD && !conversation.atStart) void attempt(() => conversation.loadOlder());
    else if (below < clientHeight * AHEAD && !conversation.atEnd) void attempt(() => conversation.loadNewer());
  }, [conversation, rows, attempt, setStop, toEnd]);

  const showGoal = useCallback((): boolean => {
    const row = goal.current !== undefined && box.current!.querySelector<HTMLElement>(`[data-seq="${goal.current}"]`);
    if (!row) return false;
    goal.current = undefined;
    row.scrollIntoView({ block: 'center' });
    const background = 'var(--highlight)';
    const isStill = matchMedia('(prefers-reduced-motion: reduce)').matches;
    row.animate([{ background }, isStill ? { background } : {}], 1500);
    return true;
  }, []);

  // biome-ignore lint/correctness/useExhaustiveDependencies: runs after each change of the list.
  useLayoutEffect(() => {
    const scroller = box.current!;
    const rowOf = (key: string) => scroller.querySelector<HTMLElement>(`[data-key="${CSS.escape(key)}"]`);
    const line = scroller.querySelector<HTMLElement>('.unread-line');
    // The former first or last row, whichever is still there, has moved as far as all messages in sight.
    const edge = edges.current.map(({ key, end }) => ({ row: rowOf(key), end })).find(({ row }) => row);
    const toLine = () => {
      if (line) scroller.scrollTop = line.offsetTop - scroller.clientHeight / 3;
      else toEnd();
    };
    if (!placed.current && messages.length) {
      placed.current = true;
      if (!showGoal()) toLine();
    } else if (goal.current === undefined || !showGoal()) {
      // What comes while nobody looks stays below the line, until the user scrolls on, and so does what was missed.
      const isUnseen = !isAttended() && (unreadFrom ?? 0) > (conversation.item?.readSeq ?? 0);
      const last = messages.at(-1);
      const isMissed = (last?.at ?? 0) < (missedBefore ?? 0) && (last?.seq ?? 0) > (conversation.item?.readSeq ?? 0);
      if (atBottom.current && (isUnseen || isMissed)) toLine();
      else if (atBottom.current || !edge) toEnd();
      else scroller.scrollTop += endOf(edge.row!, scroller) - edge.end;
    }
    height.current = scroller.clientHeight;
    newest.current = newestOf(messages);
    const all = rows();
    edges.current = [all[0], all[all.length - 1]].flatMap((row) => (row ? [{ key: row.dataset.key!, end: endOf(row, scroller) }] : []));
    look();
  }, [messages, view, unreadFrom]);

  useEffect(() => {
    const resized = new ResizeObserver(() => {
      if (atBottom.current) toEnd();
      look();
    });
    resized.observe(box.current!);
    const offAttention = onAttention(look);
    return () => {
      resized.disconnect();
      offAttention();
    };
  }, [look, toEnd]);
  useEffect(() => {
    if (!covered) look();
  }, [covered, look]);

  /** Scrolls to a message, and loads it if it is not in the list. */
  const jump = useCallback(
    async (seq: number) => {
      goal.current = seq;
      atBottom.current = false;
      if (showGoal()) look();
      else await attempt(() => conversation.jumpTo(seq));
    },
    [conversation, showGoal, look, attempt],
  );
  useEffect(() => {
    if (target) void jump(target.seq);
  }, [target, jump]);
  const jumpToEnd = () =>
    attempt(async () => {
      await conversation.jumpTo();
      atBottom.current = true;
      toEnd();
      onSeenAll();
    });

  const today = useToday();
  const unread = conversation.item?.unread ?? 0;
  const first = messages[0];
  const lineInList = unreadFrom !== undefined && messages.some((message) => message.seq === unreadFrom);
  return (
    <div className="messages-frame">
      <div
        ref={box}
        className="messages"
        onScroll={look}
        tabIndex={-1}
        role="log"
        aria-live="off"
        aria-label="Messages"
        aria-busy={conversation.loading}
      >
        {/* Another zone changes the time of each message. */}
        <div className="rows" key={today.split(' ')[0]}>
          {conversation.atStart && first && <p className="beginning">This is the beginning of the conversation.</p>}
          {!first && !conversation.atEnd && !conversation.error && <Skeleton rows={7} />}
          {!first && conversation.atEnd && <p className="beginning">No messages yet. Say hello!</p>}
          {messages.map((message, i) => {
            const before = messages[i - 1];
            const day = !before || dayOf(before.at) !== dayOf(message.at);
            const line = message.seq !== undefined && message.seq === unreadFrom;
            const follows =
              !day && !line && before.kind === 'text' && before.sender === message.sender && message.at - before.at < GROUP_MS;
            return (
              <Fragment key={message.key}>
                {day && <h3 className="day">{dayName(message.at)}</h3>}
                {line && <p className="unread-line">New messages</p>}
                <Row
                  conversation={conversation}
                  message={message}
                  own={message.sender === user}
                  follows={follows}
                  withSender={withSenders}
                  user={user}
                  may={may}
                  editWindowS={editWindowS}
                  actions={actions}
                  onJump={jump}
                />
              </Fragment>
            );
          })}
        </div>
      </div>
      <Announcements conversation={conversation} user={user} />
      {unreadFrom !== undefined && !lineInList && (
        <button type="button" className="float top" onClick={() => jump(unreadFrom)}>
          <Icon name="up" /> First unread message
        </button>
      )}
      {problem && (
        <p role="alert" className="float bottom problem">
          {problem.message}
          <button type="button" onClick={problem.again}>
            Try again
          </button>
        </p>
      )}
      {away && !problem && (
        <button
          type="button"
          className="float bottom"
          onClick={() => void jumpToEnd()}
          aria-label={unread ? `To the end, ${unread} unread` : 'To the end'}
        >
          {unread > 0 && <span className="badge">{unread > 999 ? '999+' : unread}</span>}
          <Icon name="down" />
        </button>
      )}
      {conversation.loading && <span className="loading" role="progressbar" aria-label="Loading messages" />}
    </div>
  );
}

/** Returns where a row ends inside the scrolled content. `offsetTop` would be rounded to whole pixels. */
const endOf = (row: HTMLElement, scroller: HTMLElement) => row.getBoundingClientRect().bottom + scroller.scrollTop;
