/** The reactions under a message, and the picker that adds one. */
import { memo, useEffect, useId, useRef, useState } from 'react';
import type { ChatMessage, Conversation } from '../../src/index.js';
import { COLUMNS, EMOJI, isSame, nameOf, shownAs } from './emoji.js';
import { Menu, Note } from './Popup.js';
import { Icon } from './parts.js';

/** The number of names in the note of who reacted. */
const NAMED = 12;
/** The time for which the note is shown after a tap, in milliseconds. */
const NOTE_MS = 4_000;

const isMine = ({ mine }: ChatMessage, emoji: string): boolean => mine?.some((one) => isSame(one, emoji)) ?? false;

/** Adds the user's reaction, or removes it. A refusal is shown at the message. */
export function toggle(conversation: Conversation, { seq, key, mine, reactions = {} }: ChatMessage, emoji: string): void {
  const own = mine?.filter((one) => isSame(one, emoji)) ?? [];
  for (const one of own) conversation.unreact(seq ?? key, one).catch(() => {});
  if (own.length) return;
  // The one that others chose, so that all are counted together everywhere.
  const chosen = Object.keys(reactions).find((one) => isSame(one, emoji)) ?? emoji;
  conversation.react(seq ?? key, chosen).catch(() => {});
}

interface Props {
  conversation: Conversation;
  message: ChatMessage;
  user: string;
  /** Whether the user may react. */
  may: boolean;
}

/** The reactions of a message. A click adds or removes the user's own one. */
export const Reactions = memo(function Reactions({ conversation, message, user, may }: Props) {
  const [anchor, setAnchor] = useState<HTMLElement>();
  const { reactions = {} } = message;
  const all = Object.keys(reactions);
  const emoji = all.filter((one, i) => all.findIndex((other) => isSame(one, other)) === i);
  if (!emoji.length) return null;
  return (
    // biome-ignore lint/a11y/useSemanticElements: a fieldset would need a legend in sight.
    <div className="reactions" role="group" aria-label="Reactions">
      {emoji.map((one) => (
        <Chip
          key={one}
          conversation={conversation}
          message={message}
          user={user}
          may={may}
          emoji={shownAs(one)}
          forms={all.filter((other) => isSame(one, other)).join(' ')}
        />
      ))}
      {may && (
        <button
          type="button"
          className="chip add"
          aria-label="Add a reaction"
          title="Add a reaction"
          aria-haspopup="menu"
          aria-expanded={anchor !== undefined}
          onClick={(event) => setAnchor(anchor ? undefined : event.currentTarget)}
        >
          <Icon name="smile" />
        </button>
      )}
      {anchor && <Picker anchor={anchor} conversation={conversation} message={message} onClose={() => setAnchor(undefined)} />}
    </div>
  );
});

/** @param forms The forms in which users chose the emoji, with spaces between. */
function Chip({ conversation, message, user, may, emoji, forms }: Props & { emoji: string; forms: string }) {
  const isOwn = isMine(message, emoji);
  const count = forms.split(' ').reduce((sum, form) => sum + (message.reactions?.[form] ?? 0), 0);
  const id = useId();
  /** The button while the note is shown. */
  const [anchor, setAnchor] = useState<HTMLElement>();
  const [names, setNames] = useState<string>();
  const closing = useRef<ReturnType<typeof setTimeout>>(undefined);
  const { seq, pending } = message;
  // Until the gateway has acknowledged the own reaction, it is not among those that the gateway lists.
  const isWaiting = pending !== undefined && pending.length > 0;
  // biome-ignore lint/correctness/useExhaustiveDependencies: asks again when the number changes.
  useEffect(() => {
    if (!anchor || seq === undefined || isWaiting) return;
    const stop = new AbortController();
    const lists = forms.split(' ').map((emoji) => conversation.reactions(seq, { emoji, limit: NAMED, signal: stop.signal }));
    Promise.all(lists).then(
      (pages) =>
        setNames(
          namesOf(
            pages.flatMap(({ items }) => items),
            user,
            count,
          ),
        ),
      () => {},
    );
    return () => stop.abort();
  }, [anchor, conversation, seq, forms, count, isOwn, isWaiting]);
  useEffect(() => () => clearTimeout(closing.current), []);
  const show = (button: HTMLElement) => {
    clearTimeout(closing.current);
    setAnchor(button);
  };
  const hide = () => setAnchor(undefined);
  const people = `${count.toLocaleString()} ${count === 1 ? 'person' : 'people'}`;
  return (
    <>
      <button
        type="button"
        className="chip"
        aria-label={`${nameOf(emoji)}, ${people}${isOwn ? ', you too' : ''}`}
        aria-describedby={anchor ? id : undefined}
        aria-pressed={isOwn}
        aria-disabled={!may}
        onPointerEnter={(event) => event.pointerType === 'mouse' && show(event.currentTarget)}
        onPointerLeave={(event) => event.pointerType === 'mouse' && hide()}
        onFocus={(event) => event.currentTarget.matches(':focus-visible') && show(event.currentTarget)}
        onBlur={hide}
        onKeyDown={(event) => event.key === 'Escape' && hide()}
        onClick={(event) => {
          if (may) toggle(conversation, message, emoji);
          // A finger does not hover.
          if (!matchMedia('(hover: none)').matches) return;
          show(event.currentTarget);
          closing.current = setTimeout(hide, NOTE_MS);
        }}
      >
        <bdi aria-hidden="true">{emoji}</bdi> {count.toLocaleString()}
      </button>
      {anchor && (
        <Note anchor={anchor} id={id}>
          {names ?? people}
        </Note>
      )}
    </>
  );
}

/** Returns the names of who reacted, the user first. */
function namesOf(items: readonly { user: string }[], me: string, count: number): string {
  const users = [...new Set(items.map(({ user }) => user))].slice(0, NAMED);
  const sorted = [...users.filter((user) => user === me), ...users.filter((user) => user !== me)];
  const names = sorted.map((user) => (user === me ? 'You' : user));
  const more = count - names.length;
  return more > 0 ? `${names.join(', ')} and ${more.toLocaleString()} more` : names.join(', ');
}

interface PickerProps {
  anchor: HTMLElement;
  conversation: Conversation;
  message: ChatMessage;
  onClose: () => void;
}

/** The emoji to choose from. */
export function Picker({ anchor, conversation, message, onClose }: PickerProps) {
  return (
    <Menu anchor={anchor} label="Choose a reaction" columns={COLUMNS} onClose={onClose}>
      {EMOJI.map(([emoji, name]) => (
        <button
          key={emoji}
          type="button"
          role="menuitemcheckbox"
          aria-checked={isMine(message, emoji)}
          aria-label={name}
          title={name}
          tabIndex={-1}
          onClick={() => {
            toggle(conversation, message, emoji);
            onClose();
          }}
        >
          {emoji}
        </button>
      ))}
    </Menu>
  );
}
