import "./language";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { type JSX, render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { go, hasView, usePlace } from "./address";
import { isReading, isReport, type Sources, sources, sourcesAgain, stampNow, trajectories } from "./answers";
import { Frame } from "./frame";
import { Failure, useAnswer, Waiting } from "./parts";
import { SessionContext, sessionOf } from "./session";
import { plain } from "./text";

try {
  const kept = localStorage.getItem("rollouts-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // a page from disk may have no storage
}

function Page(): JSX.Element {
  const place = usePlace();
  const answer = useAnswer("sources", sources);
  const known = useNewest(answer.value ?? null);
  const session = useMemo(() => (known === null ? null : sessionOf(known, place)), [known, place]);
  const task = useTask(session?.dataset?.id ?? null, place.trajectory, place.task);
  useEffect(() => {
    if (known !== null && !hasView && known.runs.length > 0 && location.hash.length <= 2) go({ view: "run" }, { replace: true });
  }, [known]);
  useEffect(() => {
    const chosen = place.trajectory ?? place.task ?? session?.dataset?.name;
    document.title = `${place.view}${chosen === undefined ? "" : ` · ${plain(chosen, 60)}`} · rollouts`;
  }, [place, session]);
  useEffect(() => {
    if (task !== undefined && task !== place.task) go({ task }, { replace: true });
  }, [task]);
  if (answer.state === "refused") return <Failure error={answer.error} />;
  if (session === null) return <Waiting />;
  return (
    <SessionContext.Provider value={session}>
      <Frame />
    </SessionContext.Provider>
  );
}

const AGAIN_MS = 700;
const LOOK_MS = 3000;

/** The sources, asked for again while logs are being read, and when logs or runs have grown. */
function useNewest(first: Sources | null): Sources | null {
  const [now, setNow] = useState<Sources | null>(null);
  const newest = now ?? first;
  useEffect(() => {
    if (newest === null || isReport) return;
    const again = (): void => void sourcesAgain(newest).then(setNow, () => setNow({ ...newest }));
    const look = (): void => {
      if (document.hidden) return;
      stampNow().then((stamp) => stamp !== newest.stamp && again(), () => undefined);
    };
    const timer = isReading(newest) ? window.setTimeout(again, AGAIN_MS) : window.setInterval(look, LOOK_MS);
    return () => window.clearInterval(timer);
  }, [newest]);
  return newest;
}

/** Look up the task of a trajectory whose address has none, as in a search result. */
function useTask(dataset: string | null, trajectory: string | undefined, task: string | undefined): string | undefined {
  const [found, setFound] = useState<string | undefined>(task);
  useEffect(() => {
    setFound(task);
    if (dataset === null || trajectory === undefined || task !== undefined || isReport) return;
    const where = `trajectory_id = '${trajectory.replaceAll("'", "''")}'`;
    trajectories(dataset, { where, sort: "", descending: false }, 0, 1).then(
      ({ rows }) => setFound(rows[0] === undefined ? undefined : String(rows[0].instance_id)),
      () => undefined,
    );
  }, [dataset, trajectory, task]);
  return found;
}

render(<Page />, document.getElementById("page")!);
