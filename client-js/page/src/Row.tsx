/** One entry of the list: a message with its menu and its reactions, a deleted one, or a system entry. */
import { memo, useId, useRef, useState } from 'react';
import type { ChatMessage, Conversation } from '../../src/index.js';
import { useMessage } from '../../src/react.js';
import { bodyOf } from './Body.js';
import { exactly, timeOf } from './days.js';
import { isFewEmoji } from './emoji.js';
import { type FileActions, Files } from './Files.js';
import { kindOf, mayDelete, mayEdit } from './facts.js';
import { useGestures } from './gestures.js';
import { Menu } from './Popup.js';
import { Avatar, Icon } from './parts.js';
import { Picker, Reactions } from './Reactions.js';
import { briefly, deletedText, gistOf, hueOf, Name, stateText, systemText } from './words.js';

/** What the user can do with a message. The object stays the same, so that rows need not be rendered again. */
export interface Actions extends FileActions {
  reply: (message: ChatMessage) => void;
  edit: (message: ChatMessage) => void;
  remove: (message: ChatMessage) => void;
  /** Shows who has read the message. */
  inform: (message: ChatMessage) => void;
  /** Copies the text as it was typed, or the address of the message. */
  copy: (message: ChatMessage, what: 'text' | 'link') => void;
}

interface Props {
  conversation: Conversation;
  message: ChatMessage;
  own: boolean;
  follows: boolean;
  withSender: boolean;
  user: string;
  /** Whether the user may react and edit. */
  may: boolean;
  editWindowS: number;
  actions: Actions;
  onJump: (seq: number) => void;
}

/** Code points of the name of a file that stands for a message. */
const NAME_MAX = 100;

const ticks = { sending: 'clock', sent: 'check', delivered: 'checks', read: 'seen', failed: 'alert' } as const;

export const Row = memo(function Row(props: Props) {
  const { conversation, message, own, follows, withSender, user, may, actions, onJump } = props;
  const { key, seq, sender, kind, body, attachments, replyTo, system, at, state, deleted } = message;
  const id = useId();
  if (kind === 'system') {
    return (
      <p className="system" tabIndex={-1} data-key={key} data-seq={seq}>
        <span title={exactly(at)}>{system && systemText(sender, system, user)}</span>
      </p>
    );
  }
  const names = `message${own ? ' own' : ''}${follows ? ' follows' : ''}${deleted ? ' deleted' : ''}`;
  return (
    <article
      className={names}
      tabIndex={-1}
      aria-labelledby={`${id}who ${id}what ${id}files`}
      data-key={key}
      data-seq={seq}
      data-state={state}
    >
      {withSender && !own && (follows ? <span className="avatar" /> : <Avatar name={sender} kind="dm" />)}
      <div className="bubble">
        {withSender && !own && !follows ? (
          <p className="sender" id={`${id}who`} data-hue={hueOf(sender)}>
            <Name of={sender} />
          </p>
        ) : (
          // Its side and the message above show the sender; a screen reader needs the name.
          <p className="sr-only" id={`${id}who`}>
            {own ? 'You' : <Name of={sender} />}
          </p>
        )}
        {replyTo && !deleted && (
          <button type="button" className="quote" onClick={() => onJump(replyTo)}>
            <Quote conversation={conversation} seq={replyTo} />
          </button>
        )}
        {deleted ? (
          <p className="stub" id={`${id}what`}>
            {deletedText(deleted, sender, user)}
          </p>
        ) : (
          <div className={isFewEmoji(body) ? 'body large' : 'body'} id={`${id}what`} dir="auto">
            {bodyOf(body)}
          </div>
        )}
        {attachments && !body && (
          <span className="sr-only" id={`${id}files`}>
            {attachments.length > 1 ? `${attachments.length} files` : briefly(message, NAME_MAX)}
          </span>
        )}
        {attachments && <Files files={attachments} actions={actions} own={own} />}
        <Meta message={message} />
        <Failures conversation={conversation} message={message} />
      </div>
      <Reactions conversation={conversation} message={message} user={user} may={may && seq !== undefined} />
      {seq !== undefined && conversation.item && !deleted && <MessageActions {...props} actions={actions} />}
    </article>
  );
});

