/** Find text or token ids in the selection. */

import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { go } from "./address";
import { type AnswerError, type Hits, isReport, search } from "./answers";
import { useKeys } from "./keys";
import { asError, Failure, Text } from "./parts";
import { useSession } from "./session";
import { count, short } from "./text";

export function Find(): JSX.Element | null {
  const { dataset, selection } = useSession();
  const box = useRef<HTMLInputElement>(null);
  const [kind, setKind] = useState<"text" | "ids">("text");
  const [found, setFound] = useState<Hits | null>(null);
  const [error, setError] = useState<AnswerError | null>(null);
  const [at, setAt] = useState(-1);
  const [busy, setBusy] = useState(false);
  const show = (index: number): void => {
    const hit = found?.hits[index];
    if (hit === undefined) return;
    setAt(index);
    go({ view: "tokens", trajectory: hit.trajectory_id, step: String(hit.step_index), at: hit.position === null ? undefined : String(hit.position), task: undefined });
  };
  const close = (): void => {
    setFound(null);
    setError(null);
    setAt(-1);
  };
  useKeys("Find", [
    { key: "/", does: "find text or token ids", run: () => box.current?.focus() },
    { key: "n", does: "next place where it was found", run: () => found !== null && show((at + 1) % (found.hits.length || 1)) },
    { key: "N", does: "place before", run: () => found !== null && show((at - 1 + found.hits.length) % (found.hits.length || 1)) },
    { key: "Escape", does: "close what was found", run: close },
  ]);
  if (isReport || dataset === null) return null;
  const submit = (event: Event): void => {
    event.preventDefault();
    const text = box.current?.value ?? "";
    if (text.trim() === "") return close();
    setBusy(true);
    const what = kind === "text" ? { text } : { ids: text.trim().replace(/[\s,]+/g, ",") };
    search(dataset.id, what, selection.where)
      .then(
        (hits) => {
          setFound(hits);
          setError(null);
          setAt(-1);
        },
        (reason: unknown) => setError(asError(reason)),
      )
      .finally(() => setBusy(false));
    box.current?.blur();
  };
  return (
    <div class="find">
      <form role="search" aria-label="Find" onSubmit={submit}>
        <select aria-label="Find what" value={kind} onChange={(event) => setKind(event.currentTarget.value as "text" | "ids")}>
          <option value="text">text</option>
          <option value="ids">ids</option>
        </select>
        <input ref={box} type="search" aria-label={kind === "text" ? "Text to find" : "Token ids to find"} placeholder={kind === "text" ? "Find (/)" : "151644, 872"} onKeyDown={(event) => event.key === "Escape" && event.currentTarget.blur()} />
      </form>
      {(found !== null || error !== null || busy) && (
        <div class="hits" role="region" aria-label="Found">
          {busy && <p role="status">Searching…</p>}
          {error !== null && <Failure error={error} />}
          {found !== null && !busy && (
            <>
              <header><span role="status">
                {found.hits.length === 0 ? "Not found" : count(found.hits.length, "place")}
                {!found.complete && " so far; the search stopped early"}
                </span>
                <button type="button" onClick={close} aria-label="Close">✕</button>
              </header>
              <ol>
                {found.hits.map((hit, index) => (
                  <li key={index}>
                    <button type="button" class={index === at ? "link chosen" : "link"} onClick={() => show(index)}>
                      <Text value={hit.trajectory_id} /> <small>step {hit.step_index}{hit.position !== null && `, token ${short(hit.position)}`}</small>
                    </button>
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
