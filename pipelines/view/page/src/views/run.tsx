/** View 1: the metrics of runs; a click on an update opens its rows. */

import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { changed, go, here } from "../address";
import { type Metrics, metrics, type Run } from "../answers";
import { LINES } from "../colours";
import { useKeys } from "../keys";
import { cssVariable, Empty, Failure, Go, Num, Text, useAnswer, useTheme, Waiting } from "../parts";
import { useSession } from "../session";
import { count, plain, short } from "../text";

const HEIGHT = 164;
const MOST = 8;
// The metrics shown first, in this order; other metrics follow by name.
const FIRST = [/^(eval\/|.*\beval)/, /^reward|avg_score|avg_raw_reward/, /pass_at|pass@/, /^num_trained_groups$/, /^loss$|policy_loss/, /kl\b/, /entropy/, /clip_?(ratio|frac)/, /grad_norm/, /effective_share|abs_diff_mean/, /stale/, /clip|ratio|mismatch|diff/, /advantage/];

/** The name and unit of a metric, with its description as a tooltip. */
export function MetricName({ name, about }: { name: string; about: Metrics["about"] }): JSX.Element {
  const known = about[name];
  return (
    <span class="metric-name" title={known?.meaning.replaceAll("`", "")}>
      <Text value={plain(name, 80)} />
      {known !== undefined && known.unit !== "1" && !name.includes(known.unit) && <small>, {known.unit}</small>}
    </span>
  );
}

interface Loaded {
  run: Run;
  metrics: Metrics;
}

export function RunView(): JSX.Element {
  const { sources, place, run } = useSession();
  const shown = shownRuns(sources.runs, place.runs, run);
  const key = JSON.stringify([shown.map((one) => one.id), sources.stamp]);
  const answer = useAnswer(key, () =>
    Promise.all(shown.map(async (one) => ({ run: one, metrics: await metrics(one.id) }))), "runs");
  const smooth = Number(place.smooth ?? 0);
  const box = useRef<HTMLInputElement>(null);
  useKeys("Run", [
    { key: "f", does: "choose metrics by name", run: () => box.current?.focus() },
    { key: "s", does: "smooth more", run: () => setSmooth(Math.min(0.95, smooth + 0.1)) },
    { key: "S", does: "smooth less", run: () => setSmooth(Math.max(0, smooth - 0.1)) },
  ]);
  if (sources.runs.length === 0) {
    return (
      <section class="view" aria-labelledby="title">
        <h1 id="title">Run</h1>
        <Empty>
          No run is open. <code>rollouts view RUN</code> shows the metrics of a training run.
        </Empty>
      </section>
    );
  }
  return (
    <section class="view" aria-labelledby="title">
      <header class="tools">
        <h1 id="title">{shown.length === 1 ? <Text value={shown[0]!.name} /> : `${shown.length} runs`}</h1>
        {sources.runs.length > 1 && (
          <fieldset>
            <legend class="hidden">Runs</legend>
            {sources.runs.map((one) => (
              <label key={one.id}>
                <input type="checkbox" checked={shown.includes(one)} onChange={() => toggleRun(shown, one)} />
                <Text value={one.name} />
              </label>
            ))}
          </fieldset>
        )}
        <label>
          metrics{" "}
          <input
            ref={box}
            type="search"
            value={place.keys ?? ""}
            placeholder="by name: reward kl"
            onInput={(event) => go({ keys: event.currentTarget.value || undefined }, { replace: true })}
          />
        </label>
        <label>
          smoothing{" "}
          <input
            type="range"
            min="0"
            max="0.95"
            step="0.05"
            value={smooth}
            onInput={(event) => setSmooth(Number(event.currentTarget.value))}
          />
          <output>{smooth === 0 ? "off" : short(smooth)}</output>
        </label>
      </header>
      {answer.state === "refused" ? (
        <Failure error={answer.error} />
      ) : answer.value === undefined ? (
        <Waiting />
      ) : (
        <Charts loaded={answer.value} smooth={smooth} wanted={place.keys ?? ""} />
      )}
    </section>
  );
}

function setSmooth(value: number): void {
  go({ smooth: value === 0 ? undefined : String(Number(value.toFixed(2))) }, { replace: true });
}

function shownRuns(runs: Run[], named: string | undefined, chosen: Run | null): Run[] {
  if (named === undefined) return runs.length <= 6 ? runs : chosen === null ? [] : [chosen];
  const ids = JSON.parse(named) as string[];
  const found = runs.filter((run) => ids.includes(run.id));
  return found.length > 0 ? found : runs.slice(0, 1);
}

