/** Texts of messages that are made to break what shows them. */

const PARTS = [
  ...[
    '`',
    '``',
    '```',
    '```\n',
    '```js\n',
    '\n```\n',
    '*',
    '**',
    '***',
    ' **',
    '** ',
    '> ',
    '>',
    '\n> ',
    '- ',
    '\n- ',
    '1. ',
    '\n1. ',
    '\n2. ',
  ],
  ...['\n', '\n\n', ' ', '\t', '\\', '_', '~~', '#', '|', 'a', 'word', '7', 'ш', 'ש', '重', '😀', '\u0301', '.', ',', ':'],
  ...[
    '<b>',
    '</b>',
    '<img src=x onerror=alert(1)>',
    '<script>',
    '&amp;',
    '&lt;',
    '"',
    "'",
    '{x}',
    'javascript:alert(1)',
    '[x](y)',
    '![x](y)',
  ],
  ...['https://example.org/a', 'www.example.com', 'alice@example.org', '**https://example.org/**'],
];

/** Matches all that may be a link in these texts. */
export const LINK = /:\/\/|www\.|@/g;

/** Returns texts of random parts, the same in each run. */
export function random(count: number): string[] {
  let x = 2463534242;
  const next = (below: number) => {
    x ^= x << 13;
    x ^= x >>> 17;
    x ^= x << 5;
    return (x >>> 0) % below;
  };
  return Array.from({ length: count }, () => Array.from({ length: 1 + next(60) }, () => PARTS[next(PARTS.length)]).join(''));
}
