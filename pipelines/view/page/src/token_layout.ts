/** The position of each token in lines of fixed-width text. */

import type { Table } from "apache-arrow";
import { pieces, tokenPieces } from "./text";

export const LINE = 22;
const GAP = 1;
/** Height of a picture with its caption, in lines. */
export const PICTURE_LINES = 7;
const PICTURE_WIDTH = 300;

/** The tokens that stand for a picture of the dataset's store. */
export interface PictureSpan {
  sha256: string;
  start: number;
  length: number;
}

export function pictureAt(pictures: PictureSpan[], at: number | null): PictureSpan | undefined {
  return at === null ? undefined : pictures.find(({ start, length }) => start <= at && at < start + length);
}

export interface TokenText {
  shown: string;
  /** Whether the text contains an escape, for a partial or an invisible character. */
  escaped: boolean;
  /** Ends a line. */
  breaks: boolean;
}

/** The text drawn for each token: its decoded text, or its id if there is no tokenizer. */
export function tokenTexts(table: Table): TokenText[] {
  const [ids, bytes] = [table.getChild("id"), table.getChild("bytes")];
  const known = new Map<number, TokenText>();
  return Array.from({ length: table.numRows }, (_unused, at) => {
    const id = Number(ids?.get(at));
    let text = known.get(id);
    if (text === undefined) {
      text = textOf(id, bytes?.get(at) as Uint8Array | null | undefined);
      known.set(id, text);
    }
    return text;
  });
}

function textOf(id: number, bytes: Uint8Array | null | undefined): TokenText {
  if (bytes === null || bytes === undefined || bytes.length === 0) return { shown: `${id} `, escaped: false, breaks: false };
  const parts = tokenPieces(bytes);
  const shown = parts.map((piece) => piece.text).join("").replaceAll("\n", "⏎").replaceAll("\t", "⇥"); // prettier-ignore
  const long = shown.length > 400 ? `${shown.slice(0, 400)}…` : shown;
  return { shown: long, escaped: parts.some((piece) => piece.escaped !== undefined), breaks: bytes.includes(10) };
}

export interface Layout {
  x: Float32Array;
  width: Float32Array;
  line: Int32Array;
  /** The first token of each line, and the number of tokens as the last element. */
  starts: number[];
  /** All tokens of a picture are on its first line, at one place; its other lines have no tokens. */
  pictures: PictureSpan[];
}

const ASCII = /^[\x20-\x7e]*$/;

/** Wrap tokens into lines of this width; each picture has lines to itself. */
export function layOut(texts: TokenText[], pictures: PictureSpan[], breakBefore: number, width: number, context: CanvasRenderingContext2D): Layout {
  const count = texts.length;
  const layout: Layout = {
    x: new Float32Array(count),
    width: new Float32Array(count),
    line: new Int32Array(count),
    starts: [0],
    pictures,
  };
  const letter = context.measureText("m").width;
  const measured = new Map<string, number>();
  const widthOf = (text: string): number => {
    if (ASCII.test(text)) return text.length * letter;
    let known = measured.get(text);
    if (known === undefined) {
      known = context.measureText(text).width;
      measured.set(text, known);
    }
    return known;
  };
  const lengths = new Map(pictures.map(({ start, length }) => [start, length]));
  let x = 0;
  for (let at = 0; at < count; at++) {
    const length = lengths.get(at);
    if (length !== undefined) {
      const end = at + length;
      if (x > 0) layout.starts.push(at);
      layout.width.fill(Math.min(PICTURE_WIDTH, width), at, end);
      layout.line.fill(layout.starts.length - 1, at, end);
      for (let line = 1; line < PICTURE_LINES + Number(end < count); line++) layout.starts.push(end);
      x = 0;
      at = end - 1;
      continue;
    }
    const text = texts[at]!;
    const wide = Math.max(widthOf(text.shown), 3);
    const isForced = at === breakBefore || (at > 0 && texts[at - 1]!.breaks);
    if (x > 0 && (x + wide > width || isForced)) {
      layout.starts.push(at);
      x = 0;
    }
    layout.x[at] = x;
    layout.width[at] = wide;
    layout.line[at] = layout.starts.length - 1;
    x += wide + GAP;
  }
  layout.starts.push(count);
  return layout;
}

/** The token at a point, or the nearest one on its line; the first one of a picture; -1 if there are no tokens. */
export function tokenAt(layout: Layout, x: number, line: number): number {
  const lines = layout.starts.length - 1;
  if (line < 0 || line >= lines) return -1;
  const [start, end] = [layout.starts[line]!, layout.starts[line + 1]!];
  let at = start;
  while (at < end - 1 && x >= layout.x[at]! + layout.width[at]! + GAP) at += 1;
  at = Math.min(at, end - 1);
  return pictureAt(layout.pictures, at)?.start ?? at;
}

/** Bytes as hexadecimal numbers. */
export function hex(bytes: Uint8Array | null): string {
  return bytes === null ? "" : [...bytes.subarray(0, 64)].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
}

const DECODER = new TextDecoder("utf-8", { fatal: true });

/** The character that a token encodes part of, and all its tokens; null for complete characters. */
export function wholeCharacter(table: Table, at: number): { first: number; last: number; text: string } | null {
  const bytes = table.getChild("bytes");
  const of = (index: number): Uint8Array => (bytes?.get(index) as Uint8Array | null) ?? new Uint8Array();
  for (let length = 2; length <= 4; length++) {
    for (let first = at - length + 1; first <= at; first++) {
      if (first < 0 || first + length > table.numRows) continue;
      const joined = new Uint8Array(Array.from({ length }, (_unused, k) => [...of(first + k)]).flat());
      try {
        const text = DECODER.decode(joined);
        const shown = pieces(text).map((piece) => piece.text);
        return { first, last: first + length - 1, text: shown.join("") };
      } catch {
        // not whole yet
      }
    }
  }
  return null;
}
