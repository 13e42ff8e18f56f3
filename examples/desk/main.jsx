// The desk of a support team: all conversations with their unread counts, and a live view of the open one.
import { ChatClient } from '@chat-gateway/client';
import { useConnection, useConversation, useInbox, usePresence } from '@chat-gateway/client/react';
import { StrictMode, useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';

const chat = new ChatClient('ws://127.0.0.1:8080/v1/ws', {
  token: async ({ signal }) => (await (await fetch('chat-token', { signal })).json()).token,
});

function Desk() {
  const [id, setId] = useState();
  const { at, error } = useConnection(chat);
  const { items } = useInbox(chat);
  useEffect(() => {
    chat.connect().catch(() => {}); // useConnection returns the error.
    return () => chat.disconnect();
  }, []);
  return (
    <>
      <p role="status">{error ? error.message : at}</p>
      <nav>
        {items.map(({ conversation, name, unread }) => (
          <button key={conversation} aria-pressed={conversation === id} onClick={() => setId(conversation)}>
            {name} {unread > 0 && `(${unread} new)`}
          </button>
        ))}
      </nav>
      {id && <Thread key={id} id={id} />}
    </>
  );
}

function Thread({ id }) {
  const { conversation, messages, typing } = useConversation(chat, id);
  const visitor = conversation.item?.name;
  const presence = usePresence(chat, visitor);
  const [text, setText] = useState('');
  const newest = messages.at(-1)?.seq;
  useEffect(() => {
    if (newest) conversation.read(newest);
  }, [conversation, newest]);
  const send = (event) => {
    event.preventDefault();
    conversation.send(text).catch(() => {}); // The list shows it as failed.
    setText('');
  };
  return (
    <main>
      <h1>
        {visitor} {presence?.online ? 'is here' : 'is away'} {typing.length > 0 && 'and typing'}
      </h1>
      <ol role="log" aria-label="Messages">
        {messages.map(({ key, sender, body, state }) => (
          <li key={key}>
            {sender}: {body} {state && `(${state})`}
          </li>
        ))}
      </ol>
      <form onSubmit={send}>
        <input aria-label="Message" value={text} onChange={(event) => setText(event.target.value)} required /> <button>Send</button>
      </form>
    </main>
  );
}

createRoot(document.getElementById('root')).render(
  <StrictMode>
    <Desk />
  </StrictMode>,
);
