/** The answers in a one-file report, in the format of `pipelines/view/export.py`. */

import { RecordBatch, Schema, Table, tableFromIPC } from "apache-arrow";

export type Parameters = Record<string, string | number | null | undefined>;

interface Index {
  /** The blob that contains a JSON answer, and the byte range in it. */
  texts: Record<string, [blob: number, begin: number, end: number]>;
  /** The record ranges whose columns form an Arrow answer, and the metadata of its schema. */
  tables: Record<string, { parts: [blob: number, begin: number, end: number][]; totals: Record<string, string> }>;
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
    return once(this.whole, blob, async () => tableFromIPC(await decompressed(this.blobs[blob]!)));
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
