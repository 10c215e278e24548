/** The dialogs: keyboard shortcuts, copying a selection, labels, pinned trajectories. */

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { go, pinsOf, togglePin } from "./address";
import { isReport, trajectories, writeLabels } from "./answers";
import { keysNow } from "./keys";
import { asError, Failure, Go, Text, useAnswer } from "./parts";
import { useSession } from "./session";
import { among, commandOf, labelOf, polarsOf, polarsWhere, usesComputed } from "./sql";
import { count, short } from "./text";

export type Opened = "keys" | "copy" | "label" | "pins" | null;

export function Dialog(props: { title: string; onClose: () => void; children: ComponentChildren }): JSX.Element {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => ref.current?.showModal(), []);
  return (
    <dialog
      ref={ref}
      aria-labelledby="dialog-title"
      onClose={props.onClose}
      onClick={(event) => event.target === ref.current && ref.current?.close()}
    >
      <div class="dialog">
        <header>
          <h2 id="dialog-title">{props.title}</h2>
          <button type="button" onClick={() => ref.current?.close()} aria-label="Close">
            ✕
          </button>
        </header>
        {props.children}
      </div>
    </dialog>
  );
}

const NAMES: Record<string, string> = {
  ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", PageDown: "page down", PageUp: "page up",
}; // prettier-ignore

