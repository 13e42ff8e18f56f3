import { type FormEvent, type ReactNode, useCallback, useEffect, useRef, useState } from 'react';
import type { Conversation, ConversationDetails, Participant, Role } from '../../src/index.js';
import { dateOf, exactly } from './days.js';
import { idOf } from './ids.js';
import { Avatar, Confirm, Dialog, Icon, Skeleton } from './parts.js';
import { Name } from './words.js';

const PAGE = 50;
const rank: Record<Role, number> = { member: 0, admin: 1, owner: 2 };

interface Props {
  conversation: Conversation;
  details: ConversationDetails;
  user: string;
  title: string;
  /** The name for the avatar. */
  face: string;
  onJump: (seq: number) => void;
}

/** The panel beside the conversation. It takes the focus, and Escape closes it. */
export function Panel({ onClose, children }: { onClose: () => void; children: ReactNode }) {
  const panel = useRef<HTMLElement>(null);
  useEffect(() => panel.current!.focus(), []);
  return (
    <aside
      ref={panel}
      className="details"
      aria-label="Details"
      tabIndex={-1}
      onKeyDown={(event) => {
        // Escape in a dialog inside the panel closes the dialog only, and an input method gives a word up with it (Safari: only 229 tells).
        if (
          event.key === 'Escape' &&
          !event.nativeEvent.isComposing &&
          event.keyCode !== 229 &&
          !(event.target as Element).closest('dialog')
        )
          onClose();
      }}
    >
      <header>
        <h2>Details</h2>
        <button type="button" className="quiet" aria-label="Close" onClick={onClose}>
          <Icon name="close" />
        </button>
      </header>
      {children}
    </aside>
  );
}

