/** The golden frames of the protocol. This test and the gateway's (`tests/rust/golden.rs`) both read
 * `tests/golden/frames.json`, so neither side can change alone. It has every frame and field of docs/protocol.md. After an
 * intended change, `GOLDEN=write` replaces the requests, which the SDK encodes. */
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { type Frame, json } from '../src/codec.js';
import { FINAL, RESTART, TOKEN_EXPIRED, UNAUTHORIZED } from '../src/codes.js';
import { msgpack } from '../src/msgpack.js';
import type { Replies, Request, ServerEvent } from '../src/types.js';
import { fromWire, toWire } from '../src/wire.js';
import { readText } from './support/gateway.js';

const FILE = 'tests/golden/frames.json';
const conversation = '0199c0de-0000-4000-8000-000000000001';
const client_id = '0199c0de-0000-4000-8000-000000000002';

interface Vector {
  frame: Frame;
  msgpack: string;
}
interface Golden {
  requests: Vector[];
  replies: Vector[];
  events: Vector[];
}
const golden = () => JSON.parse(readText(FILE)) as Golden;

const CAT = { url: 'https://example.org/cat.png', name: 'cat.png', mime: 'image/png', size: 70_000 };
/** Every request, with all its fields. */
const requests: Request[] = [
  { type: 'connect', token: 'a.b.c', device: 'phone', cursors: { [conversation]: [4, 0] } },
  { type: 'connect', token: 'a.b.c', device: 'phone', cursors: { [conversation]: [4, 0] }, more: true },
  { type: 'cursors', cursors: { [conversation]: [4, 0] }, more: true },
  { type: 'refresh', token: 'd.e.f' },
  { type: 'inbox', limit: 20, before: '1795000000123.7' },
  { type: 'create', kind: 'dm', participants: ['bob'] },
  { type: 'create', kind: 'group', participants: ['bob', 'carol'], name: 'Lunch', conversation, public: true, posting: 'admins' },
  { type: 'conversation', conversation },
  { type: 'participants', conversation, after: 'bob', limit: 20 },
  { type: 'add', conversation, user: 'dave' },
  { type: 'remove', conversation, user: 'dave' },
  { type: 'join', conversation },
  { type: 'leave', conversation },
  { type: 'set_role', conversation, user: 'bob', role: 'admin' },
  { type: 'update', conversation, name: 'Dinner', posting: 'everyone', public: false },
  {
    type: 'send',
    conversation,
    clientId: client_id,
    body: 'Grüße 👋',
    attachments: [CAT],
    replyTo: 3,
    retry: true,
  },
  { type: 'history', conversation, before: 4, limit: 10 },
  { type: 'history', conversation, after: 4, limit: 200 },
  { type: 'history', conversation, around: 300 },
  { type: 'read', conversation, seq: 4 },
  { type: 'delivered', conversation, seq: 70_000 },
  { type: 'typing', conversation },
  { type: 'watch', users: ['bob', 'carol'] },
  { type: 'unwatch', users: ['bob'] },
  { type: 'subscribe', conversation, after: 5_000_000_000, rev: 9 },
  { type: 'unsubscribe', conversation },
  { type: 'public', after: conversation, limit: 20 },
  { type: 'ping' },
  { type: 'edit', conversation, seq: 4, body: 'See you at 13:00', attachments: [CAT], baseRev: 70_000 },
  { type: 'delete', conversation, seqs: [3, 6] },
  { type: 'react', conversation, seq: 4, emoji: '👍' },
  { type: 'unreact', conversation, seq: 4, emoji: '👍' },
  { type: 'reactions', conversation, seq: 4, emoji: '👍', after: '👍 bob', limit: 20 },
  { type: 'changes', conversation, after: 6, limit: 100 },
  { type: 'attachment_urls', ids: ['0199c0de-0000-4000-8000-000000000004'] },
  {
    type: 'device_set',
    device: 'browser',
    provider: 'web',
    subscription: { endpoint: 'https://push.example.org/a', keys: { p256dh: 'BCVxsr7N', auth: 'BTBZMqHH' } },
  },
  { type: 'device_set', device: 'phone', provider: 'apns', token: '00fc13adff', content: 'none' },
  { type: 'device_remove', device: 'phone' },
  { type: 'devices' },
  { type: 'away', away: true },
  { type: 'settings_set', conversation, mutedUntil: 1_795_000_000_123, push: 'off' },
];

/** The type of the answer to each request, and every event. The compiler checks that none is missing. */
const replyOf: { [Type in keyof Replies]: string } = {
  connect: 'connected',
  cursors: 'none',
  refresh: 'refreshed',
  inbox: 'inbox',
  create: 'created',
  conversation: 'conversation',
  participants: 'participants',
  add: 'ok',
  remove: 'ok',
  join: 'ok',
  leave: 'ok',
  set_role: 'ok',
  update: 'ok',
  send: 'sent',
  history: 'history',
  read: 'ok',
  delivered: 'ok',
  typing: 'none',
  watch: 'presence',
  unwatch: 'presence',
  subscribe: 'ok',
  unsubscribe: 'ok',
  public: 'public',
  ping: 'pong',
  edit: 'ok',
  delete: 'ok',
  react: 'ok',
  unreact: 'ok',
  reactions: 'reactions',
  changes: 'changes',
  attachment_urls: 'attachment_urls',
  device_set: 'ok',
  device_remove: 'ok',
  devices: 'devices',
  away: 'ok',
  settings_set: 'ok',
};
const events: { [Type in ServerEvent['type']]: true } = {
  message: true,
  receipt: true,
  typing: true,
  presence: true,
  conversation: true,
  resync: true,
  changed: true,
  reacted: true,
  settings: true,
  reconnect: true,
  error: true,
};

