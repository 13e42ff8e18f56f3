import { type FormEvent, type KeyboardEvent, useEffect, useLayoutEffect, useRef, useState } from 'react';
import type { ChatMessage, Conversation } from '../../src/index.js';
import { draftOf, keepDraft } from './drafts.js';
import { Icon, useMedia } from './parts.js';
import { Name } from './words.js';

interface Props {
  user: string;
  conversation: Conversation;
  bodyBytes: number;
  replyTo: ChatMessage | undefined;
  /** The message whose text is being edited. If it was deleted meanwhile, the composer ends the editing. */
  editing: ChatMessage | undefined;
  onCancelReply: () => void;
  /** Edits the user's last message, or ends it. */
  onEdit: (message: 'last' | undefined) => void;
  onSent: () => void;
}

/** The field to write a message in. */
export function Composer({ user, conversation, bodyBytes, replyTo, editing: edits, onCancelReply, onEdit, onSent }: Props) {
  const editing = edits?.deleted ? undefined : edits;
  const [draft, setDraft] = useState(() => draftOf(user, conversation.id));
  const [edited, setEdited] = useState('');
  /** The message as it was when the editing began. */
  const [from, setFrom] = useState<ChatMessage>();
  const [notice, setNotice] = useState<string>();
  const text = editing ? edited : draft;
  const onTouch = useMedia('(pointer: coarse)');
  const field = useRef<HTMLTextAreaElement>(null);
  const body = text.trim();
  // An attachment needs no text.
  const isEmpty = !body && !editing?.attachments?.length;
  const tooLong = new TextEncoder().encode(body).length > bodyBytes;
  const canSend = !isEmpty && !tooLong;

  // biome-ignore lint/correctness/useExhaustiveDependencies: the height follows the text.
  useLayoutEffect(() => {
    const area = field.current!;
    area.style.height = 'auto';
    area.style.height = `${Math.min(area.scrollHeight, 200)}px`;
  }, [text]);
  // On a phone the keyboard would cover the messages, so there the field takes no focus by itself.
  useEffect(() => {
    if (replyTo || editing || matchMedia('(hover: hover)').matches) field.current?.focus();
  }, [replyTo, editing]);
  const editedKey = editing?.key;
  // biome-ignore lint/correctness/useExhaustiveDependencies: a change of the message must not replace what the user wrote.
  useLayoutEffect(() => {
    if (!editing) return;
    setEdited(editing.body);
    setFrom(editing);
    setNotice(undefined);
  }, [editedKey]);
  const isChanged = editing?.key === from?.key && editing?.body !== from?.body;
  const isDeleted = edits?.deleted !== undefined;
  // biome-ignore lint/correctness/useExhaustiveDependencies: once, with what was typed until then.
  useLayoutEffect(() => {
    if (!isDeleted) return;
    const isTyped = edits?.key === from?.key && edited.trim() !== from?.body;
    if (isTyped) keep([draft, edited].filter((text) => text.trim()).join('\n'));
    setNotice(`The message was deleted.${isTyped ? ' Your text is kept here as a draft.' : ''}`);
    onEdit(undefined);
  }, [isDeleted]);

  const keep = (value: string) => {
    setDraft(value);
    keepDraft(user, conversation.id, value);
  };

  const write = (value: string) => {
    if (editing) return setEdited(value);
    setNotice(undefined);
    keep(value);
    if (value.trim()) conversation.sendTyping();
  };
  const send = () => {
    if (!canSend) return;
    if (editing) {
      const { seq, key, attachments } = editing;
      // The list shows whether it was refused.
      if (body !== editing.body) conversation.edit(seq ?? key, body, attachments, { from }).catch(() => {});
      onEdit(undefined);
      return field.current?.focus();
    }
    // The list shows whether it was sent.
    conversation.send(body, replyTo?.seq ? { replyTo: replyTo.seq } : {}).catch(() => {});
    setNotice(undefined);
    keep('');
    onSent();
    field.current?.focus();
  };
  const submit = (event: FormEvent) => {
    event.preventDefault();
    send();
  };
  const pressed = (event: KeyboardEvent) => {
    if (event.key === 'Escape' && editing) return onEdit(undefined);
    if (event.key === 'Escape' && replyTo) onCancelReply();
    if (event.key === 'ArrowUp' && !text && !editing && !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault();
      return onEdit('last');
    }
    if (event.key !== 'Enter' || event.shiftKey) return;
    // In an input method Enter chooses a word. Safari ends the composition before it reports the key: `isComposing` is then
    // false, and only the key code 229 tells.
    if (event.nativeEvent.isComposing || event.keyCode === 229) return;
    // Keyboards on a screen have no Shift+Enter, so there Enter begins a new line and the button sends.
    if (onTouch && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    send();
  };

  return (
    <form className="composer" onSubmit={submit}>
      {editing && (
        <p className="replying">
          <Icon name="pen" />
          <span>
            {isChanged ? 'Changed on another device meanwhile: ' : 'Edit: '}
            <bdi>{editing.body.slice(0, 100)}</bdi>
          </span>
          <button type="button" className="quiet" aria-label="Do not edit" onClick={() => onEdit(undefined)}>
            <Icon name="close" />
          </button>
        </p>
      )}
      {replyTo && !editing && (
        <p className="replying">
          <span>
            Reply to <Name of={replyTo.sender} />: <bdi>{replyTo.body.slice(0, 100)}</bdi>
          </span>
          <button type="button" className="quiet" aria-label="Do not reply" onClick={onCancelReply}>
            <Icon name="close" />
          </button>
        </p>
      )}
      <div role="status">{notice && <p className="replying">{notice}</p>}</div>
      {tooLong && (
        <p role="alert" className="problem">
          Too long: at most {bodyBytes.toLocaleString()} bytes.
        </p>
      )}
      <div className="line">
        <textarea
          ref={field}
          rows={1}
          dir="auto"
          aria-label={editing ? 'Edited message' : 'Message'}
          placeholder="Write a message"
          value={text}
          onChange={(event) => write(event.target.value)}
          onKeyDown={pressed}
          enterKeyHint={onTouch ? 'enter' : 'send'}
        />
        <button type="submit" className="primary round" aria-label={editing ? 'Save' : 'Send'} disabled={!canSend}>
          <Icon name={editing ? 'check' : 'send'} />
        </button>
      </div>
    </form>
  );
}
