/** View 6: every token of a row's prompt and response, coloured by any column. */

import type { Table } from "apache-arrow";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { go, togglePin } from "../address";
import { picturesOf, type Span, tokens, total, valueOf, verdicts } from "../answers";
import { css, inkOn, type Scale } from "../colours";
import { drawFault, faultsAt, GUTTER, marginNotes, spanOf, Verdicts } from "../faults";
import { NoTrajectory } from "../first_trajectory";
import { useKeys } from "../keys";
import { Awaited, Cell, cssVariable, Legend, Num, surface, Text, useAnswer, useSize, useTheme } from "../parts";
import { captionOf, PictureDialog, TokenPicture } from "../pictures";
import { RecordedIn } from "../recorded";
import { useSession } from "../session";
import { count, exact, pieces, short, tokenPieces } from "../text";
import { rankable, ranked, type TokenColumn, tokenColumns } from "../token_columns";
import { hex, type Layout, layOut, LINE, PICTURE_LINES, pictureAt, type PictureSpan, tokenAt, type TokenText, tokenTexts, wholeCharacter } from "../token_layout";

export const FONT = '13px ui-monospace, "SF Mono", "Cascadia Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace';
const MAP = 72;
const MARGIN = 12;
const NO_SPANS: Span[] = [];

export function TokensView(): JSX.Element {
  const { dataset, place, joined } = useSession();
  const { trajectory } = place;
  const step = Number(place.step ?? 0);
  const key = dataset === null || trajectory === undefined ? null : JSON.stringify([dataset.id, trajectory, step, joined]);
  const answer = useAnswer(key, () => tokens(dataset!.id, trajectory!, step, joined));
  if (dataset === null || trajectory === undefined) {
    return (
      <section class="view" aria-labelledby="title">
        <h1 id="title">Tokens</h1>
        <NoTrajectory />
      </section>
    );
  }
  return (
    <section class="view tokens-view" aria-labelledby="title">
      <Awaited answer={answer}>
        {(table) => <Tokens key={key} table={table} trajectory={trajectory} step={step} />}
      </Awaited>
    </section>
  );
}

interface Shown {
  table: Table;
  trajectory: string;
  step: number;
}

function positionOf(at: string | undefined, prompt: number, length: number): number | null {
  if (at === undefined) return null;
  const position = at.startsWith("r") ? prompt + Number(at.slice(1)) : Number(at);
  return Number.isInteger(position) && position >= 0 && position < length ? position : null;
}

const FIRST_COLOURS = ["advantage", "difference", "rollout_logprob"];

function varies({ values }: TokenColumn): boolean {
  const first = values.find((value) => !Number.isNaN(value));
  return values.some((value) => !Number.isNaN(value) && value !== first);
}

