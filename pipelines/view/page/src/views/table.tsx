/** View 2: all trajectories, filtered, sorted and brushed. */

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { go, pinsOf, textsIn, togglePin } from "../address";
import {
  type AnswerError,
  type Dataset,
  histogram,
  isReport,
  type Row,
  type Shares,
  trajectories,
  type Value,
  type Window,
} from "../answers";
import { NoMatch } from "../first_trajectory";
import { Histogram } from "../histogram";
import { useKeys } from "../keys";
import { asError, Cell, Empty, Failure, Num, Text, useAnswer } from "../parts";
import { useSession } from "../session";
import { equals, hasCondition, rangeOf, withCondition, withoutCondition } from "../sql";
import { TaskLine } from "../task_text";
import { plain, short } from "../text";
import { shareTitle } from "../token_columns";
import { type Head, VirtualTable } from "../virtual_table";

const CHUNK = 100;
const KEPT_CHUNKS = 60;

const TITLES: Record<string, [string, string]> = {
  instance_id: ["group id", "instance_id: the attempts with this id form a group"],
  task_instance_id: ["task id", "task_instance_id: the task that its group attempts"],
  trajectory_id: ["trajectory", "trajectory_id: one attempt at a task"],
  repetition_id: ["attempt", "repetition_id"],
  num_rows: ["rows", "num_rows: rows of the table, one per model call unless merged"],
  num_turns: ["turns", "num_turns: steps, merged or not"],
  return: ["return", "The reward of the last step, or the sum over steps"],
  prompt_tokens: ["prompt tokens", "prompt_tokens: tokens of all prompts"],
  response_tokens: ["response tokens", "response_tokens: tokens of all responses"],
  trained_tokens: ["trained tokens", "trained_tokens: response tokens that are trained on"],
  longest_row_tokens: ["tokens of longest row", "longest_row_tokens: prompt and response of the longest row"],
  stop_reason: ["stop reason", "stop_reason of the last row"],
  error: ["error", "The reason why the trajectory failed"],
  policy_version: ["policy version", "policy_version: the version of the oldest weights that sampled it"],
  agents: ["agents", "The agents that made the calls"],
  num_messages: ["messages", "num_messages: messages; repeated ones count once"],
  num_characters: ["characters", "num_characters: characters of all messages"],
  num_tool_calls: ["tool calls", "num_tool_calls"],
  num_tool_errors: ["failed tool calls", "num_tool_errors: tool calls whose result is an error"],
  num_images: ["images", "num_images"],
  num_agents: ["number of agents", "num_agents: the main agent and its sub-agents"],
  format: ["format", "format: the format of the log"],
  file: ["file", "file: the log that contains it"],
  modified: ["modified", "modified: when the file was last written, UTC"],
  task_text: ["task", "task_text: the first user message of the task"],
};
const ADDED_TITLES: Record<string, [string, string]> = {
  faults: ["faults", "faults: the kinds of faults that an audit found in its rows; none: audited, no fault found"],
  findings: ["findings", "findings: the labels of what finders found in it; none: they found nothing (rollouts rescore)"],
  fault_nats: ["certainty of faults, nats", "fault_nats: the largest log-likelihood ratio of a fault to the label"],
};
const NUMBERS = new Set(["repetition_id", "num_rows", "num_turns", "num_messages", "num_characters", "num_tool_calls", "num_tool_errors", "num_images", "num_agents", "return", "prompt_tokens", "response_tokens", "trained_tokens", "longest_row_tokens", "policy_version"]); // prettier-ignore
const BADGES = new Set(["faults", "findings"]);
const CHARTED = ["return", "response_tokens", "num_rows", "stop_reason", "faults"];
const ORDER = ["trajectory_id", "task_text", "instance_id", "task_instance_id", "repetition_id", "return"];
const LOG_CHARTED = ["num_turns", "num_characters", "num_tool_calls", "format"];
const LOG_ORDER = ["trajectory_id", "task_text", "return", "error", "num_turns", "num_messages", "num_characters", "num_tool_calls", "num_tool_errors", "num_agents", "num_images", "modified", "file", "format", "stop_reason"]; // prettier-ignore

