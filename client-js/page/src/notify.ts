/** Desktop notifications of messages that come while the page is hidden. */
import { useCallback, useEffect, useState } from 'react';
import type { ChatClient, Message } from '../../src/index.js';
import { base } from './session.js';

/** The time for which messages are coalesced. Meanwhile another tab or device may have read them. */
const GATHER_MS = 1_000;
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
export const forgetNotifications = (user: string): void => localStorage.removeItem(keyOf(user));

/** The switch for notifications. */
export interface Notifying {
  on: boolean;
  /** Why notifications cannot be turned on, as a sentence. */
  problem: string | undefined;
  toggle: () => void;
}

const blocked = () =>
  isSecureContext
    ? "The browser blocks notifications of this page. Allow them in the browser's settings for this site."
    : 'Browsers show notifications only for pages that are served over HTTPS.';

/** Shows notifications while the page is hidden. Returns the switch; undefined in a browser without notifications. */
export function useNotifications(chat: ChatClient, user: string, onOpen: (id: string) => void): Notifying | undefined {
  const [on, setOn] = useState(
    () => 'Notification' in globalThis && Notification.permission === 'granted' && localStorage.getItem(keyOf(user)) === 'on',
  );
  const [problem, setProblem] = useState<string>();

  const turn = useCallback(
    (on: boolean, problem?: string) => {
      if (on) localStorage.setItem(keyOf(user), 'on');
      else localStorage.removeItem(keyOf(user));
      setOn(on);
      setProblem(problem);
    },
    [user],
  );
  const toggle = useCallback(async () => {
    if (on) return turn(false);
    // Browsers refuse the request of a page unless a click caused it.
    if ((await Notification.requestPermission()) !== 'granted') return turn(false, blocked());
    try {
      // A first notification shows the user what to expect. It throws in a browser where pages may not show any.
      show('Chat', { body: 'Notifications are on.', tag: 'on' });
      turn(true);
    } catch {
      turn(false, 'This browser does not let pages show notifications.');
    }
  }, [on, turn]);

  useEffect(() => {
    if (!on) return;
    const waiting = new Map<string, Message>();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const showWaiting = () => {
      timer = undefined;
      for (const message of waiting.values()) {
        const item = chat.inbox.get(message.conversation);
        if (!item || item.readSeq >= message.seq || !document.hidden) continue;
        const title = item.kind === 'dm' ? message.sender : `${message.sender} · ${item.name || `a ${item.kind}`}`;
        const body = [...(message.body || message.attachments?.[0]?.name || 'an attachment')].slice(0, BODY_MAX).join('');
        // The tag makes a later notification of a conversation replace the earlier one.
        const notification = show(title, { body, tag: message.conversation }, message);
        notification.onclick = () => {
          focus();
          onOpen(message.conversation);
          notification.close();
        };
      }
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
  }, [on, chat, user, onOpen]);

  return 'Notification' in globalThis ? { on, problem, toggle: () => void toggle() } : undefined;
}
