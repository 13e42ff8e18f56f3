/** Links in the texts of messages. */
import { LinkifyIt } from 'linkify-it';
import type { ReactNode } from 'react';

/** Most texts have nothing that may be a link, and need not be searched. */
const MAY_HAVE = /:\/\/|www\.|@/i;

/** The number of links above which a text is shown without them. Very many would make a browser slow, and Tab stop at each. */
export const LINKS_MAX = 100;

let finder: LinkifyIt | undefined;

/** Returns what finds links: with a scheme, with `www.`, and mail addresses. Other names with a dot may be files, such as `main.rs`. */
function makeFinder(): LinkifyIt {
  const made = new LinkifyIt().add('ftp:', null).add('//', null);
  const rest = new RegExp(`(?=[^/?#\\s]{0,255}\\.)${made.re.get_url_host_port().source}${made.re.get_path().source}`, 'iy');
  return made.add('www.', {
    validate: (text, pos) => {
      rest.lastIndex = pos;
      return rest.exec(text)?.[0].length ?? 0;
    },
    normalize: (match) => {
      match.url = `https://${match.url}`;
    },
  });
}

/** A link as it is shown, and its address. */
export interface Link {
  index: number;
  end: number;
  text: string;
  href: string;
}

/** `URL.canParse` is missing in browsers that can do all else. */
function hrefOf(url: string): string | undefined {
  try {
    return new URL(url).href;
  } catch {
    return undefined;
  }
}

/** Returns the links in a text. */
export function linksOf(body: string): Link[] {
  if (!MAY_HAVE.test(body)) return [];
  finder ??= makeFinder();
  const links: Link[] = [];
  for (const { index, lastIndex, url } of finder.match(body) ?? []) {
    const href = hrefOf(url);
    if (!href) continue;
    // Characters that change the direction could show another ending than the address has.
    const text = body.slice(index, lastIndex).replace(/\p{Bidi_Control}/gu, encodeURIComponent);
    links.push({ index, end: lastIndex, text, href });
  }
  return links;
}

/** Whether an address leads to a conversation of this page. */
const isOfPage = (href: string): boolean => href.startsWith(`${globalThis.location?.href.split('#')[0]}#/`);

/** Returns a text with its links. */
export function linked(text: string): ReactNode {
  const links = linksOf(text);
  if (!links.length || links.length > LINKS_MAX) return text;
  const parts: ReactNode[] = [];
  let before = 0;
  for (const { index, end, text: shown, href } of links) {
    parts.push(
      text.slice(before, index),
      // An address is read from left to right in texts of any direction.
      <a key={index} dir="ltr" href={href} target={isOfPage(href) ? undefined : '_blank'} rel="noopener noreferrer nofollow ugc">
        {shown}
      </a>,
    );
    before = end;
  }
  parts.push(text.slice(before));
  return parts;
}