/** Title and explanation of a column. */
function titleOf(name: string, { added }: Dataset, shares: Shares[]): [string, string] {
  if (added.includes(name)) {
    const file = shares.find((one) => one.column === name)?.name ?? "";
    return ADDED_TITLES[name] ?? [shareTitle(name), `${name}: the sum of its rows' shares of the update (${plain(file, 60)})`];
  }
  return TITLES[name] ?? [name, `${name}: a user-defined column (the last row's value)`];
}

function ordered(columns: string[], { added, log = null }: Dataset): string[] {
  const first = [...(log === null ? ORDER : LOG_ORDER), ...added];
  return [...first.filter((name) => columns.includes(name)), ...columns.filter((name) => !first.includes(name))];
}

/** Windows of rows, fetched when they scroll into view. */
function useWindows(): {
  facts: Omit<Window, "rows"> | null;
  row: (index: number) => Row | null;
  error: AnswerError | null;
  show: (first: number, last: number) => void;
} {
  const { dataset, selection } = useSession();
  const key = JSON.stringify([dataset?.id, selection]);
  const version = dataset?.log?.version ?? 0;
  const chunks = useRef(new Map<number, Row[]>());
  const state = useRef<{ key: string; asked: Set<number> }>({ key: "", asked: new Set() });
  const timer = useRef(0);
  const [facts, setFacts] = useState<Omit<Window, "rows"> | null>(null);
  const [error, setError] = useState<AnswerError | null>(null);
  const [, redraw] = useState(0);

  const fetchChunk = (chunk: number): void => {
    const { asked } = state.current;
    if (dataset === null || asked.has(chunk)) return;
    asked.add(chunk);
    trajectories(dataset.id, selection, chunk * CHUNK, CHUNK).then(
      ({ rows, ...rest }) => {
        if (state.current.key !== key) return;
        if (chunks.current.size > KEPT_CHUNKS) {
          chunks.current.clear();
          asked.clear();
          asked.add(chunk);
        }
        chunks.current.set(chunk, rows);
        setFacts((old) => (old !== null && old.total === rest.total && old.all === rest.all && Object.is(old.mean_return, rest.mean_return) ? old : rest));
        setError(null);
        redraw((number) => number + 1);
      },
      (reason: unknown) => {
        if (state.current.key !== key) return;
        asked.delete(chunk);
        setError(asError(reason));
      },
    );
  };
  useEffect(() => {
    state.current = { key, asked: new Set() };
    chunks.current = new Map();
    setFacts(null);
    setError(null);
    fetchChunk(0);
    return () => window.clearTimeout(timer.current);
  }, [key]);
  useEffect(() => {
    if (version === 0) return;
    const asked = [...state.current.asked];
    state.current.asked = new Set();
    for (const chunk of asked) fetchChunk(chunk);
  }, [version]);
  return {
    facts,
    error,
    row: (index) => chunks.current.get(Math.floor(index / CHUNK))?.[index % CHUNK] ?? null,
    show: (first, last) => {
      const [from, to] = [Math.floor(first / CHUNK), Math.floor(Math.max(first, last - 1) / CHUNK)];
      window.clearTimeout(timer.current);
      const missing = state.current.asked.has(from) && state.current.asked.has(to) ? -1 : 40;
      if (missing < 0) return;
      timer.current = window.setTimeout(() => {
        for (let chunk = from; chunk <= to; chunk++) fetchChunk(chunk);
      }, missing);
    },
  };
}

