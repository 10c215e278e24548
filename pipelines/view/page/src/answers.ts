/** The data layer: requests data from the server, or reads them from a one-file report. */

import { type Table, tableFromIPC } from "apache-arrow";
import { sorted } from "./order";
import { NotInReport, type Parameters, Report } from "./report";
import type { PictureSpan } from "./token_layout";

export type { Parameters };
export type Value = number | string | boolean | null;
export type Row = Record<string, Value>;

export class AnswerError extends Error {
  constructor(
    message: string,
    readonly hint: string = "",
  ) {
    super(message);
  }
}

const report = readReport();

/** True if this page is a one-file report, without a server. */
export const isReport = report !== null;

const token = new URLSearchParams(location.search).get("token") ?? "";
const KEPT = 64;
const kept = new Map<string, Promise<unknown>>();

function readReport(): Report | null {
  const element = document.getElementById("answers");
  if (element === null) return null;
  return new Report(JSON.parse(element.textContent ?? "[]") as string[]);
}

function addressOf(path: string, parameters: Parameters): string {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") search.set(name, String(value));
  }
  const query = search.toString();
  return query === "" ? path : `${path}?${query}`;
}

async function fetchBytes(address: string, body: unknown): Promise<Uint8Array> {
  const request: RequestInit = { headers: { "X-Rollouts-Token": token } };
  if (body !== undefined) {
    request.method = "POST";
    request.headers = { ...request.headers, "Content-Type": "application/json" };
    request.body = JSON.stringify(body);
  }
  let answer: Response;
  try {
    answer = await fetch(address, request);
  } catch {
    throw new AnswerError("The server does not respond.", "Check that `rollouts view` is still running.");
  }
  if (!answer.ok) throw await refusal(answer);
  return new Uint8Array(await answer.arrayBuffer());
}

async function refusal(answer: Response): Promise<AnswerError> {
  if (answer.status === 403) {
    return new AnswerError(
      "The server rejected the request.",
      "Open the address that `rollouts view` printed: it contains the token.",
    );
  }
  try {
    const { error, hint } = (await answer.json()) as { error?: string; hint?: string | null };
    return new AnswerError(error ?? `The server responded with status ${answer.status}.`, hint ?? "");
  } catch {
    return new AnswerError(`The server responded with status ${answer.status}.`);
  }
}

function ask<T>(path: string, parameters: Parameters, read: (address: string) => Promise<T>): Promise<T> {
  const address = addressOf(path, parameters);
  let answer = kept.get(address) as Promise<T> | undefined;
  if (answer === undefined) {
    answer = read(address).catch((error: unknown) => {
      if (!(error instanceof NotInReport)) throw error;
      throw new AnswerError(
        "This report does not contain these data.",
        "A report contains one selection of a dataset. Export a larger selection, or run `rollouts view` on the dataset.",
      );
    });
    answer.catch(() => kept.delete(address));
  }
  kept.delete(address);
  kept.set(address, answer);
  for (const old of kept.keys()) {
    if (kept.size <= KEPT) break;
    kept.delete(old);
  }
  return answer;
}

export function json<T>(path: string, parameters: Parameters = {}): Promise<T> {
  return ask(path, parameters, async (address) => {
    const bytes = await (report?.text(path, parameters) ?? fetchBytes(address, undefined));
    return JSON.parse(new TextDecoder().decode(bytes)) as T;
  });
}

export function arrow(path: string, parameters: Parameters = {}): Promise<Table> {
  return ask(path, parameters, async (address) =>
    report === null ? tableFromIPC(await fetchBytes(address, undefined)) : report.table(path, parameters),
  );
}

export async function post<T>(path: string, body: unknown): Promise<T> {
  const bytes = await fetchBytes(path, body);
  return JSON.parse(new TextDecoder().decode(bytes)) as T;
}

/** A number from the table's metadata. */
export function total(table: Table, key: string): number {
  const text = table.schema.metadata.get(key);
  return text === undefined ? Number.NaN : Number(text);
}