function Tokens({ table, trajectory, step }: Shown): JSX.Element {
  const { dataset, place, joined, run } = useSession();
  const theme = useTheme();
  const prompt = total(table, "prompt_tokens");
  const steps = total(table, "num_steps");
  const reward = total(table, "return");
  const length = table.numRows;
  const columns = useMemo(() => tokenColumns(table), [table]);
  const pictures = useMemo(() => picturesOf(table), [table]);
  const [opened, setOpened] = useState<PictureSpan | null>(null);
  // With most estimators, all tokens of a row have the same advantage, so its colour shows nothing.
  const fallback = useMemo(() => {
    const named = FIRST_COLOURS.map((name) => columns.find((one) => one.name === name)).filter((one) => one !== undefined);
    return named.find(varies) ?? named[0] ?? columns[0] ?? null;
  }, [columns]);
  const column = columns.find((one) => one.name === place.color) ?? fallback;
  const scale = useMemo(() => column?.scale(theme) ?? null, [column, theme]);
  // Counted now but sorted on demand: long rows have tens of thousands of tokens.
  const numWorst = useMemo(() => (column === null ? 0 : rankable(column)), [column]);
  const order = useRef<{ column: TokenColumn; worst: Int32Array } | null>(null);
  const cursor = positionOf(place.at, prompt, length);
  const [hovered, setHovered] = useState<number | null>(null);
  // Stored with its column, because an effect that resets the rank could run after the next key press.
  const [ranking, setRanking] = useState<{ column: TokenColumn; rank: number } | null>(null);
  const rank = ranking?.column === column ? (ranking?.rank ?? null) : null;
  const layout = useRef<Layout | null>(null);
  const audited = dataset !== null && dataset.num_verdicts + dataset.num_findings > 0;
  const audit = useAnswer(audited ? JSON.stringify([dataset.id, trajectory, step]) : null, () => verdicts(dataset!.id, trajectory, step));
  const spans = useMemo(() => (audit.value === undefined ? NO_SPANS : [...audit.value.spans, ...audit.value.findings.map(spanOf)]), [audit.value]);
  const faults = useMemo(() => spans.filter((span) => span.is_fault && span.start < span.end), [spans]);

  const moveTo = (at: number): void => {
    if (length > 0) go({ at: String(Math.max(0, Math.min(length - 1, at))) }, { replace: true });
  };
  const move = (by: 1 | -1): void => {
    if (cursor === null) return moveTo(prompt < length ? prompt : 0);
    const here = pictureAt(pictures, cursor);
    const next = by < 0 ? (here?.start ?? cursor) - 1 : here === undefined ? cursor + 1 : here.start + here.length;
    moveTo(pictureAt(pictures, next)?.start ?? next);
  };
  const moveLine = (by: number): void => {
    const lines = layout.current;
    if (lines === null || cursor === null) return move(1);
    const lower = by > 0 && pictureAt(pictures, cursor) !== undefined ? PICTURE_LINES - 1 : 0;
    const next = tokenAt(lines, lines.x[cursor]!, lines.line[cursor]! + lower + by);
    if (next >= 0) moveTo(next);
  };
  const goWorst = (by: number): void => {
    if (column === null || numWorst === 0) return;
    if (order.current?.column !== column) order.current = { column, worst: ranked(column) };
    const next = rank === null ? 0 : Math.max(0, Math.min(numWorst - 1, rank + by));
    setRanking({ column, rank: next });
    moveTo(order.current.worst[next]!);
  };
  const goFault = (by: number): void => {
    if (faults.length === 0) return;
    const places = [...new Set(faults.flatMap(({ start, swap_position: swap }) => (swap === null ? [start] : [start, swap])))].sort((a, b) => a - b);
    const here = cursor === null ? -1 : cursor - prompt;
    const next = by > 0 ? (places.find((one) => one > here) ?? places[0]!) : (places.findLast((one) => one < here) ?? places.at(-1)!);
    moveTo(prompt + next);
  };
  const goStep = (by: number): void => {
    const next = step + by;
    if (next >= 0 && next < steps) go({ step: String(next), at: undefined });
  };
  const nextColumn = (by: number): void => {
    const at = columns.findIndex((one) => one === column);
    const next = columns[(at + by + columns.length) % columns.length];
    if (next !== undefined) go({ color: next.name }, { replace: true });
  };
  useKeys("Tokens", [
    { key: "ArrowRight", does: "next token", run: () => move(1) },
    { key: "ArrowLeft", does: "previous token", run: () => move(-1) },
    { key: "ArrowDown", does: "line below", run: () => moveLine(1) },
    { key: "ArrowUp", does: "line above", run: () => moveLine(-1) },
    { key: "PageDown", does: "20 lines down", run: () => moveLine(20) },
    { key: "PageUp", does: "20 lines up", run: () => moveLine(-20) },
    { key: "Home", does: "first token", run: () => moveTo(0) },
    { key: "End", does: "last token", run: () => moveTo(length - 1) },
    { key: "r", does: "first token of the response", run: () => moveTo(prompt) },
    { key: "w", does: "next worst token by the colour's column", run: () => goWorst(1) },
    { key: "W", does: "previous token in that order", run: () => goWorst(-1) },
    ...(audited ? [{ key: "v", does: "next fault or swap that the audit found", run: () => goFault(1) }, { key: "V", does: "previous fault or swap", run: () => goFault(-1) }] : []),
    ...(pictures.length > 0 ? [{ key: "Enter", does: "open the picture at the cursor", run: () => setOpened(pictureAt(pictures, cursor) ?? null) }] : []),
    { key: "[", does: "previous step", run: () => goStep(-1) },
    { key: "]", does: "next step", run: () => goStep(1) },
    { key: "x", does: "colour by the next column", run: () => nextColumn(1) },
    { key: "X", does: "colour by the previous column", run: () => nextColumn(-1) },
    { key: "p", does: "pin or unpin the trajectory", run: () => togglePin(trajectory) },
  ]);
  const decoded = table.schema.metadata.get("decoded") !== "0";
  return (
    <>
      <header class="tools">
        <h1 id="title">
          <Text value={trajectory} />
          <small>
            return <Num value={Number.isNaN(reward) ? null : reward} name="return" />, {steps === 1 ? "one step" : `step ${short(step)} of 0–${short(steps - 1)}`}, <Num value={prompt} name="prompt_tokens" /> prompt and{" "}
            <Num value={length - prompt} name="response_tokens" /> response tokens
          </small>
        </h1>
        <div class="group" role="group" aria-label="Steps">
          <button type="button" disabled={step <= 0} onClick={() => goStep(-1)} title="Previous step ([)">
            ‹ step
          </button>
          <button type="button" disabled={step + 1 >= steps} onClick={() => goStep(1)} title="Next step (])">
            step ›
          </button>
        </div>
        <label>
          colour{" "}
          <select
            id="color"
            value={column?.name ?? ""}
            onChange={(event) => go({ color: event.currentTarget.value }, { replace: true })}
          >
            {columns.map((one) => (
              <option key={one.name} value={one.name} title={one.help}>
                {one.title}
              </option>
            ))}
          </select>
        </label>
        {column !== null && (
          <div class="group" role="group" aria-label="Worst tokens">
            <button type="button" disabled={numWorst === 0} onClick={() => goWorst(1)} title={`Next token, ${column.worst} first (w)`}>
              Next worst
            </button>
            <span class="hint" role="status">
              {rank === null
                ? `${count(numWorst, "token")}, ${column.worst} first`
                : `${short(rank + 1)} of ${short(numWorst)}, ${column.worst} first`}
            </span>
          </div>
        )}
      </header>
      {!decoded && <p class="note">Tokens are shown as ids because the dataset's tokenizer is not available.</p>}
      {run !== null && joined.update === undefined && (
        <p class="note">No update is selected. Select one above to see the values that it recorded.</p>
      )}
      {dataset !== null && <RecordedIn dataset={dataset} of={{ trajectory_id: trajectory, step_index: step }} what="this row" />}
      <div class="stage">
        <TokenCanvas
          table={table}
          name={`${trajectory} ${step}`}
          prompt={prompt}
          pictures={pictures}
          column={column}
          scale={scale}
          faults={faults}
          cursor={cursor}
          layoutRef={layout}
          onHover={setHovered}
          onChoose={moveTo}
          onOpen={setOpened}
        />
        <div class="beside">
          {scale !== null && column !== null && <Legend scale={scale} values={column.values} title={column.unit === "" ? column.title : `${column.title}, ${column.unit}`} />}
          {audited && <Awaited answer={audit}>{(found) => <Verdicts spans={found.spans} findings={found.findings} audited={dataset!.num_verdicts > 0} onOpen={(position) => moveTo(prompt + position)} />}</Awaited>}
          <Details table={table} faults={faults} picture={pictureAt(pictures, hovered ?? cursor)} at={hovered ?? cursor} prompt={prompt} columns={columns} isHovered={hovered !== null && hovered !== cursor} />
        </div>
      </div>
      {opened !== null && <PictureDialog span={opened} onClose={() => setOpened(null)} />}
    </>
  );
}

interface CanvasProps {
  table: Table;
  /** Id of the row, for tests that wait until it is drawn. */
  name: string;
  prompt: number;
  pictures: PictureSpan[];
  column: TokenColumn | null;
  scale: Scale | null;
  faults: Span[];
  cursor: number | null;
  layoutRef: { current: Layout | null };
  onHover: (at: number | null) => void;
  onChoose: (at: number) => void;
  onOpen: (picture: PictureSpan) => void;
}

function TokenCanvas(props: CanvasProps): JSX.Element {
  const { table, prompt, pictures, column, scale, faults, cursor } = props;
  const theme = useTheme();
  const [ref, size] = useSize();
  const canvas = useRef<HTMLCanvasElement>(null);
  const texts = useMemo(() => tokenTexts(table), [table]);
  const [trained, sampled] = useMemo(() => [flags(table, "trained"), flags(table, "sampled")], [table]);
  const gutter = faults.length === 0 ? 0 : Math.min(GUTTER, size.width / 3);
  const width = Math.max(0, size.width - 2 * MARGIN - gutter);
  const layout = useMemo(() => {
    if (width === 0) return null;
    const context = document.createElement("canvas").getContext("2d")!;
    context.font = FONT;
    return layOut(texts, pictures, prompt, width, context);
  }, [texts, pictures, width, prompt]);
  props.layoutRef.current = layout;
  const lines = layout === null ? 0 : layout.starts.length - 1;
  const notes = useMemo(() => {
    if (layout === null || gutter === 0) return null;
    const context = document.createElement("canvas").getContext("2d")!;
    context.font = FONT;
    return marginNotes(faults, layout, prompt, Math.floor((gutter - MARGIN) / context.measureText("m").width));
  }, [faults, layout, prompt, gutter]);
  const lowest = notes === null ? 0 : [...notes.keys()].reduce((most, line) => Math.max(most, line + 1), 0);
  const height = Math.max(lines, lowest) * LINE + 2 * MARGIN;
  const frame = useRef(0);
  const [hovered, setHovered] = useState<number | null>(null);
  const inks = useMemo(() => inksOf(column, scale), [column, scale]);

  const linesOf = (at: number): number => (pictureAt(pictures, at) === undefined ? 1 : PICTURE_LINES);
  const draw = (): void => {
    if (canvas.current === null || layout === null || ref.current === null) return;
    const top = ref.current.scrollTop;
    const context = surface(canvas.current, size.width, size.height);
    context.font = FONT;
    context.textBaseline = "middle";
    const look = {
      ink: cssVariable("--ink"), muted: cssVariable("--muted"), accent: cssVariable("--accent"),
      escape: cssVariable("--escape"), line: cssVariable("--line"),
    }; // prettier-ignore
    const first = Math.max(0, Math.floor((top - MARGIN) / LINE));
    const last = Math.min(lines, Math.ceil((top - MARGIN + size.height) / LINE) + 1);
    for (let line = first; line < last; line++) {
      const y = MARGIN + line * LINE - top;
      if (layout.line[prompt] === line && prompt > 0) {
        context.fillStyle = look.line;
        context.fillRect(MARGIN, y - 1, width, 1);
      }
      if (pictureAt(pictures, layout.starts[line]!) !== undefined) continue;
      for (let at = layout.starts[line]!; at < layout.starts[line + 1]!; at++) {
        drawToken(context, at, texts[at]!, layout, y, inks, look, sampled[at] === 1, trained[at] === 1);
      }
    }
    const bad = cssVariable("--bad");
    for (const span of faults) drawFault(context, span, layout, prompt, { left: MARGIN, top: MARGIN - top, first, last, colour: bad });
    for (const [line, note] of notes ?? []) {
      const y = MARGIN + line * LINE - top;
      if (y < -LINE || y > size.height) continue;
      context.fillStyle = note.isName ? bad : look.muted;
      context.fillText(note.text, 2 * MARGIN + width, y + LINE / 2 - 1);
    }
    for (const [at, colour, wide] of [[hovered, look.muted, 1], [cursor, look.accent, 2]] as const) {
      if (at === null || at >= layout.line.length) continue;
      context.strokeStyle = colour;
      context.lineWidth = wide;
      context.strokeRect(MARGIN + layout.x[at]! - 0.5, MARGIN + layout.line[at]! * LINE - top + 0.5, layout.width[at]! + 1, linesOf(at) * LINE - 3);
    }
    canvas.current.dataset.drawn = `${first} ${last}`;
  };
  const redraw = (): void => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(draw);
  };
  useLayoutEffect(() => {
    draw();
  }, [layout, inks, faults, notes, cursor, hovered, size.width, size.height, theme]);
  const isSeen = useRef(false);
  useLayoutEffect(() => {
    if (layout === null || ref.current === null || size.height === 0) return;
    const to = cursor ?? (isSeen.current ? null : prompt);
    if (to === null || to >= layout.line.length) return;
    const y = MARGIN + layout.line[to]! * LINE;
    const { scrollTop } = ref.current;
    if (!isSeen.current && cursor === null) ref.current.scrollTop = Math.max(0, y - 5 * LINE);
    else if (y < scrollTop + LINE) ref.current.scrollTop = y - (isSeen.current ? 2 * LINE : size.height / 3);
    else if (y > scrollTop + size.height - (linesOf(to) + 1) * LINE) {
      ref.current.scrollTop = y - size.height * (isSeen.current && y < scrollTop + size.height + 3 * LINE ? 0.9 : 0.4);
    }
    isSeen.current = true;
  }, [cursor, layout, size.height]);

  const under = (event: MouseEvent): number | null => {
    if (layout === null || ref.current === null) return null;
    const box = ref.current.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top + ref.current.scrollTop - MARGIN) / LINE);
    const at = tokenAt(layout, event.clientX - box.left - MARGIN, line);
    return at < 0 ? null : at;
  };
  const hover = (at: number | null): void => {
    if (at === hovered) return;
    setHovered(at);
    props.onHover(at);
  };
  return (
    <div class="canvas-box">
      <div
        class="scroller"
        ref={ref}
        tabIndex={0}
        role="application"
        aria-label={`${count(table.numRows, "token")}. Arrow keys move the cursor; the table beside it has the numbers.`}
        title={hovered === null ? undefined : faultsAt(faults, hovered - prompt) || undefined}
        onScroll={redraw}
        onMouseMove={(event) => hover(under(event))}
        onMouseLeave={() => hover(null)}
        onClick={(event) => {
          const at = under(event);
          if (at !== null) props.onChoose(at);
        }}
      >
        <div class="sizer" style={{ height: `${height}px` }}>
          <canvas ref={canvas} class="tokens" aria-hidden="true" data-row={props.name} data-tokens={table.numRows} />
          {layout !== null &&
            pictures.map((span) => {
              const top = MARGIN + layout.line[span.start]! * LINE + 2;
              const place = { top: `${top}px`, left: `${MARGIN}px`, width: `${layout.width[span.start]!}px`, height: `${PICTURE_LINES * LINE - 6}px` };
              return <TokenPicture key={span.start} span={span} style={place} onOpen={() => props.onOpen(span)} />;
            })}
        </div>
      </div>
      {layout !== null && <Minimap layout={layout} inks={inks} width={width} prompt={prompt} faults={faults} scroller={ref} size={size} cursor={cursor} />}
    </div>
  );
}

