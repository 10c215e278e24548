/** View 3: the attempts at one task, and where they diverge. */

import type { Table } from "apache-arrow";
import type { JSX } from "preact";
import { go, pinsOf, togglePin } from "../address";
import { type Attempt, group, type Task, tasks, tokens } from "../answers";
import { useKeys } from "../keys";
import { Said } from "../logs";
import { Awaited, Bar, Cell, Empty, Go, Num, Text, useAnswer } from "../parts";
import { RecordedIn } from "../recorded";
import { useSession } from "../session";
import { TaskLine, TaskText } from "../task_text";
import { count, short, tokenPieces } from "../text";

const AROUND = 14;
const EXCERPTS = 16;

export function GroupView(): JSX.Element {
  const { dataset, place, joined } = useSession();
  const task = place.task;
  const key = dataset === null || task === undefined ? null : JSON.stringify([dataset.id, task, joined]);
  const answer = useAnswer(key, () => group(dataset!.id, task!, joined));
  const attempts = answer.value?.attempts ?? [];
  const chosen = attempts.findIndex((attempt) => attempt.trajectory_id === place.trajectory);
  const move = (by: number): void => {
    const next = attempts[Math.max(0, Math.min(attempts.length - 1, chosen + by))];
    if (next !== undefined) go({ trajectory: next.trajectory_id, step: undefined, at: undefined }, { replace: true });
  };
  useKeys("Group", [
    { key: "j", does: "next attempt", run: () => move(1) },
    { key: "ArrowDown", does: "next attempt", run: () => move(1) },
    { key: "k", does: "previous attempt", run: () => move(-1) },
    { key: "ArrowUp", does: "previous attempt", run: () => move(-1) },
    { key: "Enter", does: "open its tokens", run: () => place.trajectory !== undefined && go({ view: "tokens" }) },
    {
      key: "p",
      does: "pin or unpin it",
      run: () => place.trajectory !== undefined && togglePin(place.trajectory),
    },
  ]);
  if (dataset === null || task === undefined) {
    return (
      <section class="view" aria-labelledby="title">
        <h1 id="title">Group</h1>
        {dataset === null ? <Empty>No dataset is open.</Empty> : <Tasks dataset={dataset.id} />}
      </section>
    );
  }
  return (
    <section class="view" aria-labelledby="title">
      <h1 id="title">
        Attempts at <Text value={task} />
      </h1>
      <TaskText key={`${dataset.id} ${task}`} task={task} start={answer.value?.task_text ?? null} />
      {answer.value?.has_mixed_prompts && <p class="note">The attempts start from different prompts: they may be attempts at different tasks.</p>}
      <RecordedIn dataset={dataset} of={{ instance_id: task }} what="this task" />
      <Awaited answer={answer}>{(found) => <Attempts attempts={found.attempts} />}</Awaited>
    </section>
  );
}

