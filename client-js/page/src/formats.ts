/** The formats that people type into messages: code, bold, lists and quotes. The text of a message stays as it was typed; only how it
 * is shown differs. The time is proportional to the length, because a message may be long and made to be slow. */
import { linksOf } from './links.js';

/** A piece of a text. */
export type Piece = string | Code | Bold;
/** A piece between backticks; `mark` is how many there are on each side. */
export interface Code {
  mark: string;
  code: string;
}
/** A piece between two pairs of asterisks. */
export interface Bold {
  bold: Piece[];
}

/** A part of a message that is shown below the one before. */
export type Block =
  | { type: 'text' | 'quote'; pieces: Piece[] }
  /** `language` is what follows the backticks of the first line. */
  | { type: 'code'; language: string; code: string }
  /** A numbered list keeps the numbers that were typed. */
  | { type: 'list'; items: { number?: number; pieces: Piece[] }[] };

const FENCE = /^```([\w+#.-]*)\s*$/;
const QUOTE = /^>(?: |$)/;
const BULLET = /^- (?=\S)/;
const NUMBER = /^(0|[1-9]\d{0,2})\. (?=\S)/;
const MARKS = /`+|\*+/g;
/** A slash, too: `**` is a part of the names of files. */
const isWord = (character: string | undefined): boolean => character !== undefined && /[\w/]/.test(character);
const isSpace = (character: string | undefined): boolean => character === undefined || /\s/.test(character);

/** Returns the pieces of a line. A mark without a partner in the same line is text. */
function piecesOf(line: string): Piece[] {
  const marks = Array.from(line.matchAll(MARKS), ({ 0: mark, index }) => ({ mark, index, end: index + mark.length }));
  // For each run of backticks the next one that is as long.
  const partners: number[] = [];
  const latest = new Map<string, number>();
  for (let i = marks.length - 1; i >= 0; i--) {
    partners[i] = latest.get(marks[i]!.mark) ?? -1;
    latest.set(marks[i]!.mark, i);
  }
  const links = line.includes('**') ? linksOf(line) : [];
  const pieces: Piece[] = [];
  let [at, link] = [0, 0];
  /** Where the asterisks are that nothing has closed yet: their place in `pieces`, and their end in the line. */
  let open: { place: number; end: number } | undefined;
  const take = (piece: Piece | undefined, from: number, to: number) => {
    if (from > at) pieces.push(line.slice(at, from));
    if (piece !== undefined) pieces.push(piece);
    at = to;
  };
  for (let i = 0; i < marks.length; i++) {
    const { mark, index, end } = marks[i]!;
    const partner = marks[partners[i]!];
    if (mark.startsWith('`')) {
      const code = partner && line.slice(end, partner.index);
      if (!code?.trim()) continue;
      take({ mark, code }, index, partner!.end);
      i = partners[i]!;
      continue;
    }
    if (mark !== '**') continue;
    while (links[link] && links[link]!.end < end) link++;
    // An address may contain asterisks. Those at its end close what is bold.
    const isInLink = links[link] && links[link]!.index < index && end < links[link]!.end;
    if (isInLink) continue;
    const [before, after] = [line[index - 1], line[end]];
    if (open && index > open.end && !isSpace(before) && !isWord(after)) {
      take(undefined, index, end);
      pieces.push({ bold: pieces.splice(open.place).slice(1) });
      open = undefined;
    } else if (!open && !isSpace(after) && !isWord(before)) {
      take(mark, index, end);
      open = { place: pieces.length - 1, end };
    }
  }
  take(undefined, line.length, line.length);
  return pieces;
}

/** Returns the pieces of several lines. */
function piecesOfLines(lines: readonly string[]): Piece[] {
  const pieces: Piece[] = [];
  const add = (piece: Piece) => {
    const last = pieces.at(-1);
    // A text without marks is one piece.
    if (typeof last === 'string' && typeof piece === 'string') pieces[pieces.length - 1] = last + piece;
    else pieces.push(piece);
  };
  for (const [i, line] of lines.entries()) {
    if (i) add('\n');
    for (const piece of piecesOf(line)) add(piece);
  }
  return pieces;
}

/** Returns the blocks of a text. The empty lines around them are left out. */
export function blocksOf(body: string): Block[] {
  const lines = body.split('\n');
  const blocks: Block[] = [];
  let text: string[] = [];
  /** Whether there may be a line that ends a block of code. */
  let hasEnd = true;
  const add = (block?: Block) => {
    let [start, end] = [0, text.length];
    while (start < end && !text[start]!.trim()) start++;
    while (start < end && !text[end - 1]!.trim()) end--;
    if (start < end) blocks.push({ type: 'text', pieces: piecesOfLines(text.slice(start, end)) });
    text = [];
    if (block) blocks.push(block);
  };
  /** Returns the first line from `i` on to which something does not apply. */
  const after = (i: number, applies: (line: string) => boolean) => {
    while (i < lines.length && applies(lines[i]!)) i++;
    return i;
  };
  for (let i = 0; i < lines.length; ) {
    const line = lines[i]!;
    const [, language] = (hasEnd && FENCE.exec(line)) || [];
    if (language !== undefined) {
      const end = after(i + 1, (line) => line.trimEnd() !== '```');
      hasEnd = end < lines.length;
      if (hasEnd && end > i + 1) {
        add({ type: 'code', language, code: lines.slice(i + 1, end).join('\n') });
        i = end + 1;
        continue;
      }
    }
    const isQuote = QUOTE.test(line) && line.length > 2;
    const mark = [BULLET, NUMBER].find((mark) => mark.test(line));
    const end = isQuote ? after(i, (line) => QUOTE.test(line)) : mark ? after(i, (line) => mark.test(line)) : i;
    const own = lines.slice(i, end);
    if (isQuote) add({ type: 'quote', pieces: piecesOfLines(own.map((line) => line.slice(2))) });
    // One line that begins with a number may be a date.
    else if (mark === BULLET || own.length > 1) add({ type: 'list', items: own.map(itemOf) });
    else text.push(line);
    i = Math.max(end, i + 1);
  }
  add();
  return blocks;
}

function itemOf(line: string): { number?: number; pieces: Piece[] } {
  const number = NUMBER.exec(line);
  return number ? { number: Number(number[1]), pieces: piecesOf(line.slice(number[0].length)) } : { pieces: piecesOf(line.slice(2)) };
}
