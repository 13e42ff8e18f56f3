import { useCallback, useEffect, useState } from 'react';
import type { ChatClient, ChatMessage } from '../../src/index.js';
import { useConversation, usePresence } from '../../src/react.js';
import { Composer } from './Composer.js';
import { Details } from './Details.js';
import { MessageList } from './MessageList.js';
import { Avatar, Icon } from './parts.js';
import { Name, presenceText, titleOf, typingText } from './words.js';

/** One conversation: its head, its messages, and where to write. */
export function Thread({ chat, id, user, onBack }: { chat: ChatClient; id: string; user: string; onBack: () => void }) {
  const conversation = chat.conversation(id);
  const item = conversation.item;
  // Where the unread messages began when it was opened: the list begins there, under a line.
  const [unreadFrom, setUnreadFrom] = useState(() => (item?.unread ? item.readSeq + 1 : undefined));
  const view = useConversation(chat, id, unreadFrom);
  const [replyTo, setReplyTo] = useState<ChatMessage>();
  const [target, setTarget] = useState<{ seq: number }>();
  const [showsDetails, setShowsDetails] = useState(false);
  const [problem, setProblem] = useState<string>();
  const { details, removed } = conversation;
  const kind = item?.kind ?? details?.kind;
  const title = item ? titleOf(item, user) : details?.name || (kind ? `A ${kind}` : '…');
  const presence = usePresence(chat, item?.kind === 'dm' && item.name !== user ? item.name : undefined);
  const outside = details !== undefined && details.role === undefined;

  // A public channel is looked into without joining.
  useEffect(() => {
    if (!outside || details?.kind !== 'channel') return;
    conversation.subscribe().catch(() => {});
    return () => {
      conversation.unsubscribe().catch(() => {});
    };
  }, [conversation, outside, details?.kind]);

  const reply = useCallback((message: ChatMessage) => setReplyTo(message), []);
  const attempt = async (what: Promise<unknown>) => {
    try {
      setProblem(undefined);
      await what;
    } catch (error) {
      setProblem((error as Error).message);
    }
  };

  const subtitle = view.typing.length
    ? typingText(view.typing)
    : kind === 'dm'
      ? presenceText(presence)
      : details &&
        `${details.participantCount.toLocaleString()} ${details.participantCount === 1 ? 'member' : 'members'}${details.public ? ' · public' : ''}`;
  const mayPost = details?.posting !== 'admins' || (details.role !== undefined && details.role !== 'member');

  return (
    <>
      <main className="thread" aria-label={title}>
        <header>
          <button type="button" className="quiet back" aria-label="Back to the conversations" onClick={onBack}>
            <Icon name="back" />
          </button>
          <Avatar name={title} kind={kind ?? 'group'} online={presence?.online} />
          <div className="names">
            <h2>
              <Name of={title} />
            </h2>
            <p aria-live="polite">{subtitle}</p>
          </div>
          <button
            type="button"
            className="quiet"
            aria-label="Details"
            aria-expanded={showsDetails}
            onClick={() => setShowsDetails(!showsDetails)}
          >
            <Icon name="info" />
          </button>
        </header>
        {(problem ?? (conversation.error && !conversation.loading && !view.messages.length && conversation.error.message)) && (
          <p role="alert" className="problem">
            {problem ?? conversation.error?.message}
          </p>
        )}
        <MessageList
          user={user}
          view={view}
          target={target}
          unreadFrom={unreadFrom}
          withSenders={kind !== 'dm'}
          onReply={reply}
          onSeenAll={() => setUnreadFrom(undefined)}
        />
        {removed || outside ? (
          <footer className="outside">
            {removed ? (
              <p>You are not in this conversation any more.</p>
            ) : (
              <>
                <p>You are looking in. Join to take part.</p>
                <button
                  type="button"
                  className="primary"
                  onClick={() => attempt(conversation.join().then(() => conversation.loadDetails()))}
                >
                  Join
                </button>
              </>
            )}
          </footer>
        ) : mayPost ? (
          <Composer
            conversation={conversation}
            bodyBytes={chat.session?.limits.bodyBytes ?? 16384}
            replyTo={replyTo}
            onCancelReply={() => setReplyTo(undefined)}
            onSent={() => {
              setReplyTo(undefined);
              setUnreadFrom(undefined);
              void conversation.jumpTo().catch(() => {});
            }}
          />
        ) : (
          <footer className="outside">
            <p>Only admins post here.</p>
          </footer>
        )}
      </main>
      {showsDetails && details && (
        <Details
          conversation={conversation}
          details={details}
          user={user}
          title={title}
          onJump={(seq) => setTarget({ seq })}
          onClose={() => setShowsDetails(false)}
        />
      )}
    </>
  );
}
