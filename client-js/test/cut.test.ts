/** Texts are cut between grapheme clusters, as at the gateway (docs/protocol.md, "Texts"). */
import { afterAll, afterEach, beforeAll, expect, test, vi } from 'vitest';
import { cut, firstOf } from '../src/cut.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';

const gateway = new Gateway();
beforeAll(() => gateway.start());
afterEach(() => {
  disconnectAll();
  vi.unstubAllGlobals();
  vi.resetModules();
});
afterAll(() => gateway.close());

const FAMILY = '👨‍👩‍👧‍👦';
const ACCENTED = 'e\u0301';

test('no grapheme cluster is cut, unless the first one alone is longer', () => {
  expect(cut('', 3)).toBe('');
  expect(cut('abc', 3)).toBe('abc');
  expect(cut('abcd', 3)).toBe('abc');
  expect(cut('😀😀😀😀', 3)).toBe('😀😀😀');
  expect(cut(`ab${ACCENTED}c`, 3)).toBe('ab');
  expect(cut(`ab${ACCENTED}c`, 4)).toBe(`ab${ACCENTED}`);
  // A flag has two code points, and a family seven.
  expect(cut('🇩🇪🇫🇷🇯🇵', 3)).toBe('🇩🇪');
  expect(cut(FAMILY.repeat(3), 20)).toBe(FAMILY.repeat(2));
  expect(cut(FAMILY.repeat(3), 21)).toBe(FAMILY.repeat(3));
  expect(cut('a\r\nb', 2)).toBe('a');
  expect(cut(FAMILY, 3)).toBe('👨‍👩');
  // A text need not be well-formed.
  expect(cut('\ud83d\ud83d\ud83d', 2)).toBe('\ud83d\ud83d');
});

test('the first cluster of a text', () => {
  expect(['', 'abc', `${FAMILY}b`, `${ACCENTED}a`].map(firstOf)).toEqual(['', 'a', FAMILY, ACCENTED]);
});

test.each([
  ['Intl.Segmenter', { ...Intl, Segmenter: undefined }],
  ['Intl', undefined],
])('a platform without %s cuts between code points', async (_, intl) => {
  vi.resetModules();
  vi.stubGlobal('Intl', intl);
  const other = await import('../src/cut.js');
  expect(other.cut(`${FAMILY}b`, 3)).toBe('👨‍👩');
  expect(other.cut('😀😀', 1)).toBe('😀');
  expect(other.cut('abc', 3)).toBe('abc');
  expect(['', `${FAMILY}b`].map(other.firstOf)).toEqual(['', '👨']);
});

test('the inbox has the same previews as the gateway', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const [alice, bob] = [await gateway.connect(a), await gateway.connect(b)];
  const dm = await alice.dm(b);
  const ends = [
    FAMILY,
    ACCENTED,
    '🇩🇪🇫🇷',
    '👍🏽',
    '❤️',
    '각',
    'นำ',
    '\r\n',
    'x\u0301\u0302\u0303',
    '1️⃣',
    '\u{1f3f4}\u{e0067}\u{e0062}\u{e007f}',
  ];
  for (const end of ends) {
    for (const before of [96, 97, 98, 99, 100]) {
      const body = `${'.'.repeat(before)}${end.repeat(3)}z`;
      const { seq } = await dm.send(body);
      await until(() => bob.inbox.get(dm.id)?.lastSeq === seq);
      const told = bob.inbox.get(dm.id)!.lastMessage!.preview;
      const { value } = await alice.inbox.pages({ limit: 1 }).next();
      expect(told, JSON.stringify(body)).toBe(value![0]!.lastMessage!.preview);
    }
  }
  const { seq } = await dm.send(`a${'\u0301'.repeat(300)}`);
  await until(() => bob.inbox.get(dm.id)?.lastSeq === seq);
  expect(bob.inbox.get(dm.id)!.lastMessage!.preview).toBe(`a${'\u0301'.repeat(99)}`);
});
