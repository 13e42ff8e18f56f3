/** Starts real gateways, each with its own directory. */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import WebSocket from 'ws';
import { ChatClient, type ChatOptions } from '../../src/index.js';

const ROOT = join(import.meta.dirname, '../../..');
const BINARY = process.env.CHAT_GATEWAY ?? join(ROOT, 'target/release/chat-gateway');
/** The time after which a missing event is a failure. It is no measure of speed. */
export const PATIENCE_MS = 60_000;

export class Gateway {
  readonly directory = mkdtempSync(join(tmpdir(), 'chat-test-'));
  /** The address for clients, the same after a restart. */
  address = '';
  #process: ChildProcess | undefined;
  #settings: Record<string, string>;
  #log = '';
  /** The logs of earlier starts. */
  #earlier = '';

  constructor(settings: Record<string, string> = {}) {
    this.#settings = settings;
  }

  async start(): Promise<this> {
    if (!this.address) this.address = `127.0.0.1:${await freePort()}`;
    this.#earlier += this.#log;
    this.#log = '';
    this.#process = spawn(BINARY, [], { env: this.#env(), stdio: ['ignore', 'pipe', 'pipe'] });
    this.#process.stdout!.on('data', (text) => (this.#log += text));
    this.#process.stderr!.on('data', (text) => (this.#log += text));
    await until(() => {
      if (this.#process!.exitCode !== null) throw new Error(`the gateway did not start. Its log:\n${this.#log}`);
      return this.#log.includes('"ready"');
    });
    return this;
  }

  get url(): string {
    return `ws://${this.address}/v1/ws`;
  }

  get page(): string {
    return `http://${this.address}/`;
  }

  /** Changes settings. They apply from the next start on. */
  set(settings: Record<string, string>): void {
    Object.assign(this.#settings, settings);
  }

  /** Ends the gateway with SIGKILL. */
  async kill(): Promise<void> {
    await this.#end('SIGKILL');
  }

  /** Ends the gateway with SIGTERM, so that it drains. */
  async stop(): Promise<void> {
    await this.#end('SIGTERM');
  }

  /** Ends the gateway and deletes its directory. Throws if it panicked, also before an earlier end. */
  async close(): Promise<void> {
    await this.kill();
    const log = this.#earlier + this.#log;
    if (log.includes('panicked')) throw new Error(log);
    rmSync(this.directory, { recursive: true, force: true });
  }

  /** Imports conversations and messages. The gateway must not run meanwhile. */
  import(lines: readonly object[]): void {
    const file = join(this.directory, 'import.jsonl');
    writeFileSync(file, lines.map((line) => JSON.stringify(line)).join('\n'));
    execFileSync(BINARY, ['import', file], { env: this.#env(), stdio: 'pipe' });
  }

  /** Runs a command of the gateway's program and returns its output. */
  cli(...args: string[]): string {
    return execFileSync(BINARY, args, { env: this.#env(), encoding: 'utf8' }).trim();
  }

  /** Returns a development token. */
  async token(user: string): Promise<string> {
    const answer = await fetch(`${this.page}v1/tokens`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ user }),
    });
    return ((await answer.json()) as { token: string }).token;
  }

  /** Returns a client of this user that is not connected yet.
   * @param url The address of a proxy, if not of the gateway. */
  client(user: string, options: Partial<ChatOptions> = {}, url = this.url): ChatClient {
    const client = new ChatClient(url, { token: () => this.token(user), WebSocket, ...options });
    clients.push(client);
    return client;
  }

  /** Returns a client of this user that is connected. */
  async connect(user: string, options: Partial<ChatOptions> = {}, url = this.url): Promise<ChatClient> {
    const client = this.client(user, options, url);
    await client.connect();
    return client;
  }

  async #end(signal: NodeJS.Signals): Promise<void> {
    const process = this.#process;
    if (!process || process.exitCode !== null || process.signalCode !== null) return;
    const ended = new Promise((resolve) => process.once('exit', resolve));
    process.kill(signal);
    await ended;
  }

  #env(): NodeJS.ProcessEnv {
    const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith('CHAT__')));
    const settings = {
      client__listen: this.address || '127.0.0.1:0',
      internal__listen: '127.0.0.1:0',
      store__embedded__path: join(this.directory, 'data'),
      log__format: 'json',
      drain__spread_ms: '100',
      limits__requests_per_second: '100000',
      limits__requests_burst: '100000',
      limits__request_bytes_per_second: '1000000000',
      limits__request_bytes_burst: '1000000000',
      limits__connects_burst_per_address: '100000',
      ...this.#settings,
    };
    return { ...env, ...Object.fromEntries(Object.entries(settings).map(([name, value]) => [`CHAT__${name.toUpperCase()}`, value])) };
  }
}

const clients: ChatClient[] = [];

/** Disconnects all clients. Called after each test. */
export function disconnectAll(): void {
  for (const client of clients.splice(0)) client.disconnect();
}

let names = 0;
/** Returns the name of a new user. */
export const user = (name: string): string => `${name}-${process.pid}-${++names}`;

/** Waits until `check` returns a true value, and returns that value. */
export async function until<T>(check: () => T | Promise<T>, what: string | (() => string) = 'the condition'): Promise<T> {
  const end = Date.now() + PATIENCE_MS;
  for (;;) {
    const value = await check();
    if (value) return value;
    if (Date.now() > end) throw new Error(`${typeof what === 'string' ? what : what()}: not true within ${PATIENCE_MS} ms: ${check}`);
    await sleep(10);
  }
}

/**
 * Returns a free port below the range of outgoing connections, so that it is still free after a restart of the gateway. Other tests
 * have the ports up to 29,499 (`tests/blackbox/ports.py`).
 */
export function freePort(): Promise<number> {
  return new Promise((resolve) => {
    const port = 29_500 + Math.floor(Math.random() * 2_500);
    const probe = createServer();
    probe.once('error', () => resolve(freePort()));
    probe.listen(port, '127.0.0.1', () => probe.close(() => resolve(port)));
  });
}

/** Returns a file of the repository. */
export const readText = (path: string): string => readFileSync(join(ROOT, path), 'utf8');