function toggleRun(shown: Run[], run: Run): void {
  const next = shown.includes(run) ? shown.filter((one) => one !== run) : [...shown, run];
  if (next.length > 0) go({ runs: JSON.stringify(next.map((one) => one.id)) }, { replace: true });
}

function rankOf(key: string): number {
  const at = FIRST.findIndex((pattern) => pattern.test(key.toLowerCase()));
  return at < 0 ? FIRST.length : at;
}

function Charts({ loaded, smooth, wanted }: { loaded: Loaded[]; smooth: number; wanted: string }): JSX.Element {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const all = useMemo(() => {
    const keys = new Set<string>();
    for (const { metrics: one } of loaded) {
      for (const [key, values] of Object.entries(one.metrics)) if (values.some((value) => value !== null)) keys.add(key);
    }
    keys.delete("global_step");
    return [...keys].sort((a, b) => rankOf(a) - rankOf(b) || (a < b ? -1 : 1));
  }, [loaded]);
  const matches = all.filter((key) => words.length === 0 || words.some((word) => key.toLowerCase().includes(word)));
  const isConstant = (key: string): boolean =>
    loaded.every(({ metrics: one }) => new Set((one.metrics[key] ?? []).filter((value) => value !== null)).size <= 1);
  const updates = Math.max(0, ...loaded.map(({ metrics: one }) => one.updates.length));
  if (Math.max(0, ...loaded.map(({ metrics: one }) => one.global_step.length)) < 2) return <OneUpdate keys={matches} loaded={loaded} />;
  const moving = words.length > 0 ? matches : matches.filter((key) => !isConstant(key));
  const still = words.length > 0 ? [] : matches.filter(isConstant);
  return (
    <>
      <RunNames loaded={loaded} />
      {matches.length === 0 && <Empty>No metric has a matching name.</Empty>}
      <p class="note">
        {count(updates, "update")}
        {loaded.some(({ metrics: one }) => one.global_step.includes(0)) && "; 0 is the evaluation before training"}. Click a point to
        open the rows of its update.
      </p>
      <Sources loaded={loaded} />
      <div class="plots">
        {moving.map((key) => (
          <Chart key={key} name={key} loaded={loaded} smooth={smooth} />
        ))}
      </div>
      {still.length > 0 && (
        <details>
          <summary>{still.length === 1 ? "1 metric that does not change" : `${still.length} metrics that do not change`}</summary>
          <LastValues keys={still} loaded={loaded} label="Metrics that do not change" />
        </details>
      )}
      <details>
        <summary>Last values as a table</summary>
        <LastValues keys={matches} loaded={loaded} label="Last values" />
      </details>
    </>
  );
}

/** The rewards' source and the number of groups with a gradient, which help explain a flat reward. */
function Sources({ loaded }: { loaded: Loaded[] }): JSX.Element {
  return (
    <>
      {loaded.map(({ run, metrics: one }) => {
        const [trained, all] = [one.metrics.num_trained_groups ?? [], one.metrics.num_groups ?? []];
        const known = trained.map((value, at) => [value, all[at]]).filter(([a, b]) => typeof a === "number" && typeof b === "number") as [number, number][];
        const last = known.at(-1);
        const sum = (place: 0 | 1): number => known.reduce((total, pair) => total + pair[place], 0);
        const hasReward = Object.keys(one.metrics).some((key) => /reward|return_mean|pass_at/.test(key) && !key.startsWith("eval"));
        const isFixed = run.samples === false && hasReward;
        if (!isFixed && last === undefined) return null;
        return (
          <p class="note" key={run.id}>
            {loaded.length > 1 && <><Text value={run.name} />: </>}
            {isFixed && "Rewards come from the dataset, because this run did not sample. They differ between updates because batches contain different tasks. "}
            {last !== undefined && `Groups with a gradient: ${short(last[0])} of ${short(last[1])} in the last update, ${short(sum(0))} of ${short(sum(1))} in total.`}
          </p>
        );
      })}
    </>
  );
}

