/** A fake WebSocket and its server, without a network. A test makes it do what a real gateway does not do on demand. */
import type { ChatOptions } from '../../src/index.js';

type Sent = { type: string; id?: number } & Record<string, unknown>;

export class FakeServer {
  /** All sockets that were opened, in order. */
  sockets: FakeSocket[] = [];
  /** The answers to requests, by type. Any other type is answered with `ok`. */
  answers: Record<string, (request: Sent) => object | undefined> = {
    connect: () => this.hello,
    inbox: () => ({ type: 'inbox', items: [] }),
    devices: () => ({ type: 'devices', items: [] }),
    ping: () => ({ type: 'pong', time: Date.now() }),
    refresh: () => ({ type: 'refreshed', expires_at: Date.now() + 3_600_000 }),
  };
  requests: Sent[] = [];
  /** The answer to `connect`. */
  hello: Record<string, unknown> = {};

  constructor() {
    const hello = { type: 'connected', user: 'alice', session: '1', gateway: 'g', ping_interval_ms: 25_000, limits: {} };
    Object.defineProperty(this, 'hello', {
      get: () => ({ ...hello, time: Date.now(), expires_at: Date.now() + 3_600_000, ...this.changes }),
    });
  }
  /** Fields that replace those of `hello`. */
  changes: Record<string, unknown> = {};

  get socket(): FakeSocket {
    return this.sockets.at(-1)!;
  }

  /** The WebSocket class for the options of a client. */
  get WebSocket(): ChatOptions['WebSocket'] {
    const server = this;
    return class extends FakeSocket {
      constructor(url: string, protocol: string) {
        super(server, url, protocol);
      }
    };
  }

  /** Returns the requests of a type, in order. */
  received(type: string): Sent[] {
    return this.requests.filter((request) => request.type === type);
  }
}

export class FakeSocket {
  binaryType = '';
  readyState = 0;
  onopen: (() => void) | null = null;
  onmessage: ((event: { data: string }) => void) | null = null;
  onclose: ((event: { code: number; reason: string }) => void) | null = null;
  onerror: (() => void) | null = null;
  /** Whether requests get no answer. */
  silent = false;
  readonly url: string;
  readonly protocol: string;
  #server: FakeServer;

  constructor(server: FakeServer, url: string, protocol: string) {
    this.url = url;
    this.protocol = protocol;
    this.#server = server;
    server.sockets.push(this);
    queueMicrotask(() => {
      if (this.readyState !== 0) return;
      this.readyState = 1;
      this.onopen?.();
    });
  }

  send(data: string): void {
    const request = JSON.parse(data) as Sent;
    this.#server.requests.push(request);
    queueMicrotask(() => {
      if (this.silent || this.readyState !== 1) return;
      const answers = this.#server.answers[request.type] ?? (() => ({ type: 'ok' }));
      const answer = answers(request);
      if (answer) this.say({ ...answer, id: request.id });
    });
  }

  /** Sends a frame to the client. */
  say(frame: object): void {
    this.onmessage?.({ data: JSON.stringify(frame) });
  }

  /** Closes the socket from the side of the gateway. */
  end(code: number, reason = ''): void {
    if (this.readyState === 3) return;
    this.readyState = 3;
    this.onclose?.({ code, reason });
  }

  close(): void {
    this.readyState = 3;
  }
}
