/** The frame around a view: pickers of datasets and runs, tabs of the eight views, and the current selection. */

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { changed, go, linkTo, pinsOf, type View, VIEWS } from "./address";
import { isReport } from "./answers";
import { currentTheme } from "./colours";
import { Dialogs, type Opened } from "./dialogs";
import { shownView, whyEmpty } from "./empty_views";
import { Find } from "./find";
import { useKeys } from "./keys";
import { LogLine } from "./logs";
import { Go, Text } from "./parts";
import { type Session, useSession } from "./session";
import { ending, plain, short } from "./text";
import { ConversationView } from "./views/conversation";
import { DiffView } from "./views/diff";
import { GroupView } from "./views/group";
import { RunView } from "./views/run";
import { TableView } from "./views/table";
import { TokensView } from "./views/tokens";
import { TreeView } from "./views/tree";
import { UpdateView } from "./views/update";

const SHOWN: Record<View, () => JSX.Element> = {
  run: RunView,
  table: TableView,
  group: GroupView,
  tree: TreeView,
  conversation: ConversationView,
  tokens: TokensView,
  update: UpdateView,
  diff: DiffView,
};

function nameOf(view: View): string {
  return view[0]!.toUpperCase() + view.slice(1);
}

/** Change the view and reset the token position and the colour, which differ between views. */
function toView(view: View): { view: View; at: undefined; color: undefined } {
  return { view, at: undefined, color: undefined };
}

export function toggleTheme(): void {
  const next = currentTheme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("rollouts-theme", next);
  } catch {
    // a page from disk may have no storage
  }
}

export function Frame(): JSX.Element {
  const session = useSession();
  const { place, sources } = session;
  const [opened, setOpened] = useState<Opened>(null);
  const pins = pinsOf(place);
  useKeys("Everywhere", [
    ...VIEWS.map((view, at) => ({ key: String(at + 1), does: nameOf(view), run: () => go(toView(view)) })),
    { key: "c", does: "copy the selection", run: () => setOpened("copy") },
    { key: "l", does: "label the trajectory, or the pinned ones", run: () => setOpened("label") },
    { key: "P", does: "pinned trajectories", run: () => setOpened("pins") },
    { key: "m", does: "switch between light and dark", run: toggleTheme },
    { key: "?", does: "list the keys", run: () => setOpened("keys") },
  ]);
  const shown = shownView(place.view, session);
  const Shown = SHOWN[shown];
  const log = session.dataset?.log ?? null;
  // The table and a conversation follow logs; other lists are drawn again once all are read.
  const key = shown === "group" || shown === "diff" ? `${shown} ${log === null || !log.is_done ? "" : log.version}` : shown;
  return (
    <div class="frame">
      <a class="skip" href="#title" onClick={skip}>
        Skip to the view
      </a>
      <header class="top">
        <span class="brand">rollouts <span>{isReport ? "report" : "view"}</span></span>
        <Pickers session={session} />
        <span class="space" />
        <Find />
        <button type="button" onClick={() => setOpened("copy")} title="Copy the selection (c)">Copy</button>
        <button type="button" onClick={() => setOpened("pins")} title="Pinned trajectories (P)">
          Pins{pins.length > 0 && ` ${pins.length}`}
        </button>
        {!isReport && <button type="button" onClick={() => setOpened("label")} title="Label (l)">Label</button>}
        <button type="button" class="icon" onClick={toggleTheme} aria-label="Light or dark" title="Light or dark (m)">◐</button>
        <button type="button" class="icon" onClick={() => setOpened("keys")} aria-label="Keys" title="Keys (?)">?</button>
      </header>
      <nav aria-label="Views">
        <ul>
          {VIEWS.map((view, at) => {
            const reason = whyEmpty(view, session);
            return (
              <li key={view}>
                <a
                  href={linkTo(toView(view))}
                  aria-current={view === shown ? "page" : undefined}
                  class={reason === null ? "" : "grey"}
                  title={reason ?? undefined}
                >
                  <kbd aria-hidden="true">{at + 1}</kbd>
                  {nameOf(view)}
                </a>
              </li>
            );
          })}
        </ul>
        <Chosen session={session} />
      </nav>
      {sources.warnings.length > 0 && (
        <details class="warnings">
          <summary>{sources.warnings.length === 1 ? "1 warning" : `${sources.warnings.length} warnings`}</summary>
          <ul>
            {sources.warnings.map((warning, at) => (
              <li key={at}><Text value={warning} /></li>
            ))}
          </ul>
        </details>
      )}
      {session.dataset !== null && <LogLine key={session.dataset.id} dataset={session.dataset} />}
      <main tabIndex={-1}>
        <Shown key={key} />
      </main>
      <Dialogs opened={opened} onClose={() => setOpened(null)} />
    </div>
  );
}

function skip(event: MouseEvent): void {
  event.preventDefault();
  const title = document.getElementById("title");
  title?.setAttribute("tabindex", "-1");
  title?.focus();
}

const FORGET = { task: undefined, trajectory: undefined, step: undefined, at: undefined, where: undefined, sort: undefined, descending: undefined, columns: undefined } as const; // prettier-ignore

function Pickers({ session }: { session: Session }): JSX.Element {
  const { sources, dataset, run, update, joined } = session;
  return (
    <>
      {sources.datasets.length > 0 && (
        <label>
          <span>dataset</span>
          <select value={dataset?.id} onChange={(event) => go({ ...FORGET, data: event.currentTarget.value, update: undefined })} title={dataset?.path}>
            {sources.datasets.map((one) => (
              <option key={one.id} value={one.id}>{plain(one.name, 60)}</option>
            ))}
          </select>
        </label>
      )}
      {sources.runs.length > 0 && (
        <label>
          <span>run</span>
          <select value={run?.id} onChange={(event) => go({ run: event.currentTarget.value, update: undefined })} title={run?.path}>
            {sources.runs.map((one) => (
              <option key={one.id} value={one.id}>{plain(one.name, 60)}</option>
            ))}
          </select>
        </label>
      )}
      {run !== null && run.token_updates.length > 0 && (
        <label>
          <span>update</span>
          <select
            value={joined.update === undefined ? "none" : (update ?? "none")}
            onChange={(event) => go({ update: event.currentTarget.value })}
            title="Tokens and groups show the values that this update recorded"
          >
            <option value="none">none</option>
            {run.token_updates.map((one) => (
              <option key={one} value={String(one)}>{short(one)}</option>
            ))}
          </select>
        </label>
      )}
    </>
  );
}

function Chosen({ session }: { session: Session }): JSX.Element | null {
  const { task, trajectory, step } = session.place;
  if (task === undefined && trajectory === undefined) return null;
  return (
    <div class="chosen-path" aria-label="Chosen">
      {task !== undefined && (
        <Go to={changed(session.place, toView("group"))}><span title={plain(task)}><Text value={ending(task, 40)} /></span></Go>
      )}
      {trajectory !== undefined && (
        <>
          {task !== undefined && <span aria-hidden="true">›</span>}
          <Go to={changed(session.place, toView("tokens"))}><span title={plain(trajectory)}><Text value={ending(trajectory, 48)} /></span></Go>
        </>
      )}
      {trajectory !== undefined && step !== undefined && (
        <>
          <span aria-hidden="true">›</span>
          <span>step {plain(step, 12)}</span>
        </>
      )}
    </div>
  );
}
