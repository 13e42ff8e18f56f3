'use client';
/** React hooks over a client. */
import { useCallback, useEffect, useMemo, useSyncExternalStore } from 'react';
import type { ChatClient } from './client.js';
import type { ChatError } from './codes.js';
import type { State } from './connection.js';
import type { Conversation, ConversationView } from './conversation.js';
import type { ChatMessage } from './list.js';
import type { ConversationId, InboxItem, Presence, Seq, UserId } from './types.js';
import type { Upload } from './upload.js';

/** The state of a client that was not started, for server rendering and hydration. */
const IDLE: State = { at: 'idle' };
const NOTHING: InboxView = { items: [], loaded: false, error: undefined };
const empty = new WeakMap<Conversation, ConversationView>();

/** Returns the state of the connection. */
export function useConnection(client: ChatClient): State {
  return useSyncExternalStore(
    useCallback((show) => client.on('state', show), [client]),
    () => client.state,
    () => IDLE,
  );
}

/** An immutable view of the inbox, for a component to render. */
export interface InboxView {
  items: readonly InboxItem[];
  /** Whether the first page was loaded. */
  loaded: boolean;
  /** The error of the last attempt to load it. */
  error: ChatError | undefined;
}

const inboxes = new WeakMap<ChatClient, InboxView>();

/** Returns the current view: the same object until the inbox changes. */
function inboxOf(client: ChatClient): InboxView {
  const { items, loaded, error } = client.inbox;
  const known = inboxes.get(client);
  if (known && known.items === items && known.loaded === loaded && known.error === error) return known;
  const view = { items, loaded, error };
  inboxes.set(client, view);
  return view;
}

/** Returns the user's conversations, the one with the newest message first. */
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

/** Returns one conversation. Its list is open while the component is mounted, and begins at the newest message or around
 * the seq `at`. */
export function useConversation(client: ChatClient, id: ConversationId, at?: Seq): ConversationView {
  // The client holds a conversation weakly, so the component has to hold it.
  const conversation = useMemo(() => client.conversation(id), [client, id]);
  // biome-ignore lint/correctness/useExhaustiveDependencies: a later `at` does not open the list again.
  useEffect(() => conversation.open(at === undefined ? {} : { at }), [conversation]);
  return useSyncExternalStore(
    useCallback((show) => conversation.on('change', show), [conversation]),
    () => conversation.view(),
    () => emptyView(conversation),
  );
}

/** Watches a user, and returns whether they are online. */
export function usePresence(client: ChatClient, user: UserId | undefined): Presence | undefined {
  useEffect(() => (user === undefined ? undefined : client.watch([user])), [client, user]);
  return useSyncExternalStore(
    useCallback((show) => client.on('presence', show), [client]),
    () => (user === undefined ? undefined : client.presence(user)),
    () => undefined,
  );
}

/** An immutable view of an upload, for a component to render. */
export type UploadView = Pick<Upload, 'state' | 'sent' | 'size' | 'error' | 'metadata'>;

const uploads = new WeakMap<Upload, UploadView>();

/** Returns the current view: the same object until the upload changes. */
function viewOf(upload: Upload): UploadView {
  const { state, sent, size, error, metadata } = upload;
  const known = uploads.get(upload);
  if (known && known.state === state && known.sent === sent && known.error === error && known.metadata === metadata) return known;
  const view = { state, sent, size, error, metadata };
  uploads.set(upload, view);
  return view;
}

/** Returns the progress and the state of an upload that `conversation.attach()` returned. */
export function useUpload(upload: Upload): UploadView {
  const view = () => viewOf(upload);
  return useSyncExternalStore(
    useCallback(
      (show) => {
        const ends = [upload.on('progress', show), upload.on('state', show)];
        return () => {
          for (const end of ends) end();
        };
      },
      [upload],
    ),
    view,
    view,
  );
}

/** Returns a message with its newest state, for example one that a reply quotes. Loads it if it is not in the list.
 * `undefined` until then, and if there is no such message. */
export function useMessage(conversation: Conversation, seq: Seq): ChatMessage | undefined {
  const message = useSyncExternalStore(
    useCallback((show) => conversation.on('change', show), [conversation]),
    () => conversation.message(seq),
    () => undefined,
  );
  const isMissing = !message;
  useEffect(() => {
    if (!isMissing) return;
    const stop = new AbortController();
    conversation.loadMessage(seq, stop.signal).catch(() => {});
    return () => stop.abort();
  }, [conversation, seq, isMissing]);
  return message;
}
