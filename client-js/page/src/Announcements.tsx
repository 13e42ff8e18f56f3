/** What a screen reader says while the list is open: each message that comes, once. What the user scrolls to is no news. */
import { useEffect, useState } from 'react';
import type { Conversation, Message } from '../../src/index.js';
import { briefly } from './words.js';

/** The number of messages that are kept. Only additions are read out. */
const KEPT = 5;

export function Announcements({ conversation, user }: { conversation: Conversation; user: string }) {
  const [heard, setHeard] = useState<readonly Message[]>([]);
  useEffect(
    () =>
      conversation.on('message', (message) => {
        if (message.sender !== user && message.kind === 'text' && !message.deleted) setHeard((before) => [...before, message].slice(-KEPT));
      }),
    [conversation, user],
  );
  // What was edited or deleted since is not left there.
  const now = heard.map((message) => conversation.message(message.seq) ?? message).filter(({ deleted }) => !deleted);
  return (
    <div className="sr-only" aria-live="polite" aria-relevant="additions">
      {now.map((message) => (
        <p key={message.seq}>
          {message.sender}: {briefly(message, 200)}
        </p>
      ))}
    </div>
  );
}
