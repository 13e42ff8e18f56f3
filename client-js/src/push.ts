/** Push notifications: registers this device at the gateway, and tells the service workers of the page what was read.
 * `client.ts` loads this file. */
import { ChatError } from './codes.js';
import { uuid } from './ids.js';
import type { Inbox } from './inbox.js';
import { isMuted } from './muting.js';
import type { ClientEvents, PushOptions, RequestOptions } from './options.js';
import type { OutboxStorage } from './storage.js';
import type { AppToken, ConversationId, InboxItem, Millis, Replies, Request, WebSubscription } from './types.js';

/** The time limit for removing a device, so that signing out does not wait for long. */
const REMOVE_TIMEOUT_MS = 3_000;
/** The time limit for another tab that registers the device. */
const LOCK_TIMEOUT_MS = 3_000;

/** What pushes need of the client. */
export interface PushHost {
  readonly inbox: Inbox;
  request<R extends Request>(request: R, options?: RequestOptions): Promise<Replies[R['type']]>;
  /** Returns the time of the gateway. */
  now(): Millis;
  /** Whether the list of a conversation is open. */
  isOpen(conversation: ConversationId): boolean;
  emit(name: 'open', event: ClientEvents['open']): void;
}

/** How this device is registered, as the storage keeps it. */
interface Kept {
  device: string;
  /** The address of the browser's subscription. */
  endpoint?: string | undefined;
}

/** The pushes to this device. */
export class Push {
  #host: PushHost;
  #storage: OutboxStorage;
  /** The name in the storage. */
  #name: string;
  /** What the storage should keep. It may refuse to. */
  #known: Kept | undefined;
  /** The conversations that the service workers know to be read. */
  #read = new Set<ConversationId>();
  #unwatch: (() => void) | undefined;

  constructor(host: PushHost, storage: OutboxStorage, name: string) {
    this.#host = host;
    this.#storage = storage;
    this.#name = name;
  }

  async register(target: WebSubscription | AppToken, { content, device }: PushOptions): Promise<void> {
    const address = addressOf(target);
    const endpoint = address.provider === 'web' ? address.subscription.endpoint : undefined;
    // Two tabs that begin at the same time must not make two devices.
    const id = await locked(this.#name, async () => {
      const id = device ?? (await this.#kept())?.device ?? uuid();
      // Before the request: if its answer is lost, the device may be registered, and signing out has to remove it.
      await this.#keep({ device: id, endpoint });
      return id;
    });
    await this.#host.request({ type: 'device_set', device: id, ...address, content });
    if (endpoint) this.#watch();
  }

  async unregister(): Promise<void> {
    this.#unwatch?.();
    this.#unwatch = undefined;
    const kept = await this.#kept();
    if (!kept) return;
    // First, because it works without a connection.
    await Promise.all((await registrations()).map((worker) => forget(worker, kept.endpoint)));
    await this.#host.request({ type: 'device_remove', device: kept.device }, { timeoutMs: REMOVE_TIMEOUT_MS }).catch((error) => {
      if ((error as ChatError).code !== 'not_found') throw error;
    });
    await this.#keep(undefined);
  }

  async #kept(): Promise<Kept | undefined> {
    if (this.#known) return this.#known;
    try {
      const text = await this.#storage.get?.(this.#name);
      return text ? (JSON.parse(text) as Kept) : undefined;
    } catch {
      // It is registered anew.
      return undefined;
    }
  }

  async #keep(kept: Kept | undefined): Promise<void> {
    this.#known = kept;
    // A browser that refuses to store can still get pushes, until the page is closed.
    try {
      await this.#storage.set?.(this.#name, kept && JSON.stringify(kept));
    } catch {}
  }

  /** Tells the service workers from now on which conversations are read, and answers them which are open. */
  #watch(): void {
    if (this.#unwatch) return;
    const { inbox } = this.#host;
    const over = new AbortController();
    const off = inbox.on('change', (items) => this.#tell(items));
    const heard = ({ data, ports }: MessageEvent) => {
      if (data?.type === 'chat-gateway:is-open') ports[0]?.postMessage(this.#host.isOpen(data.conversation));
      if (data?.type === 'chat-gateway:open') this.#host.emit('open', data.conversation);
    };
    globalThis.navigator?.serviceWorker?.addEventListener('message', heard, over);
    this.#unwatch = () => {
      off();
      over.abort();
    };
    this.#tell(inbox.items);
  }

  #tell(items: readonly InboxItem[]): void {
    const read = items.filter(({ unread }) => !unread).map(({ conversation }) => conversation);
    const fresh = read.filter((conversation) => !this.#read.has(conversation));
    this.#read = new Set(read);
    if (!fresh.length) return;
    const counted = items.filter((item) => item.kind !== 'channel' && !isMuted(item, this.#host.now()));
    const badge = counted.reduce((sum, { unread }) => sum + unread, 0);
    registrations().then(
      (workers) => workers.forEach(({ active }) => active?.postMessage({ type: 'chat-gateway:read', conversations: fresh, badge })),
      () => {},
    );
  }
}

/** Returns the fields by which the gateway reaches the device. */
function addressOf(target: WebSubscription | AppToken) {
  if ('token' in target) return { provider: target.provider, token: target.token };
  const { endpoint, keys: { p256dh, auth } = {} } = target.toJSON?.() ?? target;
  if (!endpoint || !p256dh || !auth) throw new ChatError('bad_request', 'the subscription has no endpoint or no keys');
  return { provider: 'web' as const, subscription: { endpoint, keys: { p256dh, auth } } };
}

/** Calls `work` when no other tab does the same. A tab that shows a dialog keeps its lock, and is not waited for. */
async function locked<T>(name: string, work: () => Promise<T>): Promise<T> {
  const locks = globalThis.navigator?.locks;
  if (!locks) return work();
  const over = new AbortController();
  const timer = setTimeout(() => over.abort(), LOCK_TIMEOUT_MS);
  const begin = () => {
    clearTimeout(timer);
    return work();
  };
  try {
    return await locks.request(`chat ${name}`, { signal: over.signal }, begin);
  } catch (error) {
    if (over.signal.aborted) return work();
    throw error;
  }
}

/** Returns the service workers of this page's origin. */
async function registrations(): Promise<readonly ServiceWorkerRegistration[]> {
  return (await globalThis.navigator?.serviceWorker?.getRegistrations()) ?? [];
}

/** Ends the subscription with this endpoint, and closes the notifications of messages. The next user must see neither. */
async function forget(worker: ServiceWorkerRegistration, endpoint: string | undefined): Promise<void> {
  try {
    for (const notification of await worker.getNotifications()) if (notification.data?.conversation) notification.close();
    const subscription = await worker.pushManager?.getSubscription();
    if (subscription && subscription.endpoint === endpoint) await subscription.unsubscribe();
  } catch {
    // The gateway sends nothing more once it removed the device.
  }
}