/** One displayed value. Integers beyond 2^53 are strings, which keep all their digits. */
export function valueOf(value: unknown): Value {
  if (value === null || value === undefined) return null;
  if (typeof value === "bigint") {
    return Number.isSafeInteger(Number(value)) ? Number(value) : value.toString();
  }
  if (typeof value === "number" || typeof value === "string" || typeof value === "boolean") return value;
  if (value instanceof Date) return value.toISOString();
  return JSON.stringify(value, (_key, inner: unknown) => (typeof inner === "bigint" ? inner.toString() : inner));
}

export function rowsOf(table: Table): Row[] {
  const columns = table.schema.fields.map((field, at) => [field.name, table.getChildAt(at)] as const);
  return Array.from({ length: table.numRows }, (_unused, index) =>
    Object.fromEntries(columns.map(([name, vector]) => [name, valueOf(vector?.get(index))])),
  );
}

export interface Column {
  name: string;
  kind: "number" | "text" | "bool" | "other";
  own: boolean;
}

/** What is known of logs that are shown without a conversion. */
export interface Log {
  /** Changes when trajectories are added. */
  version: number;
  is_done: boolean;
  stage: "open" | "find" | "read" | null;
  done: number;
  total: number;
  num_files: number;
  num_records: number;
  num_rejected: number;
  num_skipped: number;
  skipped: string[];
  notes: string[];
  error: string | null;
  has_tokens: boolean;
  /** The command that converts the logs. */
  command: string;
}

export interface Dataset {
  id: string;
  name: string;
  path: string;
  num_rows: number;
  num_trajectories: number;
  num_groups: number;
  columns: Column[];
  tokenizer: string | null;
  layout: string;
  /** Verdicts of audits about its rows. */
  num_verdicts: number;
  /** Findings of `rollouts rescore` beside it. */
  num_findings: number;
  /** The columns that verdicts and shares add to the trajectory table. */
  added: string[];
  /** Null unless these are logs. */
  log?: Log | null;
  /** The newest other dataset that shares a task; null without one. */
  shares_tasks_with: string | null;
}

export interface Run {
  id: string;
  name: string;
  path: string;
  datasets: string[];
  updates: number[];
  token_updates: number[];
  /** The dataset of each token update; null if it is not open. */
  token_datasets: (string | null)[];
  /** True if the run sampled its data (`rl`), false if it trained on a fixed dataset (`train`); null if unknown. */
  samples: boolean | null;
}

/** A table of shares in an update. */
export interface Shares {
  id: string;
  name: string;
  run: string | null;
  update: number;
  column: string;
  num_rows: number;
}

export interface Sources {
  datasets: Dataset[];
  runs: Run[];
  shares: Shares[];
  warnings: string[];
  /** Differs when logs or runs have grown. */
  stamp: string;
  /** The selection that a report was exported with. */
  export?: { where: string | null; limit: number };
}

export interface Window {
  rows: Row[];
  columns: string[];
  total: number;
  all: number;
  failed: number;
  /** NaN if no return is known. */
  mean_return: number;
}

export interface Selection {
  where: string;
  sort: string;
  descending: boolean;
}

function datasetPath(dataset: string, name: string): string {
  return `/api/datasets/${encodeURIComponent(dataset)}/${name}`;
}

function windowOf(table: Table): Window {
  const columns = table.schema.fields.map((field) => field.name);
  const all = total(table, "all");
  const facts = { failed: total(table, "failed"), mean_return: total(table, "mean_return") };
  return { rows: rowsOf(table), columns, total: total(table, "total"), all, ...facts };
}

/** Rows offset to offset + limit of the filtered and sorted trajectories. */
export async function trajectories(
  dataset: string,
  { where, sort, descending }: Selection,
  offset: number,
  limit: number,
): Promise<Window> {
  const path = datasetPath(dataset, "trajectories");
  if (!isReport) {
    const order = { sort, descending: sort === "" ? null : Number(descending) };
    return windowOf(await arrow(path, { where, ...order, offset, limit }));
  }
  const whole = windowOf(await arrow(path));
  const rows = sorted(whole.rows, sort, descending);
  return { ...whole, rows: rows.slice(offset, offset + limit), total: rows.length };
}

export type Histogram = { nulls: number; counts: number[]; counts_all: number[] } & (
  | { edges: number[]; not_finite: number }
  | { values: (string | boolean | null)[]; others: number }
);

export function histogram(dataset: string, column: string, where: string): Promise<Histogram> {
  return json(datasetPath(dataset, "histogram"), { column, where, bins: 40 });
}

