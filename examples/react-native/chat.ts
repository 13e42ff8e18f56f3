/** The client of a user in an app. */
import './polyfills';
import { ChatClient, type TokenSource } from '@chat-gateway/client';
import { AppState } from 'react-native';
import { asyncStorage } from './storage';

/** @param user The user, so that waiting messages are shown, and direct chats opened, before the first connection.
 * @param token Asks your back end for a token. */
export function createChat(url: string, user: string, token: TokenSource): ChatClient {
  return new ChatClient(url, { user, token, storage: asyncStorage() });
}

/** Connects, and tells the client what a browser would tell it: whether somebody looks. Returns a function that disconnects. */
export function start(chat: ChatClient): () => void {
  // A push may have started the app in the background.
  chat.away(AppState.currentState === 'background');
  chat.connect().catch(() => {}); // useConnection returns the error.
  const watch = AppState.addEventListener('change', (state) => {
    // While all devices are away, messages are pushed to them.
    chat.away(state === 'background');
    // The connection may have died while the app slept, or wait for its next attempt.
    if (state === 'active') chat.connect().catch(() => {});
  });
  return () => {
    watch.remove();
    chat.disconnect();
  };
}