const hex = (bytes: Uint8Array) => Buffer.from(bytes).toString('hex');
const bytes = (text: string) => new Uint8Array(Buffer.from(text, 'hex')).buffer;

test('requests equal the golden ones', () => {
  const is: Vector[] = requests.map((request, i) => {
    const frame = toWire({ ...request, id: i + 1 });
    return { frame: json.decode(json.encode(frame) as string), msgpack: hex(msgpack.encode(frame) as Uint8Array) };
  });
  if (process.env.GOLDEN === 'write') {
    const file = join(import.meta.dirname, '../..', FILE);
    writeFileSync(file, `${JSON.stringify({ ...golden(), requests: is }, null, 2)}\n`);
  }
  expect(is).toEqual(golden().requests);
});

test('every field has one name on the wire and one in the API', () => {
  const { requests, replies, events } = golden();
  for (const { frame } of [...requests, ...replies, ...events]) expect(toWire(fromWire(frame))).toEqual(frame);
  expect(JSON.stringify(fromWire(events[0]!.frame))).not.toMatch(/"[a-z]+_[a-z]+":/);
});

test('golden replies and events mean the same in both encodings', () => {
  const { replies, events } = golden();
  for (const { frame, msgpack: packed } of [...replies, ...events]) {
    expect(msgpack.decode(bytes(packed))).toEqual(frame);
    expect(json.decode(JSON.stringify(frame))).toEqual(frame);
  }
});

/** Returns the rows of a table of docs/protocol.md. */
function rows(heading: string): string[][] {
  const [, part] = readText('docs/protocol.md').split(`\n## ${heading}\n`);
  const lines = part!.split('\n## ')[0]!.split('\n');
  const table = lines.filter((line) => line.startsWith('|') && !line.startsWith('|-')).slice(1);
  return table.map((line) => line.split('|').slice(1, -1));
}
const quoted = (cell: string) => [...cell.matchAll(/`(\w+)\??`/g)].map(([, word]) => word!);
/** Returns the fields in the outermost braces of a text like `reply {a, b?, c {d}}`. */
const braced = (cell: string) =>
  (cell.match(/\{(.*)\}/)?.[1] ?? '')
    .replace(/\{.*?\}/g, '')
    .split(',')
    .flatMap((field) => field.match(/\w+/)?.[0] ?? []);
const fields = (vectors: Vector[], type: string) => {
  const names = vectors.filter(({ frame }) => frame.type === type).flatMap(({ frame }) => Object.keys(frame));
  return [...new Set(names)].filter((name) => name !== 'type' && name !== 'id').sort();
};

test('every request and reply of docs/protocol.md is in the golden file, and has a type', () => {
  const { requests, replies } = golden();
  const documented = new Map<string, string>();
  const answered = new Map<string, Set<string>>();
  for (const [names, has, reply] of rows('Requests')) {
    const answer = quoted(reply!)[0]!;
    const type = reply!.trim().startsWith('none') ? 'none' : answer;
    for (const name of quoted(names!)) {
      documented.set(name, type);
      expect(fields(requests, name), `fields of ${name}`).toEqual(quoted(has!).sort());
    }
    if (type !== 'none') answered.set(type, new Set([...(answered.get(type) ?? []), ...braced(reply!)]));
  }
  expect(Object.fromEntries(documented)).toEqual(replyOf);
  for (const [type, has] of answered) expect(fields(replies, type), `fields of ${type}`).toEqual([...has].sort());
  expect(new Set(replies.map(({ frame }) => frame.type))).toEqual(new Set([...answered.keys(), 'error']));
});

test('every event of docs/protocol.md is in the golden file, and has a type', () => {
  const documented = rows('Events').map(([name]) => quoted(name!)[0]!);
  const names = Object.keys(events);
  expect([...documented, 'error'].sort()).toEqual(names.sort());
  expect(new Set(golden().events.map(({ frame }) => frame.type))).toEqual(new Set(names));
  const changes = golden().events.flatMap(({ frame }) => (frame.system as { change: string } | undefined)?.change ?? []);
  expect(new Set(changes)).toEqual(new Set(rows('Messages').flatMap(([names]) => quoted(names!))));
});

test('the close codes that the client handles are those of docs/protocol.md', () => {
  const codes = rows('Close codes').map(([code]) => Number(code));
  for (const code of [RESTART, TOKEN_EXPIRED, UNAUTHORIZED, FINAL]) expect(codes).toContain(code);
});