export function TableView(): JSX.Element {
  const { sources, dataset, place, selection } = useSession();
  const made = sources.export?.where ?? "";
  const { facts, row, error, show } = useWindows();
  const [cursor, setCursor] = useState<number | null>(null);
  const pins = pinsOf(place);
  const total = facts?.total ?? 0;

  const choose = (index: number): void => {
    setCursor(index);
    const chosen = row(index);
    if (chosen === null) return;
    go(
      { trajectory: String(chosen.trajectory_id), task: String(chosen.instance_id), step: undefined, at: undefined },
      { replace: true },
    );
  };
  const open = (index: number, view: "tokens" | "conversation" | "group"): void => {
    const chosen = row(index);
    if (chosen === null) return;
    go({ view, trajectory: String(chosen.trajectory_id), task: String(chosen.instance_id), step: undefined, at: undefined });
  };
  const move = (by: number): void => choose(Math.max(0, Math.min(total - 1, (cursor ?? -1) + by)));
  useEffect(() => setCursor(null), [dataset?.id, selection.where, selection.sort, selection.descending]);
  useKeys("Table", [
    { key: "j", does: "next trajectory", run: () => move(1) },
    { key: "ArrowDown", does: "next trajectory", run: () => move(1) },
    { key: "k", does: "previous trajectory", run: () => move(-1) },
    { key: "ArrowUp", does: "previous trajectory", run: () => move(-1) },
    { key: "PageDown", does: "20 trajectories down", run: () => move(20) },
    { key: "PageUp", does: "20 trajectories up", run: () => move(-20) },
    { key: "Home", does: "first trajectory", run: () => choose(0) },
    { key: "End", does: "last trajectory", run: () => choose(total - 1) },
    { key: "Enter", does: "open its tokens", run: () => (cursor !== null ? open(cursor, "tokens") : place.trajectory !== undefined && go({ view: "tokens" })) },
    {
      key: "p",
      does: "pin or unpin it",
      run: () => {
        const chosen = cursor === null ? place.trajectory : row(cursor)?.trajectory_id;
        if (typeof chosen === "string") togglePin(chosen);
      },
    },
  ]);
  if (dataset === null) return <Empty>No dataset is open.</Empty>;

  const kinds = new Map(dataset.columns.map((column) => [column.name, column.kind]));
  const columns = ordered(facts?.columns ?? [...Object.keys(TITLES), ...dataset.added], dataset).filter((name) => name !== "repetition_id" && name !== "instance_id");
  const heads: Head[] = columns.map((name) => ({
    name,
    title: titleOf(name, dataset, sources.shares)[0],
    help: titleOf(name, dataset, sources.shares)[1],
    numeric: dataset.added.includes(name) ? !BADGES.has(name) : NUMBERS.has(name) || kinds.get(name) === "number",
  }));
  const onSort = (name: string): void => {
    const same = selection.sort === name;
    const numeric = heads.find((head) => head.name === name)?.numeric === true;
    const descending = same ? !selection.descending : numeric;
    const off = same && selection.descending !== numeric;
    go({ sort: off ? undefined : name, descending: off || !descending ? undefined : "1" });
  };
  return (
    <section class="view table-view" aria-labelledby="title">
      <h1 id="title">Trajectories</h1>
      <FilterBox />
      {error !== null && <Failure error={error} />}
      <Charts columns={columns} />
      <div class="counts-line">
      <div class="counts" role="status" aria-live="polite">
        {facts === null ? (
          error === null && "Counting…"
        ) : (
          <>
            <strong>
              <Num value={facts.total} name="total" />
            </strong>{" "}
            of <Num value={facts.all} name="all" /> trajectories
            {made !== "" && (
              <>
                {" "}
                where <code>{plain(made, 1000)}</code>
              </>
            )}
            {pins.length > 0 && `, ${short(pins.length)} pinned`}
          </>
        )}
      </div>
      {facts !== null && facts.total > 0 && (
        <p class="note">
          {Number.isNaN(facts.mean_return) ? "no return is known" : <>mean return <Num value={facts.mean_return} name="mean_return" /></>},{" "}
          <Num value={facts.failed} name="failed" /> failed
        </p>
      )}
      </div>
      {facts !== null && facts.total === 0 ? (
        <NoMatch dataset={dataset} />
      ) : (
        <VirtualTable
          label="Trajectories"
          heads={heads}
          total={total}
          rowKey={String}
          rowName={(index) => (row(index)?.trajectory_id as string | undefined) ?? null}
          cells={(index) => {
            const values = row(index);
            return values === null ? null : columns.map((name) => {
              if (name === "task_text") return <TaskLine key={values.instance_id} task={String(values.instance_id)} start={values.task_text as string | null} />;
              return BADGES.has(name) && dataset.added.includes(name) ? <Faults name={name} value={values[name] ?? null} /> : cellOf(name, values[name] ?? null, open, index);
            });
          }}
          isChosen={(index) => index === cursor || (cursor === null && row(index)?.trajectory_id === place.trajectory)}
          isPinned={(index) => pins.includes(String(row(index)?.trajectory_id))}
          cursor={cursor}
          sort={selection.sort}
          descending={selection.descending}
          onSort={onSort}
          onChoose={choose}
          onOpen={(index) => open(index, "tokens")}
          onWindow={show}
        />
      )}
    </section>
  );
}

