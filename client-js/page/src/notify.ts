/** Desktop notifications of messages that come while the page is hidden. */
import { useCallback, useEffect, useState } from 'react';
import type { ChatClient, Message } from '../../src/index.js';
import { isMuted } from './muting.js';
import { usePushing } from './pushing.js';
import { base } from './session.js';
import { ofBrowser } from './store.js';
import { briefly, plain } from './words.js';

/** The time for which messages are coalesced. Meanwhile another tab or device may have read them. */
const GATHER_MS = 1_000;
/** Code points of a text in a notification. */
const BODY_MAX = 150;

const keyOf = (user: string) => `chat-notify ${base.pathname} ${user}`;

/** The notifications of this page that are shown now, with their messages. */
const shown = new Map<Notification, Message | undefined>();

function show(title: string, options: NotificationOptions, message?: Message): Notification {
  const notification = new Notification(title, { ...options, icon: new URL('icon.svg', base).href });
  shown.set(notification, message);
  notification.onclose = () => shown.delete(notification);
  return notification;
}

function closeAll(): void {
  for (const notification of shown.keys()) notification.close();
}

/** Deletes this user's choice to get notifications. */
export const forgetNotifications = (user: string): void => ofBrowser.remove(keyOf(user));

/** The switch for notifications. */
export interface Notifying {
  on: boolean;
  /** Why notifications cannot be turned on, as a sentence. */
  problem: string | undefined;
  /** Whether to offer notifications now: the user wrote or got a message, and has not refused. */
  offered: boolean;
  toggle: () => void;
  /** Answers the offer with no. It is not made again. */
  refuse: () => void;
}

const blocked = () =>
  isSecureContext
    ? "The browser blocks notifications of this page. Allow them in the browser's settings for this site."
    : 'Browsers show notifications only for pages that are served over HTTPS.';

/** Whether to offer notifications: after a message came or was sent, as nobody wants them before. */
function useOffer(chat: ChatClient, user: string, canPush: boolean): [boolean, () => void] {
  const [answered, setAnswered] = useState(() => ofBrowser.get(keyOf(user)) !== null);
  const [due, setDue] = useState(false);
  const waits = canPush && !answered && !due && 'Notification' in globalThis && Notification.permission === 'default';
  useEffect(() => {
    if (waits) return chat.on('message', ({ kind }) => kind === 'text' && setDue(true));
    return undefined;
  }, [waits, chat]);
  return [due && !answered, useCallback(() => setAnswered(true), [])];
}

/** Shows notifications while nobody looks at the page: pushed ones if the gateway and the browser can, else those of the page
 * itself while it is hidden. Returns the switch; undefined in a browser without notifications.
 * @param key The gateway's key for browsers, if it has one. */
export function useNotifications(
  chat: ChatClient,
  user: string,
  key: string | undefined,
  onOpen: (id: string) => void,
): Notifying | undefined {
  const [on, setOn] = useState(
    () => 'Notification' in globalThis && Notification.permission === 'granted' && ofBrowser.get(keyOf(user)) === 'on',
  );
  const [problem, setProblem] = useState<string>();
  const [offered, answered] = useOffer(chat, user, key !== undefined);
  const isPushing = usePushing(chat, user, key, on, onOpen);

  const turn = useCallback(
    (on: boolean, problem?: string) => {
      // An answer that is kept is not asked for again.
      ofBrowser.set(keyOf(user), on ? 'on' : 'off');
      answered();
      setOn(on);
      setProblem(problem);
    },
    [user, answered],
  );
  const toggle = useCallback(async () => {
    if (on) {
      turn(false);
      await chat.unregisterPush().catch((error: Error) => setProblem(`This browser may still get notifications: ${error.message}`));
      return;
    }
    // Browsers refuse the request of a page unless a click caused it.
    if ((await Notification.requestPermission()) !== 'granted') return turn(false, blocked());
    // The service worker will show them, also in browsers where pages may not.
    if (key !== undefined && 'serviceWorker' in navigator) return turn(true);
    try {
      // A first notification shows the user what to expect. It throws in a browser where pages may not show any.
      show('Chat', { body: 'Notifications are on.', tag: 'on' });
      turn(true);
    } catch {
      turn(false, 'This browser does not let pages show notifications.');
    }
  }, [on, turn, chat, key]);

  useEffect(() => {
    if (!on || isPushing) return;
    const waiting = new Map<string, Message>();
    let timer: ReturnType<typeof setTimeout> | undefined;
    /** Shows a message in a notification, or its new text in the place of an earlier one. */
    const tell = (message: Message, earlier?: Notification) => {
      const item = chat.inbox.get(message.conversation);
      if (!item || item.readSeq >= message.seq || !document.hidden || isMuted(item) || item.push === 'off') return earlier?.close();
      // Not closed, because one of the same tag takes its place silently.
      if (earlier) shown.delete(earlier);
      const sender = plain(message.sender);
      const title = item.kind === 'dm' ? sender : `${sender} · ${plain(item.name || `a ${item.kind}`)}`;
      const body = briefly(message, BODY_MAX);
      // The tag makes a later notification of a conversation replace the earlier one.
      const notification = show(title, { body, tag: message.conversation }, message);
      notification.onclick = () => {
        focus();
        onOpen(message.conversation);
        notification.close();
      };
    };
    const showWaiting = () => {
      timer = undefined;
      for (const message of waiting.values()) tell(message);
      waiting.clear();
    };
    const off = chat.on('message', (message) => {
      if (message.sender === user || message.kind !== 'text' || message.deleted || !document.hidden) return;
      waiting.set(message.conversation, message);
      timer ??= setTimeout(showWaiting, GATHER_MS);
    });
    // The text of a deleted message must not be shown, nor stay there.
    const offChanged = chat.on('changed', ({ conversation, items }) => {
      const deleted = new Set(items.filter((item) => item.deleted).map(({ seq }) => seq));
      if (deleted.has(waiting.get(conversation)?.seq ?? 0)) waiting.delete(conversation);
      for (const [notification, message] of shown)
        if (message?.conversation === conversation && deleted.has(message.seq)) notification.close();
      // Nor what an edit took out.
      for (const { seq, body } of items) {
        const message = waiting.get(conversation);
        if (body !== undefined && message?.seq === seq) waiting.set(conversation, { ...message, body });
        for (const [notification, message] of [...shown])
          if (body !== undefined && message?.conversation === conversation && message.seq === seq) tell({ ...message, body }, notification);
      }
    });
    const seen = () => {
      if (!document.hidden) closeAll();
    };
    document.addEventListener('visibilitychange', seen);
    // After the page has gone, nothing would close its notifications or react to a click.
    addEventListener('pagehide', closeAll);
    return () => {
      off();
      offChanged();
      clearTimeout(timer);
      closeAll();
      document.removeEventListener('visibilitychange', seen);
      removeEventListener('pagehide', closeAll);
    };
  }, [on, isPushing, chat, user, onOpen]);

  const refuse = useCallback(() => turn(false), [turn]);
  return 'Notification' in globalThis ? { on, problem, offered, toggle: () => void toggle(), refuse } : undefined;
}
