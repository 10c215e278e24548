/** Audit findings of a row: outlines and margin notes in the token view, and a list. */

import type { JSX } from "preact";
import type { Found, Span } from "./answers";
import { Num, Text } from "./parts";
import { plain, short } from "./text";
import { type Layout, LINE } from "./token_layout";

/** Width of the margin that names faults. */
export const GUTTER = 170;
const NOTE_LINES = 4;

export function nameOf(span: Span): string {
  return plain(span.kind.replaceAll("_", " "), 40);
}

/** The finding in words. */
export function reasonOf(span: Span): string {
  return span.reason ?? span.meaning ?? "";
}

/** The faults of a response token, one per line. */
export function faultsAt(faults: Span[], position: number): string {
  const own = faults.filter((span) => span.start <= position && position < span.end);
  return own.map((span) => `${nameOf(span)}: ${plain(reasonOf(span), 500)}`).join("\n");
}

export interface Note {
  text: string;
  isName: boolean;
}

/** Margin notes by line of the layout: the name of a fault, then its reason. */
export function marginNotes(faults: Span[], layout: Layout, prompt: number, letters: number): Map<number, Note> {
  const notes = new Map<number, Note>();
  const starts = faults.map((span) => layout.line[prompt + span.start]!);
  let free = 0;
  faults.forEach((span, at) => {
    let line = Math.max(free, starts[at]!);
    notes.set(line, { text: plain(nameOf(span), letters), isName: true });
    const next = starts.slice(at + 1).find((other) => other > line) ?? Number.POSITIVE_INFINITY;
    for (const text of wrapped(plain(reasonOf(span), letters * NOTE_LINES), letters).slice(0, NOTE_LINES)) {
      line += 1;
      if (line >= next) break;
      notes.set(line, { text, isName: false });
    }
    free = line + (line >= next ? 0 : 1);
  });
  return notes;
}

function wrapped(text: string, letters: number): string[] {
  const lines = [""];
  for (const word of text.split(" ")) {
    const last = lines.at(-1)!;
    if (last !== "" && last.length + 1 + word.length > letters) lines.push(word.slice(0, letters));
    else lines[lines.length - 1] = (last === "" ? word : `${last} ${word}`).slice(0, letters);
  }
  return lines[0] === "" ? [] : lines;
}

/** Outline a span, with open sides at line breaks; a bar with a triangle marks the token after a swap. */
export function drawFault(
  context: CanvasRenderingContext2D,
  span: Span,
  layout: Layout,
  prompt: number,
  place: { left: number; top: number; first: number; last: number; colour: string },
): void {
  const [from, to] = [prompt + span.start, prompt + span.end - 1];
  if (to < from || to >= layout.line.length) return;
  const { left, top, first, last, colour } = place;
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.5;
  for (let line = Math.max(first, layout.line[from]!); line <= Math.min(last - 1, layout.line[to]!); line++) {
    const [begin, end] = [Math.max(from, layout.starts[line]!), Math.min(to, layout.starts[line + 1]! - 1)];
    if (end < begin) continue; // beside a picture
    const y = top + line * LINE;
    const [x0, x1] = [left + layout.x[begin]! - 1, left + layout.x[end]! + layout.width[end]! + 1];
    context.beginPath();
    if (begin === from) context.moveTo(x0, y + LINE - 1.5);
    if (begin === from) context.lineTo(x0, y);
    else context.moveTo(x0, y);
    context.lineTo(x1, y);
    if (end === to) context.lineTo(x1, y + LINE - 1.5);
    else context.moveTo(x1, y + LINE - 1.5);
    context.lineTo(x0, y + LINE - 1.5);
    context.stroke();
  }
  if (span.swap_position === null) return;
  const at = prompt + span.swap_position;
  const line = layout.line[at];
  if (line === undefined || line < first || line >= last) return;
  const [x, y] = [left + layout.x[at]! - 1, top + line * LINE];
  context.fillRect(x - 1.5, y - 1, 3, LINE);
  context.beginPath();
  context.moveTo(x - 5, y - 2);
  context.lineTo(x + 5, y - 2);
  context.lineTo(x, y + 4);
  context.fill();
}

/** A finding as a span of the token view. */
export function spanOf({ label, text, start, end }: Found): Span {
  return { start, end, kind: label, is_fault: true, meaning: null, reason: text, swap_position: null, log_likelihood_ratio: null };
}

/** The label of a finding; its text is the title. */
export function FindingBadge({ found }: { found: Found }): JSX.Element {
  return <span class="badge bad" data-name="finding" title={plain(found.text, 500)}><Text value={plain(found.label.replaceAll("_", " "), 40)} /></span>;
}

interface VerdictsProps {
  spans: Span[];
  findings: Found[];
  audited: boolean;
  onOpen: (position: number) => void;
}

/** The verdicts and findings as lists, for screen readers too; each links to its first token. */
export function Verdicts({ spans, findings, audited, onOpen }: VerdictsProps): JSX.Element | null {
  const own = findings.map(spanOf);
  return (
    <>
      {audited && spans.length === 0 && <p class="note">The audit has no verdict on this row.</p>}
      {spans.length > 0 && <Spans name="Verdicts of the audit" title="Audit" spans={spans} onOpen={onOpen} />}
      {own.length > 0 && <Spans name="Findings" title="Findings" spans={own} onOpen={onOpen} />}
    </>
  );
}

function Spans({ name, title, spans, onOpen }: { name: string; title: string; spans: Span[]; onOpen: (position: number) => void }): JSX.Element {
  return (
    <section class="verdicts" aria-label={name}>
      <h2>{title}</h2>
      <ul>
        {spans.map((span, at) => (
          <li key={at} data-span={`${span.start} ${span.end}`}>
            <button type="button" class="link" onClick={() => onOpen(span.swap_position ?? span.start)}>
              <span class={span.is_fault ? "badge bad" : "badge quiet"}>{nameOf(span)}</span>
            </button>{" "}
            <small>
              {span.start < span.end ? `response tokens ${short(span.start)} to ${short(span.end - 1)}` : "the whole step"}
              {span.swap_position !== null && <>, swap at <Num value={span.swap_position} name="swap_position" /></>}
              {span.is_fault && span.log_likelihood_ratio !== null && <>, <Num value={span.log_likelihood_ratio} name="log_likelihood_ratio" /> nats</>}
            </small>
            {reasonOf(span) !== "" && <div><Text value={reasonOf(span)} /></div>}
          </li>
        ))}
      </ul>
    </section>
  );
}
