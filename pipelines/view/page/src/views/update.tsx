/** View 7: the rows of an optimizer step, ranked, and the numbers of clipped and rejected targets. */

import type { Table } from "apache-arrow";
import type { JSX } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { go, togglePin } from "../address";
import { metrics, rowsOf, type Row, total, updateRows, updateTargets } from "../answers";
import { sorted } from "../order";
import { LINES } from "../colours";
import { useKeys } from "../keys";
import { Awaited, Cell, cssVariable, Empty, Failure, Go, Num, surface, useAnswer, useSize, useTheme } from "../parts";
import { useSession } from "../session";
import { SharesOf } from "../shares";
import { count, plain, short } from "../text";
import { MetricName } from "./run";
import { type Head, VirtualTable } from "../virtual_table";

const TITLES: Record<string, [string, string]> = {
  dataset: ["dataset", "The dataset that contains the row"],
  trajectory_id: ["trajectory", "trajectory_id"],
  step_index: ["step", "step_index of the row"],
  loss_share: ["contribution to the loss", "loss_share: the sum of weight times loss over the row's targets"],
  advantage: ["mean advantage", "Mean over the row's targets"],
  num_targets: ["targets", "num_targets: tokens of the row that this update trained on"],
  max_importance_weight: ["max importance weight", "max_importance_weight: the largest exp(logprob − old_logprob)"],
  max_abs_difference: ["max distance from sampler, nats", "max_abs_difference: the largest |logprob − rollout_logprob|, in nats"],
  mean_abs_difference: ["mean distance, nats", "mean_abs_difference: the mean |logprob − rollout_logprob|, in nats"],
  num_clipped: ["clipped", "num_clipped: targets that the clip rule left without a gradient"],
  num_rejected: ["rejected", "num_rejected: targets that the correction for sampler mismatch masked"],
};

export function UpdateView(): JSX.Element {
  const { run, sources, ...session } = useSession();
  const last = run?.updates.at(-1);
  const update = session.update ?? (last === undefined ? null : String(last));
  const known = sources.shares.filter((one) => one.run === null || one.run === run?.id);
  const own = known.filter((one) => one.run === null || update === null || one.update === Number(update));
  const shares = own.map((one) => <SharesOf key={one.id} shares={one} />);
  const others = [...new Set(known.filter((one) => !own.includes(one)).map((one) => one.update))].sort((a, b) => a - b);
  const key = run === null || update === null ? null : JSON.stringify([run.id, update]);
  const answer = useAnswer(key, () => updateRows(run!.id, update!));
  const step = (by: number): void => {
    if (run === null || update === null) return;
    const next = run.updates[run.updates.indexOf(Number(update)) + by];
    if (next !== undefined) go({ update: String(next), at: undefined });
  };
  useKeys("Update", [
    { key: "[", does: "previous update", run: () => step(-1) },
    { key: "]", does: "next update", run: () => step(1) },
  ]);
  if (run === null || update === null) {
    return (
      <section class="view" aria-labelledby="title">
        <h1 id="title">Update</h1>
        {!(run === null && shares.length > 0) && <Empty>
          {run === null ? (
            <>No run is open. <code>rollouts view RUN</code> shows the rows that each update trained on.</>
          ) : (
            <>The run has logged no update yet.</>
          )}
        </Empty>}
        {shares}
      </section>
    );
  }
  const isRecorded = run.token_updates.includes(Number(update));
  return (
    <section class="view update-view" aria-labelledby="title">
      <header class="tools">
        <h1 id="title">Update {update}<small>{plain(run.name, 60)}</small></h1>
        <div class="group" role="group" aria-label="Updates">
          <button type="button" disabled={run.updates[0] === Number(update)} onClick={() => step(-1)} title="Previous update ([)">‹ update</button>
          <button type="button" disabled={run.updates.at(-1) === Number(update)} onClick={() => step(1)} title="Next update (])">update ›</button>
        </div>
      </header>
      <Facts run={run.id} update={Number(update)} />
      {shares}
      {own.length === 0 && others.length > 0 && (
        <p class="note">
          rollouts blame computed the shares of {others.length === 1 ? "update" : "updates"}{" "}
          {others.map((one, at) => <span key={one}>{at > 0 && ", "}<Go to={{ update: String(one) }}>{one}</Go></span>)}.
        </p>
      )}
      {isRecorded ? (
        <Awaited answer={answer}>{(table) => <Rows key={key} table={table} run={run.id} update={update} />}</Awaited>
      ) : (
        <Empty>
          Update {update} recorded no tokens.
          {run.token_updates.length === 0 && <>Train with <code>record_tokens = "sampled"</code> to see its rows.</>}
          {run.token_updates.length > 0 && (
            <button type="button" onClick={() => go({ update: String(nearest(run.token_updates, Number(update))) })}>
              Go to update {nearest(run.token_updates, Number(update))}
            </button>
          )}
          {answer.state === "refused" && <Failure error={answer.error} />}
        </Empty>
      )}
    </section>
  );
}

