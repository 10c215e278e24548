"""Generate pages of docs/ (`make docs`); a test checks that they are up to date."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import runpy
import tempfile
import tomllib
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollout_io.cli.main import run
from rollout_io.formats.unrecognized import REFUSED
from schemas import RULES, TOKEN_RECORD_COLUMNS, documentation_table
from schemas.columns import PREFIX_FIELDS
from schemas.row_checks import HEADER_TOKENS, MIN_ANSWER_TOKENS
from schemas.rules import error_ids
from schemas.run_metrics import LOOP_METRICS, METRICS
from trainer.rl.config import OWN_KEYS
from trainer.run.token_records import SAMPLED_GROUPS

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
SECTIONS = {
    "data": ("trainer/config/sections.py", "DataConfig"),
    "batch": ("trainer/config/sections.py", "BatchConfig"),
    "advantage": ("trainer/config/sections.py", "AdvantageConfig"),
    "loss": ("trainer/config/sections.py", "LossConfig"),
    "model": ("trainer/config/sections.py", "ModelConfig"),
    "optimizer": ("trainer/config/sections.py", "OptimizerConfig"),
    "run": ("trainer/config/sections.py", "RunConfig"),
}
"""Sections of the configuration of training, and the classes that declare their keys."""
MOST_CHANGED = (
    (
        "optimizer.learning_rate",
        "`--lr`",
        "`policy_kl` grows quickly (lower it) or stays near 0 (raise it)",
    ),
    (
        "batch.max_updates",
        "`--max-updates`",
        "this is a first run: 2 updates show whether everything fits",
    ),
    (
        "advantage.estimator",
        "`--algorithm`",
        "there is one attempt per task: use `reinforce++` or `gae`",
    ),
    (
        "loss.policy_loss_type",
        "",
        "there are no rewards (use `cross_entropy`), or the data is off-policy",
    ),
    (
        "batch.groups_per_batch",
        "",
        "updates are noisy: raise it, together with `groups_per_mini_batch`",
    ),
    ("batch.groups_per_mini_batch", "", "a batch should have more optimizer steps: lower it"),
    ("batch.tokens_per_micro_batch", "", "memory runs out: lower it; the gradient does not change"),
    ("model.lora_rank", "", "memory runs out: 16 trains adapters, in about a third of the memory"),
)
"""Keys, their options, and when to change them."""


def table_page() -> str:
    """Build table.md: columns, physical columns and named invariants."""
    physical = "\n".join(f"| {f.name} | {f.type} |" for f in PREFIX_FIELDS)
    rules = "\n".join(
        f"| {r.name} | {r.severity} | {r.meaning} | {r.hint} |" for r in RULES.values()
    )
    return f"""# The rollout table

This page describes the columns of a rollout dataset, and the invariants that apply to every dataset. Check a dataset with
`rollouts validate DS`.

