/** The documents, as a new user tries them. Every fenced block runs as it is written, except for ports and folders, and the
 * examples run in Chromium. `NGINX` and `CADDY` name these programs if they are not on the path. */
import { execFile, execFileSync, spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { cpSync, existsSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { type Agent, Agent as HttpsAgent } from 'node:https';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { build } from 'esbuild';
import { type Browser, chromium, type Page } from 'playwright-core';
import { afterAll, beforeAll, expect, test } from 'vitest';
import WebSocket from 'ws';
import { disconnectAll, freePort, Gateway, PATIENCE_MS, readText, until } from './support/gateway.js';
import { picture } from './support/people.js';

const ROOT = join(import.meta.dirname, '../..');
const PAGES = ['docs/application.md', 'docs/attachments.md', 'docs/deployment.md', 'docs/protocol.md', 'client-js/README.md'];
const BINARY = process.env.CHAT_GATEWAY ?? join(ROOT, 'target/release/chat-gateway');
const work = mkdtempSync(join(tmpdir(), 'chat-documents-'));
const shop = join(work, 'shop');
const repository = join(work, 'chat-gateway');
const PASSWORD = 'open-sesame';

interface Fence {
  page: string;
  language: string;
  code: string;
  tried: boolean;
}
const fences: Fence[] = PAGES.flatMap((page) =>
  [...readText(page).matchAll(/^```(\w*)\n([\s\S]*?)^```/gm)].map(([, language, code]) => ({
    page,
    language: language!,
    code: code!,
    tried: false,
  })),
);
/** Returns the blocks of a page that contain a text, and marks them as tried. */
function blocks(page: string, language: string, having = ''): string[] {
  const found = fences.filter((fence) => fence.page === page && fence.language === language && fence.code.includes(having));
  for (const fence of found) fence.tried = true;
  expect(found, `${page} has no block of ${language} with ${having}`).not.toEqual([]);
  return found.map(({ code }) => code);
}
const block = (page: string, language: string, having: string) => {
  const found = blocks(page, language, having);
  expect(found, `${page} has several blocks of ${language} with ${having}`).toHaveLength(1);
  return found[0]!;
};

let gateway: Gateway;
let port: number;
let secret: string;
let browser: Browser;
const programs: { end: () => Promise<void> }[] = [];

/** Replaces the addresses and folders that a page names by those of this test. */
const here = (code: string, address = gateway.address) =>
  code
    .replaceAll('127.0.0.1:8080', address)
    .replaceAll('localhost:3000', `localhost:${port}`)
    .replaceAll('/tmp/shop', shop)
    .replaceAll('/tmp/chat-backend', join(work, 'chat-backend'))
    .replace(/\/tmp\/(bobs-)?cat\.png/g, join(work, '$1cat.png'))
    .replaceAll('target/release/chat-gateway', BINARY);
const bash = async (code: string, cwd = repository, env: NodeJS.ProcessEnv = {}, address = gateway.address) => {
  const { stdout } = await promisify(execFile)('bash', ['-euc', here(code, address)], {
    cwd,
    env: { ...process.env, CHAT_SECRET: secret, ...env },
  });
  return stdout;
};

/** Runs commands, of which the last is a server, until the test ends. Resolves when the URL `ready` answers. */
async function serve(code: string, ready: string, env: NodeJS.ProcessEnv = {}): Promise<{ end: () => Promise<void> }> {
  const options = { cwd: repository, env: { ...process.env, CHAT_SECRET: secret, ...env }, detached: true } as const;
  const child = spawn('bash', ['-euc', here(code)], options);
  let said = '';
  for (const stream of [child.stdout!, child.stderr!]) stream.on('data', (text) => (said += text));
  const ended = new Promise<void>((resolve) => child.once('exit', () => resolve()));
  // The signal goes to the whole group, because a shell may not pass it on.
  const end = async () => {
    if (child.exitCode === null && child.signalCode === null) process.kill(-child.pid!, 'SIGKILL');
    await ended;
  };
  const program = { end };
  programs.push(program);
  await until(async () => {
    if (child.exitCode !== null) throw new Error(`the server ended before it answered. Its output: ${said}`);
    return fetch(ready).then(
      ({ ok }) => ok,
      () => false,
    );
  }, `${ready}: ${code}`);
  return program;
}
const backEnd = (having: string) =>
  serve(block('docs/application.md', 'sh', having), `http://localhost:${port}/chat-token`, { PORT: String(port) });

/** Opens a page of the back end. Returns its lines on the console. */
async function open(page: Page, path: string): Promise<string[]> {
  const said: string[] = [];
  page.on('console', (message) => said.push(message.text()));
  page.on('pageerror', (error) => said.push(`uncaught: ${error}`));
  await page.goto(`http://localhost:${port}${path}`);
  return said;
}

beforeAll(async () => {
  port = await freePort();
  // The variables that the commands of the first step set.
  const start = block('docs/application.md', 'sh', 'cargo run --release');
  const set = execFileSync('bash', ['-euc', start.replace('cargo run --release', 'env -0')], { encoding: 'utf8' });
  const { CHAT_SECRET, CHAT__AUTH__KEYS, CHAT__CLIENT__ORIGINS } = Object.fromEntries(
    set.split('\0').map((pair) => [pair.slice(0, pair.indexOf('=')), pair.slice(pair.indexOf('=') + 1)]),
  );
  secret = CHAT_SECRET!;
  gateway = new Gateway({
    auth__keys: CHAT__AUTH__KEYS!,
    client__origins: CHAT__CLIENT__ORIGINS!.replace('3000', String(port)),
  });
  await gateway.start();
  // The commands run in a copy, so that nothing is left in the repository.
  mkdirSync(join(repository, 'target'), { recursive: true });
  cpSync(join(ROOT, 'examples'), join(repository, 'examples'), { recursive: true, filter: (path) => !path.endsWith('node_modules') });
  symlinkSync(join(ROOT, 'client-js'), join(repository, 'client-js'));
  for (const file of ['widget/index.html', 'desk/main.jsx']) {
    writeFileSync(join(repository, 'examples', file), here(readText(`examples/${file}`)));
  }
  await bash(block('docs/application.md', 'sh', 'npm run build && cp'));
  browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--headless', '--disable-gpu'] });
});
afterAll(async () => {
  disconnectAll();
  await browser?.close();
  for (const { end } of programs) await end();
  await gateway?.close();
  rmSync(work, { recursive: true, force: true });
});

test('a visitor asks in the widget, the desk answers, and a restart of the gateway loses nothing', async () => {
  const server = await backEnd('server.mjs');
  const visitor = await (await browser.newContext()).newPage();
  const desk = await (await browser.newContext({ httpCredentials: { username: 'support', password: PASSWORD } })).newPage();
  for (const page of [visitor, desk]) page.setDefaultTimeout(PATIENCE_MS);
  expect((await fetch(`http://localhost:${port}/desk/chat-token`)).status).toBe(401);

  const said = await open(visitor, '/');
  const saidAtDesk = await open(desk, '/desk/');
  await visitor.getByText('Questions?').click();
  await visitor.getByLabel('Message', { exact: true }).fill('Is it <b>blue</b>?');
  await visitor.getByRole('button', { name: 'Send' }).click();
  await visitor.getByText('You: Is it <b>blue</b>? (').waitFor();

  await desk.getByRole('button', { name: /visitor-.* \(1 new\)/ }).click();
  await desk.getByText(/visitor-\w{12}: Is it <b>blue<\/b>\?/).waitFor();
  await desk.getByRole('heading', { name: 'is here' }).waitFor();
  await visitor.getByText('You: Is it <b>blue</b>? (read)').waitFor();
  await visitor.getByText('Questions?').click();
  await desk.getByLabel('Message', { exact: true }).fill('It is.');
  await desk.getByRole('button', { name: 'Send' }).click();
  await visitor.getByText('(1 new)').waitFor();
  await visitor.getByText('Questions?').click();
  await visitor.getByText('support: It is.').waitFor();
  await desk.getByText('support: It is. (read)').waitFor();

  await gateway.kill();
  await visitor.getByText('No connection. What you write is sent later.').waitFor();
  await visitor.getByLabel('Message', { exact: true }).fill('Thank you!');
  await visitor.getByRole('button', { name: 'Send' }).click();
  await visitor.getByText('You: Thank you! (sending)').waitFor();
  await gateway.start();
  await desk.getByText(/visitor-\w{12}: Thank you!/).waitFor();
  await visitor.getByText('You: Thank you! (read)').waitFor();
  expect(await visitor.getByRole('listitem').count()).toBe(3);

  // A visitor who reloads the page is the same user, and sees all messages again.
  await visitor.reload();
  await visitor.getByText('Questions?').click();
  await visitor.getByText('support: It is.').waitFor();
  const failed = [...said, ...saidAtDesk].filter((text) => text.startsWith('uncaught'));
  expect(failed).toEqual([]);
  await server.end();
});

test('a page of an origin that is not in the setting is refused', async () => {
  const server = await backEnd('server.mjs');
  const page = await browser.newPage();
  const refused = page.waitForEvent('console', (message) => message.text().includes('403'));
  await page.goto(`http://127.0.0.1:${port}/`);
  await refused;
  await server.end();
});

test.each([['server.py'], ['go run .']])('a token of the back end %s is accepted', async (having) => {
  // Go compiles its standard library the first time, which takes longer than a server may need to start.
  if (having.startsWith('go')) await bash('cd examples/backend && go build -o /dev/null .');
  const server = await backEnd(having);
  const answer = await fetch(`http://localhost:${port}/chat-token`);
  const cookie = answer.headers.get('set-cookie')!.split(';')[0]!;
  const { token } = (await answer.json()) as { token: string };
  const client = gateway.client('', { token: () => token });
  const { user } = await client.connect();
  expect(user).toMatch(/^visitor-[0-9a-f]{12}$/);
  const again = await fetch(`http://localhost:${port}/chat-token`, { headers: { cookie } });
  expect(atob(((await again.json()) as { token: string }).token.split('.')[1]!)).toContain(`"${user}"`);
  expect(await (await fetch(`http://localhost:${port}/`)).text()).toContain('A shop with a support chat');
  client.disconnect();
  await server.end();
});

test('the lines of the back ends that the page shows are in the files', () => {
  const lines = (text: string) => text.split('\n').flatMap((line) => line.trim().replace(/;$/, '') || []);
  for (const [language, file] of [
    ['js', 'server.mjs'],
    ['python', 'server.py'],
    ['go', 'server.go'],
  ] as const) {
    const source = readText(`examples/backend/${file}`);
    for (const line of blocks('docs/application.md', language).flatMap(lines)) expect(source).toContain(line);
  }
});

test('a back end without a valid secret says what to do', async () => {
  await expect(bash('cd examples/backend && CHAT_SECRET=short node server.mjs')).rejects.toThrow('openssl rand -base64 48');
});

test('a back end sends with curl', async () => {
  const alice = gateway.client('alice', { token: () => gateway.cli('token', 'alice') });
  await alice.connect();
  const heard = new Promise<string>((resolve) => alice.on('message', ({ sender, body }) => resolve(`${sender}: ${body}`)));
  const commands = [block('docs/application.md', 'sh', 'export SERVICE_TOKEN'), ...blocks('docs/application.md', 'sh', 'curl')];
  const out = (await bash(commands.join('echo\n'))).trim().split('\n');
  expect(await heard).toBe('support: Your order has been sent.');
  const shown = blocks('docs/application.md', 'json');
  const [created, sent, page] = out.map((line) => JSON.parse(line));
  for (const [is, documented] of [
    [created, shown[0]],
    [sent, shown[1]],
  ]) {
    expect(Object.keys(is)).toEqual(Object.keys(JSON.parse(documented)));
  }
  expect(page.messages.at(-1)).toMatchObject({ sender: 'support', body: 'Your order has been sent.' });
});

test('a picture is uploaded, sent and downloaded with curl, and the page of the other user shows it', async () => {
  const development = await new Gateway().start();
  try {
    const commands = blocks('docs/attachments.md', 'sh', 'curl').join('echo\n');
    const env = { CHAT__STORE__EMBEDDED__PATH: join(development.directory, 'data') };
    const out = (await bash(commands, repository, env, development.address)).split('\n').filter(Boolean);
    const [announced] = blocks('docs/attachments.md', 'json');
    // The ids differ in each run.
    const shape = (text: string) => text.trim().replace(/[0-9a-f]{8}-[^"/]+/g, 'id');
    expect(shape(out[0]!)).toBe(shape(announced!));
    expect(out.slice(1, 4).map((line) => line.trim())).toEqual(block('docs/attachments.md', '', 'file-state').trim().split('\n'));
    expect(JSON.parse(out[4]!)).toMatchObject({ type: 'sent', duplicate: false });
    expect(out[5]).toBe('Bob has the same picture');
    const bob = await browser.newPage();
    bob.setDefaultTimeout(PATIENCE_MS);
    await bob.goto(development.page);
    await bob.getByLabel('Name').fill('bob');
    await bob.getByRole('button', { name: 'Sign in' }).click();
    await bob.getByRole('button', { name: /alice/ }).click();
    const shown = bob.locator('.picture img');
    await until(() => shown.evaluate((image) => (image as HTMLImageElement).naturalWidth > 0), 'the picture');
    expect(await shown.getAttribute('alt')).toBe('a cat');
    await picture(bob, 'documents-attachments');
    await bob.close();
  } finally {
    await development.close();
  }
});

/** Connects from an address through a proxy. Returns the status of the upgrade, and the socket if there is one. */
function through(proxy: number, from: string, headers: Record<string, string> = {}): Promise<{ status: number; socket?: WebSocket }> {
  const agent: Agent = new HttpsAgent({ localAddress: from, rejectUnauthorized: false, servername: 'chat.example.org' });
  const socket = new WebSocket(`wss://127.0.0.1:${proxy}/v1/ws`, 'chat.v1.json', { agent, headers });
  return new Promise((resolve, reject) => {
    socket.once('open', () => resolve({ status: 101, socket }));
    socket.once('unexpected-response', (_, response) => resolve({ status: response.statusCode! }));
    socket.once('error', reject);
  });
}

test.each(['nginx', 'caddy'])('%s in front, as configured: TLS, WebSocket, addresses, its own page', async (name) => {
  const documented = block('docs/deployment.md', name, '');
  const [, trusted] = block('docs/deployment.md', 'toml', 'trusted_proxies').match(/trusted_proxies = (.*)/)!;
  const behind = new Gateway({
    auth__keys: `[{algorithm = "HS256", secret = "${secret}"}]`,
    client__trusted_proxies: trusted!,
    limits__connections_per_address: '1',
  });
  const proxy = await freePort();
  const folder = join(work, name);
  mkdirSync(folder);
  const program = process.env[name.toUpperCase()] ?? name;
  try {
    await behind.start();
    let started: string[];
    const moved = documented.replaceAll('127.0.0.1:8080', behind.address);
    if (name === 'nginx') {
      const pem = (kind: string) => join(folder, `chat.${kind}`);
      const subject = ['-subj', '/CN=chat.example.org', '-keyout', pem('key'), '-out', pem('pem')];
      execFileSync('openssl', ['req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '2', ...subject], { stdio: 'ignore' });
      const server = moved.replace('listen 443', `listen 127.0.0.1:${proxy}`).replaceAll('/etc/ssl/chat.example.org', join(folder, 'chat'));
      const logs = `daemon off; user root; pid ${folder}/pid; error_log stderr; events {}`;
      const temporary = ['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi'].map((what) => `${what}_temp_path ${folder}/${what};`);
      const config = `${logs}\nhttp { access_log off; ${temporary.join(' ')}\n${server}\n}\n`;
      writeFileSync(join(folder, 'nginx.conf'), config);
      started = [program, '-p', folder, '-c', join(folder, 'nginx.conf')];
      await promisify(execFile)(program, [...started.slice(1), '-t']);
    } else {
      const options = `{\n admin off\n skip_install_trust\n auto_https disable_redirects\n storage file_system ${folder}\n}\n`;
      const site = moved.replace('chat.example.org {', `https://chat.example.org:${proxy} {\n tls internal`);
      writeFileSync(join(folder, 'Caddyfile'), options + site);
      started = [program, 'run', '--config', join(folder, 'Caddyfile'), '--adapter', 'caddyfile'];
      const validate = ['validate', '--config', join(folder, 'Caddyfile'), '--adapter', 'caddyfile'];
      await promisify(execFile)(program, validate, { env: { ...process.env, HOME: folder } });
    }
    const child = spawn(started[0]!, started.slice(1), { env: { ...process.env, HOME: folder }, stdio: 'ignore' });
    const ended = new Promise<void>((resolve) => child.once('exit', () => resolve()));
    programs.push({
      end: async () => {
        child.kill();
        await ended;
      },
    });
    const host = `chat.example.org:${proxy}`;
    const first = await until(
      () => through(proxy, '127.0.0.2', { host, origin: `https://${host}` }).catch(() => undefined),
      `${name} to answer`,
    );
    expect(first!.status).toBe(101);
    const token = behind.cli('token', 'alice');
    const answered = new Promise((resolve) => first!.socket!.once('message', (text) => resolve(JSON.parse(String(text)))));
    first!.socket!.send(JSON.stringify({ type: 'connect', id: 1, token }));
    expect(await answered).toMatchObject({ type: 'connected', user: 'alice' });
    // The limit is one socket per address. A second one is refused, whatever its headers say; another address is accepted.
    expect((await through(proxy, '127.0.0.2', { host })).status).toBe(429);
    const claims = { 'x-forwarded-for': '203.0.113.9', forwarded: 'for=203.0.113.9' };
    expect((await through(proxy, '127.0.0.2', { host, ...claims })).status).toBe(429);
    const other = await through(proxy, '127.0.0.3', { host });
    expect(other.status).toBe(101);
    // The page has an origin that is not allowed.
    expect((await through(proxy, '127.0.0.4', { host, origin: 'https://elsewhere.example' })).status).toBe(403);
    for (const { socket } of [first!, other]) socket!.close();
  } finally {
    await programs.pop()?.end();
    await behind.close();
  }
});

test('the settings that the pages show are accepted', () => {
  const own = block('docs/application.md', 'toml', 'origins');
  const proxied = block('docs/deployment.md', 'toml', 'trusted_proxies') + own.slice(own.indexOf('[auth]'));
  const file = join(work, 'gateway.toml');
  for (const text of [own, proxied]) {
    writeFileSync(file, text);
    execFileSync(BINARY, ['--config', file, 'config', 'check'], { stdio: 'pipe' });
  }
});

test('docs/deployment.md lists the commands of the program', () => {
  const help = execFileSync(BINARY, ['--help'], { encoding: 'utf8' });
  const commands = [...help.split('Options:')[0]!.matchAll(/^ {2}(\w+) /gm)].map(([, name]) => name);
  const listed = block('docs/deployment.md', '', 'chat-gateway [serve]').matchAll(/^chat-gateway \[?(\w+)/gm);
  // A command with commands of its own has a line for each.
  const names = new Set([...listed].map(([, name]) => name));
  expect([...names, 'help'].sort()).toEqual(commands.sort());
});

test('docs/protocol.md shows a golden frame of every request, reply and event', async () => {
  interface Frame {
    type: string;
    id?: number;
  }
  const golden = JSON.parse(readText('tests/golden/frames.json')) as Record<string, { frame: Frame }[]>;
  const [requests, error, events] = blocks('docs/protocol.md', 'jsonl');
  const frames = (text: string) =>
    text
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line) as Frame);
  const without = ({ id: _, ...frame }: Frame) => frame;
  const known = [...golden.requests!, ...golden.replies!].map(({ frame }) => without(frame));
  const asked: Frame[] = [];
  for (const [request, reply] of requests!.trim().split('\n\n').map(frames)) {
    asked.push(request!);
    expect(known).toContainEqual(without(request!));
    if (!reply) continue;
    expect(reply.id).toBe(request!.id);
    expect(known).toContainEqual(without(reply));
  }
  expect(asked).toEqual(golden.requests!.map(({ frame }) => frame));
  expect(known).toContainEqual(without(frames(error!)[0]!));
  expect(frames(events!)).toEqual(golden.events!.map(({ frame }) => frame));
});

test('the id of a direct chat is the one that docs/protocol.md computes', async () => {
  const text = readText('docs/protocol.md');
  const [, space] = text.match(/name space `(.*?)`/)!;
  const [, id] = text.match(/For `alice` and `bob`: `(.*?)`/)!;
  const hash = createHash('sha1')
    .update(Buffer.from(space!.replaceAll('-', ''), 'hex'))
    .update('alice\0bob')
    .digest();
  hash[6] = (hash[6]! & 0x0f) | 0x50;
  hash[8] = (hash[8]! & 0x3f) | 0x80;
  expect(id!.replaceAll('-', '')).toBe(hash.toString('hex', 0, 16));
  const bob = gateway.client('bob', { token: () => gateway.cli('token', 'bob') });
  await bob.connect();
  const early = bob.request({ type: 'send', conversation: id!, clientId: crypto.randomUUID(), body: 'too early' });
  await expect(early).rejects.toMatchObject({ code: 'not_found' });
  expect((await bob.dm('alice')).id).toBe(id);
});

test('the SDK can be installed in each way of its README, with a single React', async () => {
  const sdk = 'client-js/README.md';
  for (const [name, having] of [
    ['packed', 'npm pack'],
    ['linked', '--install-links'],
  ] as const) {
    const project = join(work, name);
    mkdirSync(project);
    writeFileSync(join(project, 'package.json'), '{ "private": true }');
    await bash(block(sdk, 'sh', having), project);
    const look = `import('@chat-gateway/client').then((m) => console.log(typeof m.ChatClient))`;
    expect(await bash(`node -e "${look}"`, project)).toBe('function\n');
    expect(existsSync(join(project, 'node_modules/@chat-gateway/client/node_modules/react'))).toBe(false);
  }
  const page = join(work, 'plain');
  mkdirSync(page);
  await bash(block(sdk, 'sh', 'global.js'), page);
  writeFileSync(join(page, 'index.html'), block(sdk, 'html', 'script'));
  const plain = await browser.newPage();
  await plain.goto(`file://${page}/index.html`);
  expect(await plain.evaluate('typeof chatGateway.ChatClient')).toBe('function');
});

test("the blocks of the SDK's README run in a page, one after the other", async () => {
  const [, ...story] = blocks('client-js/README.md', 'js');
  const page = join(shop, 'readme');
  cpSync(join(ROOT, 'client-js/dist'), join(page, 'dist'), { recursive: true });
  const map = { imports: { '@chat-gateway/client': './dist/index.js' } };
  writeFileSync(
    join(page, 'index.html'),
    `<script type="importmap">${JSON.stringify(map)}</script><script type="module">${here(story.join('\n'))}; console.log('the end')</script>`,
  );
  const server = await backEnd('server.mjs');
  const tab = await browser.newPage();
  const said = await open(tab, '/readme/');
  // A message is `sent` only until the desk, which is still open, has it.
  const isStored = (line: string, text: string) => new RegExp(`^list: \\S+ \\d+ \\S+ ${text} (sent|delivered)$`).test(line);
  await until(
    () => said.includes('the end') && said.some((line) => isStored(line, 'A picture')),
    () => said.join('\n'),
  );
  const me = said.find((line) => line.startsWith('I am'))!.slice(5);
  for (const line of ['state: connected', 'shown: sending', 'stored: 1']) expect(said).toContain(line);
  expect(said.some((line) => line.includes(` 1 ${me} Hello! `) && isStored(line, 'Hello!'))).toBe(true);
  expect(said.some((line) => /^inbox: \S+ support 0 /.test(line))).toBe(true);
  expect(said.filter((line) => /^(error|uncaught|refused)/.test(line))).toEqual([]);
  await server.end();
});

test("the component of the SDK's README runs in StrictMode", async () => {
  const page = join(shop, 'react');
  mkdirSync(page);
  await build({
    stdin: { contents: here(block('client-js/README.md', 'jsx', 'StrictMode')), loader: 'jsx', resolveDir: join(work, 'packed') },
    nodePaths: [join(ROOT, 'client-js/node_modules')],
    bundle: true,
    jsx: 'automatic',
    outfile: join(page, 'main.js'),
  });
  writeFileSync(join(page, 'index.html'), '<div id="root"></div><script src="main.js"></script>');
  const server = await backEnd('server.mjs');
  const tab = await browser.newPage();
  const said = await open(tab, '/react/');
  await tab.getByText('connected', { exact: true }).waitFor();
  const me = await tab.evaluate(async () => JSON.parse(atob((await (await fetch('/chat-token')).json()).token.split('.')[1])).sub);
  const support = gateway.client('support', { token: () => gateway.cli('token', 'support') });
  await support.connect();
  await (await support.dm(me)).send('Can we help?');
  await tab.getByRole('button', { name: 'support (1)' }).click();
  await tab.getByText('support: Can we help?').waitFor();
  await tab.getByRole('button', { name: 'support (0)' }).waitFor();
  expect(said.filter((line) => line.startsWith('uncaught'))).toEqual([]);
  await server.end();
});

test('the widget has at most 60 lines', () => {
  expect(readText('examples/widget/index.html').trim().split('\n').length).toBeLessThanOrEqual(60);
});

test('every block of the pages was tried', () => {
  const elsewhere = [
    // `tests/run` runs it before these tests.
    'npm ci && npm run build',
    'npm run page',
    // One needs a container. The other prints a token that the example with curl signs too.
    'docker run',
    'token notifier',
    // A black-box test imports lines with these fields.
    '"edited_at": 1795000060000',
    // They need a bucket. Black-box tests and `page-files-s3.test.ts` use such settings, and the rules that the commands print.
    'store = "s3"',
    'aws s3api',
  ];
  const left = fences.filter(({ tried, code }) => !tried && !elsewhere.some((having) => code.includes(having)));
  expect(left.map(({ page, code }) => `${page}: ${code}`)).toEqual([]);
});
