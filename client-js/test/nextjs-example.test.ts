/** The example for Next.js, without Next.js: its page is rendered on a server and comes alive in Chromium, in strict mode, with the
 * tokens of its route. */
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type Browser, chromium, type Page } from 'playwright-core';
import type { ReactElement } from 'react';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { bundle, install } from './support/examples.js';
import { freePort, Gateway, PATIENCE_MS, until } from './support/gateway.js';

const SECRET = 'a secret of more than thirty-two bytes';
const work = mkdtempSync(join(tmpdir(), 'chat-nextjs-'));
let gateway: Gateway;
let server: Server;
let browser: Browser;
let address: string;
const said: string[] = [];

/** The parts of the example that run on the server. */
interface OnServer {
  Page(): Promise<ReactElement<{ url: string; user: string }>>;
  GET(): Promise<Response>;
  signIn(form: FormData): Promise<void>;
  signOut(): Promise<void>;
  renderToString(element: ReactElement): string;
}

// Next.js gives each request its cookies. The example asks for them before it waits for anything.
const HEADERS = `export const cookies = async () => globalThis.exampleCookies;`;
const ON_SERVER = `
  export { default as Page } from './app/page';
  export { GET } from './app/api/token/route';
  export { signIn, signOut } from './app/actions';
  export { renderToString } from 'react-dom/server';`;
// Next.js puts a call of the server in the place of each action.
const ACTIONS = `export const signIn = () => {}, signOut = () => fetch('/sign-out');`;
const IN_BROWSER = `
  import { StrictMode } from 'react';
  import { hydrateRoot } from 'react-dom/client';
  import { Chat } from './app/chat';
  const app = <StrictMode><Chat {...window.exampleProps} /></StrictMode>;
  window.exampleRoot = hydrateRoot(document.getElementById('root')!, app, { onRecoverableError: (error) => console.error(error) });`;

/** Calls a part of the example with the cookies of a request. Returns the cookies that it set. */
async function withCookies<T>(given: string, call: () => Promise<T>): Promise<[T, Map<string, string>]> {
  const jar = new Map(given.split('; ').map((pair) => pair.split('=') as [string, string]));
  const set = new Map<string, string>();
  const get = (name: string) => jar.has(name) && { value: decodeURIComponent(jar.get(name)!) };
  Object.assign(globalThis, {
    exampleCookies: { get, set: (name: string, value: string) => set.set(name, value), delete: (name: string) => set.set(name, '') },
  });
  return [await call(), set];
}

beforeAll(async () => {
  const port = await freePort();
  address = `http://localhost:${port}`;
  gateway = await new Gateway({
    auth__keys: `[{algorithm = "HS256", secret = "${SECRET}"}]`,
    client__origins: `["${address}"]`,
  }).start();
  Object.assign(process.env, { CHAT_SECRET: SECRET, CHAT_URL: gateway.url });
  await install('nextjs', work, 'jose');
  const outfile = join(work, 'server.mjs');
  // react-dom requires modules of Node.
  const banner = { js: `import { createRequire } from 'node:module'; const require = createRequire('${outfile}');` };
  const common = { folder: work, define: { 'process.env.NODE_ENV': '"development"' } };
  const onServer = { ...common, instead: { 'next/headers': HEADERS }, outfile, banner, format: 'esm', platform: 'node' } as const;
  await bundle('nextjs', ON_SERVER, onServer);
  const inBrowser = await bundle('nextjs', IN_BROWSER, { ...common, instead: { './actions': ACTIONS }, write: false });
  const script = inBrowser.outputFiles![0]!.text;
  const { Page, GET, signIn, signOut, renderToString } = (await import(outfile)) as OnServer;
  const answer = async (path: string, cookie: string): Promise<[number, string, Map<string, string>?]> => {
    if (path === '/script.js') return [200, script];
    if (path === '/api/token') {
      const [response] = await withCookies(cookie, GET);
      return [response.status, await response.text()];
    }
    if (path.startsWith('/sign-in/')) {
      const form = new FormData();
      form.set('user', path.slice('/sign-in/'.length));
      return [200, 'signed in', (await withCookies(cookie, () => signIn(form)))[1]];
    }
    if (path === '/sign-out') return [200, 'signed out', (await withCookies(cookie, signOut))[1]];
    const [element] = await withCookies(cookie, Page);
    const props = JSON.stringify(element.props);
    const html = `<div id="root">${renderToString(element)}</div><script>exampleProps = ${props}</script><script src="script.js"></script>`;
    return [path === '/' ? 200 : 404, html];
  };
  server = createServer(async ({ url, headers }, response) => {
    const [status, text, set] = await answer(url!, headers.cookie ?? '');
    for (const [name, value] of set ?? []) response.setHeader('set-cookie', `${name}=${encodeURIComponent(value)}; Path=/`);
    response.writeHead(status, { 'content-type': url === '/script.js' ? 'text/javascript' : 'text/html' }).end(text);
  }).listen(port);
  browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--headless', '--disable-gpu'] });
});
afterAll(async () => {
  await browser?.close();
  server?.close();
  await gateway?.close();
  rmSync(work, { recursive: true, force: true });
});

