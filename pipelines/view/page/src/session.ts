/** The current choices: the address, with defaults from the sources. */

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Place } from "./address";
import type { Dataset, Run, Selection, Sources } from "./answers";

export interface Session {
  sources: Sources;
  place: Place;
  dataset: Dataset | null;
  run: Run | null;
  /** The update whose columns are joined to tokens and groups; null without one. */
  update: string | null;
  selection: Selection;
  /** Parameters of requests that join an update of a run. */
  joined: { run?: string; update?: string };
}

/** The datasets A and B to compare: those in the address, else the newest two that share tasks. */
export function comparedIn({ datasets }: Sources, place: { data?: string; other?: string }): [Dataset | null, Dataset | null] {
  const named = (id: string | null | undefined): Dataset | undefined => datasets.find((one) => one.id === id);
  const newest = datasets.findLast((one) => one.shares_tasks_with !== null);
  const given = named(place.other) ?? (named(place.data) === undefined ? newest : undefined);
  const a = named(place.data) ?? named(given?.shares_tasks_with) ?? datasets[0] ?? null;
  const b = given === undefined || given === a ? named(a?.shares_tasks_with) : given;
  return [a, b ?? datasets.find((one) => one !== a) ?? null];
}

export function sessionOf(sources: Sources, place: Place): Session {
  const run = sources.runs.find((one) => one.id === place.run) ?? sources.runs[0] ?? null;
  const named = sources.datasets.find((one) => one.id === place.data);
  const first = place.view === "diff" ? comparedIn(sources, place)[0] : sources.datasets[0];
  const dataset = named ?? first ?? null;
  const known = run?.token_updates ?? [];
  const ofDataset = known.filter((_update, at) => run?.token_datasets[at] === dataset?.id);
  const latest = ofDataset.at(-1) ?? known.at(-1);
  const update = place.update ?? (latest === undefined ? null : String(latest));
  const selection = {
    where: place.where ?? "",
    sort: place.sort ?? "",
    descending: place.descending === "1",
  };
  const isJoined = run !== null && update !== null && known.includes(Number(update)) && place.update !== "none";
  const joined = isJoined ? { run: run.id, update } : {};
  return { sources, place, dataset, run, update: update === "none" ? null : update, selection, joined };
}

export const SessionContext = createContext<Session | null>(null);

export function useSession(): Session {
  const session = useContext(SessionContext);
  if (session === null) throw new Error("no session");
  return session;
}