/** A run with one point is shown as a table, not as a chart. */
function OneUpdate({ keys, loaded }: { keys: string[]; loaded: Loaded[] }): JSX.Element {
  const first = loaded.find(({ metrics: one }) => one.updates.length > 0);
  const step = first?.metrics.updates[0];
  if (first === undefined || step === undefined) {
    const isEvaluated = loaded.some(({ metrics: one }) => one.global_step.length > 0);
    return (
      <>
        <Empty>No update has been logged yet.</Empty>
        {isEvaluated && <LastValues keys={keys} loaded={loaded} label="Last values" />}
      </>
    );
  }
  return (
    <>
      <p class="note">
        One update so far. <Go to={{ view: "update", run: first.run.id, update: String(step) }}>Open its rows</Go>
      </p>
      <Sources loaded={loaded} />
      <LastValues keys={keys.slice(0, MOST)} loaded={loaded} label="Last values" isExplained />
      {keys.length > MOST && (
        <details>
          <summary>{count(keys.length - MOST, "more metric")}</summary>
          <LastValues keys={keys.slice(MOST)} loaded={loaded} label="More values" isExplained />
        </details>
      )}
    </>
  );
}

function RunNames({ loaded }: { loaded: Loaded[] }): JSX.Element | null {
  const theme = useTheme();
  if (loaded.length < 2) return null;
  return (
    <ul class="line-names" aria-label="Runs">
      {loaded.map(({ run }, at) => (
        <li key={run.id}>
          <span class="swatch" style={{ background: LINES[theme][at % LINES[theme].length] }} />
          <Text value={run.name} />
        </li>
      ))}
    </ul>
  );
}

interface LastValuesProps {
  keys: string[];
  loaded: Loaded[];
  label: string;
  isExplained?: boolean;
}

