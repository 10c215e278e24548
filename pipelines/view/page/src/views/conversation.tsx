/** View 5: the messages of a trajectory, in lanes. */

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { go } from "../address";
import { type Conversation, conversation, type Part, picture, type Turn } from "../answers";
import { FindingBadge } from "../faults";
import { useKeys } from "../keys";
import { Awaited, Empty, Go, Num, Text, useAnswer } from "../parts";
import { useSession } from "../session";
import { count, plain } from "../text";

const KINDS: Record<Part["type"], string> = {
  text: "text",
  thinking: "thinking",
  tool_call: "calls",
  tool_result: "result of",
  image: "image",
  file: "file",
};

export function ConversationView(): JSX.Element {
  const { dataset, place } = useSession();
  const { trajectory } = place;
  const key = dataset === null || trajectory === undefined ? null : JSON.stringify([dataset.id, trajectory]);
  const answer = useAnswer(key, () => conversation(dataset!.id, trajectory!));
  if (dataset === null || trajectory === undefined) {
    return (
      <section class="view" aria-labelledby="title">
        <h1 id="title">Conversation</h1>
        <Empty>
          Choose a trajectory in the <Go to={{ view: "table" }}>table</Go> to read it.
        </Empty>
      </section>
    );
  }
  return (
    <section class="view" aria-labelledby="title">
      <Awaited answer={answer}>{(found) => <Lanes key={key} found={found} trajectory={trajectory} />}</Awaited>
    </section>
  );
}

function Lanes({ found, trajectory }: { found: Conversation; trajectory: string }): JSX.Element {
  const [open, setOpen] = useState(false);
  const [repeated, setRepeated] = useState(false);
  const [turn, setTurn] = useState(-1);
  const { found: sought = "" } = useSession().place;
  const turns = found.lanes.flatMap((lane) => lane.turns);
  const soughtIn = sought === "" ? undefined : turns.find((one) => one.is_new && one.parts.some((part) => part.text.includes(sought)));
  const folds = turns.some((one) => one.parts.some((part) => isFolded(part, one.role)));
  const sampled = turns.filter((one) => one.num_tokens !== null);
  const cut = sampled.filter((one) => one.stop_reason === "length").length;
  const old = found.lanes.reduce((sum, lane) => sum + lane.turns.filter((one) => !one.is_new).length, 0);
  const move = (by: number): void => {
    const cards = [...document.querySelectorAll<HTMLElement>("article.turn")];
    const next = Math.max(0, Math.min(cards.length - 1, turn + by));
    setTurn(next);
    cards[next]?.focus();
    cards[next]?.scrollIntoView({ block: "nearest" });
  };
  useKeys("Conversation", [
    { key: "j", does: "next turn", run: () => move(1) },
    { key: "k", does: "previous turn", run: () => move(-1) },
    { key: "e", does: "unfold or fold all parts", run: () => setOpen(!open) },
    { key: "h", does: "show or hide repeated turns", run: () => setRepeated(!repeated) },
    {
      key: "Enter",
      does: "open the tokens of the turn's step",
      run: () => {
        const step = document.activeElement?.getAttribute("data-step");
        if (step !== null && step !== undefined) go({ view: "tokens", step, at: undefined });
      },
    },
  ]);
  return (
    <>
      <header class="tools">
        <h1 id="title">
          <Text value={trajectory} />
          <small>
            return <Num value={found.return} name="return" />
            {sampled.length > 0 && `, ${count(sampled.length, "sampled turn")}`}
            {found.is_approximate && <span title="The log has no token ids: its text was re-tokenized">, approximate tokens</span>}
            {cut > 0 && `, ${cut} cut off at the token limit`}
          </small>
        </h1>
        {folds && (
          <button type="button" aria-pressed={open} onClick={() => setOpen(!open)} title="Fold or unfold (e)">
            {open ? "Fold all" : "Unfold all"}
          </button>
        )}
        {old > 0 && (
          <button type="button" aria-pressed={repeated} onClick={() => setRepeated(!repeated)} title="Repeated turns (h)">
            {repeated ? "Hide" : "Show"} {count(old, "repeated turn")}
          </button>
        )}
      </header>
      {found.error !== null && (
        <div class="failure" role="note">
          <strong>The trajectory failed: </strong>
          <Text value={found.error} />
        </div>
      )}
      {found.findings.length > 0 && <p class="note">{found.findings.map((one, at) => <FindingBadge key={at} found={one} />)}</p>}
      {found.lanes.every((lane) => lane.turns.length === 0) && <Empty>The dataset has no text for this trajectory.</Empty>}
      <div class={found.lanes.length > 1 ? "lanes several" : "lanes"}>
        {found.lanes.map((lane, at) => (
          <section key={at} class="lane" aria-label={lane.agent ?? "conversation"}>
            {found.lanes.length > 1 && <h2><Text value={lane.agent ?? "(unnamed agent)"} /></h2>}
            {lane.turns.map((one, place) =>
              one.is_new || repeated ? <TurnCard key={place} turn={one} open={open || one === soughtIn} isFound={one === soughtIn} /> : null,
            )}
          </section>
        ))}
      </div>
    </>
  );
}

