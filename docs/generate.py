"""Write the pages of docs/ that derive from the code: `make docs`. A test compares them."""

from __future__ import annotations

import ast
import pkgutil
import runpy
import tomllib
from itertools import pairwise
from pathlib import Path

from schemas import RULES, documentation_table
from schemas.columns import PREFIX_FIELDS
from trainer.metrics import LOOP_METRICS, METRICS
from trainer.rl.config import OWN_KEYS

DOCS = Path(__file__).parent


def table_page() -> str:
    """The rollout table: columns, physical columns, named invariants."""
    physical = "\n".join(f"| {f.name} | {f.type} |" for f in PREFIX_FIELDS)
    rules = "\n".join(
        f"| {r.name} | {r.severity} | {r.meaning} | {r.hint} |" for r in RULES.values()
    )
    return f"""# The rollout table

One row per sequence; freshly converted data has one row per step. Extra columns of yours are kept.
Nullable columns may be absent.

{documentation_table()}
In the `prefix` layout (the default on disk) these columns stand in for `prompt_token_ids`:

| column | type |
|---|---|
{physical}

## Named invariants

| rule | severity | what holds | hint |
|---|---|---|---|
{rules}
"""


def training_page() -> str:
    """Every key of a training configuration, from `TrainConfig`'s source, and of `metrics.jsonl`."""
    rows, loss_rows = (
        "\n".join(f"| `{n}` | {k} | {d} | {doc} |" for n, k, d, doc in config_fields(*source))
        for source in (
            ("trainer/config.py", "TrainConfig"),
            ("trainer/loss_config.py", "LossConfig"),
        )
    )
    metrics = "\n".join(f"| `{n}` | {m.unit} | {m.meaning} |" for n, m in METRICS.items())
    return f"""# Training

`rollouts train DS --model DIR --out RUN [--config F.toml] [--set key=value]...`

Groups of the dataset are taken in the order of their first appearance. `groups_per_batch` of them share
one pass for the old log-probabilities; `groups_per_mini_batch` make one optimizer step, however many
turns they took. By default a trajectory's advantage is GRPO's, from its return, and goes to all its rows;
the loss is PPO's clipped one, weighted by truncated importance sampling where the sampler's
log-probabilities are known, summed over the trained tokens of the whole mini-batch and divided by their
number. So neither the layout (`step`, `merge`, `tree`: see [tree.md](tree.md)) nor the micro-batch budget
changes the gradient.
[algorithms.md](algorithms.md) has the others, with their equations.

A group that has another number of trajectories than `group_size` (by default that of the largest group;
failed ones count) is partial. Trajectories that infrastructure lost are missing from baselines, and bias them
where the loss is not by chance: long ones run out of time more often. So a dataset with partial groups is refused
where groups have baselines (grpo, rloo, maxrl); `partial_groups` masks them, or trains with what is there.

Every check comes before the first update and before anything is written. Refused among others: a model whose
tokenizer is not the one whose fingerprint the dataset has (another chat template is a warning; a model directory
without tokenizer files cannot be compared, which a note says), token ids beyond the vocabulary, rows longer than
the budget or the model's context, rows out of the order of their steps, `rollout_logprobs` that importance weights cannot use, and a dataset of which
nothing can be learned: no token trains, or every advantage is 0 (no group whose returns vary) and neither a KL nor
an entropy term has a gradient of its own. Of reinforce++ and gae, whose advantages are known once a batch is, the
update itself warns.

DS may be anywhere that fsspec knows (`s3://...`); RUN is local. Of the dataset, memory holds the batch that
trains and the next one, which is read meanwhile.

RUN holds `config.json` (the resolved configuration), `metrics.jsonl` (a line per update) and
`checkpoints/global_step_N/` (model directories that Transformers loads). Progress goes to stderr: a bar
on a terminal, elsewhere a line per update, with a warning, once a run, where the numbers look wrong.

**Does the sampler say what the trainer says?** Every line of `metrics.jsonl` compares the policy's log-probabilities
with `rollout_logprobs`: mean, spread and percentiles of the differences, their sign (`rollout_logprobs_diff_mean`:
noise has none), and the effective sample size of the ratios. An average above 0.3 nats is no rounding: the warning
names the likely cause, found by asking the policy again at other temperatures and for the tokens beside.

## The plan: `--dry-run`

`rollouts train ... --dry-run` makes every check of a real run, models loaded, prints what it would do (`--json`:
for machines) and writes nothing. Of one pass over the dataset it counts sequences, tokens to forward, the longest
row, the micro-batches of an update and what cutting trees repeats, in every layout; masked trajectories and what
follows a row's last trained token are not forwarded.

Memory is that of one process at its peak, in bytes, of P weights of which T train:

| part | bytes |
|---|---|
| weights | 4 P of policy and critic; bfloat16: and 2 P of the policy |
| gradients | 4 T |
| optimizer | 8 T; adamw_8bit: 2 T |
| reference | 4 P |
| activations | what autograd keeps of a forward of the largest micro-batch: measured with 32, 64 and 96 tokens, and a parabola through these |
| logits | 4 x `logprob_chunk_tokens` x vocabulary |

The sum is an upper bound, for gradients come as activations go. The first update, which has no optimizer state
yet, takes less. On SmolLM2-135M (float32, on a CPU, 1,000 tokens a micro-batch) it was 3.72 GiB where the
second update took 3.68.

## Curves: `rollouts plot`

`rollouts plot RUN [RUN2 ...] [--out curves.png] [--metric NAME]...` draws curves of `metrics.jsonl` over
`global_step`, one panel a metric, several runs over each other; without `--metric` those that say how a run
goes. The suffix says the format. It needs `pip install "rollout-io[plot]"`, and no torch.

## Several processes

    accelerate launch --multi_gpu --num_processes 8 -m rollout_io train DS --model DIR --out RUN
    torchrun --nproc_per_node 2 -m rollout_io train DS --model DIR --out RUN

The second is also how several processes run on a CPU. Their number is no key of the configuration, and changes
no number: a batch's groups are shared out to be read, its micro-batches to be forwarded, and what comes of it is
exchanged, so that advantages, denominators, metrics and the gradient are those of one process but for rounding
(tested to a relative 1e-4). Only `num_micro_batches` may grow: micro-batches are split where a process would
have none, then dealt so that each round has some of similar cost. All processes make as many forwards; one that
is left over forwards a single token without a target, whose gradient is 0. A checkpoint is that of one process
too: it goes on with any number of them.

The main process alone writes and talks. What one finds wrong ends all of them, with one message. Processes wait
two hours for each other, as long as a large checkpoint may take.

FSDP2 (ZeRO-3's sharding of parameters, gradients and optimizer state) comes by Accelerate's config file, or

    accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\
        --fsdp_reshard_after_forward true --num_processes 8 -m rollout_io train ...

Reference and critic are sharded as the policy is. Every process loads the whole model into host memory first,
and tries it out. Gradients are reduced after every micro-batch: no process has room for whole ones. With
`dtype=bfloat16` weights are gathered in bfloat16, and what flows from layer to layer is bfloat16 too (elsewhere
autocast keeps it float32); gradients are reduced in float32. Tested on a CPU, with `fully_shard` itself and with
Accelerate's FSDP2 over gloo; on GPUs not yet. FSDP version 1, FSDP on a CPU, which Accelerate would silently take for
plain data parallelism, `adamw_8bit` with FSDP, and DeepSpeed are refused.

## Checkpoints and `--resume`

`rollouts train ... --resume` goes on with the run in RUN from its latest checkpoint, or begins it where it
has none yet. A run that was killed anywhere, and resumed, has the `metrics.jsonl`, times aside, and the
weights of one that was not: bit for bit on a CPU with the same libraries and number of threads.

`checkpoints/global_step_N/` is written under another name, synced, then renamed: it is there whole or not
at all. `checkpoints/latest` names the latest one; name an earlier one there to go back to it, and those
after it are removed by `--resume`. `keep_checkpoints` says how many stay. Beside the model, and the critic
in `critic/`, its `state/` holds safetensors and JSON, no pickle:

| file | holds |
|---|---|
| `optimizer.safetensors`, `critic_optimizer.safetensors` | the optimizer's moments and step of each parameter, `PARAMETER.NAME` |
| `run.json` | the position (batches gone through over all epochs, mini-batches of the next one), the KL coefficient, the counts, a digest of the trajectories' returns and masks, and of each row's lengths and sum of tokens |
| `batch.safetensors` | within a batch: the old log-probabilities, the reference's and the critic's values, as at its start |
| `rng.json` | the generators of torch, CUDA, NumPy and Python |

A schedule has no state: the learning rate is a function of `global_step`. The configuration must be the
run's own; a key that differs is refused by name, so give the same `--config` and `--set` again. `save_every_updates`, `keep_checkpoints` and `trackers`
may change, `num_epochs` may grow, and `max_updates` may be anything that is not passed yet; these two stay
where `learning_rate_schedule` is not constant, for it goes down towards the last planned update. Lines of `metrics.jsonl`
after the checkpoint are cut off. While one process trains into RUN, another is refused. A disk that is full
ends the run with one message; the checkpoints that
were there stay.

## Optimizer and learning rate

AdamW trains policy and critic; on a GPU torch's fused one. `optimizer = "adamw_8bit"` keeps its moments in
8 bits (`pip install "rollout-io[bnb]"`): a quarter of their memory.

The learning rate of the update after `s` others, of `N` planned ones (`max_updates`, or all the mini-batches
there are) and `W = warmup_updates`, is `learning_rate` times

| `s < W` | constant | linear | cosine |
|---|---|---|---|
| (s + 1) / (W + 1) | 1 | 1 - p, p = (s - W) / (N - W) | (1 + cos(pi p)) / 2 |

The critic's goes the same way. A mini-batch that is skipped does not count, and no update has a rate of 0.

## LoRA

`lora_rank = 16` trains adapters in the policy's linear layers in place of its weights (`pip install
"rollout-io[lora]"`): the optimizer has state for them alone, and the reference of a KL divergence is the
same model with its adapters turned off, not a second copy (unless `reference_model` names another). Such
runs want a learning rate about ten times that of full training. A checkpoint is a model directory with the
adapters merged, for Transformers and vLLM; its `adapter/` is what peft loads onto `model`, and what
`--resume` goes on from: merging leaves the running model alone. The critic of gae is trained whole.

## Memory and speed

Rows are packed into micro-batches without padding. Each attends to itself alone: there is no mask of tokens
x tokens, and attention's memory grows with the tokens. On CUDA in bfloat16 one kernel does all rows (PyTorch's
`varlen_attn`, where it has one with windows), elsewhere one call per row. Sliding windows hold whatever the
row's length. Models that do not go through Transformers' attention interface get a dense mask, and rows up to
their window; those that cap attention scores (Gemma 2) are refused.

Logits exist for trained tokens only, `logprob_chunk_tokens` of them at once, each chunk once: its gradient
takes its place. All chunks but the last are computed again for the backward pass. `gradient_checkpointing`
leaves one hidden state per layer and token.

`python -m benchmarks.training` takes one step on the shop data beside a padded Transformers loop: seconds, peak
memory above weights and gradients, and how far the two gradients are apart. With `--groups shop-0 shop-1
--tokens 2816` on two cores: 96.5 s against 25.8 (3.7x), 2,304 MiB against 605 (3.8x), gradients 2.0e-4 apart in
float32. `--long` has one micro-batch of 100,000 tokens: with `--layers 2`, which leaves the head as it is, 97,272
tokens of which 63,192 train took 6.4 GB above weights and gradients; their logits alone are 12.4 GB.

## Configuration

| key | type | default | meaning |
|---|---|---|---|
{rows}

### The loss

| key | type | default | meaning |
|---|---|---|---|
{loss_rows}

## metrics.jsonl

One JSON object per mini-batch; a number that is not finite is null.

| key | unit | meaning |
|---|---|---|
{metrics}
"""