export interface PartsAt {
  row: number;
  /** Null if texts were compared. */
  token: number | null;
  /** The answer that differs. */
  answer?: number;
  /** For both attempts, the text before the difference and the text from there on. */
  said?: [string, string][];
  /** The place in the first attempt; null if it ended before. */
  first_row: number | null;
  first_token: number | null;
}

export interface Attempt {
  trajectory_id: string;
  repetition_id: number;
  return: number | null;
  advantage: number | null;
  num_rows: number;
  response_tokens: number;
  trained_tokens: number;
  stop_reason: string | null;
  error: string | null;
  parts_at: PartsAt | null;
}

export interface Joined {
  run?: string | undefined;
  update?: string | undefined;
}

export function group(dataset: string, instance: string, joined: Joined): Promise<{ attempts: Attempt[]; task_text: string | null; has_mixed_prompts: boolean }> {
  return json(datasetPath(dataset, "group"), { instance_id: instance, ...joined });
}

/** The complete text of a task: its first user message. */
export function taskText(dataset: string, instance: string): Promise<{ text: string | null }> {
  return json(datasetPath(dataset, "task"), { instance_id: instance });
}

export interface Task {
  instance_id: string;
  /** The start of the first user message, on one line; null without messages. */
  task_text: string | null;
  attempts: number;
  num_returns: number;
  mean: number | null;
  /** Largest minus smallest return; null if fewer than two are known. */
  spread: number | null;
}

/** The tasks with the least spread of returns, and the number of all tasks. */
export function tasks(dataset: string): Promise<{ tasks: Task[]; total: number }> {
  return json(datasetPath(dataset, "tasks"), { limit: 200 });
}

/** The updates of a run that recorded a task or row, and the updates whose records cannot be read. */
export interface Recorded {
  updates: number[];
  unreadable: number[];
}

/** For each run, the updates that recorded a task (`instance_id`) or a row (`trajectory_id`, `step_index`). */
export function recorded(dataset: string, of: Parameters): Promise<Record<string, Recorded>> {
  return json(datasetPath(dataset, "recorded"), of);
}

export interface TreeNode {
  id: number;
  parent: number | null;
  start: number;
  end: number;
  rows: [string, number][];
  num_trajectories: number;
  return: number | null;
  advantage: number | null;
  sampled: boolean;
  text: string;
  cause: string | null;
}

export interface Tree {
  nodes: TreeNode[];
  num_tokens: number;
}

export function tree(dataset: string, of: Parameters, joined: Joined): Promise<Tree> {
  return json(datasetPath(dataset, "tree"), { ...of, ...joined });
}

export interface Part {
  type: "text" | "thinking" | "tool_call" | "tool_result" | "image" | "file";
  name: string | null;
  /** Of an image or a file: the reference to it in the dataset's store, or its URL. */
  text: string;
}

export interface Turn {
  role: string;
  step_index: number;
  is_new: boolean;
  trained: boolean;
  from: "messages" | "tokens";
  /** Null unless the turn was sampled. */
  num_tokens: number | null;
  stop_reason: string | null;
  num_chars: number;
  findings: Found[];
  parts: Part[];
}

export interface Conversation {
  lanes: { agent: string | null; turns: Turn[] }[];
  /** About the whole trajectory. */
  findings: Found[];
  error: string | null;
  return: number | null;
  /** True if tokens come from re-tokenized text. */
  is_approximate: boolean;
}

export function conversation(dataset: string, trajectory: string): Promise<Conversation> {
  return json(datasetPath(dataset, "conversation"), { trajectory_id: trajectory });
}

/** The pictures of a row whose tokens are known, in their order. */
export function picturesOf(table: Table): PictureSpan[] {
  return JSON.parse(table.schema.metadata.get("pictures") ?? "[]") as PictureSpan[];
}

/** Return a picture as a data URL; null if the store does not have it. */
export function picture(dataset: string, blob: string): Promise<{ url: string | null }> {
  return json(datasetPath(dataset, "picture"), { blob });
}

export function tokens(dataset: string, trajectory: string, step: number, joined: Joined): Promise<Table> {
  const of = { trajectory_id: trajectory, step_index: step, ...joined };
  return arrow(datasetPath(dataset, "tokens"), of);
}

