"""Rows of verifiers 0.3.1 (legacy environments): `python make_legacy.py http://127.0.0.1:8000/v1`."""

import sys
from pathlib import Path

import verifiers.legacy as vf
from datasets import Dataset
from verifiers.legacy.types import ClientConfig

HERE = Path(__file__).parent


class TwoTurns(vf.MultiTurnEnv):
    async def env_response(self, *_, **__):
        return [{"role": "user", "content": "Are you sure? One number."}]


def correct(completion, answer):
    return float(answer in str(completion[-1]["content"]))


def brief(completion):
    return float(len(str(completion[-1]["content"])) < 40)


def environment():
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in [(2, 3), (4, 1)]]
    rubric = vf.Rubric(funcs=[correct, brief], weights=[1.0, 0.25])
    system = "You answer with one number."
    dataset = Dataset.from_list(rows)
    return TwoTurns(max_turns=2, eval_dataset=dataset, rubric=rubric, system_prompt=system)


def main(base_url):
    client = ClientConfig(api_base_url=base_url, api_key_var="UNUSED")
    sampling = {"temperature": 1.0, "max_tokens": 16, "logprobs": True}
    sampling["extra_body"] = {"return_token_ids": True}
    for name, columns in {"tokens": ["trajectory"], "text": None}.items():
        kept = {"state_columns": columns, "results_path": Path("legacy") / name}
        asked = {"num_examples": 2, "rollouts_per_example": 2, "save_results": True}
        environment().evaluate_sync(client, "smollm2", sampling, **asked, **kept)
        for file in kept["results_path"].iterdir():
            target = HERE / kept["results_path"] / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(file.read_text())


if __name__ == "__main__":
    main(sys.argv[1])
