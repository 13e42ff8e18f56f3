/** Hooks over a client; React is not part of the core. */
import { useCallback, useEffect, useSyncExternalStore } from 'react';
import type { ChatClient } from './client.js';
import type { State } from './connection.js';
import type { ChatMessage, Conversation } from './conversation.js';
import type { ConversationId, InboxItem, Presence, Seq, UserId } from './types.js';

/** Bursts are shown at most this often. */
const FRAME_MS = 16;

/** Calls the first time at once, then at most once a frame. */
function gathered(show: () => void): { notify: () => void; stop: () => void } {
  let timer: ReturnType<typeof setTimeout> | undefined;
  let again = false;
  const notify = () => {
    if (timer) {
      again = true;
      return;
    }
    show();
    timer = setTimeout(() => {
      timer = undefined;
      if (again) {
        again = false;
        notify();
      }
    }, FRAME_MS);
  };
  return { notify, stop: () => clearTimeout(timer) };
}

/** What the connection is doing. */
export function useConnection(client: ChatClient): State {
  return useSyncExternalStore(
    useCallback((show) => client.on('state', show), [client]),
    () => client.state,
    () => client.state,
  );
}

/** The conversations of the user, most active first. */
export function useInbox(client: ChatClient): { items: readonly InboxItem[]; loaded: boolean } {
  const items = useSyncExternalStore(
    useCallback(
      (show) => {
        const { notify, stop } = gathered(show);
        const off = client.inbox.on('change', notify);
        return () => {
          off();
          stop();
        };
      },
      [client],
    ),
    () => client.inbox.items,
    () => client.inbox.items,
  );
  return { items, loaded: client.inbox.loaded };
}

/** What a component shows of a conversation. */
export interface ConversationView {
  conversation: Conversation;
  messages: readonly ChatMessage[];
  typing: UserId[];
}

const views = new WeakMap<Conversation, { view: ConversationView; of: unknown[] }>();

/** The same object as long as nothing has changed. */
function viewOf(conversation: Conversation): ConversationView {
  const { messages, typing, loading, atStart, atEnd, head, details, removed, error } = conversation;
  const of = [messages, typing.join(' '), loading, atStart, atEnd, head, details, removed, error];
  const known = views.get(conversation);
  if (known?.of.every((value, i) => value === of[i])) return known.view;
  const view = { conversation, messages, typing };
  views.set(conversation, { view, of });
  return view;
}

/** One conversation, live as long as the component is there; begun around `at`, if given. */
export function useConversation(client: ChatClient, id: ConversationId, at?: Seq): ConversationView {
  const conversation = client.conversation(id);
  // biome-ignore lint/correctness/useExhaustiveDependencies: `at` is where it begins, not what it follows.
  useEffect(() => conversation.open(at === undefined ? {} : { at }), [conversation]);
  return useSyncExternalStore(
    useCallback(
      (show) => {
        const { notify, stop } = gathered(show);
        const off = conversation.on('change', notify);
        return () => {
          off();
          stop();
        };
      },
      [conversation],
    ),
    () => viewOf(conversation),
    () => viewOf(conversation),
  );
}

/** Who of these is online. */
export function usePresence(client: ChatClient, user: UserId | undefined): Presence | undefined {
  useEffect(() => (user === undefined ? undefined : client.watch([user])), [client, user]);
  return useSyncExternalStore(
    useCallback((show) => client.on('presence', show), [client]),
    () => (user === undefined ? undefined : client.presence(user)),
    () => undefined,
  );
}