function flags(table: Table, name: string): Uint8Array {
  const vector = table.getChild(name);
  return Uint8Array.from({ length: table.numRows }, (_unused, at) => Number(vector?.get(at) === true));
}

interface Inks {
  fill: (string | null)[];
  ink: (string | null)[];
}

/** Compute each colour's CSS text once: there are few colours and many tokens. */
function inksOf(column: TokenColumn | null, scale: Scale | null): Inks {
  if (column === null || scale === null) return { fill: [], ink: [] };
  const inks = new Map<string, string>();
  const fill: (string | null)[] = new Array(column.values.length).fill(null);
  const ink = fill.slice();
  column.values.forEach((value, at) => {
    const colour = scale.colour(value);
    if (colour === null) return;
    const text = css(colour);
    let on = inks.get(text);
    if (on === undefined) {
      on = inkOn(colour);
      inks.set(text, on);
    }
    [fill[at], ink[at]] = [text, on];
  });
  return { fill, ink };
}

function drawToken(
  context: CanvasRenderingContext2D,
  at: number,
  text: TokenText,
  layout: Layout,
  y: number,
  inks: Inks,
  look: { ink: string; muted: string; accent: string; escape: string },
  isSampled: boolean,
  isTrained: boolean,
): void {
  const [x, width] = [MARGIN + layout.x[at]!, layout.width[at]!];
  const fill = inks.fill[at] ?? null;
  if (fill !== null) {
    context.fillStyle = fill;
    context.fillRect(x, y + 1, width, LINE - 4);
  }
  if (fill !== null) context.fillStyle = inks.ink[at]!;
  else context.fillStyle = isSampled ? look.ink : look.muted;
  context.fillText(text.shown, x, y + LINE / 2 - 1);
  if (text.escaped) {
    context.strokeStyle = fill === null ? look.escape : inks.ink[at]!;
    context.lineWidth = 1;
    context.setLineDash([2, 2]);
    context.strokeRect(x + 0.5, y + 2.5, width - 1, LINE - 7);
    context.setLineDash([]);
  }
  if (isTrained) {
    context.fillStyle = look.accent;
    context.fillRect(x, y + LINE - 3, width, 1.5);
  }
}

