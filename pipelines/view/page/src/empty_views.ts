/** Why a view has nothing to show for what is open. */

import type { View } from "./address";
import type { Session } from "./session";

/** The view to show: logs without tokens show the conversation instead of the tokens. */
export function shownView(view: View, { dataset }: Session): View {
  const log = dataset?.log ?? null;
  return view === "tokens" && log !== null && !log.has_tokens ? "conversation" : view;
}

/** The reason, for the tooltip of a grey tab; null if the view has something to show. */
export function whyEmpty(view: View, { sources, dataset, run }: Session): string | null {
  if (view === "run") return run === null ? "No run is open: rollouts view RUN" : null;
  if (view === "update") {
    if (run !== null) return run.updates.length === 0 ? "The run has logged no update yet" : null;
    return sources.shares.length === 0 ? "No run is open: rollouts view RUN" : null;
  }
  if (dataset === null) return "No dataset is open: rollouts view DS";
  if (view === "diff") {
    if (sources.datasets.length < 2) return "Only one dataset is open: rollouts view DS OTHER";
    return sources.datasets.every((one) => one.shares_tasks_with === null) ? "No two of the open datasets share a task" : null;
  }
  const log = dataset.log ?? null;
  if (log !== null && !log.has_tokens && (view === "tokens" || view === "tree")) {
    return "Logs have text, and no token ids: pass --tokenizer DIR to re-tokenize it, or convert them";
  }
  const hasTokenizer = dataset.tokenizer !== null;
  const hasText = dataset.columns.some(({ name }) => name === "messages" || name === "response_text");
  if (view === "tree") return dataset.num_rows === dataset.num_groups ? "Each task has one row, so no tokens are shared" : null;
  if (view === "tokens") return hasTokenizer ? null : "No tokenizer, so tokens are shown as ids: pass --tokenizer DIR";
  if (view === "conversation") return hasTokenizer || hasText ? null : "The dataset has no messages, and no tokenizer to decode its tokens: pass --tokenizer DIR";
  return null;
}
