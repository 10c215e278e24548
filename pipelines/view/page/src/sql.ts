/** SQL of filters, and commands that select the same rows in other tools. */

const SIMPLE = /^[A-Za-z_][A-Za-z0-9_]*$/;
const RESERVED = new Set(["return", "end", "start", "order", "group", "select", "from", "where", "offset", "limit"]);

export function identifier(name: string): string {
  return SIMPLE.test(name) && !RESERVED.has(name.toLowerCase()) ? name : `"${name.replaceAll('"', '""')}"`;
}

/** Parse a typed label: a number if it is a plain decimal in range, otherwise a string ("007", "0x10", spaces). */
export function labelOf(text: string): number | string {
  if (!/^-?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[+-]?\d+)?$/i.test(text)) return text;
  const value = Number(text);
  return Number.isSafeInteger(value) || (!Number.isInteger(value) && Number.isFinite(value)) ? value : text;
}

/** Whether the server truncated a string; filters cannot compare with truncated strings. */
export function isCut(value: string): boolean {
  return /\u2026 \[cut: \d+ characters, #\d+\]$/.test(value);
}

export function literal(value: string | number | boolean): string {
  if (typeof value === "string") return `'${value.replaceAll("'", "''")}'`;
  return typeof value === "boolean" ? String(value).toUpperCase() : String(value);
}

/** The columns that the viewer computes for each trajectory; others belong to rows. */
const COMPUTED =
  "num_rows|num_turns|return|prompt_tokens|response_tokens|trained_tokens|longest_row_tokens|agents|num_agents|task_text|num_tool_calls|num_tool_errors";
const OF_TRAJECTORY = new RegExp(`^(?:${COMPUTED}|instance_id|task_instance_id|trajectory_id|repetition_id)$`);
const OVER = " OVER (PARTITION BY trajectory_id)";

/** Whether a filter cannot be a Polars expression: it uses columns of trajectories, or folds the rows of one. */
export function usesComputed(where: string, added: string[] = []): boolean {
  return new RegExp(`\\b(?:(?:${[COMPUTED, ...added].join("|")})\\b|(?:any|all|last|tool_calls|tool_errors|findings)\\s*\\()`, "i").test(where.replace(/'(?:[^']|'')*'/g, ""));
}

/** The condition that a brush writes, and the pattern that finds it in a filter. */
export interface Condition {
  sql: string;
  column: string;
}

/**
 * Histograms count a trajectory once: by its last row, its oldest policy version, its first error. A condition on rows
 * has several readings, so brushes write conditions on trajectories, which combine with any other.
 */
function ofTrajectory(column: string, hasOneRow: boolean, on: (name: string) => string): Condition {
  const name = identifier(column);
  if (hasOneRow || OF_TRAJECTORY.test(column)) return { column, sql: on(name) };
  if (column === "policy_version") return { column, sql: on(`min(${name})${OVER}`) };
  if (column === "error") return { column, sql: `max(${on(name)})${OVER}` };
  return { column, sql: `max(${on(name)} AND is_last_step)${OVER}` };
}

/** Format a number for SQL; large integers keep all their digits, because integer columns are exact. */
function digits(value: number): string {
  const isLarge = Number.isInteger(value) && Math.abs(value) >= 2 ** 53 && Math.abs(value) <= 2 ** 64;
  return isLarge ? BigInt(value).toString() : String(value);
}

export function rangeOf(column: string, low: number, high: number, isLast: boolean, hasOneRow: boolean): Condition {
  const [from, to] = [`>= ${digits(low)}`, `${isLast ? "<=" : "<"} ${digits(high)}`];
  return ofTrajectory(column, hasOneRow, (name) => `${name} ${from} AND ${name} ${to}`);
}

export function equals(column: string, value: string | boolean | null, hasOneRow: boolean): Condition {
  if (value === null && column === "error" && !hasOneRow) return { column, sql: `max(error)${OVER} IS NULL` };
  return ofTrajectory(column, hasOneRow, (name) => (value === null ? `${name} IS NULL` : `${name} = ${literal(value)}`));
}

function brushed(column: string): RegExp {
  const quoted = (text: string): string => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const plain = quoted(identifier(column));
  const name = `(?:${plain}|min\\(${plain}\\)${quoted(OVER)})`;
  const number = "-?[\\d.]+(?:e[+-]?\\d+)?";
  const one = `(?:${name} >= ${number} AND ${name} <=? ${number}|${name} IS NULL|${name} = (?:TRUE|FALSE|'(?:[^']|'')*'))`;
  const whole = `max\\((?:${one}|${plain})(?: AND is_last_step)?\\)${quoted(OVER)}(?: IS NULL)?`;
  return new RegExp(`(?:^| AND )(?:${whole}|${one}(?: AND is_last_step)?)(?= AND |$)`, "g");
}

/** Blank the quoted and bracketed parts of a filter, which leaves its top level. */
function joints(where: string): string {
  let text = where.replace(/'(?:[^']|'')*'|"(?:[^"]|"")*"/g, (quoted) => " ".repeat(quoted.length));
  for (let before = ""; before !== text; ) {
    before = text;
    text = text.replace(/[([][^()[\]]*[)\]]/g, (group) => " ".repeat(group.length));
  }
  return text;
}

/** The position in a filter of the condition that a brush of this column wrote, if AND joins it to the rest. */
function placeOf(where: string, column: string): [begin: number, end: number] | null {
  const text = joints(where);
  if (/\bor\b/i.test(text)) return null;
  for (const { 0: found, index } of where.matchAll(brushed(column))) {
    if (index === 0 || text.startsWith(" AND ", index)) return [index, index + found.length];
  }
  return null;
}

/** Whether the filter contains a condition that a brush of this column wrote. */
export function hasCondition(where: string, column: string): boolean {
  return placeOf(where, column) !== null;
}

export function withoutCondition(where: string, column: string): string {
  const place = placeOf(where, column);
  if (place === null) return where;
  return (where.slice(0, place[0]) + where.slice(place[1])).replace(/^ AND /, "");
}

export function withCondition(where: string, condition: Condition): string {
  const rest = withoutCondition(where, condition.column).trim();
  if (rest === "") return condition.sql;
  return /\bor\b/i.test(joints(rest)) ? `(${rest}) AND ${condition.sql}` : `${rest} AND ${condition.sql}`;
}

function pythonText(value: string): string {
  return JSON.stringify(value);
}

/** A Polars expression for these trajectories. */
export function polarsOf(trajectories: string[]): string {
  return `pl.col("trajectory_id").is_in([${trajectories.map(pythonText).join(", ")}])`;
}

/** A Polars expression for rows that match a filter. */
export function polarsWhere(where: string): string {
  return `pl.sql_expr(${pythonText(where)})`;
}

function shellText(value: string): string {
  return /^[\w./:@=+-]+$/.test(value) ? value : `'${value.replaceAll("'", `'\\''`)}'`;
}

/** The `rollouts filter` command that writes these trajectories. */
export function commandOf(dataset: string, where: string): string {
  return `rollouts filter ${shellText(dataset)} --where ${shellText(where)} --out selected/`;
}

export function among(trajectories: string[]): string {
  return `trajectory_id IN (${trajectories.map(literal).join(", ")})`;
}
