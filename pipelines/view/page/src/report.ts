/** The answers in a one-file report, in the format of `pipelines/view/packing.py`. */

import { RecordBatch, Schema, Table, tableFromIPC } from "apache-arrow";

export type Parameters = Record<string, string | number | null | undefined>;

interface Index {
  /** The blob that contains a JSON answer, and the byte range in it. */
  texts: Record<string, [blob: number, begin: number, end: number]>;
  /** The record ranges whose columns form an Arrow answer, and the metadata of its schema. */
  tables: Record<string, { parts: [blob: number, begin: number, end: number][]; totals: Record<string, string> }>;
  /** The numbers of a blob that are stored as byte planes. */
  transposed: Record<string, Transposed[]>;
}

interface Transposed {
  at: number;
  num: number;
  /** Bytes per value. */
  width: number;
  /** The offset subtracted from the values, as unsigned integers. */
  guess: { kind: "same" | "ratio" | "product"; of: number[] } | null;
}

interface Known {
  key: string;
  path: string;
  parameters: Map<string, string>;
}

export class NotInReport extends Error {}

// A report contains only the rows of its filter, so these parameters do not select an answer.
const SELECTING = new Set(["where", "sort", "descending", "offset", "limit", "bins"]);
// Without the columns of an update, tokens and groups are still those of the dataset.
const ADDING = new Set(["run", "update"]);

export class Report {
  private readonly index: Promise<Index>;
  private readonly known: Promise<Map<string, Known[]>>;
  private readonly contents = new Map<number, Promise<Uint8Array>>();
  private readonly whole = new Map<number, Promise<Table>>();

  constructor(private readonly blobs: string[]) {
    this.index = this.content(0).then((bytes) => JSON.parse(new TextDecoder().decode(bytes)) as Index);
    this.known = this.index.then(byPath);
  }

  /** The bytes of a JSON answer. */
  async text(path: string, parameters: Parameters): Promise<Uint8Array> {
    const { texts } = await this.index;
    const place = texts[await this.key(path, parameters)];
    if (place === undefined) throw new NotInReport();
    const [blob, begin, end] = place;
    return (await this.content(blob)).subarray(begin, end);
  }

  /** An Arrow answer with the same columns and metadata as the server's. */
  async table(path: string, parameters: Parameters): Promise<Table> {
    const { tables } = await this.index;
    const answer = tables[await this.key(path, parameters)];
    if (answer === undefined) throw new NotInReport();
    const parts = await Promise.all(
      answer.parts.map(async ([blob, begin, end]) => (await this.wholeTable(blob)).slice(begin, end)),
    );
    const joined = parts.reduce((left, right) => left.assign(right) as Table);
    const schema = new Schema(joined.schema.fields, new Map(Object.entries(answer.totals)));
    return new Table(
      schema,
      joined.batches.map((batch) => new RecordBatch(schema, batch.data)),
    );
  }

  private async key(path: string, parameters: Parameters): Promise<string> {
    const found = find((await this.known).get(decodeURIComponent(path)) ?? [], parameters);
    if (found === null) throw new NotInReport();
    return found.key;
  }

  private content(blob: number): Promise<Uint8Array> {
    return once(this.contents, blob, () => decompressed(this.blobs[blob]!));
  }

  private wholeTable(blob: number): Promise<Table> {
    return once(this.whole, blob, async () => {
      const stream = await decompressed(this.blobs[blob]!);
      for (const numbers of (await this.index).transposed[blob] ?? []) restore(stream, numbers);
      return tableFromIPC(stream);
    });
  }
}

function once<T>(kept: Map<number, Promise<T>>, blob: number, make: () => Promise<T>): Promise<T> {
  let found = kept.get(blob);
  if (found === undefined) {
    found = make();
    kept.set(blob, found);
  }
  return found;
}

async function decompressed(blob: string): Promise<Uint8Array> {
  const packed = Uint8Array.from(atob(blob), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Join the byte planes of the values and add the offset, byte by byte with carry. */
function restore(stream: Uint8Array, numbers: Transposed): void {
  const { at, num, width } = numbers;
  const stored = stream.slice(at, at + num * width);
  const guess = guessed(stream, numbers);
  for (let value = 0; value < num; value++) {
    let carry = 0;
    for (let byte = 0; byte < width; byte++) {
      const place = value * width + byte;
      const sum = stored[byte * num + value]! + (guess === null ? 0 : guess[place]!) + carry;
      stream[at + place] = sum & 0xff;
      carry = sum >> 8;
    }
  }
}

/** The bytes of values that `packing.py` predicted with sums and products of doubles, which are exact IEEE 754. */
function guessed(stream: Uint8Array, { num, width, guess }: Transposed): Uint8Array | null {
  if (guess === null) return null;
  const columns = guess.of.map((at) => stream.slice(at, at + num * width));
  if (guess.kind === "same") return columns[0]!;
  const [a, b] = columns.map((bytes) => new Float32Array(bytes.buffer)) as [Float32Array, Float32Array];
  const values = new Float32Array(num);
  for (let at = 0; at < num; at++) {
    values[at] = guess.kind === "ratio" ? ratio(a[at]!, b[at]!) : -(a[at]! * b[at]!);
    if (!Number.isFinite(values[at])) values[at] = 0;
  }
  return new Uint8Array(values.buffer);
}

/** exp(a - b). */
function ratio(a: number, b: number): number {
  const small = Math.fround(a - b) / 1024;
  let power = 1;
  for (let divisor = 8; divisor > 0; divisor--) power = 1 + (small * power) / divisor;
  for (let square = 0; square < 10; square++) power *= power;
  return power;
}

function byPath({ texts, tables }: Index): Map<string, Known[]> {
  const known = new Map<string, Known[]>();
  for (const key of [...Object.keys(texts), ...Object.keys(tables)]) {
    const url = new URL(key, "http://report");
    const path = decodeURIComponent(url.pathname);
    const there = known.get(path) ?? [];
    there.push({ key, path, parameters: new Map(url.searchParams) });
    known.set(path, there);
  }
  return known;
}

function find(there: Known[], parameters: Parameters): Known | null {
  const wanted = Object.entries(parameters).filter(
    ([name, value]) => !SELECTING.has(name) && value !== null && value !== undefined && value !== "",
  );
  const fits = (answer: Known, names: (name: string) => boolean): boolean => {
    const asked = wanted.filter(([name]) => names(name));
    const given = [...answer.parameters.keys()].filter((name) => !SELECTING.has(name) && names(name));
    return (
      given.length === asked.length &&
      asked.every(([name, value]) => answer.parameters.get(name) === String(value))
    );
  };
  return (
    there.find((answer) => fits(answer, () => true)) ??
    there.find((answer) => fits(answer, (name) => !ADDING.has(name))) ??
    null
  );
}
