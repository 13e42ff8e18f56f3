/** The receivers of webhooks and the echo bot in `examples`, installed as their users install them. The signatures are made here,
 * from the text of Standard Webhooks, so that the libraries check them independently. */
import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { createHmac, randomUUID } from 'node:crypto';
import { cpSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { disconnectAll, freePort, Gateway, until, user } from './support/gateway.js';

const run = promisify(execFile);
const EXAMPLES = join(import.meta.dirname, '../../examples');
const SECRET = `whsec_${Buffer.from('a secret of thirty-two bytes !!!').toString('base64')}`;
const CONVERSATION = '0199c0de-0000-4000-8000-000000000001';
const work = mkdtempSync(join(tmpdir(), 'chat-webhooks-'));
const python = join(work, 'venv/bin/python');
const programs: ChildProcess[] = [];

beforeAll(async () => {
  cpSync(join(EXAMPLES, 'webhook-node'), join(work, 'node'), { recursive: true, filter: (name) => !name.includes('node_modules') });
  await run('npm', ['ci', '--silent', '--prefer-offline'], { cwd: join(work, 'node') });
  await run('python3', ['-m', 'venv', join(work, 'venv')]);
  for (const example of ['webhook-python', 'echo-bot'])
    await run(python, ['-m', 'pip', 'install', '--quiet', '--require-hashes', '-r', join(EXAMPLES, example, 'requirements.txt')]);
});
afterEach(() => {
  disconnectAll();
  for (const program of programs.splice(0)) program.kill();
});
afterAll(() => rmSync(work, { recursive: true, force: true }));

/** Starts an example. Resolves with its address. */
async function start(program: string, args: string[], env: NodeJS.ProcessEnv = {}): Promise<string> {
  const port = await freePort();
  const child = spawn(program, args, { env: { ...process.env, WEBHOOK_SECRET: SECRET, PORT: String(port), ...env } });
  programs.push(child);
  let said = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (text) => (said += text));
  await until(() => {
    if (child.exitCode !== null) throw new Error(said);
    return said.includes('waiting for');
  });
  return `http://127.0.0.1:${port}`;
}

/** Sends events as the gateway does. Returns the status. */
async function post(address: string, events: { type: string; data: object }[], secret = SECRET): Promise<number> {
  const id = randomUUID();
  const stamped = events.map((event) => ({ id: randomUUID(), timestamp: '2026-01-01T00:00:00.000Z', ...event }));
  const { id: _, ...only } = stamped[0]!;
  const batch = { type: 'batch', timestamp: '2026-01-01T00:00:00.000Z', data: { events: stamped } };
  const body = JSON.stringify(events.length > 1 ? batch : only);
  const time = String(Math.floor(Date.now() / 1000));
  const key = Buffer.from(secret.replace('whsec_', ''), 'base64');
  const signature = createHmac('sha256', key).update(`${id}.${time}.${body}`).digest('base64');
  const headers = { 'webhook-id': id, 'webhook-timestamp': time, 'webhook-signature': `v1,${signature}` };
  return (await fetch(address, { method: 'POST', headers: { ...headers, 'content-type': 'application/json' }, body })).status;
}

const created = (seq: number, body: string, more: object = {}) => ({
  type: 'message.created',
  data: {
    ...{ conversation: CONVERSATION, conversation_kind: 'dm', seq, message_id: randomUUID(), client_id: randomUUID() },
    ...{ sender: 'bob', kind: 'text', body, at: 1, ...more },
  },
});
const changed = (type: string, fields: object) => ({
  type,
  data: { conversation: CONVERSATION, conversation_kind: 'dm', rev: 1, ...fields },
});

test.each([
  ['Node', 'node', [join(work, 'node/receiver.mjs')]],
  ['Python', python, [join(EXAMPLES, 'webhook-python/receiver.py')]],
])('the receiver in %s verifies, and finds what is not deleted', async (_, program, args) => {
  const address = await start(program, args);
  const search = async (text: string) => {
    const found = (await (await fetch(`${address}/search?q=${encodeURIComponent(text)}`)).json()) as { seq: number; body: string }[];
    return found.map(({ seq, body }) => `${seq} ${body}`);
  };
  expect(await post(address, [created(1, 'Nine at the station?')])).toBe(204);
  expect(await post(address, [created(1, 'Nine at the station?')]), 'again').toBe(204);
  expect(await post(address, [created(2, 'At the café'), created(3, 'at ten'), created(4, '', { deleted: { by: 'bob', at: 2 } })])).toBe(
    204,
  );
  expect(await search('at')).toEqual(['1 Nine at the station?', '3 at ten']);
  expect(await search('café')).toEqual(['2 At the café']);
  expect(await search('')).toHaveLength(3);
  const changes = [
    changed('message.updated', { seq: 3, body: 'at eleven', edited_at: 2, sender: 'bob' }),
    changed('message.deleted', { seqs: [1, 9], deleted: { by: 'bob', at: 3 } }),
    changed('message.reacted', { seq: 2, reactions: { '👍': 1 } }),
  ];
  expect(await post(address, changes)).toBe(204);
  expect(await search('at')).toEqual(['3 at eleven']);
  const other = `whsec_${Buffer.from('another secret, of 32 bytes too!').toString('base64')}`;
  expect(await post(address, [created(5, 'forged at all')], other)).toBe(400);
  expect((await fetch(address, { method: 'POST', body: '{}' })).status).toBe(400);
  expect(await search('at')).toEqual(['3 at eleven']);
});

test('the echo bot answers direct messages once, and asks for them again while the gateway is away', async () => {
  const gateway = await new Gateway().start();
  try {
    const [a, b] = [user('alice'), user('echo')];
    const token = gateway.cli('token', 'bot', '--role', 'service', '--scope', 'messages:write');
    const env = { GATEWAY: gateway.page.slice(0, -1), SERVICE_TOKEN: token, BOT: b };
    const bot = await start(python, [join(EXAMPLES, 'echo-bot/bot.py')], env);
    const alice = await gateway.connect(a);
    const dm = await alice.dm(b);
    const { seq, messageId } = await dm.send('Hello!');
    const event = created(seq, 'Hello!', { conversation: dm.id, message_id: messageId, sender: a });
    expect(await post(bot, [event])).toBe(204);
    expect(await post(bot, [event, event]), 'again').toBe(204);
    expect(await post(bot, [created(seq + 1, 'Hello!', { conversation: dm.id, sender: b })]), 'of itself').toBe(204);
    expect(await post(bot, [created(1, 'Hi')]), 'of a conversation without the bot').toBe(204);
    const texts = async () =>
      (await dm.history()).messages.filter(({ kind }) => kind === 'text').map(({ body, sender }) => `${sender}: ${body}`);
    expect(await texts()).toEqual([`${a}: Hello!`, `${b}: Hello!`]);
    expect(await post(bot, [event], `whsec_${Buffer.alloc(32).toString('base64')}`)).toBe(400);
    alice.disconnect();
    await gateway.kill();
    expect(await post(bot, [created(seq, 'Later', { conversation: dm.id, sender: a })])).toBe(503);
  } finally {
    await gateway.close();
  }
});
