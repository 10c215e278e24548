/** View 8: two datasets, task by task. */

import type { Table } from "apache-arrow";
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { go } from "../address";
import { type Dataset, diff, diffPair, isReport, type Pair, rowsOf, type Row, total } from "../answers";
import { sorted } from "../order";
import { useKeys } from "../keys";
import { Said } from "../logs";
import { Awaited, Bar, Cell, Empty, Go, Num, Text, useAnswer } from "../parts";
import { comparedIn, useSession } from "../session";
import { plain } from "../text";
import { type Head, VirtualTable } from "../virtual_table";
import { Excerpt } from "./group";

export function DiffView(): JSX.Element {
  const { sources, place, selection } = useSession();
  // A report has the diff of one pair, whichever dataset is chosen.
  const [dataset, other] = comparedIn(sources, isReport ? {} : place);
  const key = dataset === null || other === null ? null : JSON.stringify([dataset.id, other.id, selection.where]);
  const answer = useAnswer(key, () => diff(dataset!.id, other!.id, selection.where));
  const swap = (): void => {
    if (dataset !== null && other !== null) go({ data: other.id, other: dataset.id });
  };
  useKeys("Diff", isReport ? [] : [{ key: "x", does: "swap the two datasets", run: swap }]);
  if (dataset === null || other === null) {
    return (
      <section class="view" aria-labelledby="title">
        <h1 id="title">Diff</h1>
        <Empty>
          Only one dataset is open. <code>rollouts view DS OTHER</code> compares two.
        </Empty>
      </section>
    );
  }
  return (
    <section class="view diff-view" aria-labelledby="title">
      <header class="tools">
        <h1 id="title">
          <Text value={dataset.name} /> (A) against <Text value={other.name} /> (B)
        </h1>
        {sources.datasets.length > 2 && !isReport && (
          <label>
            B{" "}
            <select value={other.id} onChange={(event) => go({ other: event.currentTarget.value, task: undefined })}>
              {sources.datasets.filter((one) => one !== dataset).map((one) => (
                <option key={one.id} value={one.id}>{plain(one.name, 60)}</option>
              ))}
            </select>
          </label>
        )}
        {!isReport && <button type="button" onClick={swap} title="Swap A and B (x)">Swap A and B</button>}
      </header>
      <Awaited answer={answer}>{(table) => <Tasks key={key} table={table} a={dataset} b={other} />}</Awaited>
    </section>
  );
}

const HEADS: Head[] = [
  { name: "task_instance_id", title: "task", numeric: false },
  { name: "difference", title: "mean return B − A", help: "Difference between the mean returns", numeric: true },
  { name: "bar", title: "", numeric: false },
  { name: "return_a", title: "mean return A", help: "Mean return in A", numeric: true },
  { name: "return_b", title: "mean return B", help: "Mean return in B", numeric: true },
  { name: "num_a", title: "attempts A", numeric: true },
  { name: "num_b", title: "attempts B", numeric: true },
  { name: "solved_a", title: "solved A", help: "Attempts with a positive return", numeric: true },
  { name: "solved_b", title: "solved B", help: "Attempts with a positive return", numeric: true },
  { name: "response_tokens_a", title: "mean response tokens A", help: "Mean number of response tokens of an attempt in A", numeric: true },
  { name: "response_tokens_b", title: "mean response tokens B", help: "Mean number of response tokens of an attempt in B", numeric: true },
];