// The metrics shown first, in this order.
const FACTS = ["reward/avg_raw_reward", "return_mean", "loss", "policy_kl", "policy_entropy", "clip_ratio", "grad_norm", "rollout_logprobs_abs_diff_mean"];

/** The most important metrics of the update. */
function Facts({ run, update }: { run: string; update: number }): JSX.Element | null {
  const answer = useAnswer(run, () => metrics(run));
  const at = answer.value?.global_step.indexOf(update) ?? -1;
  if (answer.state === "asked") return <ul class="tiles" aria-busy="true" />;
  if (answer.value === undefined || at < 0) return null;
  const found = answer.value.metrics;
  const shown = FACTS.filter((name) => typeof found[name]?.[at] === "number" && !(name === "return_mean" && FACTS[0]! in found));
  if (shown.length === 0) return null;
  return (
    <ul class="tiles" aria-label="Metrics of the update">
      {shown.map((name) => (
        <li key={name}><strong><Num value={found[name]![at]!} name={name} /></strong> <MetricName name={name} about={answer.value!.about} /></li>
      ))}
      <li><Go to={{ view: "run" }}>all metrics</Go></li>
    </ul>
  );
}

function nearest(updates: number[], to: number): number {
  return updates.reduce((best, one) => (Math.abs(one - to) < Math.abs(best - to) ? one : best));
}

function sum(rows: Row[], name: string): number {
  return rows.reduce((total, row) => total + Number(row[name] ?? 0), 0);
}

/** The dataset of a row as a change of the address; empty if it is not open. */
function datasetOf(row: Row): { data?: string } {
  return typeof row.dataset === "string" ? { data: row.dataset } : {};
}

