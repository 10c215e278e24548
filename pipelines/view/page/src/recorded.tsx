/** Links to the updates that recorded the task or row of a view. */

import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { go } from "./address";
import { type Dataset, recorded } from "./answers";
import { Go, useAnswer } from "./parts";
import { useSession } from "./session";
import { short } from "./text";

const SHOWN = 12;

/**
 * "Recorded in updates 2 and 5", with links. If no update is chosen, the newest one opens.
 * `what` names the task or the row: "this task", "this row".
 */
export function RecordedIn({ dataset, of, what }: { dataset: Dataset; of: Record<string, string | number>; what: string }): JSX.Element | null {
  const { run, place, update } = useSession();
  const hasRecords = run !== null && run.token_updates.length > 0;
  const answer = useAnswer(hasRecords ? JSON.stringify([dataset.id, of]) : null, () => recorded(dataset.id, of));
  const found = run === null ? undefined : answer.value?.[run.id];
  const newest = found?.updates.at(-1);
  const isJoined = update !== null && found?.updates.includes(Number(update)) === true;
  useEffect(() => {
    if (found !== undefined && newest !== undefined && !isJoined && place.update === undefined) {
      go({ update: String(newest) }, { replace: true });
    }
  }, [found, newest, isJoined, place.update]);
  // An empty line reserves space while the answer loads, so that the content below does not move.
  if (hasRecords && answer.state === "asked") return <p class="note recorded-in" role="status" aria-busy="true" />;
  if (found === undefined) return null;
  const { updates, unreadable } = found;
  return (
    <p class="note recorded-in" role="status">
      {update !== null && !isJoined && `Update ${update} did not record ${what}. `}
      {updates.length === 0 ? `No update of this run recorded ${what}: the run did not train on it, or did not record its tokens (record_tokens).` : <Links updates={updates} chosen={isJoined ? Number(update) : null} />}
      {unreadable.length > 0 && ` The records of ${unreadable.length === 1 ? "update" : "updates"} ${unreadable.map(short).join(", ")} cannot be read.`}
    </p>
  );
}

/** The newest updates; older ones are only counted. */
function Links({ updates, chosen }: { updates: number[]; chosen: number | null }): JSX.Element {
  const shown = updates.slice(-SHOWN);
  const others = updates.length - shown.length;
  return (
    <>
      Recorded in {updates.length === 1 ? "update " : "updates "}
      {others > 0 && `(${short(others)} earlier), `}
      {shown.map((one, at) => (
        <span key={one}>
          {at === 0 ? "" : at === shown.length - 1 ? " and " : ", "}
          {one === chosen ? <strong>{short(one)}</strong> : <Go to={{ update: String(one) }}>{short(one)}</Go>}
        </span>
      ))}
      .
    </>
  );
}