function Tasks({ table, a, b }: { table: Table; a: Dataset; b: Dataset }): JSX.Element {
  const { place, selection } = useSession();
  const [order, setOrder] = useState({ by: "difference", descending: true });
  const all = useMemo(
    () =>
      rowsOf(table).map((row): Row => {
        const [x, y] = [row.return_a ?? null, row.return_b ?? null];
        return { ...row, difference: x === null || y === null ? null : Number(y) - Number(x) };
      }),
    [table],
  );
  const rows = useMemo(() => sorted(all, order.by, order.descending), [all, order]);
  const cursor = rows.findIndex((row) => row.task_instance_id === place.task);
  const known = all.map((row) => row.difference).filter((value) => typeof value === "number");
  const reach = known.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const choose = (index: number): void => {
    const row = rows[index];
    if (row !== undefined) go({ task: String(row.task_instance_id) }, { replace: true });
  };
  const move = (by: number): void => choose(Math.max(0, Math.min(rows.length - 1, cursor + by)));
  useKeys("Tasks", [
    { key: "j", does: "next task", run: () => move(1) },
    { key: "ArrowDown", does: "next task", run: () => move(1) },
    { key: "k", does: "previous task", run: () => move(-1) },
    { key: "ArrowUp", does: "previous task", run: () => move(-1) },
  ]);
  const facts = [
    ["better in B", known.filter((value) => value > 0).length],
    ["worse in B", known.filter((value) => value < 0).length],
    ["equal", known.filter((value) => value === 0).length],
    ["only in A", total(table, "only_a")],
    ["only in B", total(table, "only_b")],
  ] as const;
  const mean = known.length === 0 ? null : known.reduce((one, value) => one + value, 0) / known.length;
  return (
    <>
      <ul class="tiles">
        <li><strong><Num value={all.length} name="tasks" /></strong> tasks in both</li>
        <li><strong><Num value={mean} name="mean_difference" /></strong> mean difference of return, B − A</li>
        {facts.map(([name, number]) => (
          <li key={name}><strong><Num value={Number.isNaN(number) ? null : number} name={name} /></strong> {name}</li>
        ))}
      </ul>
      {selection.where !== "" && <p class="note">Only trajectories where <code><Text value={selection.where} /></code></p>}
      {all.length === 0 ? (
        <Empty>
          {[a, b].some((one) => one.log?.is_done === false) ? "No task in both has been read yet; reading goes on." : selection.where === "" ? "The datasets have no task in common." : "No task in both has trajectories that match the filter."}
        </Empty>
      ) : (
        <VirtualTable
          label="Tasks in both"
          heads={HEADS}
          total={rows.length}
          rowKey={(index) => String(rows[index]!.task_instance_id)}
          rowName={(index) => String(rows[index]!.task_instance_id)}
          cells={(index) =>
            HEADS.map(({ name }) =>
              name === "bar" ? <Bar value={rows[index]!.difference as number | null} reach={reach} signed /> : <Cell value={rows[index]![name]} name={name} />,
            )
          }
          isChosen={(index) => index === cursor}
          cursor={cursor < 0 ? null : cursor}
          sort={order.by}
          descending={order.descending}
          onSort={(name) => name !== "bar" && setOrder({ by: name, descending: order.by === name ? !order.descending : true })}
          onChoose={choose}
          onOpen={choose}
        />
      )}
      {cursor >= 0 && <Pairs a={a} b={b} task={String(rows[cursor]!.task_instance_id)} />}
    </>
  );
}

function Pairs({ a, b, task }: { a: Dataset; b: Dataset; task: string }): JSX.Element {
  const answer = useAnswer(JSON.stringify([a.id, b.id, task]), () => diffPair(a.id, b.id, task));
  return (
    <section class="pairs" aria-label={`Attempts at ${plain(task, 60)}`}>
      <h2>Attempts at <Text value={task} /></h2>
      <Awaited answer={answer}>
        {({ pairs }) => (
          <ul class="partings">
            {pairs.map((pair, at) => (
              <PairOf key={at} pair={pair} a={a} b={b} task={task} />
            ))}
          </ul>
        )}
      </Awaited>
    </section>
  );
}

function textOf(number: number | null | undefined): string | undefined {
  return number === null || number === undefined ? undefined : String(number);
}

function PairOf({ pair, a, b, task }: { pair: Pair; a: Dataset; b: Dataset; task: string }): JSX.Element {
  const side = (dataset: Dataset, trajectory: string | null, value: number | null, name: string): JSX.Element => (
    <span class="side">
      {name}:{" "}
      {trajectory === null ? (
        <span class="none">no attempt</span>
      ) : (
        <>
          <Go
            to={{
              view: "tokens", data: dataset.id, other: dataset === a ? b.id : a.id, task, trajectory,
              step: String((dataset === a ? pair.parts_at?.first_row : pair.parts_at?.row) ?? 0),
              at: textOf(dataset === a ? pair.parts_at?.first_token : pair.parts_at?.token),
            }}
          >
            <Text value={trajectory} />
          </Go>{" "}
          return <Num value={value} name={`return_${name.toLowerCase()}`} />
        </>
      )}
    </span>
  );
  const { parts_at: parts, trajectory_a: first, trajectory_b: second } = pair;
  return (
    <li>
      <h3>
        {side(a, first, pair.return_a, "A")} {side(b, second, pair.return_b, "B")}
        <small>{parts === null ? (first !== null && second !== null ? "the same tokens" : "") : parts.token === null ? `diverge in answer ${(parts.answer ?? 0) + 1}` : `diverge at step ${parts.row}, token ${parts.token}`}</small>
      </h3>
      {parts?.said !== undefined && <Said said={parts.said} names={["A", "B"]} />}
      {parts !== null && parts.token !== null && first !== null && second !== null && (
        <>
          <Excerpt dataset={a.id} trajectory={first} row={parts.first_row} token={parts.first_token} name="A" />
          <Excerpt dataset={b.id} trajectory={second} row={parts.row} token={parts.token} name="B" />
        </>
      )}
    </li>
  );
}
