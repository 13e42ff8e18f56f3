/** Links in the texts of messages. */
import { expect, test } from 'vitest';
import { linksOf } from '../page/src/links.js';

const shown = (body: string) => linksOf(body).map(({ text }) => text);

test('links end where readers see their end', () => {
  for (const [body, ...links] of [
    ['see https://en.wikipedia.org/wiki/Rust_(programming_language).', 'https://en.wikipedia.org/wiki/Rust_(programming_language)'],
    ['(https://example.com/a)', 'https://example.com/a'],
    ['https://example.com/foo。次の文。', 'https://example.com/foo'],
    ['「https://example.com/foo」、https://example.com/bar。', 'https://example.com/foo', 'https://example.com/bar'],
    ['HTTPS://EXAMPLE.COM/Foo', 'HTTPS://EXAMPLE.COM/Foo'],
    ["https://example.com/it's, they said", "https://example.com/it's"],
    ["'https://example.com'", 'https://example.com'],
    ['www.example.com/a?b=c, WWW.Example.photos!', 'www.example.com/a?b=c', 'WWW.Example.photos'],
    ['write to alice@example.com.', 'alice@example.com'],
    ['http://localhost:8080/#/x and https://[2001:db8::1]/a', 'http://localhost:8080/#/x', 'https://[2001:db8::1]/a'],
    ['https://пример.рф/путь', 'https://пример.рф/путь'],
    // Names of files and of methods, and what is no address.
    ['main.rs README.md a.b() //comment.com ftp://example.com javascript:alert(1) http:// @alice www. www.x'],
  ] as const)
    expect(shown(body)).toEqual(links);
});

test('addresses are those that are meant', () => {
  const [www, mail, host] = linksOf('www.example.com alice@example.com https://EXAMPLE.com/ü');
  expect([www!.href, mail!.href, host!.href]).toEqual([
    'https://www.example.com/',
    'mailto:alice@example.com',
    'https://example.com/%C3%BC',
  ]);
  // A user in front of the host could look like a host.
  expect(shown('https://bank.example@evil.example/')).toEqual(['https://bank.example']);
});

test('a link does not show another ending than it has', () => {
  const [link] = linksOf('https://example.com/\u202Egpj.exe');
  expect(link).toMatchObject({ text: 'https://example.com/%E2%80%AEgpj.exe', href: 'https://example.com/%E2%80%AEgpj.exe' });
  expect(linksOf('https://exa\u202Emple.com/')).toEqual([]);
});
