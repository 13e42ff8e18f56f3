import { useCallback, useEffect, useMemo, useRef, useState } from 'react';
import { ChatClient, indexedDbStorage, memoryStorage, type OutboxStorage, type State } from '../../src/index.js';
import { useConnection, useInbox } from '../../src/react.js';
import { forgetAttached } from './attaching.js';
import { setClock } from './clock.js';
import { watchKept } from './kept.js';
import { isMuted, useMuting } from './muting.js';
import { type Notifying, useNotifications } from './notify.js';
import { useMedia } from './parts.js';
import { useDevices } from './pushing.js';
import { Sidebar } from './Sidebar.js';
import { SignIn } from './SignIn.js';
import { developmentToken, forget, nameOf, remember, remembered, type Session, scope, socketUrl } from './session.js';
import { useShortcuts } from './shortcuts.js';
import { useSignOut } from './sign-out.js';
import { useSound } from './sound.js';
import { Thread } from './Thread.js';

/** How long a conversation that the address names waits for the inbox. A connection may hang for longer. */
const KNOWN_WITHIN_MS = 3_000;

export function App() {
  const [session, setSession] = useState(remembered);
  const [problem, setProblem] = useState<string>();
  const signOut = (why?: string) => {
    if (session) forget(session.user);
    setProblem(why);
    setSession(undefined);
  };
  if (!session) {
    return (
      <SignIn
        problem={problem}
        onSession={(session) => {
          remember(session);
          setSession(session);
        }}
      />
    );
  }
  return <Chat key={session.user} session={session} onSignOut={signOut} />;
}

/** The conversation that the address names, and the message if it names one. */
interface Route {
  id?: string | undefined;
  seq?: number | undefined;
}

/** Returns what the address names (`#/id` or `#/id/seq`), and a function that selects a conversation. */
function useRoute(): [Route, (id: string | undefined) => void] {
  const read = (): Route => {
    const [, id, seq] = location.hash.match(/^#\/([0-9a-f-]{36})(?:\/([1-9]\d{0,14}))?$/) ?? [];
    return { id, seq: Number(seq) || undefined };
  };
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const changed = () => setRoute(read());
    addEventListener('hashchange', changed);
    return () => removeEventListener('hashchange', changed);
  });
  // From then on the address names the conversation, so that the same link leads to the message once more.
  useEffect(() => {
    if (route.seq) history.replaceState(null, '', `#/${route.id}`);
  }, [route]);
  return [route, useCallback((id) => void (location.hash = id ? `#/${id}` : '#/'), [])];
}

/** Returns the storage of the outbox: IndexedDB, or memory if there is none. Some browsers throw where storage is forbidden. */
function storageOfBrowser(): OutboxStorage {
  try {
    if (globalThis.indexedDB) return indexedDbStorage();
  } catch (error) {
    console.warn('Unsent messages are kept in memory only:', error);
  }
  return memoryStorage();
}

