/** Keeps the messages that wait to be sent in AsyncStorage, so that they survive the end of the app. */
import type { OutboxEntry, OutboxStorage } from '@chat-gateway/client';
import AsyncStorage from '@react-native-async-storage/async-storage';

const ENTRY = 'chat-gateway/entry/';
const TEXT = 'chat-gateway/text/';

export function asyncStorage(): OutboxStorage {
  let last: Promise<unknown> = Promise.resolve();
  /** Does one thing after the other: the client does not wait for each, and calls must take effect in their order. */
  function inTurn<T>(work: () => Promise<T>): Promise<T> {
    const done = last.then(work);
    last = done.catch(() => {});
    return done;
  }
  const set = (key: string, text?: string) =>
    inTurn(() => (text === undefined ? AsyncStorage.removeItem(key) : AsyncStorage.setItem(key, text)));
  return {
    shared: false,
    entries: (user) =>
      inTurn(async () => {
        const keys = (await AsyncStorage.getAllKeys()).filter((key) => key.startsWith(ENTRY));
        const texts = await Promise.all(keys.map((key) => AsyncStorage.getItem(key)));
        return texts.flatMap((text) => (text ? (JSON.parse(text) as OutboxEntry) : [])).filter((entry) => entry.user === user);
      }),
    put: (entry) => set(ENTRY + entry.clientId, JSON.stringify(entry)),
    remove: (clientId) => set(ENTRY + clientId),
    get: (name) => inTurn(async () => (await AsyncStorage.getItem(TEXT + name)) ?? undefined),
    set: (name, text) => set(TEXT + name, text),
  };
}
