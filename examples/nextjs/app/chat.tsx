'use client';
/** The chat. It is also rendered on the server, where the client never connects and all lists are empty. */
import { ChatClient, UnauthorizedError } from '@chat-gateway/client';
import { useConnection, useConversation, useInbox } from '@chat-gateway/client/react';
import { type SubmitEvent, useEffect, useState } from 'react';
import { signOut } from './actions';

async function token({ signal }: { signal: AbortSignal }): Promise<string> {
  const answer = await fetch('/api/token', { signal });
  if (answer.status === 401) throw new UnauthorizedError('signed out');
  if (!answer.ok) throw new Error(`the token route answered ${answer.status}`);
  return (await answer.json()).token;
}

export function Chat({ url, user }: { url: string; user: string }) {
  // Not outside of the component: the server renders pages of many users. In strict mode React makes two, and uses one.
  const [chat] = useState(() => new ChatClient(url, { token, user }));
  const [id, setId] = useState<string>();
  const [refusal, setRefusal] = useState('');
  const { at, error } = useConnection(chat);
  const { items } = useInbox(chat);
  useEffect(() => {
    chat.connect().catch(() => {}); // useConnection returns the error.
    return () => chat.disconnect();
  }, [chat]);
  const leave = async () => {
    setRefusal('');
    try {
      // First what can fail: without a network the user stays signed in, and the chat stays usable.
      await signOut();
      await chat.logout(); // Deletes what this browser keeps of the user.
    } catch (error) {
      setRefusal(`Not signed out: ${(error as Error).message}`);
    }
  };
  const open = async (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    setRefusal('');
    // As the sign-in does: the gateway takes `Bob` and `bob` for two users.
    const other = String(new FormData(event.currentTarget).get('with')).trim().toLowerCase();
    try {
      setId((await chat.dm(other)).id);
    } catch (error) {
      setRefusal((error as Error).message);
    }
  };
  return (
    <>
      <header>
        {user} <span role="status">{error ? error.message : at}</span>{' '}
        <button type="button" onClick={leave}>
          Sign out
        </button>
      </header>
      <nav aria-label="Conversations">
        {items.map(({ conversation, name, unread }) => (
          <button type="button" key={conversation} aria-pressed={conversation === id} onClick={() => setId(conversation)}>
            {name} {unread > 0 && `(${unread} new)`}
          </button>
        ))}
      </nav>
      <form onSubmit={open}>
        <label>
          With <input name="with" required />
        </label>{' '}
        <button type="submit">Open</button> <span role="alert">{refusal}</span>
      </form>
      {id && <Thread key={id} chat={chat} id={id} />}
    </>
  );
}

function Thread({ chat, id }: { chat: ChatClient; id: string }) {
  const { conversation, messages } = useConversation(chat, id);
  const newest = messages.at(-1)?.seq;
  useEffect(() => {
    if (newest) conversation.read(newest);
  }, [conversation, newest]);
  const send = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    const form = event.currentTarget;
    conversation.send(String(new FormData(form).get('text'))).catch(() => {}); // The list shows it as failed.
    form.reset();
  };
  return (
    <main>
      <ol role="log" aria-label="Messages">
        {messages.map(({ key, sender, body, state }) => (
          <li key={key}>
            {sender}: {body} {state && `(${state})`}
          </li>
        ))}
      </ol>
      <form onSubmit={send}>
        <input name="text" aria-label="Message" required /> <button type="submit">Send</button>
      </form>
    </main>
  );
}