Each row is one sequence; freshly converted data with exact ids has one row per step. Your own columns are kept. Nullable columns may be
absent. `convert` adds columns like your own for strings about a run (`model`, `env`), and for what a trainer noted:
[prime-rl's annotations](formats/verifiers.md) become `effective`, `advantage`, `annotations`, `advantages`, `entropies`, `is_masked` and
`mismatch_kl`, and its log-probabilities `trainer_logprobs`.

{documentation_table()}
The return of a trajectory is the reward of its last step, or the sum over its steps (`outcome` in the metadata). Earlier rows
have the reward 0.0 where only the outcome was given, so average returns, not rows:

```sql
SELECT avg(reward) FROM read_parquet('DS/*.parquet') WHERE is_last_step
```

In the `prefix` layout (the default on disk), these columns replace `prompt_token_ids`; [Open a dataset with other
tools](other_tools.md) shows how to rebuild the prompts with only Polars or DuckDB:

| column | type |
|---|---|
{physical}

Prefixes, and what `merge` joins, are compared with their pictures: two placeholders with the same token id are different where
`pictures` has different files, lengths or places in the span (`schemas.pictures.identity_ids`). A picture without a file or a
span is compared by its token ids.

`messages` is stored as text in both layouts. A re-tokenized context of an agent is one row, so its conversation is stored
once, however many turns it has; `merge` keeps it. A row with exact ids has only the messages that the harness
sent for that call, and `response_text` has the answer.

## Files

A dataset is a directory of Parquet shards. The writer stores page checksums, and the reader verifies them. The footer
of a shard also stores a digest of its schema, metadata and row counts, and its position in the dataset. A flipped bit in
a footer, a missing shard, and a shard of a different dataset under the same name are therefore detected (`readable_file`,
`shards_complete`). Shards written by `record`, `generate` and `rl` are independent: any of them may be removed.

Pictures, documents and recordings are files in the directory `DS.blobs` beside the dataset, named by the SHA-256 of their
content. A file is complete before a shard refers to it. Verbs that write a new dataset link or copy the files that its rows
refer to, and check their content. In Python, `RolloutWriter(OUT, parents=[DS])` does the same. Move and copy `DS.blobs`
together with `DS`: `rollouts validate` reports every row whose files are missing or were changed (`picture_reference`).
`export` to `hf` and `parquet` writes the directory too; `trl`, `verl` and `slime` get the bytes in the messages, as data
URLs; `skyrl` has no messages.

Several paths, or a pattern such as `runs/*/` or `s3://bucket/recorder-*/`, are read as one dataset by every verb, by `train`
and by `rollout_io.scan` (which takes a list). Where there is room for one path only, as in a configuration file or in `diff A B`,
write `{{A,B}}` or a quoted pattern. Each directory must be complete, no trajectory may be in two of them (`unique_trajectory`), and
they must agree on `tokenizer_fingerprint`, `vocab_size`, `logprobs_mode` and `outcome` where these are known. So each of many
writers can have a directory of its own. What verbs write beside a dataset (`DS.blobs`, `DS.rewards`, `DS.rejected.jsonl`) is left
out of patterns.

A directory of directories named `COLUMN=VALUE` (Hive partitions, such as `DS/run=a/part-00000.parquet`) is also a dataset:
every verb reads `run` as a column, and writes it as an ordinary column. Its values are integers if all of them are written as
integers without leading zeros, and strings otherwise; a column of the table above keeps its type. A file that has the column
itself must have the directory's value in all rows. Only directories below the path that you pass become columns; a glob
pattern adds none. Trajectories must be unique across the directories, and the directories must agree on
`tokenizer_fingerprint`, `vocab_size`, `logprobs_mode` and `outcome` where these are known. All files must be in such
directories, with the same columns everywhere. To append to a partitioned dataset, write to one of its directories.

Every verb checks all shards of its input against the invariants below before it trains or publishes anything. The check
cannot be skipped.

### How columns are stored

Shards are Parquet files with zstd compression (level 1), 1 MiB pages, page checksums, and row groups of up to 4,096 rows. Token
ids and log-probabilities are encoded with `BYTE_STREAM_SPLIT`, other columns with a dictionary. The elements of declared lists of
numbers are not nullable, which saves Parquet one level per element; the reader returns the declared types, and still reads older
files with nullable elements. Polars, pandas, pyarrow, DuckDB, Daft, `datasets` and Ray read both, even in one directory.

These settings were compared on real vLLM logs (770 rows) and on synthetic trajectories: long ones of 60 turns, with ids from a
Zipf or a uniform distribution, and short ones of 1 to 3 turns. The table shows size and CPU time relative to the previous
settings (plain ids, nullable elements). Times are minima over 25 interleaved rounds in one thread on a loaded machine, so ignore
differences below 10 %.

| setting | kept | size (real, Zipf, uniform, short) | write | read everything |
|---|---|---|---|---|
| ids with `BYTE_STREAM_SPLIT` | yes | 1.00, 0.87, 0.89, 0.88 | 0.7 to 1.0 | 0.8 to 1.1 |
| ids with `BYTE_STREAM_SPLIT`, elements not nullable | yes | 1.00, 0.87, 0.89, 0.88 | 0.6 to 1.1 | 0.6 to 1.0 |
| ids with a dictionary | no | 1.02, 1.01, 0.97, 1.01 | 0.9 to 1.5 | 0.9 to 1.0 |
| ids with `DELTA_BINARY_PACKED` | no | 1.09, 1.24, 0.93, 1.23 | 0.8 to 1.1 | 0.8 to 1.2 |
| plain log-probabilities | no | 1.01, 1.05, 1.03, 1.05 | 0.9 | 1.1 |

The next table is relative to the settings that were kept:

| setting | kept | size (real, Zipf, uniform, short) | write | read everything |
|---|---|---|---|---|
| zstd level 3 | no | 0.99, 1.01, 1.00, 1.01 | 1.0 to 1.4 | 0.9 to 1.0 |
| lz4 | no | 1.17, 1.22, 1.04, 1.25 | 0.7 to 0.9 | 0.5 to 0.9 |
| no compression | no | 3.86, 2.28, 1.65, 2.34 | 0.6 to 0.8 | 0.5 to 0.9 |
| 256 KiB pages; 4 MiB pages | no | 1.00 to 1.03; 0.99 to 1.00 | no difference | 1.0 to 1.1; 1.0 |
| data page version 2 | no | 1.02, 1.00, 1.00, 1.05 | no difference | no difference |
| page index | no | 1.00 to 1.01 | no difference | no difference |
| no page checksums | no | 1.00 | no difference | 0.9 to 1.0 |

For each row group, the shard's footer also stores Bloom filters of `trajectory_id` and `instance_id` (12 bits per id, with
digests). A query for an id, such as `scan(DS).filter(pl.col("trajectory_id") == "shop-2_1")` or one with `inspect --where`,
reads tokens only from row groups that may contain the id. With a million trajectories of 1 to 3 short rows (390 MB, 490 row
groups), this took 0.05 to 0.07 s of CPU time (medians of two runs) instead of 0.66 s: two fifths to open the shards, a
quarter to check the filters, and a quarter to read one row group. Other row group sizes were not compared. Parquet's own
statistics and Bloom filters do not suffice: with random ids, every row group spans the whole range, and no checksum covers
the statistics or the filters, so a flipped bit could hide rows.

In the `full` layout, encoding `prompt_token_ids` with `BYTE_STREAM_SPLIT` instead of a dictionary makes 60-turn trajectories
4.0 times smaller (5.8 MB instead of 22.9 MB) and cuts their read time to 30 %; real logs become 6 to 11 % smaller.

## Object stores

Wherever a dataset is expected, a URL that fsspec opens is also accepted (`s3://bucket/ds`, after `pip install s3fs`). Only the
columns that are used are read, and `train` reads the next batch while it trains on the current one. Requests are retried by
the store's own client (s3fs: busy stores, broken connections and responses; a store that never answers is reported after
about nine minutes), and those of web servers are not. The command reads the same rows as from a local directory, or ends with an error
(`remote_store`), also where a response has fewer bytes than requested. Listings are cached for two seconds. After a failed
write (`--out s3://...`), run the same command again to resume. `make test-s3` tests this with a real S3 server behind a
proxy that breaks every third response.

## Named invariants

| rule | severity | invariant | hint |
|---|---|---|---|
{rules}

