/** The address of what is shown: the URL's fragment holds everything, so that it can be sent and gone back to. */

import { useEffect, useState } from "preact/hooks";

export const VIEWS = ["run", "table", "group", "tree", "conversation", "tokens", "update", "diff"] as const;
export type View = (typeof VIEWS)[number];

/**
 * `data`, `where`, `sort`, `descending`: the selection; `task`, `trajectory`, `step`, `at`: what is chosen in it;
 * `run`, `update`: the training joined to it; `color`: the column that colours; `other`: what `data` is compared
 * with; `runs`, `smooth`, `keys`: the charts; `pins`: pinned trajectories, as a JSON list.
 */
export type Name =
  | "data" | "where" | "sort" | "descending" | "task" | "trajectory" | "step" | "at" | "run" | "update"
  | "color" | "other" | "runs" | "smooth" | "keys" | "pins" | "of" | "columns" | "axis"; // prettier-ignore

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

/** Whether the fragment named a view, or the page chooses one. */
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
  const merged: Record<string, string | undefined> = { ...place, ...change };
  for (const [name, value] of Object.entries(merged)) if (value === undefined) delete merged[name];
  return merged as Place;
}

/** The address of a link that changes this much. */
export function linkTo(change: Change): string {
  return format(changed(current, change));
}

/** Go there; `replace` leaves no step for the back button (moving a cursor, typing). */
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

/** The texts of a JSON list in the address; none if it is damaged. */
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
