import { memo, type ReactNode, useCallback, useEffect, useMemo, useRef, useState } from 'react';
import type { ChatClient, ChatMessage, InboxItem, Message, Seq } from '../../src/index.js';
import { useConnection, useConversation, usePresence } from '../../src/react.js';
import { useAttaching, useDrop } from './attaching.js';
import { isAttended } from './attention.js';
import { Composer } from './Composer.js';
import { ConversationMenu } from './ConversationMenu.js';
import { now } from './clock.js';
import { Details, Panel } from './Details.js';
import { useToday } from './days.js';
import { deleteMessage } from './deleting.js';
import { keepWriting, writingOf } from './drafts.js';
import { headingOf, isOutside, kindOf, mayChange, mayEdit, maySend, nameIn } from './facts.js';
import { MessageList } from './MessageList.js';
import { Avatar, Confirm, Icon, Skeleton, useMedia } from './parts.js';
import { ReadBy } from './ReadBy.js';
import type { Actions } from './Row.js';
import { base } from './session.js';
import type { Sounding } from './sound.js';
import { gistOf, Name, presenceText, typingText } from './words.js';

/** The time for which the page says what was done, in milliseconds. */
const DONE_MS = 3_000;

interface Props {
  chat: ChatClient;
  id: string;
  /** What the address names. A new object with a seq scrolls to that message. */
  route: { seq?: number | undefined };
  user: string;
  /** The line that says whether there is a connection, if no other part of the page has it. */
  connection: ReactNode;
  sounding: Sounding;
  /** Whether the gateway keeps settings for conversations. */
  maySet: boolean;
  /** Whether messages are pushed to any device of the user. */
  hasPushes: boolean;
  onSelect: (id: string | undefined) => void;
}

/** Whether a message counts as unread. */
const isUnread = ({ seq = 0, sender, kind, deleted }: Message | ChatMessage, { readSeq }: InboxItem, user: string) =>
  seq > readSeq && sender !== user && kind === 'text' && !deleted;

