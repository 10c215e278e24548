import numpy as np
import pytest

from rollout_io.retokenize import load_tokenizer, retokenize
from schemas.errors import RolloutError

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smol(smollm2_dir):
    return load_tokenizer(smollm2_dir)


def test_given_assistant_messages_are_part_of_the_prompt_and_do_not_train(smol):
    said = ["2+2?", "4", "3+3?", "6", "1+1?", "2"]
    roles = ["user", "assistant"] * 3
    chat = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
    all_answers, last_two = retokenize(chat, smol), retokenize(chat, smol, num_given=3)
    assert len(all_answers.spans) == 3
    assert len(last_two.spans) == 2
    joined = [np.concatenate([t.prompt_token_ids, t.response_ids]) for t in (all_answers, last_two)]
    assert joined[0].tolist() == joined[1].tolist()
    assert smol.decode(last_two.prompt_token_ids).count("<|im_start|>assistant") == 2
    with pytest.raises(RolloutError, match="has no assistant message"):
        retokenize(chat, smol, num_given=6)
