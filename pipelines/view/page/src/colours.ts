/** Colour scales that are safe for colour-blind readers: one hue by lightness, or blue to orange. */

import { short } from "./text";

export type Rgb = readonly [number, number, number];

export interface Scale {
  kind: "sequential" | "diverging" | "yes-no";
  /** Null where there is no value. */
  colour(value: number | null): Rgb | null;
  /** Tick labels of the legend from left to right: a position between 0 and 1, and its label. */
  ticks: { place: number; label: string }[];
  /** The colour at a position of the legend. */
  at(place: number): Rgb;
  /** The values at the left and right ends; values outside them are clamped. */
  ends?: readonly [number, number];
  note?: string;
}

const SEQUENTIAL: Record<Theme, Rgb[]> = {
  light: [[244, 247, 251], [198, 219, 239], [128, 177, 217], [66, 133, 186], [28, 88, 150], [8, 45, 95]],
  dark: [[33, 38, 46], [30, 58, 92], [36, 91, 143], [61, 132, 191], [125, 180, 226], [214, 236, 252]],
}; // prettier-ignore
const DIVERGING: Record<Theme, Rgb[]> = {
  light: [[20, 84, 158], [94, 155, 210], [189, 215, 238], [247, 247, 245], [252, 213, 168], [240, 146, 60], [176, 80, 4]],
  dark: [[122, 184, 245], [64, 128, 196], [38, 72, 112], [36, 40, 46], [110, 66, 24], [190, 108, 34], [255, 170, 90]],
}; // prettier-ignore

export type Theme = "light" | "dark";

function mixed(stops: Rgb[], place: number): Rgb {
  const scaled = Math.min(1, Math.max(0, place)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(scaled));
  const [a, b, share] = [stops[low]!, stops[low + 1]!, scaled - low];
  return [0, 1, 2].map((at) => Math.round(a[at]! + (b[at]! - a[at]!) * share)) as unknown as Rgb;
}

export function css(colour: Rgb): string {
  return `rgb(${colour[0]} ${colour[1]} ${colour[2]})`;
}

/** Black or white, whichever has more contrast with the background; the ratio is always at least 4.5. */
export function inkOn([red, green, blue]: Rgb): string {
  const linear = (part: number): number => ((part / 255 + 0.055) / 1.055) ** 2.4;
  const light = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  return light > 0.179 ? "#000000" : "#ffffff";
}

/** A quantile of unsorted values. */
export function quantile(values: ArrayLike<number>, share: number): number {
  const known = Float64Array.from(values).filter((value) => !Number.isNaN(value)).sort(); // prettier-ignore
  if (known.length === 0) return Number.NaN;
  return known[Math.min(known.length - 1, Math.floor(share * known.length))]!;
}

/** From `low` (pale) to `high` (strong); with `low` above `high`, smaller values are stronger. */
export function sequential(theme: Theme, low: number, high: number): Scale {
  const width = Number((high - low).toPrecision(2)) || 1;
  const stops = SEQUENTIAL[theme];
  const at = (place: number): Rgb => mixed(stops, place);
  return {
    kind: "sequential",
    colour: (value) => (value === null || Number.isNaN(value) ? null : at((value - low) / width)),
    ticks: [0, 0.5, 1].map((place) => ({ place, label: short(low + width * place) })),
    ends: [low, low + width],
    at,
  };
}

/** Blue below the middle, orange above it. With `ratio`, the scale is logarithmic. */
export function diverging(theme: Theme, middle: number, reach: number, ratio = false): Scale {
  const stops = DIVERGING[theme];
  const at = (place: number): Rgb => mixed(stops, place);
  const end = Number(reach.toPrecision(2));
  const far = ratio ? Math.log(end) || 1e-6 : end || 1;
  const distance = (value: number): number => (ratio ? Math.log(value / middle) : value - middle);
  const value = (place: number): number =>
    ratio ? middle * Math.exp((2 * place - 1) * far) : middle + (2 * place - 1) * far;
  return {
    kind: "diverging",
    colour: (given) => (given === null || Number.isNaN(given) ? null : at(0.5 + distance(given) / far / 2)),
    ticks: [0, 0.5, 1].map((place) => ({ place, label: short(Number(value(place).toPrecision(3))) })),
    ends: [value(0), value(1)],
    at,
  };
}

export function yesNo(theme: Theme, yes: string, no: string): Scale {
  const stops = SEQUENTIAL[theme];
  const at = (place: number): Rgb => mixed(stops, place < 0.5 ? 0.12 : theme === "light" ? 0.42 : 0.5);
  return {
    kind: "yes-no",
    colour: (value) => (value === null || Number.isNaN(value) ? null : at(value)),
    ticks: [
      { place: 0.25, label: no },
      { place: 0.75, label: yes },
    ],
    at,
  };
}

/** A diverging scale around zero that fits returns or advantages; its upper half if none is negative. */
export function aroundZero(theme: Theme, values: (number | null | undefined)[]): Scale {
  const known = values.filter((value) => value !== null && value !== undefined);
  const reach = known.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-12);
  const whole = diverging(theme, 0, reach);
  if (known.some((value) => value < 0)) return whole;
  const ticks = whole.ticks.filter(({ place }) => place >= 0.5).map(({ place, label }) => ({ place: 2 * place - 1, label }));
  return { ...whole, ticks, ends: [0, whole.ends![1]], at: (place) => whole.at(0.5 + place / 2) };
}

/** Colours of lines: those of the Okabe-Ito palette that have enough contrast with the theme. */
export const LINES: Record<Theme, string[]> = {
  light: ["#0072b2", "#d55e00", "#009e73", "#aa4499", "#8a6d00", "#3d3d3d"],
  dark: ["#56b4e9", "#e69f00", "#2fc79b", "#e58fc4", "#f0e442", "#c8c8c8"],
};

export function currentTheme(): Theme {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}
