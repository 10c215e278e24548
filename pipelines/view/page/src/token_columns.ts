/** The columns of a row's tokens, as numbers to colour and rank by. */

import type { Table } from "apache-arrow";
import { diverging, quantile, type Scale, sequential, type Theme, yesNo } from "./colours";

export interface TokenColumn {
  name: string;
  title: string;
  help: string;
  unit: string;
  /** NaN where there is no value; yes is 1, no is 0. */
  values: Float64Array;
  scale: (theme: Theme) => Scale;
  /** How bad a value is: tokens are ranked by decreasing badness. */
  badness: (value: number) => number;
  worst: string;
}

interface Kind {
  scale: (values: Float64Array, theme: Theme, title: string) => Scale;
  badness: (value: number) => number;
  worst: string;
}

const far: Kind = {
  scale: (values, theme) => diverging(theme, 0, quantile(values.map(Math.abs), 0.99) || maximum(values) || 1),
  badness: Math.abs,
  worst: "farthest from 0",
};
const ratio: Kind = {
  scale: (values, theme) =>
    diverging(theme, 1, Math.max(1.05, Math.exp(quantile(values.map((value) => Math.abs(Math.log(value))), 0.99) || 0)), true),
  badness: (value) => Math.abs(Math.log(value)),
  worst: "farthest from 1",
};
const low: Kind = {
  scale: (values, theme) => sequential(theme, 0, Math.min(-0.01, quantile(values, 0.01) || 0)),
  badness: (value) => -value,
  worst: "least likely",
};
const high: Kind = {
  scale: (values, theme) => sequential(theme, 0, quantile(values, 0.99) || maximum(values) || 1),
  badness: (value) => value,
  worst: "highest",
};
const flag: Kind = {
  scale: (_values, theme, title) => yesNo(theme, title, `not ${title}`),
  badness: (value) => (value === 1 ? 1 : Number.NaN),
  worst: "set",
};
const number: Kind = {
  scale: (values, theme) => sequential(theme, minimum(values), maximum(values)),
  badness: (value) => -value,
  worst: "oldest",
};

function minimum(values: Float64Array): number {
  return values.reduce((least, value) => (value < least ? value : least), Number.POSITIVE_INFINITY);
}

function maximum(values: Float64Array): number {
  return values.reduce((most, value) => (value > most ? value : most), Number.NEGATIVE_INFINITY);
}

const COLUMNS: [name: string, title: string, help: string, kind: Kind][] = [
  ["rollout_logprob", "rollout log-probability", "the sampler's log-probability", low],
  ["trained", "trained", "the loss mask of the dataset", flag],
  ["sampled", "sampled", "sampled by the policy; other response tokens come from the environment", flag],
  ["advantage", "advantage", "the advantage in this update", far],
  ["difference", "log-probability − rollout", "trainer's minus sampler's log-probability", far],
  ["importance_weight", "importance weight", "exp(log-probability − old)", ratio],
  ["clipped", "clipped", "the clip rule left no gradient", flag],
  ["rejected", "rejected", "masked by the correction for sampler mismatch", flag],
  ["loss", "loss", "the loss of this target, before weighting", far],
  ["weight", "weight", "the weight of this target in the loss", high],
  ["correction_weight", "correction weight", "the weight from the correction for sampler mismatch", ratio],
  ["old_logprob", "old log-probability", "the trainer's log-probability at the start of the batch", low],
  ["logprob", "log-probability", "the trainer's log-probability in this update", low],
  ["ref_logprob", "reference log-probability", "the log-probability under the frozen reference model", low],
  ["ref_difference", "log-probability − reference", "trainer's minus reference's log-probability", far],
  ["entropy", "entropy", "the entropy of the policy at this token", high],
  ["reward", "reward", "the reward placed on this token", far],
  ["policy_version", "policy version", "the version of the weights that sampled this token", number],
];

/** Start of the names of columns with shares; the number of the update follows. */
export const SHARE = "share_of_update_";

const IN_NATS = new Set(["rollout_logprob", "old_logprob", "logprob", "ref_logprob", "difference", "ref_difference", "entropy"]);

function numbersOf(table: Table, name: string): Float64Array | null {
  const vector = table.getChild(name);
  if (vector === null || vector.nullCount === vector.length) return null;
  const values = new Float64Array(vector.length).fill(Number.NaN);
  let at = 0;
  for (const value of vector) {
    if (value !== null) values[at] = Number(value);
    at += 1;
  }
  return values;
}

function difference(a: Float64Array | null, b: Float64Array | null): Float64Array | null {
  if (a === null || b === null) return null;
  return a.map((value, at) => value - b[at]!);
}

/** "share of update 3", or "share of update 3 (2)" for its second table. */
export function shareTitle(name: string): string {
  const [update, again] = name.slice(SHARE.length).split("_");
  return `share of update ${update}${again === undefined ? "" : ` (${again})`}`;
}

/** The columns that have a value in this row. */
export function tokenColumns(table: Table): TokenColumn[] {
  const found: TokenColumn[] = [];
  const shares = table.schema.fields.map((field) => field.name).filter((name) => name.startsWith(SHARE));
  const ofShares = shares.map((name): (typeof COLUMNS)[number] => [name, shareTitle(name), "from rollouts blame; a negative share works against the step", far]);
  for (const [name, title, help, kind] of [...COLUMNS, ...ofShares]) {
    let values: Float64Array | null;
    if (name === "difference") values = difference(numbersOf(table, "logprob"), numbersOf(table, "rollout_logprob"));
    else if (name === "ref_difference") values = difference(numbersOf(table, "logprob"), numbersOf(table, "ref_logprob"));
    else values = numbersOf(table, name);
    if (values === null || values.every(Number.isNaN)) continue;
    if (kind === low) values = onlySampled(values, table);
    const kept = values;
    found.push({
      name,
      title,
      help,
      unit: IN_NATS.has(name) ? "nats" : "",
      values: kept,
      scale: (theme) => kind.scale(kept, theme, title),
      badness: kind.badness,
      worst: kind.worst,
    });
  }
  return found;
}

/** Tokens that were not sampled have the placeholder 0.0 as their log-probability. */
function onlySampled(values: Float64Array, table: Table): Float64Array {
  const sampled = numbersOf(table, "sampled");
  return sampled === null ? values : values.map((value, at) => (sampled[at] === 1 ? value : Number.NaN));
}

/** The number of tokens that have a rank. */
export function rankable(column: TokenColumn): number {
  return column.values.reduce((number, value) => number + Number(!Number.isNaN(column.badness(value))), 0);
}

/** Positions from worst to best. */
export function ranked(column: TokenColumn): Int32Array {
  const scores = column.values.map((value) => (Number.isNaN(value) ? Number.NaN : column.badness(value)));
  const order = Int32Array.from(scores.keys()).filter((at) => !Number.isNaN(scores[at]!));
  return order.sort((a, b) => scores[b]! - scores[a]! || a - b);
}