`response_in_prompt` compares tokens. The last {HEADER_TOKENS} tokens of a prompt identify the header of the answer. The
prompt's last assistant message starts after the last earlier occurrence of these tokens. A row breaks the rule if its first
sampled range is trained on and has at least {MIN_ANSWER_TOKENS} tokens, and if that message begins with this range. It is
exempt if an earlier row of its trajectory sampled the same tokens, because then the model repeated itself. Shorter answers
are not compared.
"""


def errors_page() -> str:
    """Build errors.md: the cause and the fix of every error id, by kind."""
    lines = [
        "# Errors",
        "",
        "Every error message ends with an id in brackets: `Error: calls.jsonl:3: ... [json_line]`. This",
        "page lists the cause and the fix of each id, by kind. In Python, a kind is a class in",
        "`schemas.errors` that derives from `RolloutError`, and the id is `error.rule`.",
    ]
    for kinds in dict.fromkeys(entry.kinds for entry in error_ids().values()):
        lines += ["", "## " + " or ".join(kind.__name__ for kind in kinds), ""]
        lines += [" ".join((kind.__doc__ or "").strip() for kind in kinds)]
        for name, entry in error_ids().items():
            if entry.kinds == kinds:
                lines += ["", f"### {name}", "", entry.cause, "", f"Fix: {entry.fix}"]
    return "\n".join([*lines, ""])


def training_page() -> str:
    """Build training.md, with every key of `TrainConfig` and `metrics.jsonl`."""
    keys, fields = list[str](), dict[str, tuple[str, str]]()
    for section, (file, name) in SECTIONS.items():
        found = config_fields(file, name)
        fields |= {f"{section}.{n}": (d, doc) for n, _, d, doc in found}
        keys += ["", f"### `[{section}]`", "", class_summary(file, name), ""]
        keys += ["| key | type | default | meaning |", "|---|---|---|---|"]
        keys += [f"| `{n}` | {k} | {d} | {doc} |" for n, k, d, doc in found]
    tables = "\n".join(keys)
    most_changed = "\n".join(
        f"| `{n}` | {option} | {fields[n][0]} | {change} |" for n, option, change in MOST_CHANGED
    )
    metrics = "\n".join(f"| `{n}` | {m.unit} | {m.meaning} |" for n, m in METRICS.items())
    return f"""# Training

`rollouts train DS --model DIR --out RUN [--config F.toml] [--lr X] [--max-updates N] [--algorithm NAME] [--set section.key=value]...`

The options override the configuration file, and `--set` overrides both. `--show-config` prints the resolved configuration as
TOML, which `--config` reads back.

## The eight keys you will change

| key | option | default | change it if |
|---|---|---|---|
{most_changed}