interface MapProps {
  layout: Layout;
  inks: Inks;
  width: number;
  prompt: number;
  faults: Span[];
  scroller: { current: HTMLDivElement | null };
  size: { width: number; height: number };
  cursor: number | null;
}

/** An overview of all lines that marks the visible part; click or drag to scroll. */
function Minimap({ layout, inks, width, prompt, faults, scroller, size, cursor }: MapProps): JSX.Element {
  const theme = useTheme();
  const ref = useRef<HTMLCanvasElement>(null);
  const [part, setPart] = useState({ top: 0, height: 1 });
  const lines = layout.starts.length - 1;
  const per = Math.min(4, size.height / Math.max(1, lines));
  const high = lines * per;
  useLayoutEffect(() => {
    if (ref.current === null || size.height === 0) return;
    const context = surface(ref.current, MAP, size.height);
    const shrink = MAP / Math.max(1, width);
    const plain = cssVariable("--faint");
    const tall = Math.max(1, per - (per > 2.5 ? 1 : 0));
    for (let at = 0; at < layout.line.length; at++) {
      context.fillStyle = inks.fill[at] ?? plain;
      context.fillRect(layout.x[at]! * shrink, layout.line[at]! * per, Math.max(0.7, layout.width[at]! * shrink), tall);
    }
    context.fillStyle = cssVariable("--all");
    for (const { start } of layout.pictures) context.fillRect(0, layout.line[start]! * per, layout.width[start]! * shrink, PICTURE_LINES * per);
    if (prompt > 0 && prompt < layout.line.length) {
      context.fillStyle = cssVariable("--muted");
      context.fillRect(0, layout.line[prompt]! * per, MAP, 1);
    }
    context.fillStyle = cssVariable("--bad");
    for (const { start, end } of faults) {
      const [from, to] = [layout.line[prompt + start], layout.line[prompt + end - 1]];
      if (from !== undefined && to !== undefined) context.fillRect(MAP - 4, from * per, 3, Math.max(2, (to - from + 1) * per));
    }
    if (cursor !== null && cursor < layout.line.length) {
      context.fillStyle = cssVariable("--accent");
      context.fillRect(0, layout.line[cursor]! * per - 1, MAP, 2.5);
    }
  }, [layout, inks, faults, size.height, theme, cursor, prompt]);
  useEffect(() => {
    const element = scroller.current;
    if (element === null) return;
    const follow = (): void => {
      const all = element.scrollHeight || 1;
      setPart({ top: (element.scrollTop / all) * high, height: Math.min(high, (element.clientHeight / all) * high) });
    };
    follow();
    element.addEventListener("scroll", follow);
    return () => element.removeEventListener("scroll", follow);
  }, [layout, size.height, high]);
  const scroll = (event: PointerEvent): void => {
    const element = scroller.current;
    if (element === null || event.buttons !== 1) return;
    const box = (event.currentTarget as Element).getBoundingClientRect();
    element.scrollTop = ((event.clientY - box.top) / (high || 1)) * element.scrollHeight - element.clientHeight / 2;
  };
  return (
    <div
      class="minimap"
      aria-hidden="true"
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture(event.pointerId);
        scroll(event);
      }}
      onPointerMove={scroll}
    >
      <canvas ref={ref} />
      <div class="part" style={{ top: `${part.top}px`, height: `${Math.max(6, part.height)}px` }} />
    </div>
  );
}

