/** Small components shared by all views. */

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { AnswerError, type Value } from "./answers";
import { type Change, linkTo, usePlace } from "./address";
import { currentTheme, css, type Scale, type Theme } from "./colours";
import { exact, pieces, short } from "./text";

const FIRST = 20_000;

/** Text of a dataset, never parsed as HTML; invisible characters are shown as escapes. */
export function Text({ value }: { value: string }): JSX.Element {
  const [limit, setLimit] = useState(FIRST);
  const shown = value.length > limit ? value.slice(0, limit) : value;
  return (
    <bdi class="text">
      {pieces(shown).map((piece) =>
        piece.escaped === undefined ? (
          piece.text
        ) : (
          <span class="escape" title={piece.escaped}>
            {piece.text}
          </span>
        ),
      )}
      {value.length > limit && (
        <button type="button" class="more" onClick={() => setLimit(limit * 10)}>
          … show more of {short(value.length)} characters
        </button>
      )}
    </bdi>
  );
}

/** A number: shows four digits, with the exact value in a tooltip. */
export function Num({ value, name }: { value: number | null | undefined; name?: string }): JSX.Element {
  if (value === null || value === undefined) {
    return (
      <span class="none" data-value="null" data-name={name} title="no value">
        –
      </span>
    );
  }
  return (
    <data class="num" value={exact(value)} data-value={exact(value)} data-name={name} title={exact(value)}>
      {short(value)}
    </data>
  );
}

export function Cell({ value, name }: { value: Value | undefined; name?: string }): JSX.Element {
  if (typeof value === "number" || value === null || value === undefined) {
    return <Num value={value} {...(name === undefined ? {} : { name })} />;
  }
  if (typeof value === "boolean") {
    return (
      <span data-value={String(value)} data-name={name}>
        {value ? "yes" : "no"}
      </span>
    );
  }
  return (
    <span data-name={name}>
      <Text value={value} />
    </span>
  );
}

export type Answer<T> =
  | { state: "asked"; value?: T }
  | { state: "here"; value: T }
  | { state: "refused"; error: AnswerError; value?: undefined };

/**
 * Fetch when `key` changes. Null fetches nothing.
 * The previous answer is kept until the new one arrives, if `of`, what both are about, is the same and not null.
 */
export function useAnswer<T>(key: string | null, ask: () => Promise<T>, of: string | null = null): Answer<T> {
  const [answer, setAnswer] = useState<Answer<T> & { key?: string | null; of?: string | null }>({ state: "asked", key: null });
  useEffect(() => {
    if (key === null) return;
    let live = true;
    ask().then(
      (value) => live && setAnswer({ state: "here", value, key, of }),
      (error: unknown) =>
        live && setAnswer({ state: "refused", error: asError(error), key }),
    );
    return () => {
      live = false;
    };
  }, [key]);
  if (answer.key === key) return answer;
  return of !== null && answer.of === of && answer.value !== undefined ? { state: "asked", value: answer.value } : { state: "asked" };
}

export function asError(error: unknown): AnswerError {
  return error instanceof AnswerError ? error : new AnswerError(String(error));
}

export function Failure({ error }: { error: AnswerError }): JSX.Element {
  return (
    <div class="failure" role="alert">
      <strong>
        <Text value={error.message} />
      </strong>
      {error.hint !== "" && (
        <p>
          <Text value={error.hint} />
        </p>
      )}
    </div>
  );
}

export function Waiting(): JSX.Element {
  return (
    <p class="waiting" role="status">
      Loading…
    </p>
  );
}

export function Empty({ children }: { children: ComponentChildren }): JSX.Element {
  return <div class="empty">{children}</div>;
}

/** An answer, or a placeholder while it loads or an error message if it failed. */
export function Awaited<T>(props: { answer: Answer<T>; children: (value: T) => ComponentChildren }): JSX.Element {
  const { answer, children } = props;
  if (answer.state === "refused") return <Failure error={answer.error} />;
  if (answer.value === undefined) return <Waiting />;
  return <>{children(answer.value)}</>;
}