/** Returns the page of a user who is signed in, and its open sockets. */
async function person(name: string): Promise<{ page: Page; sockets: Set<object> }> {
  const page = await (await browser.newContext()).newPage();
  page.setDefaultTimeout(PATIENCE_MS);
  const sockets = new Set<object>();
  page.on('websocket', (socket) => {
    sockets.add(socket);
    socket.on('close', () => sockets.delete(socket));
  });
  page.on('console', (message) => message.type() === 'error' && said.push(message.text()));
  page.on('pageerror', (error) => said.push(`uncaught: ${error}`));
  await page.goto(`${address}/sign-in/${name}`);
  await page.goto(address);
  await page.getByText('connected', { exact: true }).waitFor();
  return { page, sockets };
}

test('nobody gets a token or the chat without a session', async () => {
  expect((await fetch(`${address}/api/token`)).status).toBe(401);
  // Nothing else is asked before, also in a build without a secret.
  delete process.env.CHAT_SECRET;
  expect((await fetch(`${address}/api/token`)).status).toBe(401);
  process.env.CHAT_SECRET = SECRET;
  for (const name of ['', 'a'.repeat(65)]) expect((await fetch(`${address}/sign-in/${name}`)).headers.has('set-cookie')).toBe(false);
  const html = await (await fetch(address)).text();
  expect(html).toContain('Sign in');
  expect(html).not.toContain('Conversations');
});

test('two users see what the other writes; unmounting disconnects', async () => {
  const alice = await person('Alice');
  const bob = await person('Bob');
  await alice.page.getByLabel('With').fill('Bob');
  await alice.page.getByRole('button', { name: 'Open' }).click();
  const write = async (page: Page, text: string) => {
    await page.getByLabel('Message', { exact: true }).fill(text);
    await page.keyboard.press('Enter');
  };
  await write(alice.page, 'Hi Bob!');
  await alice.page.getByText('alice: Hi Bob! (').waitFor();
  await bob.page.getByRole('button', { name: 'alice (1 new)' }).click();
  await bob.page.getByText('alice: Hi Bob!').waitFor();
  await alice.page.getByText('alice: Hi Bob! (read)').waitFor();
  await write(bob.page, 'Hi Alice!');
  await alice.page.getByText('bob: Hi Alice!').waitFor();
  await until(() => alice.sockets.size === 1, 'one socket in strict mode');
  await alice.page.evaluate(() => (window as unknown as { exampleRoot: { unmount(): void } }).exampleRoot.unmount());
  await until(() => alice.sockets.size === 0, 'the socket closes');

  await alice.page.reload();
  await alice.page.getByRole('button', { name: 'bob' }).click();
  await alice.page.getByText('bob: Hi Alice!').waitFor();
  await alice.page.getByLabel('With').fill('a'.repeat(65));
  await alice.page.getByRole('button', { name: 'Open' }).click();
  await alice.page.getByRole('alert').getByText('a user id has 1 to 64 bytes').waitFor();

  // Without a network, nobody is signed out, and the chat stays usable.
  await alice.page.route('**/sign-out', (route) => route.abort('internetdisconnected'), { times: 1 });
  await alice.page.getByRole('button', { name: 'Sign out' }).click();
  await alice.page.getByRole('alert').getByText('Not signed out').waitFor();
  await write(alice.page, 'Still here');
  await bob.page.getByText('alice: Still here').waitFor();
  await alice.page.getByRole('button', { name: 'Sign out' }).click();
  await alice.page.getByText('idle', { exact: true }).waitFor();
  expect((await alice.page.request.get(`${address}/api/token`)).status()).toBe(401);
  expect(said.filter((text) => !/status of 404|ERR_INTERNET_DISCONNECTED/.test(text))).toEqual([]);
});
