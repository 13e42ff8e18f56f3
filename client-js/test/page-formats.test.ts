/** The formats in the texts of messages: what is shown, that nothing gets lost, and that no text can make it slow. */
import { renderToStaticMarkup } from 'react-dom/server';
import { expect, test } from 'vitest';
import { bodyOf } from '../page/src/Body.js';
import { type Block, blocksOf, type Piece } from '../page/src/formats.js';
import { LINK, random } from './support/texts.js';

const html = (body: string) => renderToStaticMarkup(bodyOf(body));

test('code, bold, lists and quotes are shown as people mean them', () => {
  for (const [body, shown] of [
    ['use `npm ci` here', 'use <code dir="ltr">npm ci</code> here'],
    ['``a `b` c``', '<code dir="ltr">a `b` c</code>'],
    ['**Nine** at the **station**, please', '<strong>Nine</strong> at the <strong>station</strong>, please'],
    ['**run `make` now**', '<strong>run <code dir="ltr">make</code> now</strong>'],
    ['это **важно**。这是**重点**内容', 'это <strong>важно</strong>。这是<strong>重点</strong>内容'],
    ['first\n**second**\n\nthird', 'first\n<strong>second</strong>\n\nthird'],
    [
      'buy\n- milk\n- **eggs**\nthanks',
      '<p dir="auto">buy</p><ul dir="auto"><li>milk</li><li><strong>eggs</strong></li></ul><p dir="auto">thanks</p>',
    ],
    ['1. one\n2. two', '<ol dir="auto"><li value="1">one</li><li value="2">two</li></ol>'],
    ['3. c\n7. g', '<ol dir="auto"><li value="3">c</li><li value="7">g</li></ol>'],
    ['> he said\n>\n> `this`\nno', '<blockquote dir="auto">he said\n\n<code dir="ltr">this</code></blockquote><p dir="auto">no</p>'],
    ['> > twice', '<blockquote dir="auto">&gt; twice</blockquote>'],
    ['```\n**a**\n\n  - b\n```', '<pre dir="auto">**a**\n\n  - b</pre>'],
    [
      'so:\n\n```rust\nfn main() {}\n```\n\ndone',
      '<p dir="auto">so:</p><pre dir="auto" data-language="rust">fn main() {}</pre><p dir="auto">done</p>',
    ],
  ] as const)
    expect(html(body), body).toBe(shown);
});

test('what only looks like a format is shown as it was typed', () => {
  for (const body of [
    '2**3**4 is 2 ** (3 ** 4)',
    'glob/**/x and other/**/y',
    '** spaces **, **, ****, ***three***, *one*',
    'one ` backtick, and ``two```',
    '` `',
    '```\n```',
    '```\nnever closed',
    '```two words\nno block\n```',
    '>:( >_<\n>',
    '> ',
    '-5 degrees\n- \n-- x',
    '3. Oktober',
    '2024. A year\n2025. Another',
    '1.\n2.',
    '**over\nlines**',
  ])
    expect(html(body).replaceAll('&gt;', '>').replaceAll('&lt;', '<'), body).toBe(body);
});

test('links are found inside of formats, and keep their asterisks', () => {
  const hrefs = (body: string) => [...html(body).matchAll(/href="([^"]*)"/g)].map(([, href]) => href);
  expect(hrefs('**see https://example.org/a**')).toEqual(['https://example.org/a']);
  expect(html('**https://example.org/a** b')).toMatch(/^<strong><a .*>https:\/\/example.org\/a<\/a><\/strong> b$/);
  expect(hrefs('https://example.org/**/x and https://example.org/**/y')).toEqual(['https://example.org/**/x', 'https://example.org/**/y']);
  expect(hrefs('- www.example.org\n- alice@example.org\n> https://example.org')).toEqual([
    'https://www.example.org/',
    'mailto:alice@example.org',
    'https://example.org/',
  ]);
  expect(hrefs('`https://example.org`\n```\nhttps://example.org\n```')).toEqual([]);
});