const ROLES = new Set(["system", "user", "assistant", "tool"]);

function TurnCard({ turn, open, isFound }: { turn: Turn; open: boolean; isFound: boolean }): JSX.Element {
  const card = useRef<HTMLElement>(null);
  useEffect(() => {
    if (isFound) card.current?.scrollIntoView({ block: "start" });
  }, [isFound]);
  const { place, dataset } = useSession();
  const { trajectory } = place;
  const hasTokens = dataset?.log?.has_tokens !== false;
  return (
    <article
      ref={card}
      class={`turn ${ROLES.has(turn.role) ? turn.role : "other"} ${turn.is_new ? "" : "repeated"} ${isFound ? "found" : ""}`}
      tabIndex={-1}
      data-step={turn.step_index}
      aria-label={`${plain(turn.role, 40)}, step ${turn.step_index}`}
    >
      <header>
        <h3><Text value={turn.role} /></h3>
        {turn.trained && hasTokens && <span class="badge" title="Tokens of this turn are trained on">trained</span>}
        {!turn.is_new && <span class="badge quiet">repeated</span>}
        {turn.findings.map((one, at) => <FindingBadge key={at} found={one} />)}
        {turn.from === "tokens" && <span class="badge quiet" title="The dataset has no messages here; this text was decoded from token ids">from tokens</span>}
        {turn.num_tokens !== null && (
          <small class="sampling">
            {count(turn.num_tokens, "token")}
            {turn.stop_reason !== null && (
              <>, stop reason <span class={turn.stop_reason === "length" ? "failed" : ""}><Text value={plain(turn.stop_reason, 40)} /></span></>
            )}
          </small>
        )}
        {turn.num_tokens === null && turn.num_chars > 0 && <small class="sampling">{count(turn.num_chars, "character")}</small>}
        {trajectory !== undefined && hasTokens && (
          <Go to={{ view: "tokens", step: String(turn.step_index), at: undefined }} class="to-tokens">
            tokens of step {turn.step_index}
          </Go>
        )}
      </header>
      {turn.parts.map((part, at) => (
        <PartOf key={at} part={part} open={open} folds={isFolded(part, turn.role)} />
      ))}
    </article>
  );
}

/** Collapsed by default: thinking, tools, and long system prompts. */
function isFolded(part: Part, role: string): boolean {
  if (part.type === "image" || part.type === "file") return false;
  return part.type !== "text" || (role === "system" && part.text.length > 600);
}

function PartOf({ part, open, folds }: { part: Part; open: boolean; folds: boolean }): JSX.Element {
  const [own, setOwn] = useState<{ with: boolean; open: boolean } | null>(null);
  const isOpen = own !== null && own.with === open ? own.open : open;
  if (part.type === "image" || part.type === "file") return <Picture part={part} />;
  if (!folds) return <div class="said"><Text value={part.text} /></div>;
  return (
    <details
      class={`part ${part.type}`}
      open={isOpen}
      onToggle={(event) => setOwn({ with: open, open: event.currentTarget.open })}
    >
      <summary>
        <span class="kind">{part.type === "tool_result" && !part.name ? "tool result" : KINDS[part.type]}</span>{" "}
        {part.name !== null && part.name !== "" && <code><Text value={plain(part.name, 80)} /></code>}
        {!isOpen && <span class="preview">{plain(part.text.trimStart(), 110)}</span>}
        <small>{count(part.text.length, "character")}</small>
      </summary>
      {isOpen && <div class="said"><Text value={part.text} /></div>}
    </details>
  );
}

/** A picture of the dataset's store; a file, or a picture that only has a URL, is named. */
function Picture({ part }: { part: Part }): JSX.Element {
  const { dataset } = useSession();
  const isStored = part.type === "image" && part.text.startsWith("sha256:") && dataset !== null;
  const answer = useAnswer(isStored ? `${dataset.id} ${part.text}` : null, () => picture(dataset!.id, part.text));
  const url = answer.value?.url;
  const name = plain(part.name ?? part.type, 80);
  if (url !== undefined && url !== null) return <img class="picture" src={url} alt={name} title={part.text} />;
  return (
    <div class="said">
      {KINDS[part.type]} <code><Text value={name} /></code>: <Text value={plain(part.text, 200)} />
      {isStored && url === null && " (the store of the dataset does not have it)"}
    </div>
  );
}