/** A badge for each kind of fault or finding. */
function Faults({ name, value }: { name: string; value: Value }): JSX.Element {
  if (typeof value !== "string") return <Cell value={value} name={name} />;
  return (
    <span data-name={name} data-value={value}>
      {value.split(", ").map((kind) => (
        <span key={kind} class={kind === "none" ? "badge quiet" : "badge bad"}><Text value={kind.replaceAll("_", " ")} /></span>
      ))}
    </span>
  );
}

function cellOf(
  name: string,
  value: Value,
  open: (index: number, view: "tokens" | "conversation") => void,
  index: number,
): ComponentChildren {
  if (name !== "trajectory_id") return <Cell value={value} name={name} />;
  return (
    <button type="button" class="link" onClick={() => open(index, "tokens")}>
      <Cell value={value} name={name} />
    </button>
  );
}

function FilterBox(): JSX.Element {
  const { selection, dataset } = useSession();
  const [text, setText] = useState(selection.where);
  useEffect(() => setText(selection.where), [selection.where]);
  const box = useRef<HTMLInputElement>(null);
  useKeys("Filter", [{ key: "f", does: "write a filter", run: () => box.current?.focus() }]);
  return (
    <form
      class="filter"
      role="search"
      aria-label="Filter"
      onSubmit={(event) => {
        event.preventDefault();
        go({ where: text.trim() === "" ? undefined : text.trim() });
        box.current?.blur();
      }}
    >
      <label for="where">where</label>
      <input
        id="where"
        ref={box}
        type="text"
        spellcheck={false}
        autocomplete="off"
        value={text}
        disabled={isReport}
        placeholder={isReport ? "A report contains one selection; use `rollouts view` to filter." : `SQL, as for rollouts filter: ${dataset?.log ? "num_tool_calls > 20 AND error IS NULL" : "instance_id = 'task-1' AND reward > 0"}`}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") setText(selection.where);
        }}
      />
      {!isReport && <button type="submit">Filter</button>}
      {!isReport && selection.where !== "" && (
        <button type="button" onClick={() => go({ where: undefined })}>
          Clear
        </button>
      )}
    </form>
  );
}

function Charts({ columns }: { columns: string[] }): JSX.Element | null {
  const { place, dataset } = useSession();
  if (dataset === null || isReport) return null;
  const added = textsIn(place.columns);
  const own = dataset.columns.filter((column) => column.own && column.kind !== "other").map((column) => column.name);
  const charted = dataset.log ? LOG_CHARTED : CHARTED;
  const shown = [...charted.filter((name) => columns.includes(name)), ...added];
  const more = [...new Set([...columns, ...own])].filter((name) => !shown.includes(name) && !name.endsWith("_id") && name !== "task_text");
  return (
    <div class="charts" role="group" aria-label="Histograms">
      {shown.map((name) => (
        <Chart key={name} column={name} />
      ))}
      {more.length > 0 && (
        <select
          aria-label="Add a histogram"
          value=""
          onChange={(event) => go({ columns: JSON.stringify([...added, event.currentTarget.value]) }, { replace: true })}
        >
          <option value="">+ histogram</option>
          {more.map((name) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
      )}
    </div>
  );
}

function Chart({ column }: { column: string }): JSX.Element | null {
  const { dataset, selection } = useSession();
  const { where } = selection;
  const key = dataset === null ? null : JSON.stringify([dataset.id, column, where, dataset.log?.version]);
  // The columns of verdicts and shares have one value per trajectory.
  const hasOneRow = dataset !== null && (dataset.num_rows === dataset.num_trajectories || dataset.added.includes(column));
  const answer = useAnswer(key, () => histogram(dataset!.id, column, where), dataset === null ? null : `${dataset.id} ${column}`);
  if (answer.state === "refused") {
    return <figure class="histogram"><figcaption>{plain(column, 40)}</figcaption><p class="none"><Text value={answer.error.message} /></p></figure>;
  }
  if (answer.value === undefined) return <figure class="histogram" aria-busy="true" />;
  return (
    <Histogram
      column={column}
      counts={answer.value}
      onRange={(low, high, isLast) => go({ where: withCondition(where, rangeOf(column, low, high, isLast, hasOneRow)) })}
      onValue={(value) => go({ where: withCondition(where, equals(column, value, hasOneRow)) })}
      onClear={
        hasCondition(where, column) ? () => go({ where: withoutCondition(where, column) || undefined }) : null
      }
    />
  );
}
