/** The menu of a conversation: its notifications, and the sound of the page. */
import { useState } from 'react';
import type { Conversation } from '../../src/index.js';
import { now } from './clock.js';
import { mutedText } from './days.js';
import { Menu } from './Popup.js';
import { Icon } from './parts.js';
import type { Sounding } from './sound.js';

const HOUR = 3600 * 1000;

interface Props {
  conversation: Conversation;
  sounding: Sounding;
  /** Whether the gateway keeps settings for conversations. */
  maySet: boolean;
  /** Whether messages are pushed to any device of the user. */
  hasPushes: boolean;
  /** Shows why a setting was refused. */
  attempt: (what: Promise<unknown>) => Promise<void>;
}

export function ConversationMenu({ conversation, sounding, maySet, hasPushes, attempt }: Props) {
  const [anchor, setAnchor] = useState<HTMLElement>();
  const close = () => setAnchor(undefined);
  const { item, muted, kind } = conversation;
  const act = (what: () => void) => () => {
    close();
    what();
  };
  const choice = (name: string, what: () => void) => (
    <button type="button" role="menuitem" tabIndex={-1} onClick={act(what)}>
      {name}
    </button>
  );
  const option = (name: string, isOn: boolean, what: () => void) => (
    <button type="button" role="menuitemcheckbox" aria-checked={isOn} className="option" tabIndex={-1} onClick={act(what)}>
      {name}
      {isOn && <Icon name="check" />}
    </button>
  );
  const mute = (ms: number) => () => void attempt(conversation.mute(now() + ms));
  const push = item?.push !== 'off';
  return (
    <>
      <button
        type="button"
        className="quiet"
        aria-label="Conversation menu"
        title="Conversation menu"
        aria-haspopup="menu"
        aria-expanded={!!anchor}
        onClick={({ currentTarget }) => setAnchor(anchor ? undefined : currentTarget)}
      >
        <Icon name="more" />
      </button>
      {anchor && (
        <Menu anchor={anchor} label="Conversation menu" onClose={close}>
          {maySet && muted && choice(`Unmute (${mutedText(item!.mutedUntil!)})`, () => void attempt(conversation.mute(null)))}
          {maySet && !muted && choice('Mute for 1 hour', mute(HOUR))}
          {maySet && !muted && choice('Mute for 8 hours', mute(8 * HOUR))}
          {maySet && !muted && choice('Mute for ever', mute(Infinity))}
          {/* Messages of channels are never pushed. */}
          {maySet &&
            hasPushes &&
            kind !== 'channel' &&
            option('Push to my devices', push, () => void attempt(conversation.setPush(push ? 'off' : 'on')))}
          {option('Sound of new messages', sounding.on, sounding.toggle)}
        </Menu>
      )}
    </>
  );
}