/** A conversation: its title, its messages, and the field to write in. `memo` keeps changes of the inbox from rendering it. */
export const Thread = memo(function Thread({ chat, id, route, user, connection, sounding, maySet, hasPushes, onSelect }: Props) {
  const conversation = chat.conversation(id);
  const item = conversation.item;
  // The first unread message when the conversation was opened. The list begins there, under a line.
  const [unreadFrom, setUnreadFrom] = useState(() => (item?.unread ? item.readSeq + 1 : undefined));
  const view = useConversation(chat, id, route.seq ?? unreadFrom);
  // What comes while nobody looks is unread, and the line goes above it.
  useEffect(
    () =>
      conversation.on('message', (message) => {
        const { item } = conversation;
        if (item && isUnread(message, item, user) && !isAttended()) setUnreadFrom(item.readSeq + 1);
      }),
    [conversation, user],
  );
  const state = useConnection(chat);
  const connected = state.at === 'connected';
  /** What was sent before this time of the gateway came late, because there was no connection. */
  const [missedBefore, setMissedBefore] = useState<number>();
  /** The connection whose missed messages are below the line. */
  const [caughtUp, setCaughtUp] = useState(state);
  if (connected && caughtUp !== state && item) {
    // A page of the history may have them before their events come. The list must not show them first, because it reads what it shows.
    const since = state.since - Date.now() + now();
    if (view.messages.some((message) => message.at < since && isUnread(message, item, user))) {
      setCaughtUp(state);
      setMissedBefore(since);
      setUnreadFrom(item.readSeq + 1);
    }
  }
  const [replyTo, setReply] = useState(() => writingOf(user, id).replyTo);
  const setReplyTo = useCallback(
    (replyTo?: Seq) => {
      keepWriting(user, id, { replyTo });
      setReply(replyTo);
    },
    [user, id],
  );
  const [target, setTarget] = useState<{ seq: number }>();
  useEffect(() => {
    if (route.seq) setTarget({ seq: route.seq });
  }, [route]);
  const [showsDetails, setShowsDetails] = useState(false);
  const [problem, setProblem] = useState<string>();
  /** What was done, shown for a moment. */
  const [done, setDone] = useState<{ text: string }>();
  useEffect(() => {
    if (!done) return;
    const timer = setTimeout(() => setDone(undefined), DONE_MS);
    return () => clearTimeout(timer);
  }, [done]);
  const { details, removed, error } = conversation;
  const kind = kindOf(conversation);
  const face = nameIn(conversation, user);
  const title = headingOf(conversation, user, face);
  const presence = usePresence(chat, kind === 'dm' && face && face !== user ? face : undefined);
  const outside = isOutside(conversation);
  useToday();

  // A user who has not joined a public channel gets its messages by a subscription.
  useEffect(() => {
    if (!outside || details?.kind !== 'channel') return;
    conversation.subscribe().catch(() => {});
    return () => {
      conversation.unsubscribe().catch(() => {});
    };
  }, [conversation, outside, details?.kind]);

  /** The message that is being edited, as it was when that began. */
  const [edited, setEdit] = useState(() => writingOf(user, id).edit?.from);
  /** Begins an edit, or ends it. The composer keeps the one that is begun. */
  const setEdited = useCallback(
    (message?: ChatMessage) => {
      if (!message) keepWriting(user, id, { edit: undefined });
      setEdit(message);
    },
    [user, id],
  );
  const [removing, setRemoving] = useState<ChatMessage>();
  const [informing, inform] = useState<ChatMessage>();
  const actions = useMemo<Actions>(
    () => ({
      reply: (message) => {
        setEdited(undefined);
        setReplyTo(message.seq);
      },
      edit: setEdited,
      remove: setRemoving,
      inform,
      copy: async ({ body, seq }, what) => {
        setProblem(undefined);
        setDone(undefined);
        try {
          // There is none where the page is not served over HTTPS.
          await navigator.clipboard.writeText(what === 'text' ? body : new URL(`#/${id}/${seq}`, base).href);
          setDone({ text: what === 'text' ? 'Text copied' : 'Link copied' });
        } catch {
          setProblem('Not copied: the browser does not let this page use the clipboard.');
        }
      },
      address: (id) => chat.attachment(id),
    }),
    [chat, id, setEdited, setReplyTo],
  );
  const limits = chat.session?.limits;
  const attaching = useAttaching(user, conversation, limits?.attachments ?? 10);
  // A gateway that names no limit for reactions is an older one, which refuses all changes.
  const may = mayChange(conversation) && (!limits || limits.reactions !== undefined);
  const editWindowS = limits?.editWindowS ?? 0;
  const listed = view.messages.find(({ key }) => key === edited?.key);
  // The list may jump elsewhere, and what the user writes must stay.
  const editing = listed ?? (edited?.seq === undefined ? edited : (conversation.message(edited.seq) ?? edited));
  const missing = listed ? undefined : edited?.seq;
  useEffect(() => {
    // From then on it has its newest state: it may be deleted or edited meanwhile.
    if (missing !== undefined) conversation.loadMessage(missing).catch(() => {});
  }, [conversation, missing]);
  const editLast = async () => {
    // The list may be elsewhere.
    if (!conversation.atEnd) await conversation.jumpTo();
    setEdited([...conversation.messages].reverse().find((message) => mayEdit(message, user, editWindowS)));
  };
  const attempt = async (what: Promise<unknown>) => {
    try {
      setProblem(undefined);
      await what;
    } catch (error) {
      setProblem((error as Error).message);
    }
  };

  const subtitle =
    kind === 'dm'
      ? presenceText(presence)
      : details &&
        !removed &&
        `${details.participantCount.toLocaleString()} ${details.participantCount === 1 ? 'member' : 'members'}${details.public ? ' · public' : ''}`;

  // Until it is known whether the user may post, there is neither a field nor a text in its place. There are two exceptions:
  // without a connection it may stay unknown for long, and a field that the user writes in must not disappear.
  const known = maySend(conversation);
  const wasWriting = useRef(false);
  const isWriting = known ?? (wasWriting.current || (!connected && item?.kind === 'group'));
  useEffect(() => {
    wasWriting.current = isWriting;
  }, [isWriting]);

  /** What was written while the list was elsewhere, and could not go to its end. */
  const [unseen, setUnseen] = useState<readonly string[]>([]);
  // biome-ignore lint/correctness/useExhaustiveDependencies: when there is a connection, or the list is at its end.
  useEffect(() => {
    if (conversation.atEnd) setUnseen([]);
    else if (connected && unseen.length) void attempt(conversation.jumpTo());
  }, [conversation.atEnd, connected]);

  const mayAttach = isWriting && !edited && !removed && !outside;
  const { isOver, ...drop } = useDrop((files) => mayAttach && attaching.attach(files));

  const detailsButton = useRef<HTMLButtonElement>(null);
  const footer = useRef<HTMLElement>(null);
  const closeDetails = useCallback(() => setShowsDetails(false), []);
  const hadDetails = useRef(false);
  useEffect(() => {
    // Closing the panel would leave the focus nowhere.
    if (hadDetails.current && !showsDetails) (detailsButton.current ?? footer.current)?.focus();
    hadDetails.current = showsDetails;
  }, [showsDetails]);
  useEffect(() => {
    if (!removed) return;
    setShowsDetails(false);
    inform(undefined);
  }, [removed]);
  // In a narrow window the details cover the conversation.
  const isNarrow = useMedia('(width < 1000px)');
  return (
    <>
      <main className={isOver && mayAttach ? 'thread dropping' : 'thread'} aria-label={title} inert={showsDetails && isNarrow} {...drop}>
        <header>
          <button type="button" className="quiet back" aria-label="Back to the conversations" onClick={() => onSelect(undefined)}>
            <Icon name="back" />
          </button>
          <Avatar name={face} kind={kind ?? 'group'} online={presence?.online} />
          <div className="names">
            <h2>
              <Name of={title} />
            </h2>
            <p>
              <span aria-live="polite">{typingText(view.typing)}</span>
              {view.typing.length ? undefined : subtitle}
            </p>
          </div>
          {!removed && !outside && item && (
            <ConversationMenu conversation={conversation} sounding={sounding} maySet={maySet} hasPushes={hasPushes} attempt={attempt} />
          )}
          {!removed && (
            <button
              ref={detailsButton}
              type="button"
              className="quiet"
              aria-label="Details"
              title="Details"
              aria-expanded={showsDetails}
              onClick={() => setShowsDetails(!showsDetails)}
            >
              <Icon name="info" />
            </button>
          )}
        </header>
        {connection}
        {problem && (
          <p role="alert" className="problem">
            {problem}
          </p>
        )}
        {error && !conversation.loading && !view.messages.length && (
          <p role="alert" className="problem">
            {error.message}{' '}
            {error.temporary && (
              <button type="button" onClick={() => attempt(conversation.jumpTo())}>
                Try again
              </button>
            )}
          </p>
        )}
        <MessageList
          user={user}
          view={view}
          connected={connected}
          target={target}
          unreadFrom={unreadFrom}
          missedBefore={missedBefore}
          covered={showsDetails && isNarrow}
          withSenders={kind !== 'dm'}
          may={may}
          editWindowS={editWindowS}
          actions={actions}
          onSeenAll={() => setUnreadFrom(undefined)}
        />
        <p role="status" className={done ? 'note done' : 'sr-only'}>
          {done?.text}
        </p>
        {!conversation.atEnd && unseen.length > 0 && (
          <div className="unseen" role="status">
            {unseen.map((body, i) => (
              // biome-ignore lint/suspicious/noArrayIndexKey: their order never changes.
              <p key={i} className="replying">
                <Icon name="clock" />
                <span>Waiting to be sent: {gistOf({ body }, 100)}</span>
              </p>
            ))}
          </div>
        )}
        {removed || outside ? (
          <footer ref={footer} className="outside" tabIndex={-1}>
            <p role="status">
              {removed
                ? `You are not in this conversation any more.${details?.public ? ' Join to take part again.' : ''}`
                : 'You are looking in. Join to take part.'}
            </p>
            {details?.public && (
              <button type="button" className="primary" onClick={() => attempt(conversation.join().then(() => conversation.loadDetails()))}>
                Join
              </button>
            )}
          </footer>
        ) : isWriting ? (
          <Composer
            user={user}
            conversation={conversation}
            bodyBytes={chat.session?.limits.bodyBytes ?? 16384}
            replyTo={replyTo}
            editing={editing}
            attaching={attaching}
            onEdit={(which) => (which ? may && void attempt(editLast()) : setEdited(undefined))}
            onCancelReply={() => setReplyTo(undefined)}
            onSent={(body) => {
              setReplyTo(undefined);
              setUnreadFrom(undefined);
              if (connected || conversation.atEnd) void attempt(conversation.jumpTo());
              else setUnseen([...unseen, body]);
            }}
          />
        ) : (
          <footer ref={footer} className="outside" tabIndex={-1}>
            {known === false && <p>Only admins can post here.</p>}
          </footer>
        )}
      </main>
      {informing && !removed && (
        <ReadBy chat={chat} conversation={conversation} message={informing} user={user} onClose={() => inform(undefined)} />
      )}
      {removing && (
        <Confirm
          title="Delete this message?"
          action="Delete"
          onConfirm={async () => {
            deleteMessage(conversation, removing.seq!);
          }}
          onClose={() => {
            setRemoving(undefined);
            // The menu that had the focus may be gone.
            requestAnimationFrame(
              () => document.activeElement === document.body && document.querySelector<HTMLElement>('.messages')?.focus(),
            );
          }}
        >
          It disappears for everybody, and cannot be restored.
        </Confirm>
      )}
      {showsDetails && (
        <>
          {isNarrow && <div className="scrim" onClick={closeDetails} aria-hidden="true" />}
          <Panel onClose={closeDetails}>
            {details ? (
              <Details
                conversation={conversation}
                details={details}
                user={user}
                title={title}
                face={face}
                onJump={(seq) => {
                  setTarget({ seq });
                  if (isNarrow) closeDetails();
                }}
              />
            ) : (
              <Skeleton rows={4} />
            )}
          </Panel>
        </>
      )}
    </>
  );
});
