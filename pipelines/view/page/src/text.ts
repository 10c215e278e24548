/** Makes text from a dataset safe to display: invisible characters become escapes. */

// Control, format and other invisible characters, and half characters (with the u flag, only unpaired
// surrogates match the surrogate range). A zero-width joiner inside an emoji is part of a visible character.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff\u{e0000}-\u{e0fff}]|(?<!\p{Extended_Pictographic}[\ufe0f\u{1f3fb}-\u{1f3ff}]?)\u200d/gu;

export interface Piece {
  text: string;
  /** The code point that an escape stands for, as "U+202E". */
  escaped?: string;
}

function escapeOf(character: string): Piece {
  const code = character.codePointAt(0)!;
  const hex = code.toString(16);
  let text = `\\u{${hex}}`;
  if (code < 0x100) text = `\\x${hex.padStart(2, "0")}`;
  else if (code < 0x10000) text = `\\u${hex.padStart(4, "0")}`;
  return { text, escaped: `U+${hex.toUpperCase().padStart(4, "0")}` };
}

/** Split text into visible parts and escapes. */
export function pieces(text: string): Piece[] {
  const out: Piece[] = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) out.push({ text: text.slice(end, match.index) });
    out.push(escapeOf(match[0]));
    end = match.index + match[0].length;
  }
  if (end < text.length) out.push({ text: text.slice(end) });
  return out;
}

/** The same text on one line, without markup, for canvases, titles and attributes. */
export function plain(text: string, limit = 200): string {
  const cut = text.length > limit ? `${text.slice(0, limit)}…` : text;
  return pieces(cut)
    .map((piece) => piece.text)
    .join("")
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥");
}

/** The end of an id on one line: paths and prefixes, which many ids share, come first. */
export function ending(id: string, limit: number): string {
  return id.length > limit ? `…${plain(id.slice(-limit), limit)}` : plain(id, limit);
}

/** Length in bytes of the UTF-8 character that starts with this byte; 0 for an invalid first byte. */
function characterLength(byte: number): number {
  if (byte < 0x80) return 1;
  if (byte >= 0xc2 && byte < 0xe0) return 2;
  if (byte >= 0xe0 && byte < 0xf0) return 3;
  return byte >= 0xf0 && byte < 0xf5 ? 4 : 0;
}

const STRICT = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Decode the bytes of one token. Incomplete characters become escapes such as \xe2. */
export function tokenPieces(bytes: Uint8Array): Piece[] {
  try {
    return pieces(STRICT.decode(bytes));
  } catch {
    // part of a character: go byte by byte
  }
  const out: Piece[] = [];
  let at = 0;
  while (at < bytes.length) {
    const length = characterLength(bytes[at]!);
    let text: string | null = null;
    if (length > 0 && at + length <= bytes.length) {
      try {
        text = STRICT.decode(bytes.subarray(at, at + length));
      } catch {
        text = null;
      }
    }
    if (text === null) {
      const hex = bytes[at]!.toString(16).padStart(2, "0");
      out.push({ text: `\\x${hex}`, escaped: `byte ${hex.toUpperCase()}` });
      at += 1;
    } else {
      out.push(...pieces(text));
      at += length;
    }
  }
  return out;
}

/** Format a number so that Python parses it to the same value. */
export function exact(value: number): string {
  return Object.is(value, -0) ? "-0.0" : String(value);
}

/** Format a number for display: integers in full, others with four significant digits. */
export function short(value: number): string {
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return minus(value.toLocaleString("en-US"));
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return minus(value.toExponential(2));
  if (size >= 1000) return minus(value.toLocaleString("en-US", { maximumFractionDigits: 1 }));
  return minus(String(Number(value.toPrecision(4))));
}

function minus(text: string): string {
  return text.replace("-", "−");
}

/** "1 row", "2 rows". */
export function count(number: number, noun: string, plural = `${noun}s`): string {
  return `${short(number)} ${number === 1 ? noun : plural}`;
}
