/** A gateway whose uploads go to a file storage, as far as an upload needs them, in one server. */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';

/** An upload that the gateway knows. */
interface Known {
  name: string;
  size: number;
  state: string;
  /** The bytes of each part that came, by its number. */
  parts: Map<number, Buffer>;
}

/** A request that was received: method, path without the id, and headers. */
interface Seen {
  method: string;
  path: string;
  headers: IncomingMessage['headers'];
}

export class FileStorage {
  /** The bytes of a part. */
  partBytes = 1_000;
  /** How long an address is valid, in milliseconds. */
  validMs = 60_000;
  /** The state of a file that was completed. */
  completeState = 'ready';
  /** What the gateway says of the metadata of a file that is ready. */
  metadata: string | undefined;
  /** What goes wrong with the next requests whose method and path match. `true` means that the answer was given. */
  faults: { on: RegExp; times: number; fault: (response: ServerResponse, request: IncomingMessage) => void }[] = [];
  seen: Seen[] = [];
  uploads = new Map<string, Known>();
  #server: Server | undefined;
  #ids = 0;

  /** Starts it. Returns the URL for clients. */
  async start(): Promise<string> {
    this.#server = createServer((request, response) => {
      // A client may end a request.
      this.#answer(request, response).catch(() => response.destroy());
    });
    await new Promise<void>((resolve) => this.#server!.listen(0, '127.0.0.1', resolve));
    return `ws://${this.#address}/v1/ws`;
  }

  close(): void {
    this.#server?.closeAllConnections();
    this.#server?.close();
  }

  /** Makes the next requests that match fail with a status; 0 breaks the connection. */
  fail(on: RegExp, status: number, times = 1, body: object | string = ''): void {
    const fault = (response: ServerResponse) => {
      if (!status) response.destroy();
      else response.writeHead(status).end(typeof body === 'string' ? body : JSON.stringify(body));
    };
    this.faults.push({ on, times, fault });
  }

  /** Returns how often a method and path came. */
  count(method: string, path: string): number {
    return this.seen.filter((seen) => seen.method === method && seen.path === path).length;
  }

  /** Returns the bytes of an upload. */
  bytes(id: string): Buffer {
    return Buffer.concat([...this.uploads.get(id)!.parts].sort(([a], [b]) => a - b).map(([, data]) => data));
  }

  get #address(): string {
    return `127.0.0.1:${(this.#server!.address() as { port: number }).port}`;
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const { method = '', url = '', headers } = request;
    const pieces: Buffer[] = [];
    for await (const piece of request as AsyncIterable<Buffer>) pieces.push(piece);
    const body = Buffer.concat(pieces);
    const [, id = '', what = ''] = url.match(/^\/(?:v1\/attachments|bucket)\/?([^/?]*)\/?(\w*)/) ?? [];
    const path = url.startsWith('/bucket') ? 'part' : what || 'attachments';
    this.seen.push({ method, path, headers });
    const fault = this.faults.find(({ on, times }) => times > 0 && on.test(`${method} ${path}`));
    if (fault) {
      fault.times--;
      return fault.fault(response, request);
    }
    const say = (status: number, json: object, more = {}) => response.writeHead(status, more).end(JSON.stringify(json));
    if (path === 'attachments') {
      const { name, size } = JSON.parse(String(body)) as Known;
      const id = `file-${++this.#ids}`;
      this.uploads.set(id, { name, size, state: 'pending', parts: new Map() });
      return void say(201, { id, upload: { parts: `/v1/attachments/${id}/parts`, part_bytes: this.partBytes } });
    }
    const known = this.uploads.get(id);
    if (!known) return void say(404, { code: 'not_found', message: 'there is no such file' });
    if (path === 'part') return this.#put(known, new URL(url, 'http://x').searchParams, body, response);
    if (path === 'parts') return void say(200, { parts: this.#missing(id, known), expires_at: Date.now() + this.validMs });
    if (path === 'complete') {
      if (this.#missing(id, known).length) return void say(409, { code: 'conflict', message: 'parts are missing' });
      known.state = this.completeState;
      return void say(200, { state: known.state, ...this.#said(known) });
    }
    if (method === 'DELETE') known.state = 'erasing';
    const { metadata } = this.#said(known);
    const more = metadata && { 'file-metadata': metadata };
    response.writeHead(method === 'HEAD' ? 200 : 204, { 'file-state': known.state, 'upload-offset': '0', ...more }).end();
  }

  #said({ state }: Known): { metadata?: string | undefined } {
    return state === 'ready' ? { metadata: this.metadata } : {};
  }

  #put(known: Known, query: URLSearchParams, body: Buffer, response: ServerResponse): void {
    if (Number(query.get('until')) < Date.now()) response.writeHead(403).end('<Error><Code>AccessDenied</Code></Error>');
    else {
      known.parts.set(Number(query.get('number')), body);
      response.writeHead(200).end();
    }
  }

  #missing(id: string, { size, parts }: Known): object[] {
    const until = Date.now() + this.validMs;
    const all = Array.from({ length: Math.ceil(size / this.partBytes) }, (_, i) => {
      const offset = i * this.partBytes;
      const url = `http://${this.#address}/bucket/${id}?number=${i + 1}&until=${until}`;
      return { number: i + 1, offset, size: Math.min(this.partBytes, size - offset), url };
    });
    return all.filter(({ number }) => !parts.has(number)).slice(0, 100);
  }
}