const textOf = (piece: Piece): string =>
  typeof piece === 'string' ? piece : 'bold' in piece ? piece.bold.map(textOf).join('') : piece.code;
const sourceOf = (piece: Piece): string =>
  typeof piece === 'string' ? piece : 'bold' in piece ? `**${piece.bold.map(sourceOf).join('')}**` : piece.mark + piece.code + piece.mark;

/** Returns the text of a block, with or without the marks that were typed. */
function written(block: Block, pieceOf: (piece: Piece) => string, withMarks: boolean): string {
  const join = (pieces: Piece[]) => pieces.map(pieceOf).join('');
  if (block.type === 'code') return withMarks ? `\`\`\`${block.language}\n${block.code}\n\`\`\`` : block.code;
  if (block.type === 'text') return join(block.pieces);
  if (block.type === 'quote') return withMarks ? join(block.pieces).replace(/^/gm, '> ') : join(block.pieces);
  const markOf = (number?: number) => (!withMarks ? '' : number === undefined ? '- ' : `${number}. `);
  if (block.type !== 'list') throw new Error(block.type);
  return block.items.map(({ number, pieces }) => markOf(number) + join(pieces)).join(withMarks ? '\n' : '');
}

/** Returns a text without empty lines and without spaces at the end of lines. */
const tight = (text: string) =>
  text
    .split('\n')
    .map((line) => line.trimEnd())
    .filter(Boolean)
    .join('\n');

const ENTITIES: Record<string, string> = { '&lt;': '<', '&gt;': '>', '&amp;': '&', '&quot;': '"', '&#x27;': "'" };
const ALLOWED = /^(?:<\/?(?:p|blockquote|ul|ol|li|pre|strong|code|a)( (?:dir="(?:auto|ltr)"|value="\d+"|data-language="[\w+#.-]+"))*>)$/;
const LINKS = /^<a dir="ltr" href="(?:https?:\/\/|mailto:)[^"]*" target="_blank" rel="noopener noreferrer nofollow ugc">$/;

