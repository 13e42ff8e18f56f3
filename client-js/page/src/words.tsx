/** Texts for names and system entries. Input of users is always text, never markup. */
import type { ReactNode } from 'react';
import { cut, firstOf } from '../../src/cut.js';
import type { ChatMessage, Deletion, InboxItem, Presence, SystemChange } from '../../src/index.js';
import { shortTime } from './days.js';

/** Returns a name without the characters that change the direction of what follows: they could show another ending of a file's name
 * than it has. */
export const plain = (name: string): string => name.replace(/[\u202a-\u202e\u2066-\u2069]/g, '');

/** A name, isolated because it may have another text direction than the page. */
export const Name = ({ of }: { of: string }) => <bdi>{plain(of)}</bdi>;

export function titleOf(item: Pick<InboxItem, 'kind' | 'name'>, me: string): string {
  if (item.kind === 'dm') return item.name && item.name !== me ? item.name : `${me} (you)`;
  return item.name || (item.kind === 'channel' ? 'A channel' : 'A group');
}

/** Returns the name for the avatar of a conversation. */
export const faceOf = ({ kind, name }: Pick<InboxItem, 'kind' | 'name'>, me: string): string => name || (kind === 'dm' ? me : '');

export function presenceText(presence: Presence | undefined): string {
  if (!presence) return '';
  if (presence.online) return 'online';
  return presence.lastSeen ? `last seen ${shortTime(presence.lastSeen)}` : 'offline';
}

export function typingText(users: string[]): ReactNode {
  const [first, second] = users;
  if (!first) return '';
  if (!second)
    return (
      <>
        <Name of={first} /> is typing…
      </>
    );
  if (users.length > 2) return 'several people are typing…';
  return (
    <>
      <Name of={first} /> and <Name of={second} /> are typing…
    </>
  );
}

/** Returns the text of a system entry. */
export function systemText(sender: string, system: SystemChange, me: string): ReactNode {
  const who = sender === me ? 'You' : <Name of={sender} />;
  const whom = 'user' in system ? system.user === me ? 'you' : <Name of={system.user} /> : '';
  switch (system.change) {
    case 'created':
      return (
        <>
          {who} created this {system.kind}
        </>
      );
    case 'added':
      return (
        <>
          {who} added {whom}
        </>
      );
    case 'removed':
      return (
        <>
          {who} removed {whom}
        </>
      );
    case 'joined':
      return <>{who} joined</>;
    case 'left':
      return <>{who} left</>;
    case 'role_set':
      return (
        <>
          {who} made {whom} {system.role === 'member' ? 'a member' : system.role === 'admin' ? 'an admin' : 'an owner'}
        </>
      );
    case 'updated': {
      const changes = [
        system.name !== undefined && (
          <>
            named it “<Name of={system.name} />”
          </>
        ),
        system.posting !== undefined && <>{system.posting === 'admins' ? 'let only admins post' : 'let everyone post'}</>,
        system.public !== undefined && <>made it {system.public ? 'public' : 'private'}</>,
      ].filter(Boolean);
      return (
        <>
          {who}{' '}
          {changes.map((change, i) => (
            // biome-ignore lint/suspicious/noArrayIndexKey: their order never changes.
            <span key={i}>
              {i ? ', ' : ''}
              {change}
            </span>
          ))}
        </>
      );
    }
    default:
      return <>{who} changed something</>;
  }
}

/** Returns the beginning of the last message.
 * @param isDeleted Whether the user deleted it, and the gateway may not know yet. */
export function previewOf(item: InboxItem, me: string, isDeleted: boolean): ReactNode {
  const last = item.lastMessage;
  if (!last) return 'No messages yet';
  if (last.deleted || isDeleted) return <i>a deleted message</i>;
  if (last.kind === 'system') return <i>changes to this {item.kind === 'channel' ? 'channel' : 'group'}</i>;
  const text = <bdi>{last.preview || 'an attachment'}</bdi>;
  if (last.sender === me) return <>You: {text}</>;
  return item.kind === 'dm' ? (
    text
  ) : (
    <>
      <Name of={last.sender} />: {text}
    </>
  );
}

/** Returns the beginning of what a message says, as plain text; without a text, the name of its first file. */
export const briefly = ({ body, attachments }: Pick<ChatMessage, 'body' | 'attachments'>, max: number): string =>
  cut(body || attachments?.[0]?.name || 'an attachment', max);

/** Returns the beginning of what a message says, for a line that quotes it. */
export function gistOf({ body, deleted }: Pick<ChatMessage, 'body' | 'deleted'>, max: number): ReactNode {
  return deleted ? <i>a deleted message</i> : <bdi>{cut(body, max) || 'an attachment'}</bdi>;
}

/** Returns the text in the place of a deleted message. */
export function deletedText({ by }: Deletion, sender: string, me: string): ReactNode {
  if (by === me) return 'You deleted this message';
  if (by === sender) return 'This message was deleted';
  return (
    <>
      Deleted by <Name of={by} />
    </>
  );
}

export const stateText: Record<NonNullable<ChatMessage['state']>, string> = {
  sending: 'waiting to be sent',
  sent: 'sent',
  delivered: 'delivered',
  read: 'read',
  failed: 'not sent',
};

/** Returns the number of one of eight colours, always the same for a name. */
export function hueOf(name: string): number {
  let hash = 0;
  for (const c of name.normalize()) hash = (hash * 31 + c.codePointAt(0)!) | 0;
  return Math.abs(hash) % 8;
}

/** Returns one or two letters for the avatar of a name. An emoji is never cut in half. */
export function initialsOf(name: string): string {
  // Brackets and quotes are no initials.
  const words = name.split(/[\s._-]+/u).map((word) => word.replace(/^[^\p{L}\p{N}\p{Emoji}]+/u, ''));
  return words.filter(Boolean).slice(0, 2).map(firstOf).join('').toUpperCase() || '#';
}