interface DetailsProps {
  table: Table;
  faults: Span[];
  picture: PictureSpan | undefined;
  at: number | null;
  prompt: number;
  columns: TokenColumn[];
  isHovered: boolean;
}

/** Make line breaks and tabs visible, and spaces if the text has no visible character. */
function visibleBlank(text: string): string {
  const shown = text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
  return shown.trim() === "" ? shown.replaceAll(" ", "␣") : shown;
}

/** All values of one token; a screen reader announces them when the cursor stops. */
function Details({ table, faults, picture, at, prompt, columns, isHovered }: DetailsProps): JSX.Element {
  if (at === null) {
    return (
      <aside class="details" aria-label="Token">
        <h2>Token</h2>
        <p class="note">Move over a token, or press an arrow key, to see its numbers.</p>
        <h2>Marks</h2>
        <ul class="marks">
          <li><span class="sample trained">word</span> underlined: trained on, according to the dataset's loss mask</li>
          <li><span class="sample prompt">word</span> grey: not sampled, such as the prompt</li>
          <li><span class="escape">\xe2</span> dotted: an invisible character, or part of a character</li>
          <li>⏎ line break, ⇥ tab</li>
          {faults.length > 0 && <li><span class="sample fault">word</span> outlined: a fault that an audit found; ▼ is the first token after a swap of weights</li>}
        </ul>
      </aside>
    );
  }
  const bytes = (table.getChild("bytes")?.get(at) as Uint8Array | null) ?? null;
  const id = Number(table.getChild("id")?.get(at));
  const titles = new Map(columns.map((column) => [column.name, column]));
  const isBroken = bytes !== null && tokenPieces(bytes).some((piece) => piece.escaped?.startsWith("byte"));
  const whole = isBroken ? wholeCharacter(table, at) : null;
  const others = table.schema.fields.map((field) => field.name).filter((name) => !["id", "bytes", "is_response"].includes(name));
  const isKnown = (name: string): boolean => (table.getChild(name)?.nullCount ?? 0) < table.numRows;
  const [fields, unknown] = [others.filter(isKnown), others.filter((name) => !isKnown(name))];
  const joins = others.includes("advantage");
  const fault = faultsAt(faults, at - prompt);
  return (
    <aside class="details" aria-label="Token" aria-live={isHovered ? "off" : "polite"} data-token={at}>
      <h2>
        Token <Num value={at} name="position" />
        <small>
          {at < prompt ? "prompt" : "response "}
          {at >= prompt && <Num value={at - prompt} name="response_position" />}
        </small>
      </h2>
      <div class="glyph">
        {bytes === null || bytes.length === 0 ? <span class="none">no text</span> : tokenPieces(bytes).map((piece) => piece.escaped === undefined ? visibleBlank(piece.text) : <span class="escape" title={piece.escaped}>{piece.text}</span>)}
      </div>
      {picture !== undefined && <p data-name="picture">A picture is shown here: {captionOf(picture)}.</p>}
      {fault !== "" && <p class="failed" data-name="fault">{fault}{faults.some((span) => span.swap_position === at - prompt) && " (first token after the swap)"}</p>}
      {isBroken && (
        <p class="note">
          Part of a character
          {whole !== null && <>: tokens {short(whole.first)} to {short(whole.last)} form “{pieces(whole.text).map((piece) => piece.text)}”</>}.
        </p>
      )}
      <table class="facts">
        <tbody>
          <tr><th scope="row">id</th><td class="numeric"><data value={exact(id)} data-name="id" data-value={exact(id)}>{exact(id)}</data></td></tr>
          <tr><th scope="row">bytes</th><td class="numeric"><code data-name="bytes" data-value={hex(bytes)}>{hex(bytes)}</code></td></tr>
          {fields.map((name) => (
            <tr key={name}>
              <th scope="row" title={titles.get(name)?.help}>{titles.get(name)?.title ?? name.replaceAll("_", " ")}</th>
              <td class="numeric"><Cell value={valueOf(table.getChild(name)?.get(at))} name={name} /></td>
            </tr>
          ))}
          {["difference", "ref_difference"].map((name) => {
            const value = titles.get(name)?.values[at];
            return value === undefined || Number.isNaN(value) ? null : (
              <tr key={name}>
                <th scope="row" title={titles.get(name)!.help}>{titles.get(name)!.title}</th>
                <td class="numeric"><data value={exact(value)} data-name={name} data-value={exact(value)}>{short(value)}</data></td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {fields.some((name) => titles.get(name)?.unit === "nats") && <p class="note">Log-probabilities and entropy are in nats.</p>}
      {joins && unknown.includes("logprob") && <p class="note">The update did not record this row.</p>}
      {unknown.length > 0 && <p class="note">Not available in this row: {unknown.map((name) => name.replaceAll("_", " ")).join(", ")}.</p>}
    </aside>
  );
}
