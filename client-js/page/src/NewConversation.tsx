import { type FormEvent, useState } from 'react';
import type { ChatClient, Posting } from '../../src/index.js';
import { idOf, idsOf } from './ids.js';
import { Dialog } from './parts.js';

const kinds = { dm: 'Direct chat', group: 'Group', channel: 'Channel' } as const;

/** The dialog to create a conversation. */
export function NewConversation({ chat, onOpen, onClose }: { chat: ChatClient; onOpen: (id: string) => void; onClose: () => void }) {
  const [kind, setKind] = useState<keyof typeof kinds>('dm');
  const [error, setError] = useState<string>();
  const [busy, setBusy] = useState(false);

  const submit = async (event: FormEvent<HTMLFormElement>) => {
    event.preventDefault();
    const fields = new FormData(event.currentTarget);
    const text = (name: string) => String(fields.get(name) ?? '').trim();
    const participants = idsOf(text('people'));
    const name = text('name');
    setBusy(true);
    setError(undefined);
    try {
      const what = { participants, ...(name && { name }), public: fields.has('public'), posting: text('posting') as Posting };
      const made = kind === 'dm' ? chat.dm(idOf(text('people'))) : kind === 'group' ? chat.createGroup(what) : chat.createChannel(what);
      onOpen((await made).id);
    } catch (thrown) {
      setError((thrown as Error).message);
      setBusy(false);
    }
  };

  return (
    <Dialog title="New conversation" onClose={onClose}>
      <form onSubmit={submit}>
        <fieldset className="kinds">
          <legend className="sr-only">Kind</legend>
          {Object.entries(kinds).map(([value, label]) => (
            <label key={value}>
              <input type="radio" name="kind" value={value} checked={kind === value} onChange={() => setKind(value as typeof kind)} />
              {label}
            </label>
          ))}
        </fieldset>
        {kind !== 'dm' && (
          <label>
            Name
            <input name="name" required autoComplete="off" />
          </label>
        )}
        <label>
          {kind === 'dm' ? 'With' : 'People'}
          <input
            name="people"
            data-first
            required={kind === 'dm'}
            autoComplete="off"
            autoCapitalize="none"
            spellCheck={false}
            placeholder={kind === 'dm' ? 'A user' : 'Users, separated by commas'}
          />
        </label>
        {kind !== 'dm' && (
          <>
            <label className="check">
              <input type="checkbox" name="public" defaultChecked={kind === 'channel'} key={kind} /> Public: listed, and anyone may join
            </label>
            <label>
              Who may post
              <select name="posting" defaultValue={kind === 'channel' ? 'admins' : 'everyone'} key={kind}>
                <option value="everyone">Everyone</option>
                <option value="admins">Admins only</option>
              </select>
            </label>
          </>
        )}
        {error && (
          <p role="alert" className="problem">
            {error}
          </p>
        )}
        <button type="submit" className="primary" disabled={busy}>
          {kind === 'dm' ? 'Open' : 'Create'}
        </button>
      </form>
    </Dialog>
  );
}
