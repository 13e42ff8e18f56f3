/** Serves the built page and a fake gateway for it, on a port of this machine. */
import { readFileSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import { join } from 'node:path';
import { WebSocketServer } from 'ws';
import { ChangingServer } from './changing-server.js';
import { FakeSocket } from './fake-server.js';
import { freePort, readText } from './gateway.js';

const DIST = join(import.meta.dirname, '../../page/dist');
const TYPES: Record<string, string> = { html: 'text/html', js: 'text/javascript', css: 'text/css', svg: 'image/svg+xml' };

export class PageServer extends ChangingServer {
  page = '';
  #http: Server | undefined;

  async start(): Promise<this> {
    const port = await freePort();
    // The policy of the gateway, which forbids inline styles and scripts.
    const [, policy] = /format!\(\s*"(default-src (?:.|\n)*?)"\s*\)/.exec(readText('src/gateway/page.rs'))!;
    const csp = policy!.replace(/\\\n\s*/g, '').replaceAll('{files}', '');
    this.#http = createServer((request, response) => {
      const path = new URL(request.url!, 'http://x').pathname;
      if (path === '/v1/tokens') return void response.setHeader('content-type', 'application/json').end('{"token": "a.b.c"}');
      const name = path === '/' ? 'index.html' : path.slice(1);
      const type = TYPES[name.split('.').at(-1)!] ?? 'text/plain';
      response.writeHead(200, { 'content-type': `${type}; charset=utf-8`, 'content-security-policy': csp });
      response.end(readFileSync(join(DIST, name)));
    });
    const sockets = new WebSocketServer({ server: this.#http, handleProtocols: ([first]) => first ?? false });
    sockets.on('connection', (socket, { url }) => {
      const fake = new FakeSocket(this, url!, '');
      fake.onmessage = ({ data }) => socket.send(data);
      fake.onclose = ({ code, reason }) => (code === 1006 ? socket.terminate() : socket.close(code, reason));
      socket.on('message', (data) => fake.send(String(data)));
      socket.on('close', () => fake.close());
    });
    await new Promise<void>((ready) => this.#http!.listen(port, '127.0.0.1', ready));
    this.page = `http://127.0.0.1:${port}/`;
    return this;
  }

  close(): void {
    this.#http?.closeAllConnections();
    this.#http?.close();
  }
}