function KeysDialog({ onClose }: { onClose: () => void }): JSX.Element {
  const groups = keysNow().map(({ title, keys }) => {
    const lines = new Map<string, string[]>();
    for (const { key, does } of keys) lines.set(does, [...(lines.get(does) ?? []), NAMES[key] ?? key]);
    return { title, lines: [...lines] };
  });
  return (
    <Dialog title="Keys" onClose={onClose}>
      <div class="keys">
        {groups.map(({ title, lines }) => (
          <section key={title}>
            <h3>{title}</h3>
            <dl>
              {lines.map(([does, keys]) => (
                <div key={does}>
                  <dt>{keys.map((key) => <kbd key={key}>{key}</kbd>)}</dt>
                  <dd>{does}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
      </div>
    </Dialog>
  );
}

async function copyText(text: string, area: HTMLTextAreaElement | null): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // pages opened from disk have no clipboard API: select the text and copy the selection
  }
  area?.select();
  return document.execCommand("copy");
}

function Snippet({ title, text }: { title: string; text: string }): JSX.Element {
  const ref = useRef<HTMLTextAreaElement>(null);
  const [copied, setCopied] = useState("");
  return (
    <div class="snippet">
      <header>
        <h3>{title}</h3>
        <button
          type="button"
          onClick={() => {
            void copyText(text, ref.current).then((done) => setCopied(done ? "Copied" : "Press Ctrl+C"));
          }}
        >
          Copy
        </button>
        <span role="status">{copied}</span>
      </header>
      <textarea ref={ref} readOnly rows={Math.min(6, 1 + Math.floor(text.length / 70))} value={text} aria-label={title} />
    </div>
  );
}

const MOST = 1000;

/** Copy the pinned trajectories, otherwise the filtered ones, otherwise the current one. */
function CopyDialog({ onClose }: { onClose: () => void }): JSX.Element {
  const { dataset, place, selection } = useSession();
  const pins = pinsOf(place);
  const byName = pins.length === 0 && usesComputed(selection.where, dataset?.added) && !isReport;
  const found = useAnswer(byName && dataset !== null ? `${dataset.id} ${selection.where}` : null, () =>
    trajectories(dataset!.id, { ...selection, sort: "" }, 0, MOST));
  if (dataset === null) return <Dialog title="Copy the selection" onClose={onClose}>No dataset is open.</Dialog>;
  let names: string[] | null = pins.length > 0 ? pins : null;
  let what = pins.length > 0 ? count(pins.length, "pinned trajectory", "pinned trajectories") : "the filter";
  let note = "";
  if (byName) {
    names = found.value?.rows.map((row) => String(row.trajectory_id)) ?? [];
    what = count(found.value?.total ?? 0, "trajectory", "trajectories");
    note = "The filter is about trajectories, not rows, so the trajectories are listed by id.";
    if (found.value !== undefined && found.value.total > MOST) note += ` Only the first ${short(MOST)} are listed.`;
  } else if (names === null && selection.where === "" && place.trajectory !== undefined) {
    names = [place.trajectory];
    what = "the chosen trajectory";
  }
  const where = names === null ? selection.where : among(names);
  const polars = names === null ? polarsWhere(selection.where) : polarsOf(names);
  return (
    <Dialog title="Copy the selection" onClose={onClose}>
      {where === "" ? (
        <p>No trajectories are selected. Pin or choose a trajectory, or set a filter.</p>
      ) : (
        <>
          <p class="note">Selection: {what}. {note}</p>
          <Snippet title="Polars filter" text={polars} />
          <Snippet title="rollouts filter" text={commandOf(dataset.path, where)} />
        </>
      )}
      <Snippet title="Address of this view" text={isReport ? location.hash : location.href.replace(/\?token=[^#]*/, "")} />
    </Dialog>
  );
}

function LabelDialog({ onClose }: { onClose: () => void }): JSX.Element {
  const { dataset, place } = useSession();
  const pins = pinsOf(place);
  const chosen = pins.length > 0 ? pins : place.trajectory === undefined ? [] : [place.trajectory];
  const [done, setDone] = useState<{ path: string; num_rows: number } | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const submit = (event: SubmitEvent): void => {
    event.preventDefault();
    if (dataset === null) return;
    const form = new FormData(event.currentTarget as HTMLFormElement);
    const text = String(form.get("value"));
    const value = labelOf(text);
    setBusy(true);
    setError(null);
    writeLabels(dataset.id, {
      column: String(form.get("column")),
      values: Object.fromEntries(chosen.map((name) => [name, value])),
      out: String(form.get("out")),
    })
      .then(setDone, setError)
      .finally(() => setBusy(false));
  };
  return (
    <Dialog title="Label" onClose={onClose}>
      {isReport ? (
        <p>A report cannot write labels; use `rollouts view`.</p>
      ) : chosen.length === 0 ? (
        <p>Choose or pin the trajectories to label.</p>
      ) : done !== null ? (
        <p role="status">
          Wrote {count(done.num_rows, "row")} to <code><Text value={done.path} /></code>.
        </p>
      ) : (
        <form class="label-form" onSubmit={submit}>
          <p class="note">
            Writes a copy of the dataset with one more column: this value for{" "}
            {pins.length > 0 ? count(pins.length, "pinned trajectory", "pinned trajectories") : <Text value={chosen[0]!} />}, null for the others.
          </p>
          <label>column <input name="column" required value="label" spellcheck={false} /></label>
          <label>value <input name="value" required placeholder="tool misuse" autofocus /></label>
          <label>new dataset <input name="out" required placeholder="labelled/" spellcheck={false} /></label>
          {error !== null && <Failure error={asError(error)} />}
          <button type="submit" disabled={busy}>{busy ? "Writing…" : "Write the copy"}</button>
        </form>
      )}
    </Dialog>
  );
}

function PinsDialog({ onClose }: { onClose: () => void }): JSX.Element {
  const { place } = useSession();
  const pins = pinsOf(place);
  return (
    <Dialog title={count(pins.length, "pinned trajectory", "pinned trajectories")} onClose={onClose}>
      {pins.length === 0 ? (
        <p>Press p on a trajectory to pin it.</p>
      ) : (
        <>
          <ul class="pins">
            {pins.map((pin) => (
              <li key={pin}>
                <span onClick={onClose}>
                  <Go to={{ view: "tokens", trajectory: pin, task: undefined, step: undefined, at: undefined }}><Text value={pin} /></Go>
                </span>
                <button type="button" onClick={() => togglePin(pin)} aria-label={`Unpin ${pin}`}>✕</button>
              </li>
            ))}
          </ul>
          <button type="button" onClick={() => go({ pins: undefined }, { replace: true })}>Unpin all</button>
        </>
      )}
    </Dialog>
  );
}

export function Dialogs({ opened, onClose }: { opened: Opened; onClose: () => void }): JSX.Element | null {
  if (opened === "keys") return <KeysDialog onClose={onClose} />;
  if (opened === "copy") return <CopyDialog onClose={onClose} />;
  if (opened === "label") return <LabelDialog onClose={onClose} />;
  if (opened === "pins") return <PinsDialog onClose={onClose} />;
  return null;
}
