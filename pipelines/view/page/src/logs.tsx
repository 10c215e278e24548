/** The line about logs that are shown without a conversion: progress, what is not shown, and how to convert them. */

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import type { Dataset, Log } from "./answers";
import { Num, Text } from "./parts";
import { count } from "./text";

const STAGES = { open: "Detecting formats", find: "Finding runs", read: "Reading" } as const;

export function LogLine({ dataset }: { dataset: Dataset }): JSX.Element | null {
  const log = dataset.log ?? null;
  if (log === null) return null;
  return (
    <div class="log-line">
      <span role="status">{log.is_done ? <>Logs, not converted: {count(log.num_files, "file")}</> : <Doing log={log} />}</span>
      {log.error !== null && <span class="failed"><Text value={log.error} /></span>}
      <Left log={log} />
      <span class="space" />
      <Convert command={log.command} />
    </div>
  );
}

function Doing({ log }: { log: Log }): JSX.Element {
  if (log.stage === null) return <>Reading {count(log.num_files, "file")}…</>;
  const unit = log.stage === "open" ? "files read" : log.stage === "find" ? "MB" : "runs";
  const [done, total] = log.stage === "find" ? [log.done / 1e6, log.total / 1e6] : [log.done, log.total];
  return (
    <>
      <progress value={log.done} max={Math.max(log.total, 1)} aria-label={STAGES[log.stage]} /> {STAGES[log.stage]}:{" "}
      {Math.round(done).toLocaleString("en")} of {Math.round(total).toLocaleString("en")} {unit}
    </>
  );
}

/** What is not shown, and what the readers left out. */
function Left({ log }: { log: Log }): JSX.Element | null {
  if (log.num_rejected + log.num_skipped + log.notes.length === 0) return null;
  const parts = [
    log.num_rejected > 0 && <span class="failed">{count(log.num_rejected, "rejected record")}</span>,
    log.num_skipped > 0 && count(log.num_skipped, "skipped file"),
    log.notes.length > 0 && count(log.notes.length, "note"),
  ].filter((part) => part !== false);
  return (
    <details>
      <summary>{parts.map((part, at) => <span key={at}>{at > 0 && ", "}{part}</span>)}</summary>
      <div class="left-out">
        {log.num_rejected > 0 && (
          <p>
            <Num value={log.num_rejected} name="rejected" /> of <Num value={log.num_records} name="records" /> records
            cannot be used. The table has a row for each reason; the filter <code>error IS NOT NULL</code> lists them.
          </p>
        )}
        {log.skipped.length > 0 && <List title="Skipped" items={log.skipped} more={log.num_skipped - log.skipped.length} />}
        {log.notes.length > 0 && <List title="Left out or changed by the readers" items={log.notes} more={0} />}
      </div>
    </details>
  );
}

function List({ title, items, more }: { title: string; items: string[]; more: number }): JSX.Element {
  return (
    <>
      <h3>{title}</h3>
      <ul>
        {items.map((item) => <li key={item}><Text value={item} /></li>)}
        {more > 0 && <li>and {more.toLocaleString("en")} more</li>}
      </ul>
    </>
  );
}

function Convert({ command }: { command: string }): JSX.Element {
  const [copied, setCopied] = useState(false);
  const copy = (): void => {
    navigator.clipboard.writeText(command).then(() => setCopied(true), () => undefined);
  };
  return (
    <details class="convert">
      <summary>Convert to a dataset</summary>
      <div class="left-out">
        <p>Run this command, then open the dataset that it writes:</p>
        <pre><Text value={command} /></pre>
        <button type="button" onClick={copy}>{copied ? "Copied" : "Copy"}</button>
      </div>
    </details>
  );
}

function firstWord(text: string): string {
  return /^\s*\S*/.exec(text)?.[0] ?? "";
}

/** Where two texts begin to differ. */
export function Said({ said, names }: { said: [string, string][]; names: [string, string] }): JSX.Element {
  return (
    <>
      {said.map(([before, after], at) => (
        <p key={at} class="excerpt">
          <span class="who">{names[at]}</span>{" "}
          <bdi><Text value={before} /><mark><Text value={firstWord(after) || "(end)"} /></mark><Text value={after.slice(firstWord(after).length)} /></bdi>
        </p>
      ))}
    </>
  );
}
