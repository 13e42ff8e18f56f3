/** Leaves nothing of a user behind: on a shared computer the next one must not find it. */
import { useEffect, useRef, useState } from 'react';
import type { ChatClient, OutboxEntry, OutboxStorage } from '../../src/index.js';
import { deleteDrafts } from './drafts.js';
import { forgetNotifications } from './notify.js';
import { Confirm } from './parts.js';
import { base, scope } from './session.js';

/** A storage that does not answer in this time holds nobody up: they sign out without being asked. */
const STORAGE_TIMEOUT_MS = 2_000;

interface Props {
  chat: ChatClient;
  user: string;
  /** Where the client keeps the messages that are not sent. */
  storage: OutboxStorage;
  onSignedOut: (problem?: string) => void;
}

/** Deletes what is stored for this user. Returns what could not be deleted, as a sentence. */
async function clear(chat: ChatClient, user: string): Promise<string | undefined> {
  try {
    await chat.logout();
    return undefined;
  } catch (error) {
    return `You are signed out, but this browser could not delete your unsent messages: ${(error as Error).message}`;
  } finally {
    deleteDrafts(user);
    forgetNotifications(user);
  }
}

/** Signs out in all tabs of this user. `ask` begins, and `question` is what it asks where messages would be lost. */
export function useSignOut({ chat, user, storage, onSignedOut }: Props) {
  /** Messages that are not sent yet, while the user is asked about them. */
  const [unsent, setUnsent] = useState(0);
  /** The other tabs of this user. A channel does not hear what it says itself. */
  const others = useRef<BroadcastChannel>(undefined);
  // biome-ignore lint/correctness/useExhaustiveDependencies: `onSignedOut` is another function each time, and does the same.
  useEffect(() => {
    const tabs = new BroadcastChannel(`chat-page ${base.pathname} ${user}`);
    tabs.onmessage = () => void clear(chat, user).then(onSignedOut);
    others.current = tabs;
    return () => tabs.close();
  }, [chat, user]);

  const signOut = async () => {
    const problem = await clear(chat, user);
    others.current!.postMessage('signed out');
    onSignedOut(problem);
  };
  const ask = async () => {
    const late = new Promise<OutboxEntry[]>((resolve) => setTimeout(resolve, STORAGE_TIMEOUT_MS, []));
    const entries = await Promise.race([storage.entries(user).catch(() => []), late]);
    // Those that were written for another gateway stay: signing out here does not delete them.
    const here = entries.filter(({ gateway }) => gateway === undefined || gateway === scope);
    if (here.length) setUnsent(here.length);
    else await signOut();
  };
  const question = unsent > 0 && (
    <Confirm title="Sign out?" action="Sign out" onConfirm={signOut} onClose={() => setUnsent(0)}>
      {unsent === 1
        ? '1 message is not sent yet. Sign out and delete it?'
        : `${unsent} messages are not sent yet. Sign out and delete them?`}
    </Confirm>
  );
  return { ask, question };
}
