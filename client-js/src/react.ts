'use client';
/** Hooks over a client; React is not part of the core. */
import { useCallback, useEffect, useMemo, useSyncExternalStore } from 'react';
import type { ChatClient } from './client.js';
import type { ChatError } from './codes.js';
import type { State } from './connection.js';
import type { Conversation, ConversationView } from './conversation.js';
import type { ConversationId, InboxItem, Presence, Seq, UserId } from './types.js';

/** What a server renders, and a browser before it takes over: a client that has not begun. */
const IDLE: State = { at: 'idle' };
const NOTHING: InboxView = { items: [], loaded: false, error: undefined };
const empty = new WeakMap<Conversation, ConversationView>();

/** What the connection is doing. */
export function useConnection(client: ChatClient): State {
  return useSyncExternalStore(
    useCallback((show) => client.on('state', show), [client]),
    () => client.state,
    () => IDLE,
  );
}

/** What a component shows of the inbox. */
export interface InboxView {
  items: readonly InboxItem[];
  loaded: boolean;
  /** Why it could not be loaded yet. */
  error: ChatError | undefined;
}

const inboxes = new WeakMap<ChatClient, InboxView>();

/** The same object as long as nothing has changed. */
function inboxOf(client: ChatClient): InboxView {
  const { items, loaded, error } = client.inbox;
  const known = inboxes.get(client);
  if (known && known.items === items && known.loaded === loaded && known.error === error) return known;
  const view = { items, loaded, error };
  inboxes.set(client, view);
  return view;
}

/** The conversations of the user, most active first. */
export function useInbox(client: ChatClient): InboxView {
  return useSyncExternalStore(
    useCallback((show) => client.inbox.on('change', show), [client]),
    () => inboxOf(client),
    () => NOTHING,
  );
}

export type { ConversationView };

function emptyView(conversation: Conversation): ConversationView {
  let view = empty.get(conversation);
  if (!view) empty.set(conversation, (view = { conversation, messages: [], typing: [] }));
  return view;
}

/** One conversation, live as long as the component is there; begun around `at`, if given. */
export function useConversation(client: ChatClient, id: ConversationId, at?: Seq): ConversationView {
  // Held by the component: the client alone would drop it.
  const conversation = useMemo(() => client.conversation(id), [client, id]);
  // biome-ignore lint/correctness/useExhaustiveDependencies: `at` is where it begins, not what it follows.
  useEffect(() => conversation.open(at === undefined ? {} : { at }), [conversation]);
  return useSyncExternalStore(
    useCallback((show) => conversation.on('change', show), [conversation]),
    () => conversation.view(),
    () => emptyView(conversation),
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
