/** A client that is generated from the OpenAPI document of a running gateway: it compiles, has types, and works. */
import { execFile } from 'node:child_process';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { createClient } from '@hey-api/openapi-ts';
import { build } from 'esbuild';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { Gateway, user } from './support/gateway.js';

const HERE = join(import.meta.dirname, '..');
const gateway = new Gateway();
let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'chat-openapi-'));
  await gateway.start();
  await createClient({
    input: `${gateway.page}openapi.json`,
    output: join(folder, 'client'),
    plugins: ['@hey-api/typescript', '@hey-api/sdk', '@hey-api/client-fetch'],
    logs: { level: 'silent', file: false },
  });
});
afterAll(async () => {
  await rm(folder, { recursive: true, force: true });
  await gateway.close();
});

/** What a back end in TypeScript does. Its types are those of the generated client only. */
const BACK_END = `
import { client } from './client/client.gen';
import * as api from './client';

export async function run(baseUrl: string, token: string, as: string, other: string) {
  client.setConfig({ baseUrl, auth: token, headers: { 'chat-user': as } });
  const created = await api.postConversations({ body: { kind: 'dm', participants: [other] }, throwOnError: true });
  const conversation: string = created.data.conversation;
  const path = { conversation };
  const body = { client_id: crypto.randomUUID(), body: 'hello' };
  const sent = await api.postConversationsConversationMessages({ path, body, throwOnError: true });
  const seq: number = sent.data.seq;
  const reacted = await api.putConversationsConversationMessagesSeqReactionsEmoji({ path: { conversation, seq, emoji: '👍' }, throwOnError: true });
  const page = await api.getConversationsConversationMessages({ path, query: { limit: 1 }, throwOnError: true });
  const messages: api.Message[] = page.data.messages;
  const inbox = await api.getInbox({ throwOnError: true });
  const unread: number | undefined = inbox.data.items[0]?.unread;
  const begun = await api.postAttachments({ body: { conversation, name: 'a.txt', size: 1 }, throwOnError: true });
  const { upload } = begun.data;
  const place: string = 'tus' in upload ? upload.tus : upload.parts;
  const refused = await api.getConversationsConversation({ path: { conversation: crypto.randomUUID() } });
  const code: api.ErrorCode | undefined = refused.error?.code;
  // @ts-expect-error The compiler does look: the path lacks the conversation.
  const wrong = () => api.getConversationsConversation({ path: {} });
  return { conversation, seq, place, wrong: typeof wrong, rev: reacted.data.rev, messages, unread, code };
}
`;

/** Returns what the compiler says of the generated client and its caller. */
async function compiled(): Promise<string> {
  const strict = { strict: true, noUncheckedIndexedAccess: true, noEmit: true, skipLibCheck: false, types: [] };
  const compilerOptions = {
    ...strict,
    target: 'es2022',
    module: 'esnext',
    moduleResolution: 'bundler',
    lib: ['es2023', 'dom', 'dom.iterable'],
  };
  await writeFile(join(folder, 'tsconfig.json'), JSON.stringify({ compilerOptions, include: ['.'] }));
  const answer = await promisify(execFile)(join(HERE, 'node_modules/.bin/tsc'), ['-p', folder]).catch((error) => error);
  return String(answer.stdout);
}

test('it compiles in strict mode, and works', async () => {
  await writeFile(join(folder, 'back-end.ts'), BACK_END);
  expect(await compiled()).toBe('');
  const bundle = join(folder, 'back-end.mjs');
  await build({ entryPoints: [join(folder, 'back-end.ts')], bundle: true, format: 'esm', target: 'es2022', outfile: bundle });
  const { run } = await import(/* @vite-ignore */ bundle);
  const [alice, bob] = [user('alice'), user('bob')];
  const scope = 'conversations:write conversations:read messages:write messages:read';
  const token = gateway.cli('token', 'shop', '--role', 'service', '--scope', scope);
  expect(await run(gateway.page.slice(0, -1), token, alice, bob)).toEqual({
    conversation: expect.stringMatching(/^[0-9a-f-]{36}$/),
    seq: 1,
    place: expect.stringMatching(/^\/v1\/attachments\/[0-9a-f-]{36}\/upload$/),
    wrong: 'function',
    rev: 1,
    messages: [expect.objectContaining({ seq: 1, sender: alice, body: 'hello', reactions: { '👍': 1 } })],
    unread: 0,
    code: 'not_found',
  });
});

test('every answer in JSON has a type, every operation a name of its own, and a group', async () => {
  const types = await readFile(join(folder, 'client/types.gen.ts'), 'utf8');
  const untyped = [...types.matchAll(/^export type (\w+)Responses = \{([^}]*: unknown;[^}]*)\}/gm)].map(([, name]) => name);
  // An answer that has headers only, and the bytes of a file.
  expect(untyped).toEqual(['HeadAttachmentsFileUpload', 'GetFilesFileVariant']);
  const functions = await readFile(join(folder, 'client/sdk.gen.ts'), 'utf8');
  const document = (await (await fetch(`${gateway.page}openapi.json`)).json()) as {
    paths: Record<string, Record<string, { tags: string[] }>>;
  };
  const operations = Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.values(methods).map(({ tags }) => ({ path, tags })),
  );
  for (const { path, tags } of operations) expect(tags).toEqual([path.split('/')[2]]);
  const names = [...functions.matchAll(/^export const (\w+) =/gm)].map(([, name]) => name!);
  expect(new Set(names).size).toBe(operations.length);
});