function Chat({ session, onSignOut }: { session: Session; onSignOut: (why?: string) => void }) {
  const { user, token } = session;
  const [chat, storage] = useMemo(() => {
    // JSON is the default because the browser's tools show it as text; `/?codec=msgpack` has smaller frames.
    const codec = new URLSearchParams(location.search).get('codec') === 'msgpack' ? 'msgpack' : 'json';
    const storage = storageOfBrowser();
    const chat = new ChatClient(socketUrl(), {
      user,
      codec,
      token: token ?? (({ signal }) => developmentToken(user, signal)),
      device: 'page',
      scope,
      storage,
    });
    setClock(chat);
    return [chat, storage] as const;
  }, [user, token]);
  useEffect(() => {
    chat.connect().catch(() => {});
    return () => chat.disconnect();
  }, [chat]);
  useEffect(() => watchKept(chat), [chat]);
  useEffect(
    () => chat.on('conversation', ({ conversation, change }) => change === 'removed' && forgetAttached(user, conversation)),
    [chat, user],
  );

  const signingOut = useSignOut({
    chat,
    user,
    storage,
    onSignedOut: (problem) => {
      // The next user may not be in this conversation.
      history.replaceState(null, '', '#/');
      onSignOut(problem);
    },
  });
  const state = useConnection(chat);
  const { items, loaded, error } = useInbox(chat);
  // An address may name a conversation before its inbox item is here, which says what is unread. Without a connection there is no waiting.
  const isKnown = useRef(false);
  const [isLate, setLate] = useState(false);
  useEffect(() => {
    const timer = setTimeout(setLate, KNOWN_WITHIN_MS, true);
    return () => clearTimeout(timer);
  }, []);
  isKnown.current ||= loaded || !!error || (isLate && state.at !== 'connected') || state.at === 'waiting' || state.at === 'closed';
  const [route, select] = useRoute();
  const selected = route.id;
  const devices = useDevices(chat);
  const notifying = useNotifications(chat, user, devices?.webKey ?? undefined, select);
  const sounding = useSound(chat, user, selected);
  useMuting(items);
  const unread = items.reduce((sum, item) => sum + (isMuted(item) ? 0 : item.unread), 0);
  useEffect(() => {
    document.title = unread ? `(${unread}) Chat` : 'Chat';
    // Only installed pages have a badge.
    navigator.setAppBadge?.(unread).catch(() => {});
    return () => {
      document.title = 'Chat';
    };
  }, [unread]);
  const shortcuts = useShortcuts(items, selected, select);
  // In a narrow window an open conversation hides the inbox, and has this line itself.
  const isAlone = useMedia('(width < 700px)') && selected !== undefined;
  const connection = useMemo(
    () => <Connection state={state} onRetry={() => chat.connect().catch(() => {})} onSignOut={onSignOut} />,
    [chat, state, onSignOut],
  );

  return (
    <div className={`chat${selected ? ' has-thread' : ''}${notifying?.offered ? ' has-offer' : ''}`}>
      <header className="sr-only">
        <h1>Chat</h1>
      </header>
      {notifying?.offered && <Offer notifying={notifying} />}
      <Sidebar
        chat={chat}
        user={user}
        name={nameOf(session)}
        items={items}
        loaded={loaded}
        selected={selected}
        notifying={notifying}
        onSelect={select}
        onSignOut={() => void signingOut.ask()}
      >
        {!isAlone && connection}
      </Sidebar>
      {selected && !isKnown.current ? (
        <main className="thread" aria-busy="true" />
      ) : selected ? (
        <Thread
          key={selected}
          chat={chat}
          id={selected}
          route={route}
          user={user}
          connection={isAlone && connection}
          sounding={sounding}
          maySet={!!devices}
          hasPushes={!!devices && (!!devices.webKey || devices.items.length > 0)}
          onSelect={select}
        />
      ) : (
        <main className="empty">
          <img src="icon.svg" alt="" width="72" height="72" />
          <p>{items.length || !loaded ? 'Choose a conversation' : 'Your conversations will appear here'}</p>
          <button type="button" className="to-keys" onClick={shortcuts.show}>
            Keyboard shortcuts
          </button>
        </main>
      )}
      {signingOut.question}
      {shortcuts.list}
    </div>
  );
}

/** The question whether to notify. The browser asks again by itself, so a click has to come first. */
function Offer({ notifying }: { notifying: Notifying }) {
  return (
    <section className="offer" aria-label="Notifications of new messages">
      <p>Get notified of new messages, also when this page is closed?</p>
      <button type="button" className="primary" onClick={notifying.toggle}>
        Notify me
      </button>
      <button type="button" onClick={notifying.refuse}>
        Not now
      </button>
    </section>
  );
}

function Connection({ state, onRetry, onSignOut }: { state: State; onRetry: () => void; onSignOut: (why: string) => void }) {
  if (state.at === 'connected')
    return (
      <p className="connection sr-only" role="status">
        Connected
      </p>
    );
  if (state.at === 'closed') {
    return (
      <p className="connection" role="alert">
        {state.error.message}{' '}
        <button type="button" onClick={() => onSignOut(state.error.message)}>
          Sign in again
        </button>
      </p>
    );
  }
  return (
    <p className="connection" role="status" title={state.at === 'waiting' ? state.error?.message : undefined}>
      <span className="spinner" aria-hidden="true" />
      {state.at === 'waiting' ? 'No connection. Trying again…' : 'Connecting…'}
      {state.at === 'waiting' && (
        <button type="button" onClick={onRetry}>
          Try now
        </button>
      )}
    </p>
  );
}