def config_fields(file: str, name: str) -> list[tuple[str, str, str, str]]:
    """(name, type, default, docstring) of each field of a class in a file of the repository."""
    tree = ast.parse((DOCS.parent / file).read_text())
    aliases = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name).body
    fields = []
    for node, doc in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(doc, ast.Expr):
            default = ast.unparse(node.value) if node.value else "required"
            default = default.replace("field(default_factory=dict)", "{}")
            annotation = aliases.get(ast.unparse(node.annotation), node.annotation)
            kind = ast.unparse(annotation).replace("|", "or")
            text = " ".join(str(ast.literal_eval(doc.value)).split())
            fields.append((ast.unparse(node.target), kind, default, text))
    return fields


def formats_page() -> str:
    """The page on formats, its table of them as pyproject.toml registers them."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["rollout_io.adapters"]
    rows = [f"| `{n}` | {pkgutil.resolve_name(v).summary} |" for n, v in sorted(entries.items())]
    return _with_table("formats.md", ["| format | what it is |", "|---|---|", *rows])


def generation_page() -> str:
    """The page on generation, with every key of `GenerateConfig`."""
    fields = config_fields("pipelines/generation/config.py", "GenerateConfig")
    rows = [f"| `{n}` | {k} | {d} | {doc} |" for n, k, d, doc in fields]
    return _with_table(
        "generation.md", ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
    )


def rl_page() -> str:
    """The page on the loop, with the keys of `RlConfig`, and the metrics it adds."""
    fields = config_fields("trainer/rl/config.py", "RlConfig")
    rows = [f"| `{n}` | {k} | {d} | {doc} |" for n, k, d, doc in fields]
    own = [
        f"| `[{table}]` | {', '.join(f'`{key}`' for key in keys)} |"
        for table, keys in OWN_KEYS.items()
    ]
    metrics = [f"| `{n}` | {m.unit} | {m.meaning} |" for n, m in LOOP_METRICS.items()]
    lines = ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
    lines += ["", "The loop sets these keys of the tables itself, so they are refused there:", ""]
    lines += ["| table | keys |", "|---|---|", *own, "", "## metrics.jsonl", ""]
    lines += ["Besides the keys of [training.md](training.md#metricsjsonl):", ""]
    lines += ["| key | unit | meaning |", "|---|---|---|", *metrics]
    return _with_table("rl.md", lines)


def _with_table(name: str, lines: list[str]) -> str:
    """A page, whose table between the marks is made of these lines."""
    page = (DOCS / name).read_text()
    before, begin, rest = page.partition("<!-- begin generated: make docs -->\n")
    _, end, after = rest.partition("<!-- end generated -->\n")
    assert end, f"docs/{name} has lost its marks"
    table = "\n".join(lines)
    return f"{before}{begin}{table}\n{end}{after}"


def tree_page() -> str:
    """The page on trees, its picture of a forest drawn from examples/."""
    page = (DOCS / "tree.md").read_text()
    before, begin, rest = page.partition("<!-- begin generated: make docs -->\n")
    _, end, after = rest.partition("<!-- end generated -->\n")
    assert end, "docs/tree.md has lost its marks"
    picture = runpy.run_path(str(DOCS / "tree_picture.py"))["picture"]()
    return f"{before}{begin}{picture}{end}{after}"


PAGES = {
    "formats.md": formats_page,
    "generation.md": generation_page,
    "rl.md": rl_page,
    "table.md": table_page,
    "training.md": training_page,
    "tree.md": tree_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