All other keys are in the [table of all keys](#configuration). Set keys without an option with `--set SECTION.KEY=VALUE`.

## How it trains

`rollouts train` trains a policy on a rollout dataset. DS may be local or any fsspec URL (`s3://...`); RUN is a local
directory, or a URL ([Several machines](machines.md#without-a-shared-disk)).

**Batches.** Groups are used in the order of their first appearance. `groups_per_batch` groups share one pass for the old
log-probabilities; `groups_per_mini_batch` groups form one optimizer step, however many turns they have. Memory holds the
current batch and the next one, which is read in the background.

**Defaults.** Advantages are GRPO's: computed from the trajectory's return and applied to all its rows. The loss is PPO's
clipped loss, averaged over the trained tokens of the mini-batch, with truncated importance weights if the sampler's
log-probabilities are known. Neither the layout (`step`, `merge` or `tree`, [Prefix trees](tree.md)) nor the micro-batch
size changes the gradient. [Algorithms](algorithms.md) has the equations of all algorithms, and lists the reductions and
corrections with which the layout does change the loss.

**Output.** RUN contains `config.json` (the resolved configuration), `metrics.jsonl` (one line per update),
`checkpoints/global_step_N/` (model directories that Transformers can load) and `tokens/` ([what each token
contributed](#what-each-token-contributed)). Progress goes to stderr. On a terminal, a bar counts the updates, and a row
below it shows the pass of the current update (old log-probabilities, reference, training, ...) and its tokens. Otherwise,
each update prints one line, and a long update prints a line at most every 30 seconds with its pass and micro-batch. `-q`
hides the bar and these lines. Suspicious values cause a warning, once per run. In Python, `trainer.train` writes these
lines to the logger `trainer`: `logging.basicConfig(level="INFO")` shows them.

Ctrl-C and SIGTERM save a checkpoint after the current update and stop the run; a second signal, at least a second later, ends it at
once.
`rollouts train --resume RUN` continues from the latest checkpoint, bit for bit.

**Checks.** All checks run before the first update and before anything is written. A run is rejected if, for example,

- the model's tokenizer differs from the dataset's fingerprint. (A different chat template only causes a warning. A model
  without tokenizer files cannot be compared; a dataset without a fingerprint is compared by model names. A message reports
  what was compared.)
- token ids exceed the vocabulary, or rows exceed the model's context (`max_row_tokens` truncates them instead);
- rows are not in step order;
- the model's weights are quantised (`quantization_config`): they can neither be updated nor saved;
- rows of an engine do not record `temperature`, `top_p` or `top_k`, and the model's `generation_config.json` has settings that
  engines use for such requests. `sampling_defaults` states which settings were used; without that file, a note counts these
  rows, which are then trained as sampled at temperature 1 without truncation;
- importance weights are set, but the `rollout_logprobs` are missing or are not from the sampled distribution;
- nothing can be learned: there is no token to train on, or every advantage is 0 because no group has varying returns, and neither
  a KL nor an entropy term has a gradient. reinforce++ and gae warn during training instead, because their advantages are
  only known per batch.

**Partial groups** have fewer or more trajectories than `group_size` (default: the size of the largest group, counting
failed trajectories). Trajectories lost to infrastructure failures bias the baselines, because they are not lost at random:
long trajectories time out more often. Estimators that compare groups (grpo, rloo, maxrl) therefore reject partial groups by
default; `partial_groups` can instead mask such groups, or train on the trajectories that exist.

**Mismatch of sampler and trainer.** Every line of `metrics.jsonl` compares the policy's log-probabilities with
`rollout_logprobs`: mean, spread and percentiles of the absolute differences, the signed mean (`rollout_logprobs_diff_mean`;
near 0 if the differences are only noise), and the effective sample size of the ratios. Before the first update, one
micro-batch is compared; if the mean difference exceeds 0.05 nats, the trainer also evaluates the policy at other
temperatures and at neighbouring tokens. A warning names the likely cause, if there is one, or says that the weights differ
if the difference exceeds 0.3 nats, which rounding cannot explain. Later updates warn if their mean difference exceeds 0.3
nats. `rollouts audit` then finds the rows.

## The plan: `--dry-run`

`rollouts train ... --dry-run` loads the models, performs all checks, prints the plan (`--json` for machine-readable output)
and writes nothing; `--out` is optional. For one epoch and each layout, it prints the number of sequences, the
number of tokens to forward, the length of the longest row, the number of micro-batches per update, and the fraction of tokens that are forwarded again
because trees are cut. Two kinds of tokens are not forwarded: all tokens of masked trajectories and, in each row, the last
trained token and the tokens after it. A dry run loads the models as training does, reads the dataset once per layout, and
forwards 192 tokens to measure activations; a note reports how long each part took.

It also estimates the peak memory of one process, in bytes, for P weights of which T are trained:

| part | bytes |
|---|---|
| weights | 4 P for policy and critic; with bfloat16, 2 P more for the policy |
| gradients | 4 T |
| optimizer | 8 T; adamw_8bit: 2 T |
| reference | 4 P; nothing with LoRA unless `reference_model` is set |
| activations | tensors that autograd keeps for the largest micro-batch: a quadratic fit of measurements with 32, 64 and 96 tokens |
| logits | 4 x `logprob_chunk_tokens` x vocabulary |

The sum is an upper bound, because activations are freed while gradients are allocated. The first update takes less, because
it has no optimizer state yet. On SmolLM2-135M (float32, CPU, 1,000 tokens per micro-batch), the estimate was 3.72 GiB and the
second update took 3.68 GiB.

## Curves: `rollouts plot`

`rollouts plot RUN [RUN2 ...] [--out FILE] [--metric NAME]...` plots `metrics.jsonl` over `global_step`, with one panel
per metric and one color per run. Without `--metric`, it plots the most important metrics. Runs of up to 40 updates are
drawn as marked points, longer runs as faint points behind a smoothed curve. The curve is smoothed by local linear regression in a centred window, so
it does not lag behind trends or jumps. Without `--out`, the image is
`RUN/curves.png`; several runs need `--out`. Its format follows from the file extension. Plotting needs
`pip install "rollout-io[plot]"`, but not torch. `rollouts plot DS` draws a dataset ([Pictures](metrics.md#pictures)).

## Several processes

    rollouts train DS --model DIR --out RUN --num-processes 8
    accelerate launch --multi_gpu --num_processes 8 --no_python rollouts train DS --model DIR --out RUN
    torchrun --nproc_per_node 2 --no-python rollouts train DS --model DIR --out RUN

`--num-processes` starts the processes on this machine: one per GPU, or on the CPU. They find each other through a file, so
no port is needed, and they end together if one of them or the command itself is killed. You can also use `accelerate
launch` or `torchrun`, for example for FSDP2 or [several machines](machines.md). [`rollouts rl`](rl.md#several-processes) also trains in several processes.

The number of processes is not part of the configuration and does not change results. Each process reads some of the groups,
sends their rows to the processes that forward them, and knows only the sizes of all other rows ([Scale](scale.md)). Rows are
assigned so that the processes take about equally long, and each process packs its own. Advantages, denominators, metrics and the
gradient are the same as with one process, up to rounding (tested to a relative difference of 1e-4). Only `num_micro_batches`
and, with trees, `repeated_share` and `num_forwarded_tokens` may increase.

`examples/cluster/` has a file for each way to start one run on several machines: `slurm.sbatch`, `kubernetes.yaml` (JobSet),
`ssh.sh` and `ray_train.py`, in which Ray Train starts the same command on the nodes of a Ray cluster.

Only reductions that depend on micro-batches give different results: `token_mean_legacy`, and your own functions that use
`micro_batch`. All processes run the same number of forward passes; a process without a micro-batch forwards a single token
without a target, which contributes no gradient. Checkpoints do not depend on the number of processes, so you can resume
with a different number.

Only the main process writes files and messages. An error in one process ends all of them with one message on each machine.
Processes wait up to two hours for each other, enough to write a large checkpoint; a machine that does not respond is noticed
within a minute.

Enable FSDP2 (sharding of parameters, gradients and optimizer state, as in ZeRO-3) in Accelerate's config file, or with

    accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\
        --fsdp_reshard_after_forward true --num_processes 8 --no_python rollouts train ...

The reference model and the critic are sharded like the policy. Every process first loads and checks the complete model in host
memory. Gradients are reduced after every micro-batch, because no process holds all of them. With `dtype=bfloat16`, weights are
gathered in bfloat16 and activations between layers are bfloat16 (without FSDP, autocast keeps them in float32); gradients are
reduced in float32. FSDP2 is tested on a CPU, with `fully_shard` directly and through Accelerate over gloo, but not yet on GPUs.
FSDP version 1, FSDP on a CPU (which Accelerate would silently treat as data parallelism), `adamw_8bit` with FSDP, and DeepSpeed
are rejected.

## Checkpoints and `--resume`

`rollouts train --resume RUN` continues the run in RUN from its latest checkpoint, or from its start if it has none yet.
The configuration, with dataset and model, is read from `RUN/config.json`. If RUN contains no run, an error reports this and
names runs with a similar name. A resumed run has the same weights and `metrics.jsonl` (except times) as an uninterrupted
one: bit for bit on a CPU with the same libraries and number of threads.

`checkpoints/global_step_N/` is complete or absent: it is written under a temporary name, synced and renamed.
`checkpoints/latest` names the latest checkpoint. To return to an earlier checkpoint, write its name into this file;
`--resume` then removes the later checkpoints. `keep_checkpoints` limits how many are kept. A checkpoint contains the model, all
files of `model` that are neither weights nor hidden (tokenizer, processor, chat templates, licence, ...), the critic in
`critic/`, and `state/` with safetensors and JSON, no pickle. A note names the files that are left out: links out of the
directory, directories with another model or run, and files that cannot be read. `state/files.json` has the SHA-256 of every file;
each process of a resumed run checks them before the first update, which takes about 1.2 s per GB.


| file | contents |
|---|---|
| `optimizer.safetensors`, `critic_optimizer.safetensors` | moments and step of each parameter, `PARAMETER.NAME` |
| `run.json` | position (batches completed over all epochs, mini-batches of the next batch that are already done), KL coefficient, counters, and a digest of the dataset (returns and masks of trajectories, lengths and token sums of rows) |
| `batch.safetensors` | only if saved in the middle of a batch: the old and reference log-probabilities and the critic's values, computed at the start of the batch |
| `rng.json` | random generators of torch, CUDA, NumPy and Python |

`--set`, `--lr`, `--max-updates` and `--algorithm` change keys of the saved configuration; if a key must not change, the
error names it. These keys may change:
`save_every_updates`, `keep_checkpoints`, `record_tokens`, `trackers` and `log_samples`; with a constant `learning_rate_schedule` also
`num_epochs`, which may grow, and `max_updates`, which may be any number not yet reached. (Other schedules decay towards the
last planned update. The learning rate is a function of `global_step`, so schedules have no state.)

Lines of `metrics.jsonl` and files in `tokens/` that are newer than the checkpoint are removed. Only one run at a time can
use RUN. A full disk ends the run with one message and leaves earlier checkpoints intact.

## What each token contributed

A target is a response token that an update trained on. `record_tokens` writes what each target contributed to the loss to
`RUN/tokens/global_step_N.parquet`, where N is the `global_step` of the update in `metrics.jsonl`; a mini-batch without an
optimizer step has no file. `sampled`, the default, records {SAMPLED_GROUPS} groups per update, chosen by `seed` and
`global_step`; `all` records every group; `none` turns recording off. The setting changes neither weights nor
metrics, and a resumed run ends with the same files as an uninterrupted one, bit for bit under the same conditions.

The file stores the values that the loss was computed from; nothing is recomputed. There is one record per stored row of
the dataset, regardless of `sequence_layout`; its keys are `trajectory_id` and `step_index`. This example lists the ten
targets that contribute most to an update's loss, and how much the log-probabilities of policy and sampler differ:

```python
import polars as pl

import pipelines
import rollout_io

keys = ["trajectory_id", "step_index"]
values = ["weights", "losses", "logprobs"]
stored = rollout_io.scan("shop").select(*keys, "response_ids", "rollout_logprobs")
targets = (
    pipelines.scan_token_records("run", 1)
    .select(*keys, "loss_mask", *values)
    .join(stored, on=keys)
    .explode("loss_mask", *values, "response_ids", "rollout_logprobs")
    .filter("loss_mask")
    .with_columns(
        share=pl.col("weights") * pl.col("losses"),
        difference=pl.col("logprobs") - pl.col("rollout_logprobs"),
    )
)
print(targets.sort(pl.col("share").abs(), descending=True).head(10).collect())
```

The sum of `weights` x `losses` over all targets is the update's `loss`. `pipelines.scan_token_records("run")` scans all
updates. The files are ordinary Parquet; their columns are:

{documentation_table(TOKEN_RECORD_COLUMNS)}
On SmolLM2-135M (float32, CPU), recording all targets of an update took 0.2% of its time and 40 bytes per target. At the
end, the log states the size of `tokens/`.

## Optimizer and learning rate

If `learning_rate` is not set, it is the usual rate of the method, and the first line of the run states it:

| method | all weights | LoRA |
|---|---|---|
| RL | 1e-6, the default of TRL's GRPOTrainer | 1e-5 |
| imitation: `cross_entropy`, `distill` | 2e-5, the default of TRL's SFTTrainer | 2e-4 |

With LoRA, the best rate is about ten times as high, in supervised training and in RL (Schulman et al., 2025, "LoRA Without
Regret"). A run with a rate above 0.01 warns. The right rate also depends on the model and the size of a batch: if `policy_kl`
stays near 0, raise the rate.

The policy and the critic are trained with AdamW, in torch's fused implementation on a GPU. `optimizer = "adamw_8bit"`
stores AdamW's moments in 8 bits, which takes a quarter of the memory (`pip install "rollout-io[bnb]"`).

After `s` of `N` planned updates (`max_updates`, or all mini-batches), with `W = warmup_updates`, the next update's learning
rate is `learning_rate` times this factor:

| `s < W` | constant | linear | cosine |
|---|---|---|---|
| (s + 1) / (W + 1) | 1 | 1 - p, p = (s - W) / (N - W) | (1 + cos(pi p)) / 2 |

The critic's learning rate follows the same schedule. Skipped mini-batches do not count, and no update has a rate of 0.

## LoRA

`lora_rank = 16` trains adapters in the policy's linear layers instead of its weights. Only the adapters have optimizer state,
and the reference model of a KL term is the same model with its adapters disabled, unless `reference_model` names a different
one. Use about ten times the learning rate of full fine-tuning. In mixture-of-experts models, only attention layers get
adapters; experts and routers are frozen. In a model with a vision or audio encoder, only the text model's layers get
adapters. The GAE critic is always trained in full, without adapters.

A checkpoint is a model directory with merged adapters, for Transformers and vLLM. Its `adapter/` can be loaded onto `model`
with peft; `--resume` also uses it.

## Pictures

If rows show pictures (the column [`pictures`](table.md)), the policy sees them as the sampler did. Models load with
Transformers' image-text-to-text classes (5.18 or later); [Models](models.md#models-that-see-pictures) lists the families that pass.

- **One encoding.** Each distinct picture of a micro-batch is encoded once, however many rows and steps show it. Rows of a tree
  share a screen like text: two tokens are equal if their ids and pictures are.
- **Frozen encoder.** The vision tower and its projector are not trained, and LoRA adapts the text part alone. FSDP2 shards the
  text part alone, too. Checkpoints contain the complete model and the files of its processor, so that Transformers and vLLM load
  them.
- **Places.** The model's own forward pass inserts the features, into deeper layers too (DeepStack). Positions with rows and
  columns (M-RoPE) follow from the pictures above each token, and the tokens of a picture see each other where the model is
  trained so (Gemma 3).
- **Preparation.** The model directory's image processor prepares pictures on the CPU (with torchvision if it is installed, else with
  Pillow), in the process that forwards the row, with the settings by which the model's processor overrides it. vLLM uses torchvision for most
  families. The two round colours differently, by at most one step of 255, so install torchvision where you train, too: on tiny
  models, log-probabilities then agreed with the engine's to 1.4e-6 nats, and with Pillow to 0.0015.
- **Checks** before anything trains: a row with a picture is compared with the model's own forward pass. Every picture must be
  stored and unchanged, decode, and have as many placeholders as the encoder gives features for its size; placeholders outside of
  pictures, and pictures whose tokens train, are rejected. `--set data.pictures=text` trains on the tokens alone instead.

## Router replay

In a mixture of experts, a router selects a few experts for each token and layer. Rounding alone can make the trainer's router
select different experts than the sampler's did, which changes log-probabilities far more than rounding does. If the dataset records
the experts (`rollout_expert_indices`), the trainer uses them (R3, rollout routing replay); `replay_routing` is on by default. The
embedded engine always returns them; vLLM returns them with `--enable-return-routed-experts` (GPU only: vLLM 0.32 needs Triton
for this).

- **Weights.** Expert weights come from the current router: its logits at the recorded experts, with the model family's softmax or
  sigmoid, normalisation and scaling. The selection is constant, so gradients reach the router through these weights. Expert
  groups and selection biases (DeepSeek) only affect the selection, and do not apply to recorded experts.
- **Unrecorded tokens** are routed normally: tokens after the recorded leading part, and rows where the column is null. Layers are
  numbered as in the model, including dense ones; routes recorded for a dense layer are ignored.
- **Passes.** The passes for old, new and reference log-probabilities all replay the experts, and `gradient_checkpointing`
  recomputes with the same experts. The critic is routed normally, because it does not have to match a sampler.
- **Layouts.** A token's hidden state depends on the experts of all tokens before it. In `tree`, rows share a token only if
  they agree on it and all tokens before it, including experts. In `merge`, a step joins the one before it only if their
  routes agree, and merged rows are split where their routes disagree, regardless of `merge_rule`. So every layout gives the
  same results as `step`. If an engine routes a repeated prompt differently in every turn, little can be merged; an engine
  with a prefix cache returns the routes of the cached tokens.

Transformers models are not modified: a forward hook on each router replaces the experts and their weights. Qwen2-MoE,
Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V2 and DeepSeek-V3 are supported. To support another family, add one function to
`trainer/models/router_replay.py` that maps logits and experts to weights. When a supported model is loaded, rows that
replay the model's own selection of experts are compared with its eager forward pass.

If the dataset has routes, the run is rejected (`replay_routing`), before anything is written, in these cases: the model
belongs to an unsupported family; it has a different number of layers or of experts per token; it lacks a recorded expert; a
token lists an expert twice. `--set batch.replay_routing=false` ignores the routes, with a message. A warning counts the tokens
that are forwarded without a route.

## Sampling support

With `top_p`, `top_k` or `min_p`, a token is drawn from a part of the vocabulary. If the dataset records this set for each token
(`sampling_support`), the policy's log-probabilities are log-softmax(logits / temperature) over the set alone, in every pass:
current, old and reference. Entropy and KL divergence are therefore those of the restricted distributions, and the
gradient reaches only the logits of the set. A token with an empty set is normalised over the entire vocabulary. Rows with and
without sets can be mixed; layout and micro-batches do not change the result.

The embedded engine records the sets whenever it truncates. vLLM servers return them if started with `--logprobs-mode
processed_logprobs`, for `top_k` of at most 20 (with or without `top_p` and `min_p`), to `generate`, `rl` and, with
`--logprobs-mode processed`, to [`record`](record.md#what-is-recorded). A response is recorded without sets if
the returned tokens of any position have a total probability below 0.999. A set takes 4 to 5 bytes per sampled token on disk
at an average of 4 ids (measured with a Zipf distribution of ids), and memory in training grows with the number of ids, not
with the vocabulary.

## Memory and speed

**Packing.** Rows are packed into micro-batches without padding. Each row attends only to itself, without a tokens x tokens
mask, so attention memory grows linearly. On CUDA in bfloat16, one kernel processes all rows (PyTorch's `varlen_attn`, if it
supports windows); otherwise there is one call per row. Sliding windows are taken from the model's own attention masks. Models
that bypass Transformers' attention interface get a dense mask; models that cap attention scores (Gemma 2) are rejected.

**Check at load.** When a model is loaded, its windows are temporarily reduced, and short rows that exceed them are forwarded
individually, packed, packed with a row at the model's last position, and (for `tree`) as a tree. If the log-probabilities
differ from the model's own eager forward pass by 0.001 nats or more, the model is rejected (`model_layers`).
[Models](models.md) lists the tested architectures.

**Rotary frequencies** do not depend on packing. For LongRoPE and dynamic NTK, Transformers bases them on the longest row of a
forward pass; this trainer chooses them once, as vLLM does. LongRoPE (Phi-3) uses the long factors if
`max_position_embeddings` in config.json is above `original_max_position_embeddings`, else the short ones. vLLM compares its
`--max-model-len` instead, by default `max_position_embeddings`; if you serve with a smaller value, write it into config.json
as `max_position_embeddings`. With YaRN, vLLM serves `original_max_position_embeddings * factor` positions; to train on them,
write this product into config.json as `max_position_embeddings`. Dynamic NTK with `factor` uses the base for `max_position_embeddings * factor` positions.

**Logits** are computed only for trained tokens, in chunks of `logprob_chunk_tokens`; the gradient of a chunk replaces its
logits. With `dtype=bfloat16`, logits are rounded to bfloat16; `float32_head = true` computes them in float32 (with FSDP2, from
weights gathered in bfloat16). All chunks but the last are recomputed in the backward pass. `gradient_checkpointing` keeps one hidden state per layer
and token, for the policy and the critic; compiled layers also keep the output of attention. Dropout is always off.

**Measurements.** `python -m benchmarks.training` compares one step on the shop data with a padded Transformers loop. With
`--groups shop-0 shop-1 --tokens 2816` on two cores, a step takes 25.8 s instead of 96.5 s (3.7x) and 605 MiB instead of 2,304
MiB of peak memory above weights and gradients (3.8x); the gradients differ by 2.0e-4 in float32. `--long` uses one
micro-batch of 100,000 tokens. With `--layers 2` and the full output head, 97,272 tokens, of which 63,192 are trained, took
6.4 GB above weights and gradients; their logits alone would take 12.4 GB.

## Configuration

Each section is a table of the file, and its keys are set with `--set SECTION.KEY=VALUE`: `[loss] eps_clip_high = 0.28` in a file
is `--set loss.eps_clip_high=0.28` on the command line. An unknown key is rejected, and the error suggests the closest one.
{tables}

## metrics.jsonl

One JSON object per mini-batch. Numbers that are not finite are null.

| key | unit | meaning |
|---|---|---|
{metrics}
"""


BOUNDED = {
    "Annotated[int, Meta(ge=1, le=MOST_ITERATIONS)]": "int",
    "Annotated[float, Meta(gt=1)]": "float",
    "CountOrZero": "int",
    "Count": "int",
    "Positive": "float",
    "NonNegative": "float",
    "Fraction": "float",
}
"""Types shown without their bounds, because the meaning of each key states them."""


def config_fields(file: str, name: str) -> list[tuple[str, str, str, str]]:
    """List (name, type, default, docstring) of each field of a class in a file."""
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
            for bounded, plain in BOUNDED.items():
                kind = kind.replace(bounded, plain)
            text = " ".join(str(ast.literal_eval(doc.value)).split())
            fields.append((ast.unparse(node.target), kind, default, text))
    return fields


def class_summary(file: str, name: str) -> str:
    """Return the first paragraph of a class's docstring, without the name of its section."""
    tree = ast.parse((DOCS.parent / file).read_text())
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    text = (ast.get_docstring(node) or "").split("\n\n")[0].partition(": ")[2]
    return text[:1].upper() + " ".join(text[1:].split())


@cache
def known_formats() -> dict[str, Any]:
    """Return the formats in pyproject.toml, and `REFUSED`, by name."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["rollout_io.formats"]
    known = {name: pkgutil.resolve_name(value) for name, value in entries.items()} | REFUSED
    return dict(sorted(known.items()))


def formats_page() -> str:
    """Build formats.md, with a table of the formats, each with its page."""
    rows = [
        f"| [`{name}`](formats/{name}.md) | {a.summary} |" for name, a in known_formats().items()
    ]
    return _with_table("formats.md", ["| format | what it is |", "|---|---|", *rows])


def format_page(name: str) -> str:
    """Build the page of a format: its summary, what is written about it, and what it reads."""
    adapter, file = known_formats()[name], DOCS / "formats" / f"{name}.md"
    marks = [
        f"<!-- begin generated: {mark} -->\n<!-- end generated -->\n"
        for mark in ("summary", "contents")
    ]
    page = file.read_text() if file.exists() else "\n".join(marks)
    summary = adapter.summary[0].upper() + adapter.summary[1:]
    lines = [f"# `{name}`", "", f"{summary}. [What all formats share](common.md)."]
    contents = [] if adapter.contents is None else adapter.contents.rows()
    listed = ["## What is read", "", PATHS, "", "| record | keys | read |", "|---|---|---|"]
    for kind, keys, reason in contents:
        named = " ".join(f"`{key}`" for key in keys.split()) or "all"
        kind = {"": "any", "*": "any"}.get(kind, f"`{kind}`")
        listed.append(f"| {kind} | {named} | {f'no: {reason}' if reason else 'yes'} |")
    return _replaced(_replaced(page, "summary", lines), "contents", listed if contents else [])


PATHS = "Paths join keys with dots, and everything below the end of a path belongs to it."


def generation_page() -> str:
    """Build generation.md, with every key of `GenerateConfig`."""
    fields = config_fields("pipelines/generation/config.py", "GenerateConfig")
    rows = [f"| `{n}` | {k} | {d} | {doc} |" for n, k, d, doc in fields]
    return _with_table(
        "generation.md", ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
    )


def rl_page() -> str:
    """Build rl.md, with the keys of `RlConfig` and the metrics that the loop adds."""
    tables = config_fields("trainer/rl/config.py", "RlConfig")
    tables += config_fields("trainer/config/train_config.py", "Sections")
    rows = [f"| `[{n}]` | {doc} |" for n, _, _, doc in tables]
    keys = config_fields("trainer/rl/config.py", "LoopConfig")
    loop = [f"| `{n}` | {k} | {d} | {doc} |" for n, k, d, doc in keys]
    own = [
        f"| `[{table}]` | {', '.join(f'`{key}`' for key in keys)} |"
        for table, keys in OWN_KEYS.items()
    ]
    metrics = [f"| `{n}` | {m.unit} | {m.meaning} |" for n, m in LOOP_METRICS.items()]
    lines = ["| table | contents |", "|---|---|", *rows, "", "Keys of `[loop]`:", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|", *loop]
    lines += ["", "`rollouts rl` sets these keys itself and rejects them in the tables:", ""]
    lines += ["| table | keys |", "|---|---|", *own, "", "## metrics.jsonl", ""]
    lines += ["In addition to the keys in [metrics.jsonl](training.md#metricsjsonl):", ""]
    lines += ["| key | unit | meaning |", "|---|---|---|", *metrics]
    return _with_table("rl.md", lines)


def limits_page() -> str:
    """Build limits.md, with the memory of runs for several model sizes."""
    return _with_table("limits.md", runpy.run_path(str(DOCS / "sizes.py"))["table"]())


def _with_table(name: str, lines: list[str]) -> str:
    """Return a page with these lines between the comments that mark generated text."""
    return _replaced((DOCS / name).read_text(), "make docs", lines)


def _replaced(page: str, mark: str, lines: list[str]) -> str:
    """Return a page with these lines between the comments with a mark."""
    before, begin, rest = page.partition(f"<!-- begin generated: {mark} -->\n")
    _, end, after = rest.partition("<!-- end generated -->\n")
    assert end, f"a page lacks the comments around generated text: {mark}"
    table = "".join(f"{line}\n" for line in lines)
    return f"{before}{begin}{table}{end}{after}"


def tree_page() -> str:
    """Build tree.md, with a picture of a forest from examples/."""
    page = (DOCS / "tree.md").read_text()
    before, begin, rest = page.partition("<!-- begin generated: make docs -->\n")
    _, end, after = rest.partition("<!-- end generated -->\n")
    assert end, "docs/tree.md lacks the comments around generated text"
    picture = _tree_picture()["picture"]()
    return f"{before}{begin}{picture}{end}{after}"


def tree_image() -> str:
    """Draw the forest of tree.md."""
    image: str = _tree_picture()["svg"]()
    return image


@cache
def _tree_picture() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "tree_picture.py"))


def api_page(package: str) -> str:
    """Build a page of the API reference: the public names of a package, each with its docstring."""
    module = importlib.import_module(package)
    tree = ast.parse((DOCS.parent / package / "__init__.py").read_text())
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    places = {name.name: node.module for node in imports for name in node.names}
    entries = [f"::: {places.get(name, package)}.{name}" for name in module.__all__]
    summary = (module.__doc__ or "").partition("\n\n")[0]
    return "\n".join([f"# Python: `{package}`", "", summary, "", *entries, ""])


def cli_page() -> str:
    """Build cli.md, with every verb and its options."""
    page: str = runpy.run_path(str(DOCS / "cli_reference.py"))["page"]()
    return page


PAGES = {
    **{
        f"api/{package}.md": partial(api_page, package)
        for package in ("rollout_io", "schemas", "pipelines", "trainer")
    },
    "cli.md": cli_page,
    "errors.md": errors_page,
    "formats.md": formats_page,
    **{f"formats/{name}.md": partial(format_page, name) for name in known_formats()},
    "generation.md": generation_page,
    "limits.md": limits_page,
    "rl.md": rl_page,
    "table.md": table_page,
    "training.md": training_page,
    "tree.md": tree_page,
    "images/tree.svg": tree_image,
}


def draw_dataset(out: Path) -> None:
    """Draw the dataset of the examples, for metrics.md."""
    calls, rewards = (str(EXAMPLES / f"shop.{name}.jsonl") for name in ("calls", "rewards"))
    with tempfile.TemporaryDirectory() as folder:
        dataset = f"{folder}/shop"
        assert run(["convert", calls, "--rewards", rewards, "--out", dataset, "-q"]) == 0
        assert run(["plot", dataset, "--out", str(out), "-q"]) == 0


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
    draw_dataset(DOCS / "images" / "dataset.png")
