"""Compare a model before and after training on the responses of a dataset.

For each group that the run trained on, print the change in mean log-probability per
trained token, for rewarded and for unrewarded trajectories. Uses plain Transformers.

    python examples/compare_policies.py DATASET MODEL RUN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import polars as pl
import torch
from transformers import AutoModelForCausalLM

import pipelines
import rollout_io
from trainer.run.checkpoint import latest_checkpoint


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit("usage: python examples/compare_policies.py DATASET MODEL RUN")
    dataset, model, run = sys.argv[1:]
    checkpoint = latest_checkpoint(Path(run))
    frame = rollout_io.scan(dataset)
    changes = compare(frame, model, str(checkpoint), trained_groups(frame, run))
    with pl.Config(tbl_hide_dataframe_shape=True, tbl_rows=-1, float_precision=4):
        print(changes)
    risen = int((changes["relative_gain"] > 0).sum())
    print(f"rewarded trajectories gained on unrewarded ones in {risen} of {len(changes)} groups")
    sys.exit(risen < len(changes))


def trained_groups(frame: pl.LazyFrame, run: str) -> list[str]:
    """Return the groups that a run trained on (rewards vary in each group), in dataset order."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    num_groups = sum(json.loads(line)["num_groups"] for line in lines)
    returns = pipelines.trajectory_returns(frame).group_by("instance_id", maintain_order=True)
    varied = returns.agg(pl.col("return").std()).filter(pl.col("return") > 0).collect()
    return varied["instance_id"].head(num_groups).to_list()


def compare(frame: pl.LazyFrame, before: str, after: str, groups: list[str]) -> pl.DataFrame:
    """Compute, for each group, how the mean log-probability of its trajectories changed.

    The change is averaged separately over rewarded and unrewarded trajectories.
    """
    rows = frame.filter(pl.col("instance_id").is_in(groups)).collect()
    returns = pipelines.trajectory_returns(rows.lazy()).collect()
    change = mean_logprobs(rows, after) - mean_logprobs(rows, before)
    per_trajectory = (
        rows.select("trajectory_id", tokens=pl.col("loss_mask").list.sum(), change=change)
        .group_by("trajectory_id")
        .agg((pl.col("change") * pl.col("tokens")).sum() / pl.col("tokens").sum())
        .join(returns, on="trajectory_id")
    )
    rewarded = pl.col("return") > pl.col("return").mean().over("instance_id")
    return (
        per_trajectory.group_by("instance_id")
        .agg(
            rewarded=pl.col("change").filter(rewarded).mean(),
            unrewarded=pl.col("change").filter(~rewarded).mean(),
        )
        .with_columns(relative_gain=pl.col("rewarded") - pl.col("unrewarded"))
        .sort("instance_id")
    )


@torch.no_grad()
def mean_logprobs(rows: pl.DataFrame, model_dir: str) -> pl.Series:
    """Return the [N] mean log-probability of the trained tokens of each row."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    means = []
    columns = rows.select("prompt_token_ids", "response_ids", "loss_mask")
    for prompt, response, mask in columns.iter_rows():
        ids = torch.tensor([prompt + response])
        # Compute logits for the response only: the vocabulary costs more than the layers of a small model.
        kept = model(ids, logits_to_keep=len(response) + 1).logits
        logits = kept[0, :-1].log_softmax(-1)
        logprobs = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        means.append(logprobs[torch.tensor(mask)].mean().item())
    return pl.Series(means)


if __name__ == "__main__":
    main()