function LastValues({ keys, loaded, label, isExplained = false }: LastValuesProps): JSX.Element {
  return (
    <table class="plain" aria-label={label}>
      <thead>
        <tr>
          <th scope="col">metric</th>
          {loaded.map(({ run }) => (
            <th key={run.id} scope="col" class="numeric"><Text value={run.name} /></th>
          ))}
          {isExplained && <th scope="col">meaning</th>}
        </tr>
      </thead>
      <tbody>
        {keys.map((key) => (
          <tr key={key} data-row={key}>
            <th scope="row"><MetricName name={key} about={aboutOf(key, loaded)} /></th>
            {loaded.map(({ run, metrics: one }) => (
              <td key={run.id} class="numeric">
                <Num value={(one.metrics[key] ?? []).findLast((value) => value !== null) ?? null} name={key} />
              </td>
            ))}
            {isExplained && <td class="meaning">{aboutOf(key, loaded)[key]?.meaning.replaceAll("`", "")}</td>}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** Exponential moving average with bias correction; gaps stay gaps. */
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function Chart({ name, loaded, smooth }: { name: string; loaded: Loaded[]; smooth: number }): JSX.Element {
  const ref = useRef<HTMLDivElement>(null);
  const theme = useTheme();
  const [index, setIndex] = useState<number | null>(null);
  const steps = useMemo(
    () => [...new Set(loaded.flatMap(({ metrics: one }) => one.global_step))].sort((a, b) => a - b),
    [loaded],
  );
  const lines = useMemo(
    () =>
      loaded.map(({ metrics: one }) => {
        const at = new Map(one.global_step.map((step, place) => [step, place]));
        const values = one.metrics[name] ?? [];
        return steps.map((step) => {
          const place = at.get(step);
          return place === undefined ? null : (values[place] ?? null);
        });
      }),
    [loaded, name, steps],
  );
  useEffect(() => {
    const element = ref.current;
    if (element === null) return;
    const colours = LINES[theme];
    const series: uPlot.Series[] = [{}];
    const data: (number | null)[][] = [];
    lines.forEach((line, at) => {
      const stroke = colours[at % colours.length]!;
      const few = steps.length < 40;
      if (smooth > 0) {
        series.push({ stroke: `${stroke}55`, width: 1, points: { show: false }, spanGaps: true });
        data.push(line);
      }
      const points = { show: few, size: 5, fill: stroke };
      series.push({ stroke, width: 1.75, points, spanGaps: true, ...(at % 2 === 1 ? { dash: [6, 3] } : {}) });
      data.push(smooth > 0 ? smoothed(line, smooth) : line);
    });
    const axis = {
      stroke: cssVariable("--muted"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: cssVariable("--line"), width: 1 },
      ticks: { stroke: cssVariable("--line"), width: 1, size: 4 },
    };
    const labelled = { labelSize: 14, labelGap: 0, labelFont: "11px system-ui, sans-serif" };
    const whole = (_plot: uPlot, ticks: number[]): string[] => ticks.map((tick) => (Number.isInteger(tick) ? short(tick) : ""));
    const plot = new uPlot(
      {
        width: Math.max(120, element.clientWidth),
        height: HEIGHT,
        padding: [8, null, null, null],
        legend: { show: false },
        scales: { x: { time: false }, y: { range: rangeOf } },
        cursor: { points: { size: 7 }, y: false, drag: { x: false, y: false } },
        axes: [
          { ...axis, ...labelled, label: "update", size: 24, space: 40, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000], values: whole },
          { ...axis, size: (_plot, labels) => Math.max(60, 18 + 6.5 * Math.max(0, ...(labels ?? []).map((label) => label.length))), space: 28, values: (_plot, ticks) => ticksAlike(ticks) },
        ],
        series,
        hooks: { setCursor: [(self: uPlot) => setIndex(self.cursor.idx ?? null)] },
      },
      [steps, ...data] as uPlot.AlignedData,
      element,
    );
    const observer = new ResizeObserver(() => plot.setSize({ width: Math.max(120, element.clientWidth), height: HEIGHT }));
    observer.observe(element);
    const onClick = (): void => {
      const at = plot.cursor.idx;
      if (at !== null && at !== undefined && steps[at] !== undefined) openUpdate(steps[at], loaded, name);
    };
    plot.over.addEventListener("click", onClick);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [lines, steps, smooth, theme]);
  const at = index ?? steps.length - 1;
  return (
    <figure class="plot" data-metric={name}>
      <figcaption>
        <MetricName name={name} about={aboutOf(name, loaded)} />
        <span class="read">
          <span class="step">{index === null ? "last" : `update ${short(steps[at] ?? 0)}`}</span>
          {lines.map((line, run) => (
            <span key={run}>
              {lines.length > 1 && <span class="swatch" style={{ background: LINES[theme][run % 6] }} />}
              <Num value={index === null ? (line.findLast((value) => value !== null) ?? null) : (line[at] ?? null)} name={name} />
            </span>
          ))}
        </span>
      </figcaption>
      <div
        ref={ref}
        role="img"
        aria-label={`${name} over updates; the last values are in the table below`}
      />
    </figure>
  );
}

/** The range of the axis. A range of a few rounding errors would have more ticks than an array can hold. */
export function rangeOf(_plot: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  const [from, to] = [low ?? 0, high ?? 1];
  const size = Math.max(Math.abs(from), Math.abs(to));
  const room = (to - from) * 0.1;
  if (to - from > size * 1e-6) return [from - room, to + room];
  const least = size === 0 ? 1 : size * 0.1;
  return [from - least, to + least];
}

/** Tick labels with enough decimals to show the distance between ticks. */
function ticksAlike(ticks: number[]): string[] {
  const step = ticks.length > 1 ? Math.abs(ticks[1]! - ticks[0]!) : 0;
  const largest = ticks.reduce((most, tick) => Math.max(most, Math.abs(tick)), 0);
  if (largest > 0 && largest < 1e-3) {
    let digits = 0;
    while (digits < 7 && ticks.some((tick) => Math.abs(tick - Number(tick.toExponential(digits))) > step / 100)) digits += 1;
    return ticks.map((tick) => (tick === 0 ? "0" : tick.toExponential(digits).replaceAll("-", "−")));
  }
  if (step < 1e-6 || largest >= 1e6) return ticks.map(short);
  let decimals = 0;
  while (decimals < 7 && Math.abs(step - Number(step.toFixed(decimals))) > step / 100) decimals += 1;
  const options = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return ticks.map((tick) => (tick === 0 ? "0" : tick.toLocaleString("en-US", options).replace("-", "−")));
}

/** Metrics have the same documentation in all runs, so the first match is enough. */
function aboutOf(name: string, loaded: Loaded[]): Metrics["about"] {
  return (loaded.find(({ metrics: one }) => name in one.about) ?? loaded[0])?.metrics.about ?? {};
}

function openUpdate(step: number, loaded: Loaded[], name: string): void {
  const place = here();
  const fits = loaded.filter(({ metrics: one }) => {
    const at = one.global_step.indexOf(step);
    return one.updates.includes(step) && one.metrics[name]?.[at] !== null;
  });
  const run = fits.find((one) => one.run.id === place.run) ?? fits[0];
  if (run !== undefined) go(changed(place, { view: "update", run: run.run.id, update: String(step) }));
}