function Rows({ table, run, update }: { table: Table; run: string; update: string }): JSX.Element {
  const { place, sources } = useSession();
  const numbered = useMemo(() => rowsOf(table).map((row, index): Row => ({ ...row, index })), [table]);
  const [order, setOrder] = useState<{ by: string; descending: boolean }>({ by: "", descending: true });
  const rows = useMemo(() => sorted(numbered, order.by, order.descending), [numbered, order]);
  const [cursor, setCursor] = useState<number | null>(null);
  const several = new Set(numbered.map((row) => row.dataset)).size > 1;
  const columns = Object.keys(TITLES).filter((name) => (name !== "dataset" || several) && table.getChild(name) !== null);
  const heads: Head[] = columns.map((name) => ({
    name,
    title: TITLES[name]![0],
    help: TITLES[name]![1],
    numeric: name !== "trajectory_id" && name !== "dataset",
  }));
  const names = new Map(sources.datasets.map((dataset) => [dataset.id, dataset.name]));
  const choose = (index: number): void => {
    const row = rows[index];
    setCursor(index);
    if (row !== undefined) go({ trajectory: String(row.trajectory_id), task: String(row.instance_id), step: String(row.step_index), ...datasetOf(row), at: undefined }, { replace: true });
  };
  const open = (index: number, at?: string): void => {
    const row = numbered[index];
    if (row === undefined) return;
    go({ view: "tokens", run, update, trajectory: String(row.trajectory_id), task: String(row.instance_id), step: String(row.step_index), ...datasetOf(row), at });
  };
  const openSorted = (index: number): void => open(Number(rows[index]?.index));
  const move = (by: number): void => choose(Math.max(0, Math.min(rows.length - 1, (cursor ?? -1) + by)));
  useKeys("Rows", [
    { key: "j", does: "next row", run: () => move(1) },
    { key: "ArrowDown", does: "next row", run: () => move(1) },
    { key: "k", does: "previous row", run: () => move(-1) },
    { key: "ArrowUp", does: "previous row", run: () => move(-1) },
    { key: "Enter", does: "open its tokens", run: () => cursor !== null && openSorted(cursor) },
    { key: "p", does: "pin or unpin its trajectory", run: () => place.trajectory !== undefined && togglePin(place.trajectory) },
  ]);
  return (
    <>
      <div class="columns">
        <Masks rows={numbered} />
        <Scatter run={run} update={update} rows={numbered} chosen={cursor === null ? null : Number(rows[cursor]?.index)} onOpen={open} />
      </div>
      <h2>Rows, {order.by === "" ? "largest absolute contribution to the loss first" : `by ${TITLES[order.by]?.[0] ?? order.by}`}</h2>
      <VirtualTable
        label="Rows of the update"
        heads={heads}
        total={rows.length}
        rowKey={(index) => String(rows[index]!.index)}
        rowName={(index) => `${rows[index]!.trajectory_id} ${rows[index]!.step_index}`}
        cells={(index) =>
          columns.map((name) => {
            const value = rows[index]![name];
            if (name === "dataset") return <Cell value={names.get(String(value)) ?? value ?? null} name={name} />;
            if (name !== "trajectory_id") return <Cell value={value} name={name} />;
            return <button type="button" class="link" onClick={() => openSorted(index)}><Cell value={value} name={name} /></button>;
          })
        }
        isChosen={(index) => index === cursor}
        cursor={cursor}
        sort={order.by === "" ? "loss_share" : order.by}
        descending={order.descending}
        onSort={(name) => {
          setCursor(null);
          setOrder({ by: name, descending: order.by === name ? !order.descending : true });
        }}
        onChoose={choose}
        onOpen={openSorted}
      />
    </>
  );
}