/** The list of tasks; tasks whose returns are all equal, and so have no advantage, come first. */
function Tasks({ dataset }: { dataset: string }): JSX.Element {
  const answer = useAnswer(dataset, () => tasks(dataset));
  return (
    <Awaited answer={answer}>
      {(found) => {
        const hasTexts = found.tasks.some((task) => task.task_text !== null);
        return (
        <>
          <p class="lead">
            {count(found.total, "task")}, sorted by the spread of their returns, smallest first.
            {found.total > found.tasks.length && ` Only the first ${short(found.tasks.length)} are listed. Find others in the table, or press / to search for an id.`}
          </p>
          <div class="scroll">
            <table class="plain fitted" aria-label="Tasks">
              <thead>
                <tr>
                  <th scope="col" title="instance_id">task</th>
                  {hasTexts && <th scope="col" title="The first user message">text</th>}
                  <th scope="col" class="numeric">attempts</th>
                  <th scope="col" class="numeric">mean return</th>
                  <th scope="col" class="numeric" title="The largest return minus the smallest">spread</th>
                  <th scope="col" />
                </tr>
              </thead>
              <tbody>
                {found.tasks.map((task) => (
                  <tr key={task.instance_id} data-row={task.instance_id}>
                    <th scope="row">
                      <Go to={{ task: task.instance_id, trajectory: undefined, step: undefined, at: undefined }}>
                        <Text value={task.instance_id} />
                      </Go>
                    </th>
                    {hasTexts && <td><TaskLine task={task.instance_id} start={task.task_text} /></td>}
                    <td class="numeric"><Num value={task.attempts} name="attempts" /></td>
                    <td class="numeric"><Num value={task.mean} name="mean" /></td>
                    <td class="numeric"><Num value={task.spread} name="spread" /></td>
                    <td>{noteOf(task)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </>
        );
      }}
    </Awaited>
  );
}

function noteOf(task: Task): string {
  if (task.num_returns === 0) return "no known returns";
  if (task.num_returns < task.attempts) return `${count(task.attempts - task.num_returns, "return")} unknown`;
  if (task.attempts === 1) return "only one attempt";
  return task.spread === 0 ? "no advantage: all returns are equal" : "";
}

function Attempts({ attempts }: { attempts: Attempt[] }): JSX.Element {
  const { place, joined, run } = useSession();
  const pins = pinsOf(place);
  const returns = attempts.map((attempt) => attempt.return).filter((value) => value !== null);
  const reach = Math.max(0, ...returns.map(Math.abs));
  const farthest = Math.max(0, ...attempts.map((attempt) => Math.abs(attempt.advantage ?? 0)));
  const mean = returns.reduce((sum, value) => sum + value, 0) / returns.length;
  const deviation = Math.sqrt(returns.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (returns.length - 1));
  const hasAdvantage = attempts.some((attempt) => attempt.advantage !== null);
  const isEqual = returns.length > 1 && new Set(returns).size === 1;
  return (
    <>
      <p class="lead">
        {count(attempts.length, "attempt")}
        {returns.length > 0 && (
          <>
            , mean return <Num value={mean} name="mean_return" />
            {returns.length > 1 && (
              <>
                , standard deviation{" "}
                <span title="Sample standard deviation (n − 1), as in group advantages"><Num value={deviation} name="deviation" /></span>
              </>
            )}
            , from <Num value={Math.min(...returns)} /> to{" "}
            <Num value={Math.max(...returns)} />
          </>
        )}
        {isEqual && ": all equal, so all advantages are 0 with a group baseline"}
        {joined.update !== undefined && hasAdvantage && `. Advantages are from update ${joined.update}`}
        .{joined.update === undefined && (run?.token_updates.length ?? 0) > 0 && " Choose an update above to see advantages."}
      </p>
      <div class="scroll">
        <table class="plain fitted" aria-label="Attempts">
          <thead>
            <tr>
              <th scope="col">attempt</th>
              <th scope="col" class="numeric">return</th>
              <th scope="col" aria-hidden="true" />
              {hasAdvantage && <th scope="col" class="numeric" title="Mean over the tokens that the update trained">mean advantage</th>}
              {hasAdvantage && <th scope="col" aria-hidden="true" />}
              <th scope="col" class="numeric">rows</th>
              <th scope="col" class="numeric">response tokens</th>
              <th scope="col" class="numeric">trained tokens</th>
              <th scope="col">stop reason</th>
              <th scope="col">error</th>
              <th scope="col" title="The first sampled token that differs from the first attempt's">diverges at</th>
            </tr>
          </thead>
          <tbody>
            {attempts.map((attempt) => (
              <tr
                key={attempt.trajectory_id}
                data-row={attempt.trajectory_id}
                class={[
                  attempt.trajectory_id === place.trajectory ? "chosen" : "",
                  pins.includes(attempt.trajectory_id) ? "pinned" : "",
                ].join(" ")}
                onClick={() => go({ trajectory: attempt.trajectory_id, step: undefined, at: undefined }, { replace: true })}
              >
                <th scope="row">
                  <Go to={{ view: "tokens", trajectory: attempt.trajectory_id, step: undefined, at: undefined }}>
                    <Text value={attempt.trajectory_id} />
                  </Go>
                </th>
                <td class="numeric"><Num value={attempt.return} name="return" /></td>
                <td class="bar-cell"><Bar value={attempt.return} reach={reach} signed={returns.some((value) => value < 0)} /></td>
                {hasAdvantage && <td class="numeric"><Num value={attempt.advantage} name="advantage" /></td>}
                {hasAdvantage && <td class="bar-cell"><Bar value={attempt.advantage} reach={farthest} signed /></td>}
                <td class="numeric"><Num value={attempt.num_rows} name="num_rows" /></td>
                <td class="numeric"><Num value={attempt.response_tokens} name="response_tokens" /></td>
                <td class="numeric"><Num value={attempt.trained_tokens} name="trained_tokens" /></td>
                <td><Cell value={attempt.stop_reason} name="stop_reason" /></td>
                <td class={attempt.error === null ? "" : "failed"}><Cell value={attempt.error} name="error" /></td>
                <td>
                  {attempt.parts_at === null ? (
                    <span class="none">–</span>
                  ) : attempt.parts_at.token === null ? (
                    <Go to={{ view: "conversation", trajectory: attempt.trajectory_id, step: undefined, at: undefined }}>
                      answer <Num value={(attempt.parts_at.answer ?? 0) + 1} name="parts_answer" />
                    </Go>
                  ) : (
                    <Go
                      to={{
                        view: "tokens",
                        trajectory: attempt.trajectory_id,
                        step: String(attempt.parts_at.row),
                        at: String(attempt.parts_at.token),
                      }}
                    >
                      step <Num value={attempt.parts_at.row} name="parts_row" />, token{" "}
                      <Num value={attempt.parts_at.token} name="parts_token" />
                    </Go>
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Partings attempts={attempts} />
    </>
  );
}

function Partings({ attempts }: { attempts: Attempt[] }): JSX.Element | null {
  const { dataset } = useSession();
  const parted = attempts.filter((attempt) => attempt.parts_at !== null).slice(0, EXCERPTS);
  if (dataset === null || parted.length === 0) return null;
  return (
    <>
      <h2>Where each attempt diverges from the first</h2>
      <ul class="partings">
        {parted.map((attempt) => {
          const { row, token, answer, said, first_row: firstRow, first_token: firstToken } = attempt.parts_at!;
          if (token === null) {
            return (
              <li key={attempt.trajectory_id}>
                <h3>
                  <Text value={attempt.trajectory_id} /> <small>answer {(answer ?? 0) + 1}; return <Num value={attempt.return} /></small>
                </h3>
                <Said said={said ?? []} names={["first", "this"]} />
              </li>
            );
          }
          return (
            <li key={attempt.trajectory_id}>
              <h3>
                <Text value={attempt.trajectory_id} /> <small>step {row}, token {token}; return <Num value={attempt.return} /></small>
              </h3>
              <Excerpt dataset={dataset.id} trajectory={attempts[0]!.trajectory_id} row={firstRow} token={firstToken} name="first" />
              <Excerpt dataset={dataset.id} trajectory={attempt.trajectory_id} row={row} token={token} name="this" />
            </li>
          );
        })}
      </ul>
    </>
  );
}

interface ExcerptProps {
  dataset: string;
  trajectory: string;
  row: number | null;
  token: number | null;
  name: string;
}

/** The tokens around a marked token. */
export function Excerpt({ dataset, trajectory, row, token, name }: ExcerptProps): JSX.Element {
  const key = row === null ? null : JSON.stringify([dataset, trajectory, row]);
  const answer = useAnswer(key, () => tokens(dataset, trajectory, row!, {}));
  if (row === null || token === null || answer.state === "refused") {
    return (
      <p class="excerpt">
        <span class="who">{name}</span> <span class="none">ended before</span>
      </p>
    );
  }
  return (
    <p class="excerpt" aria-busy={answer.value === undefined}>
      <span class="who">{name}</span> {answer.value === undefined ? "…" : <Around table={answer.value} token={token} />}
    </p>
  );
}

function Around({ table, token }: { table: Table; token: number }): JSX.Element {
  const [ids, bytes] = [table.getChild("id"), table.getChild("bytes")];
  const start = Math.max(0, Math.min(token, table.numRows) - AROUND);
  const end = Math.min(table.numRows, token + AROUND);
  const shown: JSX.Element[] = [];
  for (let at = start; at < end; at++) {
    const raw = bytes?.get(at) as Uint8Array | null;
    const pieces = raw === null || raw.length === 0 ? [{ text: `${ids?.get(at)} ` }] : tokenPieces(raw);
    const text = pieces.map((piece) => piece.text).join("");
    shown.push(at === token ? <mark key={at}>{text}</mark> : <span key={at}>{text}</span>);
  }
  if (token >= table.numRows) shown.push(<mark key="end">(end)</mark>);
  return <bdi class="text">{shown}</bdi>;
}