/** The details and members of a conversation, and the controls to change them. */
export function Details({ conversation, details, user, title, face, onJump }: Props) {
  const [members, setMembers] = useState<Participant[]>();
  const [more, setMore] = useState(false);
  const [problem, setProblem] = useState<string>();
  /** The action to confirm: removing a member, or without `remove` leaving. */
  const [asking, setAsking] = useState<{ remove?: string }>();
  const pages = useRef<AsyncGenerator<Participant[]>>(undefined);
  const { kind, role } = details;
  /** The gateway refuses the last owner while there are others. With more pages of members there may be other owners. */
  const isLastOwner =
    role === 'owner' && !!members && !more && members.length > 1 && members.filter((member) => member.role === 'owner').length === 1;
  const isAdmin = role === 'admin' || role === 'owner';

  const load = useCallback(
    async (again = false) => {
      if (again || !pages.current) pages.current = conversation.participants({ limit: PAGE });
      const from = pages.current;
      try {
        const { value = [], done } = await from.next();
        // The list began again meanwhile, so this page is outdated.
        if (from !== pages.current) return;
        setMembers((before = []) => (again ? value : [...before, ...value]));
        setMore(!done && value.length === PAGE);
      } catch (error) {
        if (from === pages.current) setProblem((error as Error).message);
      }
    },
    [conversation],
  );
  // biome-ignore lint/correctness/useExhaustiveDependencies: loads again when the members or their roles change.
  useEffect(() => {
    void load(true);
  }, [load, details]);

  const loadMore = () => {
    setProblem(undefined);
    void load();
  };

  const attempt = async (what: Promise<unknown>) => {
    try {
      setProblem(undefined);
      await what;
      await conversation.loadDetails();
    } catch (error) {
      setProblem((error as Error).message);
    }
  };
  const submit = (action: (value: string) => Promise<unknown>) => (event: FormEvent<HTMLFormElement>) => {
    event.preventDefault();
    const form = event.currentTarget;
    const value = String(new FormData(form).get('value')).trim();
    if (value) void attempt(action(value).then(() => form.reset()));
  };

  return (
    <>
      <div className="about">
        <Avatar name={face} kind={kind} />
        <h3>
          <Name of={title} />
        </h3>
        <p>
          Created by <Name of={details.createdBy} /> on <time title={exactly(details.createdAt)}>{dateOf(details.createdAt)}</time>
        </p>
        {conversation.head > 1 && (
          <p>
            <button type="button" onClick={() => onJump(1)}>
              Go to the beginning
            </button>
          </p>
        )}
      </div>
      {problem && (
        <p role="alert" className="problem">
          {problem}{' '}
          {!members && (
            <button type="button" onClick={loadMore}>
              Try again
            </button>
          )}
        </p>
      )}
      {isAdmin && kind !== 'dm' && (
        <>
          <form onSubmit={submit((name) => conversation.update({ name }))}>
            <label>
              Name
              <input name="value" defaultValue={details.name} required />
            </label>
            <button type="submit">Rename</button>
          </form>
          <label>
            Who may post
            <select
              value={details.posting}
              onChange={(event) => attempt(conversation.update({ posting: event.target.value as 'everyone' }))}
            >
              <option value="everyone">Everyone</option>
              <option value="admins">Admins only</option>
            </select>
          </label>
          <label className="check">
            <input
              type="checkbox"
              checked={details.public}
              onChange={(event) => attempt(conversation.update({ public: event.target.checked }))}
            />
            Public: listed, and anyone may join
          </label>
          <form onSubmit={submit((who) => conversation.add(idOf(who)))}>
            <label>
              Add somebody
              <input name="value" autoComplete="off" autoCapitalize="none" spellCheck={false} required />
            </label>
            <button type="submit">Add</button>
          </form>
        </>
      )}
      <h3>
        {details.participantCount.toLocaleString()} {details.participantCount === 1 ? 'member' : 'members'}
      </h3>
      {!members && !problem && <Skeleton rows={3} />}
      <ul className="members" aria-busy={!members}>
        {members?.map((member) => (
          <li key={member.user}>
            <Avatar name={member.user} kind="dm" />
            <span className="title">
              <Name of={member.user} />
              {member.user === user && ' (you)'}
            </span>
            {role === 'owner' && kind !== 'dm' && member.user !== user ? (
              <select
                aria-label={`Role of ${member.user}`}
                value={member.role}
                onChange={(event) => attempt(conversation.setRole(member.user, event.target.value as Role))}
              >
                <option value="member">Member</option>
                <option value="admin">Admin</option>
                <option value="owner">Owner</option>
              </select>
            ) : (
              member.role !== 'member' && <small>{member.role}</small>
            )}
            {isAdmin && kind !== 'dm' && rank[member.role] < rank[role] && member.user !== user && (
              <button
                type="button"
                className="quiet"
                aria-label={`Remove ${member.user}`}
                onClick={() => setAsking({ remove: member.user })}
              >
                <Icon name="close" />
              </button>
            )}
          </li>
        ))}
      </ul>
      {more && (
        <button type="button" onClick={loadMore}>
          More
        </button>
      )}
      {role && kind !== 'dm' && (
        <button type="button" className="danger" onClick={() => setAsking({})}>
          Leave this {kind}
        </button>
      )}
      {asking &&
        (asking.remove !== undefined ? (
          <Confirm
            title="Remove a member?"
            action="Remove"
            onConfirm={() => conversation.remove(asking.remove!).then(() => conversation.loadDetails())}
            onClose={() => setAsking(undefined)}
          >
            <Name of={asking.remove} /> will not see new messages of <Name of={title} />.
          </Confirm>
        ) : isLastOwner ? (
          <Dialog title="You are the only owner" onClose={() => setAsking(undefined)}>
            <p>To leave, make another member an owner first.</p>
          </Dialog>
        ) : (
          <Confirm title={`Leave this ${kind}?`} action="Leave" onConfirm={() => conversation.leave()} onClose={() => setAsking(undefined)}>
            You will not see new messages of <Name of={title} />.{' '}
            {details.public ? 'It is public: you can join again.' : 'Only an admin can add you again.'}
          </Confirm>
        ))}
    </>
  );
}