function Masks({ rows }: { rows: Row[] }): JSX.Element {
  const targets = sum(rows, "num_targets");
  const lines = [
    ["in the loss", "not rejected; clipped targets are included but have no gradient", targets - sum(rows, "num_rejected")],
    ["clipped", "the clip rule left no gradient", sum(rows, "num_clipped")],
    ["rejected", "masked by the correction for sampler mismatch", sum(rows, "num_rejected")],
  ] as const;
  return (
    <div class="masks">
      <h2>Targets by rule</h2>
      <p class="lead">
        <Num value={targets} name="num_targets" /> recorded targets (trained tokens) in {count(rows.length, "row")}
      </p>
      <table class="plain" aria-label="Targets by rule">
        <tbody>
          {lines.map(([name, help, number]) => (
            <tr key={name} data-row={name}>
              <th scope="row" title={help}>{name}</th>
              <td class="numeric"><Num value={number} name={name} /></td>
              <td class="numeric">{targets === 0 ? "–" : `${((100 * number) / targets).toFixed(1)} %`}</td>
              <td class="bar-cell"><span class="share"><span style={{ width: `${targets === 0 ? 0 : (100 * number) / targets}%` }} /></span></td>
              <td class="why">{help}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

interface ScatterProps {
  run: string;
  update: string;
  rows: Row[];
  chosen: number | null;
  onOpen: (row: number, at: string) => void;
}

function Scatter(props: ScatterProps): JSX.Element {
  const { run, update } = props;
  const answer = useAnswer(JSON.stringify([run, update]), () => updateTargets(run, update));
  return (
    <div class="scatter">
      <h2>Importance weight against log-probability</h2>
      <Awaited answer={answer}>{(table) => <Targets {...props} table={table} />}</Awaited>
    </div>
  );
}

// Weights closer to 1 than this cannot be distinguished from it in the chart.
const FLAT = 1e-4;

/** The chart, or a sentence if all its points would form one line. */
function Targets(props: ScatterProps & { table: Table }): JSX.Element {
  const { table } = props;
  const farthest = useMemo(
    () => rowsOf(table).reduce((most, { importance_weight: weight }) => Math.max(most, typeof weight === "number" ? Math.abs(weight - 1) : Infinity), 0),
    [table],
  );
  if (table.numRows === 0) return <Empty>No targets.</Empty>;
  if (farthest > FLAT) return <Points {...props} />;
  const of = total(table, "total");
  return (
    <p class="note">
      All importance weights are 1{farthest > 0 && ` (within ${short(FLAT)})`}
      {table.numRows < of && `, as far as ${short(table.numRows)} of ${short(of)} targets show`}: the policy was the same at the start
      of this update as at the start of its batch, so no target was clipped. Click a row below to open its tokens.
    </p>
  );
}

const TALL = 250;
const EDGE = { left: 46, right: 8, top: 22, bottom: 42 };
const RATIOS = [1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000, 1e4, 1e6];

/** Round importance weights to mark on a logarithmic axis: 1, and a few ratios with their inverses. */
function weightTicks(reach: number): number[] {
  const inside = RATIOS.filter((ratio) => Math.log(ratio) <= reach * 1.001);
  const kept: number[] = [];
  for (const ratio of inside.reverse()) {
    const last = kept.at(-1);
    const isApart = last === undefined || Math.log(last / ratio) > reach / 4;
    if (isApart && Math.log(ratio) > reach / 4) kept.push(ratio);
  }
  return [1, ...kept, ...kept.map((ratio) => 1 / ratio)];
}

/** Round log-probabilities between `low` and 0, to mark on an axis. */
function logprobTicks(low: number): number[] {
  const power = 10 ** Math.floor(Math.log10(-low / 4));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => -low / one <= 6) ?? power * 10;
  return Array.from({ length: Math.floor(-low / step + 1e-9) + 1 }, (_unused, at) => -at * step);
}

function Points({ table, rows, chosen, onOpen }: ScatterProps & { table: Table }): JSX.Element {
  const theme = useTheme();
  const [ref, size] = useSize();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [near, setNear] = useState<number | null>(null);
  const points = useMemo(() => rowsOf(table), [table]);
  const box = useMemo(() => {
    const xs = points.map((point) => Number(point.logprob)).filter(Number.isFinite);
    const ys = points.map((point) => Math.abs(Math.log(Number(point.importance_weight)))).filter(Number.isFinite);
    return { low: xs.reduce((a, b) => Math.min(a, b), -0.1), reach: Math.max(0.02, ys.reduce((a, b) => Math.max(a, b), 0)) };
  }, [points]);
  const [inner, high] = [size.width - EDGE.left - EDGE.right, TALL - EDGE.top - EDGE.bottom];
  const x = (logprob: number): number => EDGE.left + (1 - logprob / box.low) * inner;
  const y = (weight: number): number => EDGE.top + high / 2 - (Math.log(weight) / box.reach) * (high / 2);
  useLayoutEffect(() => {
    if (canvas.current === null || size.width === 0) return;
    const context = surface(canvas.current, size.width, TALL);
    const [line, muted, ink] = [cssVariable("--line"), cssVariable("--muted"), cssVariable("--ink")];
    const [blue, orange, , pink] = LINES[theme];
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = muted;
    context.textBaseline = "top";
    context.fillText("importance weight", 0, 2);
    context.textAlign = "right";
    context.fillText("log-probability in this update, nats", size.width - EDGE.right, TALL - 16);
    for (const at of weightTicks(box.reach)) {
      context.fillStyle = line;
      context.fillRect(EDGE.left, Math.round(y(at)), inner, at === 1 ? 1.5 : 1);
      context.fillStyle = muted;
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(short(Number(at.toPrecision(3))), EDGE.left - 6, y(at));
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const at of logprobTicks(box.low)) {
      context.fillText(at === 0 ? "0" : short(Number(at.toPrecision(3))), Math.min(x(at), size.width - 10), TALL - EDGE.bottom + 8);
    }
    const isFew = points.length < 3000;
    points.forEach((point, at) => {
      const [px, py] = [x(Number(point.logprob)), y(Number(point.importance_weight))];
      context.globalAlpha = chosen !== null && point.row !== chosen ? 0.12 : isFew ? 0.75 : 0.4;
      if (point.rejected === true) cross(context, px, py, pink!);
      else if (point.clipped === true) triangle(context, px, py, orange!);
      else {
        context.fillStyle = blue!;
        context.beginPath();
        context.arc(px, py, isFew ? 2.5 : 1.75, 0, 7);
        context.fill();
      }
      context.globalAlpha = 1;
      if (at === near) {
        context.strokeStyle = ink;
        context.lineWidth = 1.5;
        context.beginPath();
        context.arc(px, py, 6, 0, 7);
        context.stroke();
      }
    });
  }, [points, size.width, theme, near, chosen]);
  const nearest_ = (event: MouseEvent): number | null => {
    const place = (event.currentTarget as Element).getBoundingClientRect();
    const [mx, my] = [event.clientX - place.left, event.clientY - place.top];
    let [best, distance] = [-1, 144];
    points.forEach((point, at) => {
      const far = (x(Number(point.logprob)) - mx) ** 2 + (y(Number(point.importance_weight)) - my) ** 2;
      if (far < distance) [best, distance] = [at, far];
    });
    return best < 0 ? null : best;
  };
  const shown = near === null ? null : points[near];
  const row = shown === null || shown === undefined ? null : rows[Number(shown.row)];
  const [blue, orange, , pink] = LINES[theme];
  return (
    <>
      <div class="scatter-box" ref={ref}>
        <canvas
          ref={canvas}
          role="img"
          aria-label={`${count(points.length, "target")}: importance weight against log-probability. The table below ranks the rows.`}
          onMouseMove={(event) => setNear(nearest_(event))}
          onMouseLeave={() => setNear(null)}
          onClick={() => shown !== null && shown !== undefined && onOpen(Number(shown.row), `r${shown.position}`)}
        />
      </div>
      <p class="note keys-line">
        <svg width="10" height="10" aria-hidden="true"><circle cx="5" cy="5" r="3" fill={blue} /></svg> trained{" "}
        <svg width="10" height="10" aria-hidden="true"><path d="M5 1 9 9H1z" fill={orange} /></svg> clipped{" "}
        <svg width="10" height="10" aria-hidden="true"><path d="M2 2l6 6M8 2l-6 6" stroke={pink} stroke-width="1.5" /></svg> rejected
        <span class="read">
          {row !== null && row !== undefined && shown !== null && shown !== undefined ? (
            <>
              {plain(String(row.trajectory_id), 60)}, step {String(row.step_index)}, response token {short(Number(shown.position))}: log-probability{" "}
              <Num value={Number(shown.logprob)} />, weight <Num value={Number(shown.importance_weight)} />
            </>
          ) : (
            `${points.length < total(table, "total") ? `${short(points.length)} of ${short(total(table, "total"))} targets, evenly spaced; ` : ""}click a point to open its token`
          )}
        </span>
      </p>
    </>
  );
}

function triangle(context: CanvasRenderingContext2D, x: number, y: number, colour: string): void {
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(x, y - 4);
  context.lineTo(x + 4, y + 3);
  context.lineTo(x - 4, y + 3);
  context.fill();
}

function cross(context: CanvasRenderingContext2D, x: number, y: number, colour: string): void {
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x - 3, y - 3);
  context.lineTo(x + 3, y + 3);
  context.moveTo(x + 3, y - 3);
  context.lineTo(x - 3, y + 3);
  context.stroke();
}