/** A verdict; positions count response tokens. */
export interface Span {
  start: number;
  end: number;
  kind: string;
  is_fault: boolean;
  meaning: string | null;
  reason: string | null;
  swap_position: number | null;
  log_likelihood_ratio: number | null;
}

/** What a finder found: `start` and `end` count response tokens, and are equal if it is about none in particular. */
export interface Found {
  name: string;
  label: string;
  text: string;
  start: number;
  end: number;
}

/** The verdicts and findings about a row. */
export function verdicts(dataset: string, trajectory: string, step: number): Promise<{ spans: Span[]; findings: Found[] }> {
  return json(datasetPath(dataset, "verdicts"), { trajectory_id: trajectory, step_index: step });
}

/** The rows with the largest absolute shares. */
export function topShares(shares: string): Promise<Table> {
  return arrow(`/api/shares/${encodeURIComponent(shares)}`, { limit: 100 });
}

function runPath(run: string, name: string): string {
  return `/api/runs/${encodeURIComponent(run)}/${name}`;
}

export interface Metrics {
  /** Numbers of the updates; 0 for the evaluation before training. */
  global_step: number[];
  updates: number[];
  metrics: Record<string, (number | null)[]>;
  /** Unit and meaning of each metric that the trainer documents. */
  about: Record<string, { unit: string; meaning: string }>;
}

export async function metrics(run: string): Promise<Metrics> {
  const found = await json<Metrics>(runPath(run, "metrics"));
  // A metric may have the name of a method of all objects, such as "constructor".
  const own = <T>(of: Record<string, T>): Record<string, T> => Object.assign(Object.create(null) as Record<string, T>, of);
  return { ...found, metrics: own(found.metrics), about: own(found.about) };
}

export function updateRows(run: string, update: string): Promise<Table> {
  return arrow(runPath(run, `updates/${encodeURIComponent(update)}`));
}

export function updateTargets(run: string, update: string): Promise<Table> {
  return arrow(runPath(run, `updates/${encodeURIComponent(update)}/targets`), { limit: 20000 });
}

export function diff(a: string, b: string, where: string): Promise<Table> {
  return arrow("/api/diff", { a, b, where });
}

export interface Pair {
  trajectory_a: string | null;
  trajectory_b: string | null;
  return_a: number | null;
  return_b: number | null;
  parts_at: PartsAt | null;
}

export function diffPair(a: string, b: string, task: string): Promise<{ pairs: Pair[] }> {
  return json("/api/diff/pair", { a, b, task });
}

export interface Hit {
  trajectory_id: string;
  step_index: number;
  /** Null if text was searched without a tokenizer. */
  position: number | null;
  before: string;
  found: string;
  after: string;
  task_text: string | null;
}

export interface Hits {
  hits: Hit[];
  complete: boolean;
  /** Number of trajectories searched: those that match the filter. */
  searched: number;
  /** The first ids that contain the text, in the entire dataset, and their number. */
  tasks: { instance_id: string; attempts: number; task_text: string | null }[];
  num_tasks: number;
  trajectories: string[];
  num_trajectories: number;
}

export function search(dataset: string, what: Parameters, where: string): Promise<Hits> {
  return json(datasetPath(dataset, "search"), { ...what, where, limit: 200 });
}

export interface Labels {
  column: string;
  values: Record<string, string | number | null>;
  out: string;
}

export function writeLabels(dataset: string, labels: Labels): Promise<{ path: string; num_rows: number }> {
  return post(datasetPath(dataset, "labels"), labels);
}

export function sources(): Promise<Sources> {
  return json("/api/sources");
}

/** Ask again: logs are being read, or have grown like a run. Other answers are forgotten if there is more. */
export async function sourcesAgain(before: Sources): Promise<Sources> {
  kept.delete("/api/sources");
  const now = await sources();
  if (now.stamp !== before.stamp) {
    kept.clear();
    kept.set("/api/sources", Promise.resolve(now));
  }
  return now;
}

/** The stamp of the sources as they are now. */
export async function stampNow(): Promise<string> {
  kept.delete("/api/changes");
  return (await json<{ stamp: string }>("/api/changes")).stamp;
}

export function isReading({ datasets }: Sources): boolean {
  return datasets.some(({ log }) => log !== null && log !== undefined && !log.is_done);
}
