/** In place of an empty view: choose the first trajectory of the selection, or say why there is none. */

import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { go } from "./address";
import { type Dataset, isReport, trajectories } from "./answers";
import { Awaited, Empty, useAnswer, Waiting } from "./parts";
import { useSession } from "./session";
import { equals } from "./sql";

const ALL = 1_000_000;

/** Opens the first trajectory of the chosen task, else of the table as it is filtered and sorted. */
export function NoTrajectory(): JSX.Element {
  const { dataset, place, selection } = useSession();
  const { task } = place;
  const chosen = task === undefined ? selection : { ...selection, where: equals("instance_id", task, true).sql };
  const key = dataset === null ? null : JSON.stringify([dataset.id, chosen, dataset.log?.version]);
  // A report has one selection, which it does not filter.
  const answer = useAnswer(key, () => trajectories(dataset!.id, chosen, 0, isReport ? ALL : 1));
  const rows = answer.value?.rows;
  const first = rows?.find((row) => row.instance_id === task) ?? rows?.[0];
  useEffect(() => {
    if (first !== undefined) go({ trajectory: String(first.trajectory_id), task: String(first.instance_id) }, { replace: true });
  }, [first]);
  if (dataset === null) return <Empty>No dataset is open.</Empty>;
  return <Awaited answer={answer}>{() => (first === undefined ? <NoMatch dataset={dataset} /> : <Waiting />)}</Awaited>;
}

/** While logs are being read, no match so far is not yet no match. */
export function NoMatch({ dataset }: { dataset: Dataset }): JSX.Element {
  const { where } = useSession().selection;
  const isReading = dataset.log?.is_done === false;
  const what = where === "" ? "trajectory" : "trajectory that matches the filter";
  return (
    <Empty>
      {isReading ? `No ${what} has been read yet; reading goes on.` : where === "" ? "There is no trajectory." : "No trajectory matches the filter."}
      {where !== "" && (
        <button type="button" onClick={() => go({ where: undefined })}>
          Clear the filter
        </button>
      )}
    </Empty>
  );
}
