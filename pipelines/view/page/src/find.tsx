/** Find text or token ids in the selection. */

import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { go } from "./address";
import { type AnswerError, type Hits, isReport, search } from "./answers";
import { useKeys } from "./keys";
import { asError, Failure, Text } from "./parts";
import { useSession } from "./session";
import { count, plain, short } from "./text";

export function Find(): JSX.Element | null {
  const { dataset, selection } = useSession();
  const box = useRef<HTMLInputElement>(null);
  const [kind, setKind] = useState<"text" | "ids">("text");
  const [found, setFound] = useState<Hits | null>(null);
  const [error, setError] = useState<AnswerError | null>(null);
  const [at, setAt] = useState(-1);
  const [isFiltered, setIsFiltered] = useState(false);
  const [busy, setBusy] = useState(false);
  const show = (index: number): void => {
    const hit = found?.hits[index];
    if (hit === undefined) return;
    setAt(index);
    go({ view: "tokens", trajectory: hit.trajectory_id, step: String(hit.step_index), at: hit.position === null ? undefined : String(hit.position), found: hit.position === null ? hit.found : undefined, task: undefined });
  };
  const close = (): void => {
    setFound(null);
    setError(null);
    setAt(-1);
  };
  useKeys("Find", [
    { key: "/", does: "find text or token ids", run: () => box.current?.focus() },
    { key: "n", does: "next match", run: () => found !== null && show((at + 1) % (found.hits.length || 1)) },
    { key: "N", does: "previous match", run: () => found !== null && show((at - 1 + found.hits.length) % (found.hits.length || 1)) },
    { key: "Escape", does: "leave a box, and close the search results", run: close },
  ]);
  if (isReport || dataset === null) return null;
  const find = (where: string): void => {
    const text = box.current?.value ?? "";
    if (text.trim() === "") return close();
    setBusy(true);
    const what = kind === "text" ? { text } : { ids: text.trim().replace(/[\s,]+/g, ",") };
    search(dataset.id, what, where)
      .then(
        (hits) => {
          setFound(hits);
          setIsFiltered(where !== "");
          setError(null);
          setAt(-1);
        },
        (reason: unknown) => setError(asError(reason)),
      )
      .finally(() => setBusy(false));
    box.current?.blur();
  };
  const submit = (event: Event): void => {
    event.preventDefault();
    find(selection.where);
  };
  return (
    <div class="find">
      <form role="search" aria-label="Find" onSubmit={submit}>
        <select aria-label="Find what" value={kind} onChange={(event) => setKind(event.currentTarget.value as "text" | "ids")}>
          <option value="text">text</option>
          <option value="ids">ids</option>
        </select>
        <input ref={box} type="search" aria-label={kind === "text" ? "Text to find" : "Token ids to find"} placeholder={kind === "text" ? "Find (/)" : "151644, 872"} />
      </form>
      {(found !== null || error !== null || busy) && (
        <div class="hits" role="region" aria-label="Found">
          {busy && <p role="status">Searching…</p>}
          {error !== null && <Failure error={error} />}
          {found !== null && !busy && (
            <>
              <header><span role="status">
                {found.hits.length === 0 ? (dataset.log?.is_done === false ? "No matches so far; the logs are still being read" : "No matches") : count(found.hits.length, "match", "matches")}
                {isFiltered && ` in the ${count(found.searched, "filtered trajectory", "filtered trajectories")}`}
                {!found.complete && " so far; the search stopped early"}
                </span>
                {isFiltered && <button type="button" onClick={() => find("")}>Search all {short(dataset.num_trajectories)}</button>}
                <button type="button" onClick={close} aria-label="Close">✕</button>
              </header>
              <Named found={found} />
              <ol>
                {found.hits.map((hit, index) => (
                  <li key={index}>
                    <button type="button" class={index === at ? "link chosen" : "link"} onClick={() => show(index)}>
                      <Text value={hit.trajectory_id} /> <small>step {hit.step_index}{hit.position !== null && `, token ${short(hit.position)}`}</small>
                    </button>
                    {hit.task_text !== null && hit.task_text !== found.hits[index - 1]?.task_text && <p class="of-task" title={plain(hit.task_text, 300)}>{plain(hit.task_text, 300)}</p>}
                    <p class="snippet">{hit.before}<mark>{hit.found}</mark>{hit.after}</p>
                  </li>
                ))}
              </ol>
            </>
          )}
        </div>
      )}
    </div>
  );
}

/** Tasks and trajectories whose ids contain the text. */
function Named({ found }: { found: Hits }): JSX.Element | null {
  const { tasks, trajectories } = found;
  if (tasks.length + trajectories.length === 0) return null;
  const others = found.num_tasks - tasks.length + found.num_trajectories - trajectories.length;
  return (
    <ul aria-label="Ids">
      {tasks.map(({ instance_id: task, attempts, task_text: text }) => (
        <li key={task}>
          <button type="button" class="link" onClick={() => go({ view: "group", task, trajectory: undefined, step: undefined, at: undefined })}>
            task <Text value={task} />: {count(attempts, "attempt")}
          </button>
          {text !== null && <p class="of-task" title={plain(text, 300)}>{plain(text, 300)}</p>}
        </li>
      ))}
      {trajectories.map((trajectory) => (
        <li key={trajectory}>
          <button type="button" class="link" onClick={() => go({ view: "tokens", trajectory, task: undefined, step: undefined, at: undefined })}>
            trajectory <Text value={trajectory} />
          </button>
        </li>
      ))}
      {others > 0 && <li>and {short(others)} more with matching ids</li>}
    </ul>
  );
}
