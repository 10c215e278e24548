/** The rows with the largest shares of an update, as `rollouts blame` computed them. */

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { rowsOf, type Row, type Shares, topShares, total } from "./answers";
import { Awaited, Bar, Cell, Go, Num, Text, useAnswer } from "./parts";
import { useSession } from "./session";
import { plain, short } from "./text";

const SHOWN = 10;
const KEYS = ["dataset", "trajectory_id", "step_index", "instance_id", "share"];
const TITLES: Record<string, [string, string]> = {
  gradient_norm: ["gradient norm", "L2 norm of the row's gradient"],
  norm_without: ["norm without it", "norm of the update's gradient without the row"],
  score: ["outlier score", "how far the row stands out from the others"],
  advantage: ["|advantage|", "mean over the row's targets"],
  mismatch: ["mismatch, nats", "mean |old_logprobs - rollout_logprobs|"],
  surprise: ["surprise, nats", "mean of -logprobs"],
  step_share: ["share of the step", "the row's share of the decrease in loss that the optimizer step achieves"],
  sequence: ["rank", "rank of the sequence that contains the row"],
  num_sequence_rows: ["rows of its sequence", "number of stored rows that were trained on as one sequence"],
};

export function SharesOf({ shares }: { shares: Shares }): JSX.Element {
  const answer = useAnswer(shares.id, () => topShares(shares.id));
  return (
    <section class="shares" aria-labelledby={`shares-${shares.id}`}>
      <h2 id={`shares-${shares.id}`}>Rows by their share of update {shares.update}<small>{plain(shares.name, 60)}</small></h2>
      <Awaited answer={answer}>{(table) => <Rows shares={shares} rows={rowsOf(table)} of={total(table, "total")} />}</Awaited>
    </section>
  );
}

function Rows({ shares, rows, of }: { shares: Shares; rows: Row[]; of: number }): JSX.Element {
  const { sources } = useSession();
  const [limit, setLimit] = useState(SHOWN);
  const shown = rows.slice(0, limit);
  const names = new Map(sources.datasets.map((dataset) => [dataset.id, dataset.name]));
  const several = new Set(shown.map((row) => row.dataset)).size > 1;
  const others = useMemo(
    () => Object.keys(rows[0] ?? {}).filter((name) => !KEYS.includes(name) && rows.some((row) => row[name] !== null)),
    [rows],
  );
  const reach = shown.reduce((most, row) => Math.max(most, Math.abs(Number(row.share)) || 0), 0);
  return (
    <>
      <p class="note">
        {shown.length < of && `The ${short(shown.length)} rows with the largest absolute shares, of ${short(of)}. `}The shares of all rows add up to 1; a row with a negative share works against the step.{" "}
        {shown.length < rows.length && <button type="button" class="more" onClick={() => setLimit(rows.length)}>show {short(rows.length)}</button>}
      </p>
      <div class="scroll">
        <table class="plain fitted" aria-label={`Rows by their share of update ${shares.update}`}>
          <thead>
            <tr>
              {several && <th scope="col">dataset</th>}
              <th scope="col">trajectory</th>
              <th scope="col" class="numeric">step</th>
              <th scope="col" class="numeric">share</th>
              <td />
              {others.map((name) => (
                <th key={name} scope="col" class="numeric" title={TITLES[name]?.[1] ?? name}>{TITLES[name]?.[0] ?? plain(name.replaceAll("_", " "), 40)}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={`${row.dataset} ${row.trajectory_id} ${row.step_index}`} data-row={`${row.trajectory_id} ${row.step_index}`}>
                {several && <td>{row.dataset === null ? <span class="none" title="The dataset is not open, or has changed since">–</span> : <Text value={names.get(String(row.dataset)) ?? ""} />}</td>}
                <td><Trajectory row={row} shares={shares} /></td>
                <td class="numeric"><Cell value={row.step_index} name="step_index" /></td>
                <td class="numeric"><Cell value={row.share} name="share" /></td>
                <td><Bar value={typeof row.share === "number" ? row.share : null} reach={reach} signed /></td>
                {others.map((name) => (
                  <td key={name} class="numeric"><Num value={typeof row[name] === "number" ? (row[name] as number) : null} name={name} /></td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

/** A link to the row's tokens, coloured by share, if the dataset contains the row. */
function Trajectory({ row, shares }: { row: Row; shares: Shares }): JSX.Element {
  const name = String(row.trajectory_id);
  if (typeof row.dataset !== "string") return <Cell value={name} name="trajectory_id" />;
  const task = typeof row.instance_id === "string" ? row.instance_id : undefined;
  const to = { view: "tokens", data: row.dataset, trajectory: name, task, step: String(row.step_index), at: undefined, color: shares.column } as const;
  return <Go to={to}><Cell value={name} name="trajectory_id" /></Go>;
}
