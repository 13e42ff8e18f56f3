import { type FormEvent, type KeyboardEvent, useEffect, useLayoutEffect, useRef, useState } from 'react';
import type { ChatMessage, Conversation } from '../../src/index.js';
import { Icon } from './parts.js';
import { Name } from './words.js';

/** What was begun and not sent, until the page is left. */
const drafts = new Map<string, string>();

interface Props {
  conversation: Conversation;
  bodyBytes: number;
  replyTo: ChatMessage | undefined;
  onCancelReply: () => void;
  onSent: () => void;
}

export function Composer({ conversation, bodyBytes, replyTo, onCancelReply, onSent }: Props) {
  const [text, setText] = useState(drafts.get(conversation.id) ?? '');
  const field = useRef<HTMLTextAreaElement>(null);
  const body = text.trim();
  const tooLong = new TextEncoder().encode(body).length > bodyBytes;

  // biome-ignore lint/correctness/useExhaustiveDependencies: as high as its text.
  useLayoutEffect(() => {
    const area = field.current!;
    area.style.height = 'auto';
    area.style.height = `${Math.min(area.scrollHeight, 200)}px`;
  }, [text]);
  // Not on a phone, where the keyboard would cover the messages.
  useEffect(() => {
    if (replyTo || matchMedia('(hover: hover)').matches) field.current?.focus();
  }, [replyTo]);

  const write = (value: string) => {
    setText(value);
    drafts.set(conversation.id, value);
    if (value.trim()) conversation.sendTyping();
  };
  const send = () => {
    if (!body || tooLong) return;
    // What becomes of it, the list shows.
    conversation.send(body, replyTo?.seq ? { replyTo: replyTo.seq } : {}).catch(() => {});
    setText('');
    drafts.delete(conversation.id);
    onSent();
    field.current?.focus();
  };
  const submit = (event: FormEvent) => {
    event.preventDefault();
    send();
  };
  const pressed = (event: KeyboardEvent) => {
    if (event.key === 'Escape' && replyTo) onCancelReply();
    // Enter chooses a word in Asian input methods.
    if (event.key !== 'Enter' || event.shiftKey || event.nativeEvent.isComposing) return;
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
          enterKeyHint="send"
        />
        <button type="submit" className="primary round" aria-label="Send" disabled={!body || tooLong}>
          <Icon name="send" />
        </button>
      </div>
    </form>
  );
}
