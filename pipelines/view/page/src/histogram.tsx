/** A histogram with a brush: dragging or clicking adds a condition to the filter. */

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import type { Histogram as Counts } from "./answers";
import { Text } from "./parts";
import { isCut } from "./sql";
import { exact, plain, short } from "./text";

const HEIGHT = 56;
const WIDTH = 200;

interface Props {
  column: string;
  counts: Counts;
  onRange: (low: number, high: number, isLast: boolean) => void;
  onValue: (value: string | boolean | null) => void;
  onClear: (() => void) | null;
}

export function Histogram(props: Props): JSX.Element {
  const { column, counts } = props;
  return (
    <figure class="histogram" data-histogram={column}>
      <figcaption>
        <span>{plain(column, 40)}</span>
        {props.onClear !== null && (
          <button type="button" onClick={props.onClear} aria-label={`Remove the range of ${column}`}>
            ✕
          </button>
        )}
      </figcaption>
      {"edges" in counts ? <Numbers {...props} counts={counts} /> : <Values {...props} counts={counts} />}
      {"edges" in counts && counts.not_finite > 0 && (
        <p class="none">
          NaN or infinite: <span data-value={counts.not_finite}>{short(counts.not_finite)}</span>
        </p>
      )}
      {counts.nulls > 0 && (
        <button type="button" class="nulls" onClick={() => props.onValue(null)} data-value={counts.nulls}>
          null: {short(counts.nulls)}
        </button>
      )}
    </figure>
  );
}

function Numbers(props: Props & { counts: Extract<Counts, { edges: number[] }> }): JSX.Element {
  const { edges, counts, counts_all: all } = props.counts;
  const [drag, setDrag] = useState<[number, number] | null>(null);
  const bins = counts.length;
  if (bins === 0) return <p class="none">{props.counts.nulls > 0 ? "every value is null" : "no trajectory matches"}</p>;
  const most = Math.max(1, ...all);
  const wide = WIDTH / bins;
  const high = (number: number): number => (number === 0 ? 0 : Math.max(1.5, (number / most) * HEIGHT));
  const binAt = (event: PointerEvent): number => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const share = (event.clientX - box.left) / (box.width || 1);
    return Math.max(0, Math.min(bins - 1, Math.floor(share * bins)));
  };
  const [from, to] = drag === null ? [-1, -2] : [Math.min(...drag), Math.max(...drag)];
  const range = drag === null ? [edges[0]!, edges[bins]!] : [edges[from]!, edges[to + 1]!];
  return (
    <>
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`Histogram of ${props.column}: ${short(edges[0]!)} to ${short(edges[bins]!)}; drag to filter`}
        onPointerDown={(event) => {
          (event.currentTarget as Element).setPointerCapture(event.pointerId);
          setDrag([binAt(event), binAt(event)]);
        }}
        onPointerMove={(event) => drag !== null && setDrag([drag[0], binAt(event)])}
        onPointerUp={() => {
          setDrag(null);
          if (drag !== null) props.onRange(edges[from]!, edges[to + 1]!, to === bins - 1);
        }}
      >
        {drag !== null && <rect class="brush" x={from * wide} y={0} width={(to - from + 1) * wide} height={HEIGHT} />}
        {all.map((number, bin) => (
          <g key={bin}>
            <title>
              {`${short(edges[bin]!)} to ${short(edges[bin + 1]!)}: ${short(counts[bin]!)} of ${short(number)} trajectories`}
            </title>
            <rect class="hover" x={bin * wide} width={wide} y={0} height={HEIGHT} />
            <rect class="all" x={bin * wide} width={Math.max(wide - 0.6, 0.4)} y={HEIGHT - high(number)} height={high(number)} />
            <rect
              class="found"
              data-count={counts[bin]}
              x={bin * wide}
              width={Math.max(wide - 0.6, 0.4)}
              y={HEIGHT - high(counts[bin]!)}
              height={high(counts[bin]!)}
            />
          </g>
        ))}
      </svg>
      <div class="range">
        <span data-value={exact(range[0]!)}>{short(range[0]!)}</span>
        <span class="most" title="Trajectories in the fullest bin">tallest bar: {short(most)}</span>
        <span data-value={exact(range[1]!)}>{short(range[1]!)}</span>
      </div>
    </>
  );
}

/** The tooltip shows the end of a truncated value, because many values share a prefix. */
function titleOf(value: unknown, counted: string): string {
  return typeof value === "string" && isCut(value) ? `${counted}: ${plain(value, 1000)}` : counted;
}

function Values(props: Props & { counts: Extract<Counts, { values: unknown[] }> }): JSX.Element {
  const { values, counts, counts_all: all, others } = props.counts;
  const most = Math.max(1, ...all);
  return (
    <ul class="values">
      {values.map((value, at) => (
        <li key={at}>
          <button
            type="button"
            disabled={typeof value === "string" && isCut(value)}
            onClick={() => props.onValue(value)}
            title={titleOf(value, `${short(counts[at]!)} of ${short(all[at]!)}`)}
          >
            <span class="filled all" style={{ width: `${(all[at]! / most) * 100}%` }} />
            <span class="filled found" style={{ width: `${(counts[at]! / most) * 100}%` }} />
            <span class="value">{typeof value === "string" ? <Text value={plain(value, 60)} /> : String(value)}</span>
            <span class="number" data-value={counts[at]}>
              {short(counts[at]!)}
            </span>
          </button>
        </li>
      ))}
      {others > 0 && <li class="none">other values: {short(others)}</li>}
    </ul>
  );
}
