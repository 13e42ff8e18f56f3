/** The globals of React Native 0.88 with Hermes, as far as the SDK may see them. What Node has beyond that is missing. */
import { createContext, runInContext } from 'node:vm';
import WebSocket from 'ws';

/** The URL of React Native since 0.84: it parses only `http:` and `https:`, and joins without resolving `../`. */
class NativeUrl {
  readonly href: string;
  constructor(url: string, base?: string | NativeUrl) {
    this.href = base === undefined ? url : `${String(base).replace(/\/$/, '')}/${url.replace(/^\//, '')}`;
  }
  get origin(): string {
    return this.href.match(/^(https?:\/\/[^/]+)/)?.[1] ?? '';
  }
  toString(): string {
    return this.href;
  }
}

/** The URL of React Native up to 0.83: it also appends a slash. */
class OldNativeUrl extends NativeUrl {
  override readonly href: string;
  constructor(url: string, base?: string | NativeUrl) {
    super(url, base);
    this.href = new NativeUrl(url, base).href.replace(/\/?$/, '/');
  }
}

/** The AbortController of React Native up to 0.85: there is no reason. */
class NativeAbortController {
  readonly signal = new NativeAbortSignal();
  abort(): void {
    this.signal.abort();
  }
}
class NativeAbortSignal {
  aborted = false;
  #listeners = new Set<() => void>();
  addEventListener(_: 'abort', listener: () => void): void {
    this.#listeners.add(listener);
  }
  removeEventListener(_: 'abort', listener: () => void): void {
    this.#listeners.delete(listener);
  }
  abort(): void {
    if (this.aborted) return;
    this.aborted = true;
    for (const listener of this.#listeners) listener();
  }
}

/** The storage of one app, which outlives its processes. Calls take a random time, so that they may overtake each other. */
export class NativeStorage {
  readonly items = new Map<string, string>();
  getItem = (key: string) => this.#later(() => this.items.get(key) ?? null);
  setItem = (key: string, text: string) => this.#later(() => void this.items.set(key, text));
  removeItem = (key: string) => this.#later(() => void this.items.delete(key));
  getAllKeys = () => this.#later(() => [...this.items.keys()]);

  #later<T>(work: () => T): Promise<T> {
    return new Promise((resolve) => setTimeout(() => resolve(work()), Math.random() * 5));
  }
}

/** What takes the place of native modules, by the name under which an example imports them. */
export const NATIVE = {
  'react-native': 'export const AppState = globalThis.nativeAppState;',
  'react-native-get-random-values': 'globalThis.crypto ??= { getRandomValues: globalThis.nativeRandomValues };',
  '@react-native-async-storage/async-storage': 'export default globalThis.nativeStorage;',
};

/** One process of an app. */
export class NativeApp<App> {
  /** What its bundle exports. */
  readonly app: App;
  readonly #nativeAppState: { currentState: 'active' | 'background' };
  #appState = new Set<(state: string) => void>();
  #timers = new Set<NodeJS.Timeout>();
  #sockets = new Set<WebSocket>();

  /** @param bundle A script that sets the global `app`.
   * @param isOld Whether the globals are those of React Native up to 0.83. */
  constructor(bundle: string, storage: NativeStorage, isOld = false) {
    const self = this;
    class Socket extends WebSocket {
      constructor(url: string, protocol: string) {
        super(url, protocol);
        self.#sockets.add(this);
      }
    }
    const timer = (then: () => void, ms: number) => {
      const made = setTimeout(then, ms);
      this.#timers.add(made);
      return made;
    };
    const globals = {
      ...{ console, queueMicrotask, setTimeout: timer, clearTimeout, performance: { now: () => performance.now() } },
      ...{ TextEncoder, Blob, WebSocket: Socket, URL: isOld ? OldNativeUrl : NativeUrl, AbortController: NativeAbortController },
      navigator: { product: 'ReactNative' },
      fetch: (url: string, { signal, ...options }: Omit<RequestInit, 'signal'> & { signal?: NativeAbortSignal } = {}) => {
        const over = new AbortController();
        signal?.addEventListener('abort', () => over.abort());
        return fetch(url, { ...options, signal: over.signal });
      },
      nativeStorage: storage,
      nativeRandomValues: (bytes: Uint8Array<ArrayBuffer>) => crypto.getRandomValues(bytes),
      nativeAppState: {
        currentState: 'active' as 'active' | 'background',
        addEventListener: (_: 'change', listener: (state: string) => void) => {
          this.#appState.add(listener);
          return { remove: () => this.#appState.delete(listener) };
        },
      },
    };
    this.#nativeAppState = globals.nativeAppState;
    const context = createContext(globals);
    // Parts of JavaScript that Hermes, the engine of React Native, lacks.
    const prepare = `var window = globalThis, self = globalThis; delete Intl.Segmenter; delete globalThis.WebAssembly;
      delete globalThis.SharedArrayBuffer; delete globalThis.FinalizationRegistry;`;
    this.app = runInContext(`${prepare}\n${bundle}; app;`, context);
  }

  /** The system says that the app came to the foreground, or left it. */
  appState(state: 'active' | 'background'): void {
    this.#nativeAppState.currentState = state;
    for (const listener of this.#appState) listener(state);
  }

  /** The system ends the process. Nothing of it runs any more. */
  kill(): void {
    for (const made of this.#timers) clearTimeout(made);
    for (const socket of this.#sockets) {
      socket.removeAllListeners();
      socket.on('error', () => {});
      socket.terminate();
    }
  }
}
