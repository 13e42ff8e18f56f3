import { type ClipboardEvent, type FormEvent, type KeyboardEvent, useEffect, useLayoutEffect, useRef, useState } from 'react';
import { cut } from '../../src/cut.js';
import type { ChatMessage, Conversation, Seq, Upload } from '../../src/index.js';
import { useMessage } from '../../src/react.js';
import { Attached } from './Attached.js';
import { type Attaching, filesOf, hasFiles, isPictureOfText, useUploads } from './attaching.js';
import { asBody, keepWriting, writingOf } from './drafts.js';
import { EmojiButton } from './EmojiButton.js';
import { Icon, useMedia } from './parts.js';
import { gistOf, Name } from './words.js';

interface Props {
  user: string;
  conversation: Conversation;
  bodyBytes: number;
  /** The seq of the message that is answered. */
  replyTo: Seq | undefined;
  /** The message whose text is being edited. If it was deleted meanwhile, the composer ends the editing. */
  editing: ChatMessage | undefined;
  /** The files of the next message. */
  attaching: Attaching;
  onCancelReply: () => void;
  /** Edits the user's last message, or ends it. */
  onEdit: (message: 'last' | undefined) => void;
  onSent: (body: string) => void;
}

/** The field to write a message in. */
export function Composer({ user, conversation, bodyBytes, replyTo, editing: edits, attaching, onCancelReply, onEdit, onSent }: Props) {
  const editing = edits?.deleted ? undefined : edits;
  const [kept] = useState(() => writingOf(user, conversation.id));
  const [draft, setDraft] = useState(kept.text);
  const [edited, setEdited] = useState(kept.edit?.text ?? '');
  /** The message as it was when the editing began. */
  const [from, setFrom] = useState(kept.edit?.from);
  const [notice, setNotice] = useState<string>();
  const text = editing ? edited : draft;
  const onTouch = useMedia('(pointer: coarse)');
  const field = useRef<HTMLTextAreaElement>(null);
  const body = asBody(text);
  // Files need no text.
  const files = editing ? [] : attaching.files;
  useUploads(attaching.files);
  const isEmpty = !body && !(editing?.attachments ?? files).length;
  const tooLong = new TextEncoder().encode(body).length > bodyBytes;
  // A file that failed is either uploaded again or removed first.
  const canSend = !isEmpty && !tooLong && !files.some(({ state }) => state === 'failed');

  // biome-ignore lint/correctness/useExhaustiveDependencies: the height follows the text.
  useLayoutEffect(() => {
    const area = field.current!;
    area.style.height = 'auto';
    area.style.height = `${Math.min(area.scrollHeight, 200)}px`;
  }, [text]);
  // On a phone the keyboard would cover the messages, so there the field takes no focus by itself.
  const opened = useRef(false);
  useEffect(() => {
    const begun = opened.current && (replyTo || editing);
    opened.current = true;
    // It may appear after the details, which have the focus then.
    const isElsewhere = document.activeElement?.closest('.details, dialog');
    if (begun || (!isElsewhere && matchMedia('(hover: hover)').matches)) field.current?.focus();
  }, [replyTo, editing]);
  const editedKey = editing?.key;
  const isDeleted = edits?.deleted !== undefined;
  /** The message whose edit is in the field, until the user ends it. */
  const inField = useRef<string>(undefined);
  const end = () => {
    inField.current = undefined;
    onEdit(undefined);
  };
  // biome-ignore lint/correctness/useExhaustiveDependencies: a change of the message must not replace what the user wrote.
  useLayoutEffect(() => {
    // A reply or another edit has taken its place.
    if (inField.current !== undefined && inField.current !== editedKey && !isDeleted) keepEdit();
    else if (editing) setNotice(undefined);
    inField.current = editedKey;
    if (!editing) return;
    const { edit: known } = writingOf(user, conversation.id);
    const edit = known?.from.key === editing.key ? known : { from: editing, text: editing.body };
    keepWriting(user, conversation.id, { edit });
    setEdited(edit.text);
    setFrom(edit.from);
  }, [editedKey]);
  const isChanged = editing?.key === from?.key && editing?.body !== from?.body;
  // biome-ignore lint/correctness/useExhaustiveDependencies: once, with what was typed until then.
  useLayoutEffect(() => {
    if (!isDeleted) return;
    keepEdit('The message was deleted.');
    end();
  }, [isDeleted]);

  const keep = (value: string) => {
    setDraft(value);
    keepWriting(user, conversation.id, { text: value });
  };

  /** Keeps the text of an edit that ends without the user. */
  const keepEdit = (why?: string) => {
    const isTyped = from && asBody(edited) !== from.body;
    if (isTyped) keep([draft, edited].filter((text) => text.trim()).join('\n'));
    setNotice(isTyped ? `${why ?? 'The message was not changed.'} Your text is kept here as a draft.` : why);
  };

  const write = (value: string) => {
    if (editing) {
      keepWriting(user, conversation.id, { edit: { from: from ?? editing, text: value } });
      return setEdited(value);
    }
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
      end();
      return field.current?.focus();
    }
    // The list shows whether it was sent.
    const attachments = attaching.take();
    conversation.send(body, { ...(attachments.length && { attachments }), ...(replyTo && { replyTo }) }).catch(() => {});
    setNotice(undefined);
    keep('');
    onSent(body);
    field.current?.focus();
  };
  /** Whether the field ever had the focus. Before, its caret is in front of a kept text. */
  const hasCaret = useRef(false);
  const insert = (emoji: string) => {
    const area = field.current!;
    if (!hasCaret.current) area.setSelectionRange(text.length, text.length);
    area.focus();
    // The browser's own command can be undone.
    document.execCommand('insertText', false, emoji);
  };
  const picker = useRef<HTMLInputElement>(null);
  const pasted = (event: ClipboardEvent) => {
    if (editing || !hasFiles(event.clipboardData) || isPictureOfText(event.clipboardData)) return;
    event.preventDefault();
    attaching.attach(filesOf(event.clipboardData));
  };
  const remove = (file: Upload) => {
    attaching.remove(file);
    field.current?.focus();
  };
  const submit = (event: FormEvent) => {
    event.preventDefault();
    send();
  };
  const pressed = (event: KeyboardEvent) => {
    // An input method has the key: Enter chooses a word, and Escape gives one up. Safari ends the composition before it reports the
    // key: `isComposing` is then false, and only the key code 229 tells.
    if (event.nativeEvent.isComposing || event.keyCode === 229) return;
    if (event.key === 'Escape' && editing) return end();
    if (event.key === 'Escape' && replyTo) onCancelReply();
    if (event.key === 'ArrowUp' && !text && !editing && !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault();
      return onEdit('last');
    }
    if (event.key !== 'Enter' || event.shiftKey) return;
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
            <bdi>{cut(editing.body, 100)}</bdi>
          </span>
          <button type="button" className="quiet" aria-label="Do not edit" onClick={end}>
            <Icon name="close" />
          </button>
        </p>
      )}
      {replyTo && !editing && (
        <p className="replying">
          <Answered conversation={conversation} seq={replyTo} />
          <button type="button" className="quiet" aria-label="Do not reply" onClick={onCancelReply}>
            <Icon name="close" />
          </button>
        </p>
      )}
      <div role="status">{(notice ?? attaching.notice) && <p className="replying">{notice ?? attaching.notice}</p>}</div>
      <Attached files={files} onRemove={remove} />
      {tooLong && (
        <p role="alert" className="problem">
          Too long: at most {bodyBytes.toLocaleString()} bytes.
        </p>
      )}
      <div className="line">
        {!editing && (
          <>
            <input
              ref={picker}
              type="file"
              multiple
              hidden
              onChange={({ currentTarget }) => {
                attaching.attach({ files: [...(currentTarget.files ?? [])] });
                // The same file may be chosen again.
                currentTarget.value = '';
                field.current?.focus();
              }}
            />
            <button
              type="button"
              className="quiet clip"
              aria-label="Attach files"
              title="Attach files"
              onClick={() => picker.current?.click()}
            >
              <Icon name="clip" />
            </button>
          </>
        )}
        <EmojiButton user={user} onChoose={insert} onLeave={() => field.current?.focus()} onProblem={setNotice} />
        <textarea
          ref={field}
          rows={1}
          dir="auto"
          aria-label={editing ? 'Edited message' : 'Message'}
          placeholder="Write a message"
          value={text}
          onChange={(event) => write(event.target.value)}
          onKeyDown={pressed}
          onPaste={pasted}
          onFocus={() => {
            hasCaret.current = true;
          }}
          enterKeyHint={onTouch ? 'enter' : 'send'}
        />
        <button type="submit" className="primary round" aria-label={editing ? 'Save' : 'Send'} disabled={!canSend}>
          <Icon name={editing ? 'check' : 'send'} />
        </button>
      </div>
    </form>
  );
}

/** Which message is answered, as it is now: it may be edited or deleted meanwhile. */
function Answered({ conversation, seq }: { conversation: Conversation; seq: Seq }) {
  const message = useMessage(conversation, seq);
  if (!message) return <span>Reply to message {seq}</span>;
  return (
    <span>
      Reply to <Name of={message.sender} />: {gistOf(message, 100)}
    </span>
  );
}
