/** Pushes to this browser: its service worker, and its subscription at the push service. */
import { useCallback, useEffect, useState } from 'react';
import type { ChatClient, Devices } from '../../src/index.js';
import { useConnection } from '../../src/react.js';
import { base } from './session.js';
import { ofBrowser } from './store.js';

const WORKER = new URL('worker.js', base).href;

type Policy = { createScriptURL(url: string): string };
const { trustedTypes } = globalThis as { trustedTypes?: { createPolicy(name: string, rules: object): Policy } };
let policy: Policy | undefined;

/** Returns the address of the service worker, vouched for where the content security policy demands it. Throws if that policy does
 * not name this one. */
function workerUrl(): string {
  policy ??= trustedTypes?.createPolicy('worker', { createScriptURL: () => WORKER });
  return policy?.createScriptURL(WORKER) ?? WORKER;
}

/** Returns the user's devices, with the key for browsers. `undefined` until they are known, and if the gateway is an older one. */
export function useDevices(chat: ChatClient): Devices | undefined {
  const [devices, setDevices] = useState<Devices>();
  const connected = useConnection(chat).at === 'connected';
  useEffect(() => {
    if (!connected) return;
    // An older gateway refuses it. The next connection may be to a newer one.
    chat.devices().then(setDevices, () => {});
  }, [chat, connected]);
  return devices;
}

/** Returns the bytes of a text in base64url. */
function bytesOf(text: string): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(atob(text.replace(/-/g, '+').replace(/_/g, '/')), (c) => c.charCodeAt(0));
}

/** Subscribes this browser at its push service. */
async function subscribe(key: string): Promise<PushSubscription> {
  const worker = await navigator.serviceWorker.register(workerUrl());
  const options = { userVisibleOnly: true, applicationServerKey: bytesOf(key) };
  await navigator.serviceWorker.ready;
  try {
    return await worker.pushManager.subscribe(options);
  } catch (error) {
    // The gateway has other keys than at the last time.
    const old = (error as Error).name === 'InvalidStateError' && (await worker.pushManager.getSubscription());
    if (!old) throw error;
    await old.unsubscribe();
    return worker.pushManager.subscribe(options);
  }
}

/** The name under which the browser remembers whose messages are pushed to it. */
const PUSHED_TO = `pushed-to ${base.pathname}`;

/** Ends the subscription of another user of this browser who did not sign out, so that nobody else sees their messages. */
async function endOthers(user: string): Promise<void> {
  const other = ofBrowser.get(PUSHED_TO);
  if (other === null || other === user) return;
  const workers = await navigator.serviceWorker.getRegistrations();
  for (const worker of workers.filter(({ scope }) => scope.startsWith(base.href))) {
    await (await worker.pushManager?.getSubscription())?.unsubscribe();
    for (const shown of await worker.getNotifications()) shown.close();
  }
  if (ofBrowser.get(PUSHED_TO) === other) ofBrowser.remove(PUSHED_TO);
}

/** Has messages pushed to this browser while `on`. Returns whether that works, and undefined while that is unknown. */
export function usePushing(
  chat: ChatClient,
  user: string,
  key: string | undefined,
  on: boolean,
  onOpen: (id: string) => void,
): boolean | undefined {
  const [works, setWorks] = useState<boolean>();
  const can = key !== undefined && 'serviceWorker' in navigator && 'PushManager' in globalThis;
  const begin = useCallback(async () => {
    try {
      await endOthers(user);
      ofBrowser.set(PUSHED_TO, user);
      await chat.registerPush(await subscribe(key!));
      setWorks(true);
    } catch (error) {
      // Some browsers have no push service, and some networks do not let it through. The page then shows notifications itself.
      console.warn('Messages cannot be pushed to this browser:', error);
      setWorks(false);
    }
  }, [chat, user, key]);
  useEffect(() => {
    if ('serviceWorker' in navigator) endOthers(user).catch(console.warn);
  }, [user]);
  useEffect(() => {
    if (can && on) void begin();
  }, [can, on, begin]);
  useEffect(() => chat.on('open', onOpen), [chat, onOpen]);
  return can ? works : false;
}
