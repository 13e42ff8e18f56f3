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
  onCancelReply: () => void;
  onSent: () => void;
}

/** The field to write a message in. */
export function Composer({ user, conversation, bodyBytes, replyTo, onCancelReply, onSent }: Props) {
  const [text, setText] = useState(() => draftOf(user, conversation.id));
  const onTouch = useMedia('(pointer: coarse)');
  const field = useRef<HTMLTextAreaElement>(null);
  const body = text.trim();
  const tooLong = new TextEncoder().encode(body).length > bodyBytes;

  // biome-ignore lint/correctness/useExhaustiveDependencies: the height follows the text.
  useLayoutEffect(() => {
    const area = field.current!;
    area.style.height = 'auto';
    area.style.height = `${Math.min(area.scrollHeight, 200)}px`;
  }, [text]);
  // On a phone the keyboard would cover the messages, so there the field takes no focus by itself.
  useEffect(() => {
    if (replyTo || matchMedia('(hover: hover)').matches) field.current?.focus();
  }, [replyTo]);

  const write = (value: string) => {
    setText(value);
    keepDraft(user, conversation.id, value);
    if (value.trim()) conversation.sendTyping();
  };
  const send = () => {
    if (!body || tooLong) return;
    // The list shows whether it was sent.
    conversation.send(body, replyTo?.seq ? { replyTo: replyTo.seq } : {}).catch(() => {});
    setText('');
    keepDraft(user, conversation.id, '');
    onSent();
    field.current?.focus();
  };
  const submit = (event: FormEvent) => {
    event.preventDefault();
    send();
  };
  const pressed = (event: KeyboardEvent) => {
    if (event.key === 'Escape' && replyTo) onCancelReply();
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
      {replyTo && (
        <p className="replying">
          <span>
            Reply to <Name of={replyTo.sender} />: <bdi>{replyTo.body.slice(0, 100)}</bdi>
          </span>
          <button type="button" className="quiet" aria-label="Do not reply" onClick={onCancelReply}>
            <Icon name="close" />
          </button>
        </p>
      )}
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
          aria-label="Message"
          placeholder="Write a message"
          value={text}
          onChange={(event) => write(event.target.value)}
          onKeyDown={pressed}
          enterKeyHint={onTouch ? 'enter' : 'send'}
        />
        <button type="submit" className="primary round" aria-label="Send" disabled={!body || tooLong}>
          <Icon name="send" />
        </button>
      </div>
    </form>
  );
}
