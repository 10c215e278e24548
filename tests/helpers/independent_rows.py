"""What a run of `independent_update` forwards: rows of the layout, with their trained tokens."""

from dataclasses import dataclass, field
from typing import Any

Step = dict[str, Any]
Settings = dict[str, Any]


@dataclass(kw_only=True, eq=False)
class Token:
    """A response token that trains."""

    row: int
    position: int
    step: int
    inside: int
    trajectory: str
    group: str
    rollout: float | None
    reward: float = 0.0
    advantage: float = 0.0
    old: float = 0.0
    reference: float = 0.0
    value: float = 0.0
    target: float = 0.0


@dataclass(kw_only=True, eq=False)
class Row:
    """What is forwarded: a step, or several that continue each other."""

    number: int
    group: str
    trajectory: str
    prompt: list[int]
    response: list[int]
    temperature: float
    steps: list[int]
    tokens: list[Token] = field(default_factory=list)


def by_trajectory(rows):
    found = {}
    for row in rows:
        found.setdefault(row["trajectory_id"], []).append(row)
    return found


def masks_and_returns(trajectories, c):
    """Trajectories that do not train, and the returns of those that did not fail (gdpo: rewards)."""
    failed = {t for t, steps in trajectories.items() if any(s["error"] for s in steps)}
    group_of = {t: steps[0]["instance_id"] for t, steps in trajectories.items()}
    masked = set(failed)
    if c["failed"] == "group":
        masked = {t for t in trajectories if group_of[t] in {group_of[f] for f in failed}}
    sizes = {}
    for group in group_of.values():
        sizes[group] = sizes.get(group, 0) + 1
    compares = c["estimator"] in ("grpo", "rloo", "maxrl", "gdpo")
    if c["partial_groups"] == "mask" and compares and c["policy_loss_type"] != "cross_entropy":
        masked |= {t for t in trajectories if sizes[group_of[t]] != max(sizes.values())}
    returns = {}
    for t, steps in trajectories.items():
        if t not in failed:
            last, total = steps[-1]["reward"], sum(s["reward"] for s in steps)
            returns[t] = last if c["outcome"] == "last" else total
            if c["estimator"] == "gdpo":
                returns[t] = [metric(steps, name) for name in c["reward_weights"]]
    return masked, returns


def metric(steps, name):
    for step in reversed(steps):
        for entry in step.get("metrics") or ():
            if entry["key"] == name:
                return float(entry["value"])
    raise AssertionError(name)


def varies(group, trajectories, masked, returns):
    """Whether a group has not several trained trajectories, all of one return."""
    inside = [t for t in returns if trajectories[t][0]["instance_id"] == group]
    own = [returns[t] for t in inside if t not in masked]
    return len(own) < 2 or max(own) > min(own)


def layout(trajectories, masked, c):
    """Rows with their trained tokens; `tree` has the numbers of `step`."""
    rows = []
    for trajectory, steps in trajectories.items():
        lineages = [[i] for i in range(len(steps))]
        if c["sequence_layout"] == "merge":
            lineages = merged(steps)
        for lineage in sorted(lineages, key=lambda found: found[-1]):
            trainable, imitates = trajectory not in masked, c["policy_loss_type"] == "cross_entropy"
            rows.append(joined(steps, lineage, len(rows), trainable=trainable, imitates=imitates))
    return rows


def merged(steps):
    """Each step continues the longest open step whose tokens its prompt begins with."""
    lineages = []
    for i, step in enumerate(steps):
        best = None
        for lineage in lineages:
            last = steps[lineage[-1]]
            whole = last["prompt_token_ids"] + last["response_ids"]
            same = key_of(last) == key_of(step) and last["response_ids"] and step["response_ids"]
            if same and step["prompt_token_ids"][: len(whole)] == whole:
                before = None if best is None else steps[best[-1]]
                if before is None or len(whole) > len(
                    before["prompt_token_ids"] + before["response_ids"]
                ):
                    best = lineage
        if best is None:
            lineages.append([i])
        else:
            best.append(i)
    return lineages


def key_of(step):
    known = (step[n] is None for n in ("rollout_logprobs", "reward", "rewards"))
    return (step["temperature"], step["error"], *known)


def joined(steps, lineage, number, *, trainable, imitates):
    """The rows of a lineage as one, observations between the responses.

    Greedy rows have no gradient; a loss that imitates trains them as if sampled at temperature 1.
    """
    first = steps[lineage[0]]
    temperature = 1.0 if first["temperature"] is None else first["temperature"]
    temperature = 1.0 if imitates and temperature == 0 else temperature
    row = Row(
        number=number,
        group=first["instance_id"],
        trajectory=first["trajectory_id"],
        prompt=list(first["prompt_token_ids"]),
        response=[],
        temperature=temperature,
        steps=lineage,
    )
    for i in lineage:
        step = steps[i]
        row.response += step["prompt_token_ids"][len(row.prompt) + len(row.response) :]
        for j, trains in enumerate(step["loss_mask"]):
            if trains and trainable and temperature > 0:
                known = step["rollout_logprobs"]
                row.tokens.append(
                    Token(
                        row=number,
                        position=len(row.response) + j,
                        step=i,
                        inside=j,
                        trajectory=row.trajectory,
                        group=row.group,
                        rollout=None if known is None else known[j],
                    )
                )
        row.response += step["response_ids"]
    return row
