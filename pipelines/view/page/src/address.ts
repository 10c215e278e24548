/** The state of the page, kept in the URL's fragment so that links and the back button restore it. */

import { useEffect, useState } from "preact/hooks";

export const VIEWS = ["run", "table", "group", "tree", "conversation", "tokens", "update", "diff"] as const;
export type View = (typeof VIEWS)[number];

/**
 * `data`, `where`, `sort`, `descending`: the selection; `task`, `trajectory`, `step`, `at`: the current item in it;
 * `run`, `update`: the joined update of a run; `color`: the column that sets colours; `other`: the dataset to compare
 * `data` with; `runs`, `smooth`, `keys`: the charts; `pins`: pinned trajectories, as a JSON list;
 * `found`: the text that a search found in the conversation; `text`: "markdown" to show texts as Markdown.
 */
export type Name =
  | "data" | "where" | "sort" | "descending" | "task" | "trajectory" | "step" | "at" | "run" | "update"
  | "color" | "other" | "runs" | "smooth" | "keys" | "pins" | "of" | "columns" | "axis" | "found" | "text"; // prettier-ignore

export type Place = { view: View } & { [name in Name]?: string };
export type Change = { view?: View } & { [name in Name]?: string | undefined };

export function parse(fragment: string): Place {
  const [path = "", query = ""] = fragment.replace(/^#?\/?/, "").split(/\?(.*)/s);
  const view = VIEWS.find((name) => name === path) ?? "table";
  return { ...Object.fromEntries(new URLSearchParams(query)), view };
}

export function format({ view, ...rest }: Place): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(rest)) if (value !== "") query.set(name, value);
  const text = query.toString().replaceAll("+", "%20");
  return text === "" ? `#/${view}` : `#/${view}?${text}`;
}

/** Whether the fragment names a view; if not, the page chooses one. */
export const hasView = location.hash.length > 2;

let current = parse(location.hash);
const listeners = new Set<(place: Place) => void>();

function tell(): void {
  for (const listener of listeners) listener(current);
}

window.addEventListener("popstate", () => {
  current = parse(location.hash);
  tell();
});

export function here(): Place {
  return current;
}

export function changed(place: Place, change: Change): Place {
  const merged: Record<string, string | undefined> = { ...place, ...("trajectory" in change ? { found: undefined } : {}), ...change };
  for (const [name, value] of Object.entries(merged)) if (value === undefined) delete merged[name];
  return merged as Place;
}

/** The link to the current address with these changes. */
export function linkTo(change: Change): string {
  return format(changed(current, change));
}

/** Change the address; `replace` adds no history entry (for moving a cursor or typing). */
export function go(change: Change, { replace = false } = {}): void {
  const next = changed(current, change);
  const address = format(next);
  if (address === format(current)) return;
  current = next;
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  tell();
}

export function usePlace(): Place {
  const [place, setPlace] = useState(current);
  useEffect(() => {
    listeners.add(setPlace);
    setPlace(current);
    return () => {
      listeners.delete(setPlace);
    };
  }, []);
  return place;
}

/** Parse a JSON list of strings from the address; an invalid list is empty. */
export function textsIn(json: string | undefined): string[] {
  try {
    const found: unknown = JSON.parse(json ?? "[]");
    return Array.isArray(found) ? found.filter((one) => typeof one === "string") : [];
  } catch {
    return [];
  }
}

export function pinsOf(place: Place): string[] {
  return textsIn(place.pins);
}

export function togglePin(trajectory: string): void {
  const pins = pinsOf(current);
  const next = pins.includes(trajectory) ? pins.filter((pin) => pin !== trajectory) : [...pins, trajectory];
  go({ pins: next.length > 0 ? JSON.stringify(next) : undefined }, { replace: true });
}
