/** "Webhooks in a minute" of the README, as it is written, except for ports, folders, and the program that is built already. */
import { execFile, spawn } from 'node:child_process';
import { cpSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, expect, test } from 'vitest';
import { disconnectAll, freePort, Gateway, readText, until } from './support/gateway.js';

const ROOT = join(import.meta.dirname, '../..');
const BINARY = process.env.CHAT_GATEWAY ?? join(ROOT, 'target/release/chat-gateway');
const work = mkdtempSync(join(tmpdir(), 'chat-webhooks-'));
const groups: number[] = [];

afterAll(() => {
  disconnectAll();
  for (const group of groups) process.kill(-group, 'SIGKILL');
  rmSync(work, { recursive: true, force: true });
});

test('the receiver of the README finds the messages of a real chat', async () => {
  const story = readText('README.md').split('## Webhooks in a minute')[1]!.split('\n## ')[0]!;
  const [start, search] = [...story.matchAll(/^```sh\n([\s\S]*?)^```/gm)].map(([, code]) => code!);
  const [clients, receiver] = [await freePort(), await freePort()];
  const here = (code: string) => code.replaceAll('127.0.0.1:3001', `127.0.0.1:${receiver}`).replace('cargo run --release', BINARY);
  // The commands run in a copy, so that nothing is left in the repository.
  cpSync(join(ROOT, 'examples/webhook-node'), join(work, 'examples/webhook-node'), {
    recursive: true,
    filter: (path) => !path.endsWith('node_modules'),
  });
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith('CHAT__')));
  const settings = { CHAT__CLIENT__LISTEN: `127.0.0.1:${clients}`, CHAT__INTERNAL__LISTEN: '127.0.0.1:0', PORT: String(receiver) };
  // A group of its own, because the block has two servers.
  const options = { cwd: work, env: { ...env, ...settings }, detached: true, stdio: 'ignore' } as const;
  groups.push(spawn('bash', ['-euc', here(start!)], options).pid!);
  const gateway = new Gateway();
  gateway.address = `127.0.0.1:${clients}`;
  await until(
    () =>
      fetch(gateway.page).then(
        ({ ok }) => ok,
        () => false,
      ),
    'the gateway answers',
  );
  const alice = await gateway.connect('alice');
  const sent = await (await alice.dm('bob')).send('hello, who finds this?');
  const find = async () => {
    const { stdout } = await promisify(execFile)('bash', ['-euc', here(search!)]).catch(() => ({ stdout: '[]' }));
    return JSON.parse(stdout || '[]') as { body: string; seq: number }[];
  };
  await until(async () => (await find()).length > 0, 'the message is found');
  expect(await find()).toMatchObject([{ body: 'hello, who finds this?', seq: (await sent).seq }]);
});
