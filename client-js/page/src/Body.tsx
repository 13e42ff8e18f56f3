/** The text of a message as it is shown: with its formats and links. */
import { Fragment, type ReactNode } from 'react';
import { type Block, blocksOf, type Piece } from './formats.js';
import { linked, linksOf } from './links.js';

/** Matches each text that may have a format. Most have none. */
const MAY_HAVE = /`|\*\*|^(?:>|-|\d{1,3}\.) /m;
/** The number of elements above which a message is shown as it was typed. Very many would make a browser slow. */
const ELEMENTS_MAX = 500;

const sumOf = <T,>(items: readonly T[], of: (item: T) => number): number => items.reduce((sum, item) => sum + of(item), 0);

/** Returns the number of elements of a piece. */
const weightOf = (piece: Piece): number =>
  typeof piece === 'string' ? linksOf(piece).length : 'bold' in piece ? 1 + sumOf(piece.bold, weightOf) : 1;

/** Returns the number of elements of a block. */
function sizeOf(block: Block): number {
  if (block.type === 'code') return 1;
  return block.type === 'list' ? 1 + sumOf(block.items, ({ pieces }) => 1 + sumOf(pieces, weightOf)) : 1 + sumOf(block.pieces, weightOf);
}

/** Returns code with the characters that change the direction as they are typed in programs: they can make it look like other code. */
const visible = (code: string): string =>
  code.replace(/\p{Bidi_Control}/gu, (control) => `\\u${control.charCodeAt(0).toString(16).padStart(4, '0')}`);

function Pieces({ of }: { of: readonly Piece[] }): ReactNode {
  return of.map((piece, i) => {
    const shown =
      typeof piece === 'string' ? (
        linked(piece)
      ) : 'bold' in piece ? (
        <strong>
          <Pieces of={piece.bold} />
        </strong>
      ) : (
        // Code is read from left to right in texts of any direction.
        <code dir="ltr">{visible(piece.code)}</code>
      );
    // biome-ignore lint/suspicious/noArrayIndexKey: their order never changes.
    return <Fragment key={i}>{shown}</Fragment>;
  });
}

function Shown({ block }: { block: Block }) {
  if (block.type === 'code') {
    return (
      <pre dir="auto" data-language={block.language || undefined}>
        {visible(block.code)}
      </pre>
    );
  }
  if (block.type === 'list') {
    const List = block.items[0]?.number === undefined ? 'ul' : 'ol';
    return (
      <List dir="auto">
        {block.items.map(({ number, pieces }, i) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: their order never changes.
          <li key={i} value={number}>
            <Pieces of={pieces} />
          </li>
        ))}
      </List>
    );
  }
  const Text = block.type === 'quote' ? 'blockquote' : 'p';
  return (
    <Text dir="auto">
      <Pieces of={block.pieces} />
    </Text>
  );
}

/** Returns the text of a message with its formats and links. */
export function bodyOf(body: string): ReactNode {
  if (!MAY_HAVE.test(body)) return linked(body);
  const blocks = blocksOf(body);
  if (sumOf(blocks, sizeOf) > ELEMENTS_MAX) return linked(body);
  const [first, ...others] = blocks;
  if (first?.type === 'text' && !others.length) return <Pieces of={first.pieces} />;
  // biome-ignore lint/suspicious/noArrayIndexKey: their order never changes.
  return blocks.map((block, i) => <Shown key={i} block={block} />);
}