export function Go(props: { to: Change; children: ComponentChildren; class?: string; label?: string }): JSX.Element {
  usePlace();
  return (
    <a href={linkTo(props.to)} class={props.class} aria-label={props.label}>
      {props.children}
    </a>
  );
}

export function useTheme(): Theme {
  const [theme, setTheme] = useState(currentTheme());
  useEffect(() => {
    const update = (): void => setTheme(currentTheme());
    const system = matchMedia("(prefers-color-scheme: dark)");
    const observer = new MutationObserver(update);
    observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    system.addEventListener("change", update);
    return () => {
      observer.disconnect();
      system.removeEventListener("change", update);
    };
  }, []);
  return theme;
}

/** The size of an element in CSS pixels. */
export function useSize(): [{ current: HTMLDivElement | null }, { width: number; height: number }] {
  const ref = useRef<HTMLDivElement | null>(null);
  const [size, setSize] = useState({ width: 0, height: 0 });
  useEffect(() => {
    const element = ref.current;
    if (element === null) return;
    const measure = (): void => {
      const [width, height] = [element.clientWidth, element.clientHeight];
      setSize((old) => (old.width === width && old.height === height ? old : { width, height }));
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [ref, size];
}

/** A canvas of this size in CSS pixels, scaled to the screen's pixel ratio. */
export function surface(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== high) canvas.height = high;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.direction = "ltr";
  return context;
}

export function cssVariable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const LEGEND_WIDTH = 200;

/** "≤" or "≥" at an end of the legend if values lie outside it by more than rounding. */
function beyond({ ends }: Scale, place: number, values: Float64Array | undefined): string {
  if (ends === undefined || values === undefined || (place !== 0 && place !== 1)) return "";
  const [end, other] = place === 0 ? ends : [ends[1], ends[0]];
  const slack = Math.abs(end - other) / 1000;
  if (end < other) return values.some((value) => value < end - slack) ? "≤ " : "";
  return values.some((value) => value > end + slack) ? "≥ " : "";
}

/** The legend of a colour scale. */
export function Legend({ scale, title, values }: { scale: Scale; title: string; values?: Float64Array }): JSX.Element {
  const ref = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    if (ref.current === null) return;
    const context = surface(ref.current, LEGEND_WIDTH, 10);
    for (let x = 0; x < LEGEND_WIDTH; x++) {
      context.fillStyle = css(scale.at((x + 0.5) / LEGEND_WIDTH));
      context.fillRect(x, 0, 1, 10);
    }
  }, [scale]);
  return (
    <figure class="legend" aria-label={`Colours of ${title}`}>
      <figcaption>{title}</figcaption>
      <canvas ref={ref} aria-hidden="true" />
      <div class="ticks">
        {scale.ticks.map(({ place, label }) => (
          <span style={{ left: `${place * 100}%` }} class={place === 0 ? "first" : place === 1 ? "last" : ""}>
            {beyond(scale, place, values)}{label}
          </span>
        ))}
      </div>
      {scale.note !== undefined && <small>{scale.note}</small>}
    </figure>
  );
}

/** A bar from zero, to compare numbers of a column at a glance. */
export function Bar({ value, reach, signed }: { value: number | null; reach: number; signed: boolean }): JSX.Element {
  const share = value === null || reach === 0 ? 0 : Math.max(-1, Math.min(1, value / reach));
  const [middle, width] = signed ? ["50%", 50] : ["0", 100];
  const style = share < 0 ? { right: middle, width: `${-share * width}%` } : { left: middle, width: `${share * width}%` };
  return (
    <span class={signed ? "bar signed" : "bar"} aria-hidden="true">
      <span class={share < 0 ? "below" : "above"} style={style} />
    </span>
  );
}
