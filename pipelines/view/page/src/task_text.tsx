/** The text of a task: its first user message, as one line that shows all of it on demand. */

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { taskText } from "./answers";
import { Awaited, Text, useAnswer } from "./parts";
import { useSession } from "./session";
import { plain } from "./text";

const MOST = 2000;

/** One line; its tooltip has the complete text. */
export function TaskLine({ task, start }: { task: string; start: string | null }): JSX.Element | null {
  const { dataset } = useSession();
  const [whole, setWhole] = useState<string | null>(null);
  if (start === null) return null;
  const isCut = start.endsWith("…") && whole === null && dataset !== null;
  const ask = (): void => {
    if (isCut) taskText(dataset.id, task).then(({ text }) => setWhole(text), () => undefined);
  };
  return (
    <span class="task-line" title={plain(whole ?? start, MOST).replaceAll("⏎", "\n")} onPointerEnter={ask}>
      <Text value={start} />
    </span>
  );
}

/** One line that unfolds. */
export function TaskText({ task, start }: { task: string; start: string | null }): JSX.Element | null {
  const { dataset } = useSession();
  const [isOpen, setOpen] = useState(false);
  const answer = useAnswer(isOpen && dataset !== null ? JSON.stringify([dataset.id, task]) : null, () => taskText(dataset!.id, task));
  if (start === null) return null;
  return (
    <details class="part task" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <span class="kind">task</span>
        {!isOpen && <span class="preview"><Text value={start} /></span>}
      </summary>
      {isOpen && <Awaited answer={answer}>{({ text }) => <div class="said"><Text value={text ?? start} /></div>}</Awaited>}
    </details>
  );
}
