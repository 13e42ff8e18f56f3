/** Signing out. It deletes everything of the user, so that the next user of a shared computer finds nothing. */
import { useEffect, useRef, useState } from 'react';
import type { ChatClient, OutboxEntry, OutboxStorage } from '../../src/index.js';
import { countAttached, forgetAttached } from './attaching.js';
import { deleteDrafts } from './drafts.js';
import { forgetNotifications } from './notify.js';
import { Confirm } from './parts.js';
import { base, scope } from './session.js';
import { forgetSound } from './sound.js';
import { forgetTone } from './tones.js';

/** The time limit for counting unsent messages. After it the user is signed out without a question. */
const STORAGE_TIMEOUT_MS = 2_000;

const NONE = { messages: 0, changes: 0, files: 0 };
const counted = (count: number, what: string) => `${count} ${what}${count === 1 ? '' : 's'}`;

interface Props {
  chat: ChatClient;
  user: string;
  /** The storage of the client's outbox. */
  storage: OutboxStorage;
  onSignedOut: (problem?: string) => void;
}

/** Deletes everything that is stored for this user. Returns a sentence for the user if that failed. */
async function clear(chat: ChatClient, user: string): Promise<string | undefined> {
  forgetAttached(user);
  try {
    await chat.logout();
    return undefined;
  } catch (error) {
    return `You are signed out, but this browser could not delete your unsent messages: ${(error as Error).message}`;
  } finally {
    deleteDrafts(user);
    forgetNotifications(user);
    forgetSound(user);
    forgetTone(user);
  }
}

/** Returns the channel to the other tabs. Some browsers throw where cookies are blocked; tabs then share nothing to sign out of. */
function channelOf(name: string): BroadcastChannel | undefined {
  try {
    return new BroadcastChannel(name);
  } catch {
    return undefined;
  }
}

/** Signs out in all tabs of this user. `ask` begins it; `question` is the dialog if unsent messages would be deleted. */
export function useSignOut({ chat, user, storage, onSignedOut }: Props) {
  /** The numbers of unsent messages and files that the dialog asks about. Without a dialog there are none. */
  const [{ messages, changes, files }, setUnsent] = useState(NONE);
  /** The other tabs of this user. A channel does not receive its own messages. */
  const others = useRef<BroadcastChannel>(undefined);
  // biome-ignore lint/correctness/useExhaustiveDependencies: `onSignedOut` is a new function in each rendering, and always does the same.
  useEffect(() => {
    const tabs = channelOf(`chat-page ${base.pathname} ${user}`);
    if (tabs) tabs.onmessage = () => void clear(chat, user).then(onSignedOut);
    others.current = tabs;
    return () => tabs?.close();
  }, [chat, user]);

  const signOut = async () => {
    const problem = await clear(chat, user);
    others.current?.postMessage('signed out');
    onSignedOut(problem);
  };
  const ask = async () => {
    const late = new Promise<OutboxEntry[]>((resolve) => setTimeout(resolve, STORAGE_TIMEOUT_MS, []));
    const entries = await Promise.race([storage.entries(user).catch(() => []), late]);
    // Signing out does not delete the messages for other gateways, so they are not counted.
    const here = entries.filter(({ gateway }) => gateway === scope);
    const changes = here.filter(({ change }) => change).length;
    const unsent = { messages: here.length - changes, changes, files: countAttached(user) };
    if (here.length + unsent.files) setUnsent(unsent);
    else await signOut();
  };
  const counts = { message: messages, change: changes, file: files };
  const all = Object.entries(counts).flatMap(([what, count]) => (count ? [counted(count, what)] : []));
  const isOne = messages + changes + files === 1;
  const question = all.length > 0 && (
    <Confirm title="Sign out?" action="Sign out" onConfirm={signOut} onClose={() => setUnsent(NONE)}>
      {new Intl.ListFormat('en').format(all)} {isOne ? 'is' : 'are'} not sent yet. Sign out and delete {isOne ? 'it' : 'them'}?
    </Confirm>
  );
  return { ask, question };
}
