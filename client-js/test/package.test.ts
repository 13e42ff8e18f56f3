/** The package as its users get it: packed, and installed into an empty project. The examples run unchanged. */
import { execFile, spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { chromium } from 'playwright-core';
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { disconnectAll, Gateway, readText, until, user } from './support/gateway.js';

const run = promisify(execFile);
const HERE = join(import.meta.dirname, '..');
let gateway: Gateway;
const project = mkdtempSync(join(tmpdir(), 'chat-package-'));

beforeAll(async () => {
  gateway = new Gateway({ client__origins: '["*"]' });
  const installed = (async () => {
    const { stdout } = await run('npm', ['pack', '--silent', '--pack-destination', project], { cwd: HERE });
    writeFileSync(join(project, 'package.json'), '{ "name": "empty", "private": true }');
    const tarball = join(project, stdout.trim().split('\n').at(-1)!);
    await run('npm', ['install', '--silent', '--prefer-offline', tarball, 'ws@8'], { cwd: project });
  })();
  await Promise.all([gateway.start(), installed]);
});
afterEach(disconnectAll);
afterAll(async () => {
  await gateway.close();
  rmSync(project, { recursive: true, force: true });
});

const example = () => {
  const [, code] = readText('client-js/README.md').match(/```js\n(.*?)```/s)!;
  return code!.replace('127.0.0.1:8080', gateway.address);
};
const required = (code: string) => {
  const body = code.replace(/^import (.*) from ('.*?');/gm, 'const $1 = require($2);');
  return `(async () => {\n${body}\n})();`;
};

test.each([
  ['import', 'example.mjs', (code: string) => code],
  ['require', 'example.cjs', required],
])("the README's example runs, by %s", async (_, name, written) => {
  const lines = example().trim().split('\n');
  expect(lines.filter(Boolean).length).toBeLessThanOrEqual(10);
  writeFileSync(join(project, name), written(example()));
  const alice = user('alice');
  const env = { ...process.env, TOKEN: await gateway.token(alice) };
  const { stdout } = await run('node', [name], { cwd: project, env });
  expect(stdout).toBe(`1 ${alice}: Hi Bob!\nstored as 1 of 1\n`);
});

test('both entries export the same names, and React is in its own entry', async () => {
  const names = (code: string) => run('node', ['-e', code], { cwd: project }).then(({ stdout }) => stdout.trim());
  const print = 'console.log(Object.keys(m).filter((n) => n !== "default").sort().join())';
  const required = await names(`const m = require('@chat-gateway/client'); ${print}`);
  expect(required).toBe('ChatClient,ChatError,UnauthorizedError,indexedDbStorage,memoryStorage');
  expect(await names(`import('@chat-gateway/client').then((m) => ${print})`)).toBe(required);
  const { dependencies } = JSON.parse(readFileSync(join(HERE, 'package.json'), 'utf8'));
  expect(Object.keys(dependencies)).toEqual(['@msgpack/msgpack']);
  for (const entry of ['index.js', 'index.cjs'])
    expect(readFileSync(join(HERE, 'dist', entry), 'utf8')).not.toMatch(/(from |require\()["']react/);
});

test('the licence comes with it', () => {
  const installed = join(project, 'node_modules/@chat-gateway/client');
  expect(readFileSync(join(installed, 'LICENSE'), 'utf8')).toBe(readText('LICENSE'));
  expect(JSON.parse(readFileSync(join(installed, 'package.json'), 'utf8')).license).toBe('Apache-2.0');
});

test('the types have nothing internal, and compile in a strict project', async () => {
  for (const name of readdirSync(join(HERE, 'dist')).filter((name) => /\.d\.c?ts$/.test(name)))
    expect(readFileSync(join(HERE, 'dist', name), 'utf8'), name).not.toContain('@internal');
  const program = `import { ChatClient, type Upload } from '@chat-gateway/client';
    const chat = new ChatClient('ws://127.0.0.1', { token: 't' });
    export const name: string = chat.conversation('c').name;
    export const at: number = chat.now();
    export const off: () => void = chat.watch(['bob']);
    export const sent = (upload: Upload): number => upload.sent;
    // @ts-expect-error: it is internal.
    chat.outbox;`;
  writeFileSync(join(project, 'strict.mts'), program);
  const options = ['--strict', '--noEmit', '--target', 'es2022', '--lib', 'es2022,dom', '--module', 'nodenext'];
  await run(join(HERE, 'node_modules/.bin/tsc'), [...options, 'strict.mts'], { cwd: project });
});

test('the example for Node sends and receives', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const bob = await gateway.connect(b);
  const token = await gateway.token(a);
  const program = spawn('node', ['examples/node.mjs', gateway.url, token, b], { cwd: HERE, stdio: ['pipe', 'pipe', 'inherit'] });
  let out = '';
  program.stdout.on('data', (text) => (out += text));
  const ended = new Promise((resolve) => program.once('exit', resolve));
  program.stdin.write('Hello from the terminal\n');
  await until(() => out.includes('stored as number 1'));
  await (await bob.dm(a)).send('And back');
  await until(() => out.includes(`${b}: And back`));
  program.stdin.end('Bye\n');
  expect(await ended).toBe(0);
  await until(() => bob.inbox.items[0]?.lastMessage?.preview === 'Bye');
});

test('the plain page sends and receives', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'] });
  try {
    const page = await browser.newPage();
    await page.goto(`file://${HERE}/examples/plain.html`);
    await page.getByLabel('Gateway').fill(gateway.url);
    await page.getByLabel('Token').fill(await gateway.token(a));
    await page.getByLabel('Who with').fill(b);
    await page.getByRole('button', { name: 'Start' }).click();
    await page.getByLabel('Message').fill('<b>plain</b>');
    await page.keyboard.press('Enter');
    await page.locator('li', { hasText: `${a}: <b>plain</b> (sent)` }).waitFor();
  } finally {
    await browser.close();
  }
});
