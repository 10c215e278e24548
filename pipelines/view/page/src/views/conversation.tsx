/** View 5: the messages of a trajectory, in lanes. */

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { go } from "../address";
import { type Conversation, conversation, type Part, type Turn } from "../answers";
import { FindingBadge } from "../faults";
import { NoTrajectory } from "../first_trajectory";
import { useKeys } from "../keys";
import { Markdown } from "../markdown";
import { Awaited, Empty, Go, Num, Text, useAnswer } from "../parts";
import { usePictureUrl } from "../pictures";
import { useSession } from "../session";
import { count, plain, short } from "../text";

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
  const shown = dataset === null || trajectory === undefined ? null : JSON.stringify([dataset.id, trajectory]);
  const key = shown === null ? null : `${shown} ${dataset?.log?.version ?? 0}`;
  const answer = useAnswer(key, () => conversation(dataset!.id, trajectory!), shown);
  if (dataset === null || trajectory === undefined) {
    return (
      <section class="view" aria-labelledby="title">
        <h1 id="title">Conversation</h1>
        <NoTrajectory />
      </section>
    );
  }
  return (
    <section class="view" aria-labelledby="title">
      <Awaited answer={answer}>{(found) => <Lanes key={shown} found={found} trajectory={trajectory} />}</Awaited>
    </section>
  );
}

function Lanes({ found, trajectory }: { found: Conversation; trajectory: string }): JSX.Element {
  const [open, setOpen] = useState(false);
  const [repeated, setRepeated] = useState(false);
  const [turn, setTurn] = useState(-1);
  const { found: sought = "", text } = useSession().place;
  const isMarkdown = text === "markdown";
  const switchText = (): void => go({ text: isMarkdown ? undefined : "markdown" }, { replace: true });
  const turns = found.lanes.flatMap((lane) => lane.turns);
  const soughtIn = sought === "" ? undefined : turns.find((one) => one.is_new && one.parts.some((part) => part.text.includes(sought)));
  const folds = turns.some((one) => one.parts.some((part) => isFolded(part, one.role)));
  const sampled = turns.filter((one) => one.num_tokens !== null);
  const cut = sampled.filter((one) => one.stop_reason === "length").length;
  const old = found.lanes.reduce((sum, lane) => sum + lane.turns.filter((one) => !one.is_new).length, 0);
  const numShown = repeated ? turns.length : turns.length - old;
  const show = (number: number, block: "nearest" | "start"): void => {
    const next = Math.max(0, Math.min(numShown - 1, number));
    const card = cardsNow()[next];
    setTurn(next);
    card?.focus({ preventScroll: true });
    card?.scrollIntoView({ block });
  };
  const move = (by: number): void => show(turn + by, "nearest");
  useKeys("Conversation", [
    { key: "j", does: "next turn", run: () => move(1) },
    { key: "k", does: "previous turn", run: () => move(-1) },
    { key: "t", does: "text as Markdown, or as it is", run: switchText },
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
        <button type="button" aria-pressed={isMarkdown} onClick={switchText} title="Text as Markdown, or as it is (t)">Markdown</button>
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
      <div class="conversation">
      {numShown > OUTLINED && <Outline found={found} repeated={repeated} onShow={(number) => show(number, "start")} />}
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
      </div>
    </>
  );
}

/** Conversations with more turns have an outline. */
const OUTLINED = 8;
/** Pixels at the top of the page that the name of a lane may cover; turns scroll to below them. */
const COVERED = 44;

function cardsNow(): HTMLElement[] {
  return [...document.querySelectorAll<HTMLElement>("article.turn")];
}

/** All turns with their positions; the turn at the top of the page is marked. */
function Outline({ found, repeated, onShow }: { found: Conversation; repeated: boolean; onShow: (number: number) => void }): JSX.Element {
  const list = useRef<HTMLOListElement>(null);
  const [at, setAt] = useState(0);
  useEffect(() => {
    const scroller = document.querySelector("main");
    if (scroller === null) return;
    const follow = (): void => {
      const top = scroller.getBoundingClientRect().top;
      const first = cardsNow().findIndex((card) => card.getBoundingClientRect().bottom > top + COVERED);
      if (first >= 0) setAt(first);
    };
    follow();
    scroller.addEventListener("scroll", follow, { passive: true });
    return () => scroller.removeEventListener("scroll", follow);
  }, [found, repeated]);
  useEffect(() => {
    const line = list.current?.querySelectorAll<HTMLElement>("li.turn-line")[at];
    if (line !== undefined && list.current !== null) list.current.scrollTop = line.offsetTop - list.current.clientHeight / 2;
  }, [at]);
  let number = -1;
  const total = found.lanes.reduce((sum, lane) => sum + lane.turns.filter((one) => one.is_new || repeated).length, 0);
  return (
    <nav class="outline" aria-label="Outline">
      <p class="note" role="status">turn {short(at + 1)} of {short(total)}</p>
      <ol ref={list}>
        {found.lanes.map((lane, place) => [
          found.lanes.length > 1 && <li key={place} class="agent"><Text value={plain(lane.agent ?? "(unnamed agent)", 40)} /></li>,
          ...lane.turns.filter((one) => one.is_new || repeated).map((one) => {
            number += 1;
            const here = number;
            return (
              <li key={`turn ${here}`} class={`turn-line ${ROLES.has(one.role) ? one.role : "other"}`}>
                <button type="button" class="link" aria-current={here === at ? "true" : undefined} onClick={() => onShow(here)}>
                  <span class="number">{short(here + 1)}</span> <span class="role">{plain(one.role, 12)}</span>{" "}
                  <span class={one.stop_reason === "length" ? "gist failed" : "gist"}>{gistOf(one)}</span>
                </button>
              </li>
            );
          }),
        ])}
      </ol>
    </nav>
  );
}

/** The tools of a turn, else the start of its text. */
function gistOf({ parts }: Turn): string {
  const calls = parts.filter((part) => part.type === "tool_call").map((part) => part.name ?? "call");
  if (calls.length > 0) return plain(calls.join(", "), 60);
  const first = parts.find((part) => part.text.trim() !== "");
  if (first === undefined) return "";
  return first.type === "tool_result" && first.name ? plain(first.name, 60) : plain(first.text.slice(0, 300).replace(/\s+/g, " ").trim(), 60);
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
  const isMarkdown = useSession().place.text === "markdown";
  const [own, setOwn] = useState<{ with: boolean; open: boolean } | null>(null);
  const isOpen = own !== null && own.with === open ? own.open : open;
  if (part.type === "image" || part.type === "file") return <Picture part={part} />;
  const said = isMarkdown && (part.type === "text" || part.type === "thinking") ? <Markdown value={part.text} /> : <Text value={part.text} />;
  if (!folds) return <div class="said">{said}</div>;
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
      {isOpen && <div class="said">{said}</div>}
    </details>
  );
}

/** A picture of the dataset's store; a file, or a picture that only has a URL, is named. */
function Picture({ part }: { part: Part }): JSX.Element {
  const { dataset } = useSession();
  const isStored = part.type === "image" && part.text.startsWith("sha256:") && dataset !== null;
  const url = usePictureUrl(isStored ? part.text : null);
  const name = plain(part.name ?? part.type, 80);
  if (url !== undefined && url !== null) return <img class="picture" src={url} alt={name} title={part.text} />;
  return (
    <div class="said">
      {KINDS[part.type]} <code><Text value={name} /></code>: <Text value={plain(part.text, 200)} />
      {isStored && url === null && " (the store of the dataset does not have it)"}
    </div>
  );
}