test('of hostile texts nothing gets lost but the marks, and no other element appears', () => {
  let formatted = 0;
  for (const body of [...random(200), ...HOSTILE]) {
    const blocks = blocksOf(body);
    expect(tight(blocks.map((block) => written(block, sourceOf, true)).join('\n')), body).toBe(tight(body));
    const shown = html(body);
    const tags = shown.match(/<[^>]*>/g) ?? [];
    expect(
      tags.filter((tag) => !ALLOWED.test(tag) && !LINKS.test(tag)),
      body,
    ).toEqual([]);
    expect(tags.length, body).toBeLessThan(2 * 501 + 2 * (body.match(LINK) ?? []).length);
    // React begins a `pre` with a line break if its text has one, because browsers leave out the first.
    const text = shown
      .replace(/(<pre[^>]*>)\n/g, '$1')
      .replace(/<[^>]*>/g, '')
      .replace(/&[#\w]+;/g, (entity) => ENTITIES[entity]!);
    const isPlain = text === body;
    if (!isPlain) formatted++;
    if (!isPlain) expect(text, body).toBe(blocks.map((block) => written(block, textOf, false)).join(''));
  }
  expect(formatted).toBeGreaterThan(100);
});

test('a message with very many elements is shown as it was typed', () => {
  for (const body of ['`a` '.repeat(501).trim(), '**a** '.repeat(501).trim(), '- a\n'.repeat(501).trim()])
    expect(html(body), body).toBe(body);
  expect(html('`a` '.repeat(400))).toMatch(/^<code/);
  // Links count too, with formats and without.
  for (const body of ['a@b.cc '.repeat(101).trim(), `**b** ${'a@b.cc '.repeat(500).trim()}`]) expect(html(body), body).toBe(body);
  expect(html('a@b.cc '.repeat(100))).toMatch(/^<a /);
});

/** Returns how many characters the methods of texts and expressions looked at while a text was parsed. */
function workOf(body: string): number {
  const { exec } = RegExp.prototype;
  const { slice, trim, trimEnd, includes, startsWith, split } = String.prototype;
  let work = 0;
  Object.assign(RegExp.prototype, {
    exec(this: RegExp, text: string) {
      const from = this.global || this.sticky ? this.lastIndex : 0;
      const found = exec.call(this, text);
      work += 1 + (found && this.global ? this.lastIndex : text.length) - from;
      return found;
    },
  });
  const counted = <T extends (...all: never[]) => unknown>(method: T) =>
    function (this: string, ...all: Parameters<T>) {
      const made = method.apply(this, all);
      work += 1 + (typeof made === 'string' ? made.length : this.length);
      return made;
    };
  Object.assign(String.prototype, {
    slice: counted(slice),
    trim: counted(trim),
    trimEnd: counted(trimEnd),
    includes: counted(includes as (text: string) => boolean),
    startsWith: counted(startsWith as (text: string) => boolean),
    split: counted(split as (text: string) => string[]),
  });
  try {
    blocksOf(body);
  } finally {
    Object.assign(RegExp.prototype, { exec });
    Object.assign(String.prototype, { slice, trim, trimEnd, includes, startsWith, split });
  }
  return work;
}

test('the work is proportional to the length, also of texts that are made to be slow', () => {
  for (const part of SLOW) {
    const [one, two] = [16, 32].map((kib) => workOf(part.repeat((kib * 1024) / part.length)));
    expect(two! / one!, JSON.stringify(part)).toBeLessThan(2.1);
    expect(two!, JSON.stringify(part)).toBeLessThan(32 * 1024 * 20);
  }
  // Runs of backticks that grow have no partner each.
  const growing = (n: number) => Array.from({ length: n }, (_, i) => '`'.repeat(i + 1)).join(' ');
  expect(workOf(growing(360)) / growing(360).length).toBeLessThan(20);
});

/** Parts that are repeated to texts of 16 and 32 KiB. None has links, which `linkify-it` finds. */
const SLOW = [
  ...[
    '*',
    '**',
    '** ',
    ' **',
    '**a',
    'a** ',
    '**a** ',
    '`',
    '` ',
    '`a',
    '`` ` ',
    '` `` ',
    '```',
    '```\n',
    '```\n\n',
    '```js\n',
    '```\na\n',
  ],
  ...[
    '>',
    '> ',
    '>\n',
    '> > ',
    '> a\n',
    '- ',
    '- a\n',
    '-\n',
    '1. ',
    '1. a\n',
    '1. a\n- a\n',
    '> a\n- a\n',
    '\n',
    ' \n',
    '\n \na',
    '**`',
    '**a `',
  ],
  ...['``` x\n', '``` ', '```          x\n', '**`a`', '1', '1.', '111. a\n', '\t'],
];

const HOSTILE = [
  ...[...SLOW, '**https://a.b/**', 'https://a.b/**/c '].map((part) => part.repeat(40)),
  '<script>alert(1)</script>',
  '**<img src=x onerror=alert(1)>**',
  '`<svg onload=alert(1)>`',
  '```"><script>alert(1)</script>\nx\n```',
  '```js" onclick="alert(1)\nx\n```',
  '- <a href="javascript:alert(1)">x</a>\n- [x](javascript:alert(1))',
  '> ![x](https://evil.example/x.png)',
  '**javascript:alert(1)** `javascript:alert(1)` data:text/html,<b>x</b>',
  '1. &lt;b&gt;\n2. &amp;lt;',
  '**a `b** c`',
  '`a **b` c**',
  '**a **b** c**',
  '``` \na\n``` \nb',
  '> ```\n> a\n> ```',
  '- ```\na\n```',
  '```\n```\n```\n```',
  '__proto__ **__proto__** `constructor`',
  '```__proto__\nx\n```\n```constructor\nx\n```',
];