/** The time of a message, whether it was edited, and its state. */
function Meta({ message: { at, editedAt, deleted, state, pending } }: { message: ChatMessage }) {
  return (
    <span className="meta">
      {editedAt !== undefined && !deleted && (
        <span className="edited" title={`edited ${exactly(editedAt)}`}>
          edited
        </span>
      )}
      <time dateTime={new Date(at).toISOString()} title={exactly(at)}>
        {timeOf(at)}
      </time>
      {pending ? (
        <span className="state" title="waiting to be changed">
          <Icon name="clock" />
          <span className="sr-only">waiting to be changed</span>
        </span>
      ) : (
        state &&
        !deleted && (
          <span className="state" title={stateText[state]}>
            <Icon name={ticks[state]} />
            <span className="sr-only">{stateText[state]}</span>
          </span>
        )
      )}
    </span>
  );
}

const refused = { edit: 'Not changed', delete: 'Not deleted', react: 'No reaction added', unreact: 'Reaction not removed' } as const;

const CONFLICT = 'it was changed on another device meanwhile.';

/** Why a message was not sent, or a change of it was refused. */
function Failures({ conversation, message: { key, state, error, failedChange } }: { conversation: Conversation; message: ChatMessage }) {
  const failed = state === 'failed' ? { key, text: error?.message ?? 'Not sent.' } : undefined;
  const why = failedChange?.error.code === 'conflict' ? CONFLICT : failedChange?.error.message;
  const problem = failedChange ? { key: failedChange.key, text: `${refused[failedChange.type]}: ${why}` } : failed;
  if (!problem) return null;
  return (
    <div className="failed" role="alert">
      {problem.text}
      {failedChange?.body !== undefined && (
        <p className="lost">
          Your text: <bdi>{failedChange.body}</bdi>
        </p>
      )}
      <div>
        <button type="button" onClick={() => conversation.retry(problem.key)}>
          Try again
        </button>
        <button type="button" onClick={() => conversation.discard(problem.key)}>
          Discard
        </button>
      </div>
    </div>
  );
}

/** The buttons beside a message. The menu has everything, for keyboards and fingers. */
function MessageActions({ conversation, message, own, user, may, editWindowS, actions }: Props) {
  const [open, setOpen] = useState<{ what: 'menu' | 'picker'; anchor: HTMLElement }>();
  const close = () => setOpen(undefined);
  const buttons = useRef<HTMLDivElement>(null);
  const openMenu = () => setOpen({ what: 'menu', anchor: buttons.current!.querySelector('.more')! });
  useGestures(buttons, may ? openMenu : undefined, () => actions.reply(message));
  const item = (name: string, act: () => void, danger = false) => (
    <button
      type="button"
      role="menuitem"
      tabIndex={-1}
      className={danger ? 'danger' : undefined}
      onClick={() => {
        close();
        act();
      }}
    >
      {name}
    </button>
  );
  return (
    <div ref={buttons} className={open ? 'actions open' : 'actions'}>
      {may && (
        <button
          type="button"
          className="quiet hovered"
          tabIndex={-1}
          aria-label="React"
          title="React"
          onClick={({ currentTarget }) => setOpen(open ? undefined : { what: 'picker', anchor: currentTarget })}
        >
          <Icon name="smile" />
        </button>
      )}
      <button
        type="button"
        className="quiet hovered reply"
        tabIndex={may ? -1 : undefined}
        aria-label="Reply"
        title="Reply"
        onClick={() => actions.reply(message)}
      >
        <Icon name="reply" />
      </button>
      {may && (
        <button
          type="button"
          className="quiet more"
          aria-label="Message menu"
          title="Message menu"
          aria-haspopup="menu"
          aria-expanded={open?.what === 'menu'}
          onClick={() => (open ? close() : openMenu())}
        >
          <Icon name="more" />
        </button>
      )}
      {open?.what === 'menu' && (
        <Menu anchor={open.anchor} label="Message menu" onClose={close}>
          {item('React', () => setOpen({ ...open, what: 'picker' }))}
          {item('Reply', () => actions.reply(message))}
          {message.body && item('Copy text', () => actions.copy(message, 'text'))}
          {item('Copy link', () => actions.copy(message, 'link'))}
          {own && kindOf(conversation) === 'group' && item('Info', () => actions.inform(message))}
          {mayEdit(message, user, editWindowS) && item('Edit', () => actions.edit(message))}
          {mayDelete(conversation, message, user) && item('Delete', () => actions.remove(message), true)}
        </Menu>
      )}
      {open?.what === 'picker' && <Picker anchor={open.anchor} conversation={conversation} message={message} onClose={close} />}
    </div>
  );
}

/** The message that another one answers. Loaded if it is not in the list, and kept up to date. */
function Quote({ conversation, seq }: { conversation: Conversation; seq: number }) {
  const message = useMessage(conversation, seq);
  if (!message) return <>Message {seq}</>;
  return (
    <>
      <b>
        <Name of={message.sender} />
      </b>
      {gistOf(message, 200)}
    </>
  );
}
