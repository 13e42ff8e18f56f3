/** Who has read a message of a group, and whom else it has reached. */
import { useId, useState } from 'react';
import type { ChatClient, ChatMessage, Conversation, Participant } from '../../src/index.js';
import { Avatar, Dialog, Skeleton } from './parts.js';
import { useReceipts } from './receipts.js';
import { Name } from './words.js';

/** The number of names that a list shows at first, and by which it grows. */
const PAGE = 50;

interface Props {
  chat: ChatClient;
  conversation: Conversation;
  message: ChatMessage;
  user: string;
  onClose: () => void;
}

export function ReadBy({ chat, conversation, message, user, onClose }: Props) {
  const { seq = 0 } = message;
  const { members, problem, load, connected } = useReceipts(chat, conversation);
  // Members who joined after the message are left out: their watermarks begin at the newest message of that moment.
  const others = members?.filter((member) => member.user !== user && member.joinedSeq < seq) ?? [];
  const stateOf = ({ readSeq = 0, deliveredSeq = 0 }: Participant) =>
    readSeq >= seq ? 'Read by' : deliveredSeq >= seq ? 'Delivered to' : 'Not delivered to';
  return (
    <Dialog title="Who has read it" onClose={onClose}>
      {!members && !problem && (connected ? <Skeleton rows={3} /> : <p>It is shown when there is a connection.</p>)}
      {members && !others.length && <p>Nobody else was in the group.</p>}
      {problem && (
        <p role="alert" className="problem">
          {problem}{' '}
          <button type="button" onClick={load}>
            Try again
          </button>
        </p>
      )}
      {others.length > 0 && (
        // biome-ignore lint/a11y/noNoninteractiveTabindex: keys scroll it.
        <div className="readers" tabIndex={0}>
          {(['Read by', 'Delivered to', 'Not delivered to'] as const).map((title) => (
            <Members key={title} title={title} members={others.filter((member) => stateOf(member) === title)} />
          ))}
        </div>
      )}
    </Dialog>
  );
}

/** A list of members under a title with their number. Nothing without members. */
function Members({ title, members }: { title: string; members: readonly Participant[] }) {
  const [shown, setShown] = useState(PAGE);
  const id = useId();
  if (!members.length) return null;
  return (
    <section>
      <h3 id={id}>
        {title} {members.length.toLocaleString()}
      </h3>
      <ul className="members" aria-labelledby={id}>
        {members.slice(0, shown).map(({ user }) => (
          <li key={user}>
            <Avatar name={user} kind="dm" />
            <span className="title">
              <Name of={user} />
            </span>
          </li>
        ))}
      </ul>
      {members.length > shown && (
        <button type="button" onClick={() => setShown(shown + PAGE)}>
          More
        </button>
      )}
    </section>
  );
}
