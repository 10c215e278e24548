"""Log-probabilities, entropies and their gradients are those of the formula, in place."""

import pytest
import torch

import trainer.models.logprob_head
from tests.helpers.trainer_helpers import relative_difference
from trainer.models.logprob_head import target_logprobs

NUM, VOCAB = 7, 11


def literal(logits, token, temperature, scale, cap):
    z = logits * scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    log_p = (z / temperature[:, None]).log_softmax(-1)
    return log_p.gather(-1, token[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(NUM, VOCAB, generator=generator)).to(dtype)
    token = torch.randint(VOCAB, (NUM,), generator=generator)
    return logits, token, torch.linspace(0.5, 2.0, NUM)


def gradient(found, leaf, *, through_entropy):
    weights = torch.linspace(-1, 2, NUM).to(found[0].dtype)
    total = (weights * found[0]).sum()
    if through_entropy:
        total = total + (weights.flip(0) * found[1]).sum()
    return torch.autograd.grad(total, leaf)[0]


def test_even_logits_give_the_logarithm_of_their_number():
    found = target_logprobs(torch.zeros(1, 4), torch.tensor([2]), torch.ones(1))
    assert [round(value.item(), 4) for value in found] == [-1.3863, 1.3863]


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("through_entropy", [False, True])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 3.0), (2.0, 5.0)])
def test_values_and_gradients_are_those_of_the_formula_in_float64(
    *, scale, cap, through_entropy, rows_at_once, monkeypatch
):
    monkeypatch.setattr(trainer.models.logprob_head, "BLOCK_ELEMENTS", rows_at_once * VOCAB)
    logits, token, temperature = inputs()
    exact = logits.double().requires_grad_()
    expected = literal(exact, token, temperature.double(), scale, cap)
    leaf = logits.clone().requires_grad_()
    found = target_logprobs(
        leaf * 1, token, temperature, scale=scale, softcap=cap, entropy_gradient=through_entropy
    )
    assert found[1].requires_grad == through_entropy
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    ours, theirs = (
        gradient(pair, variable, through_entropy=through_entropy)
        for pair, variable in ((found, leaf), (expected, exact))
    )
    assert relative_difference(ours.double(), theirs) < 1e-5


def test_logits_of_half_precision_are_worked_on_in_float32():
    logits, token, temperature = inputs(torch.bfloat16)
    exact = logits.double().requires_grad_()
    expected = literal(exact, token, temperature.double(), 1.0, None)
    leaf = logits.clone().requires_grad_()
    found = target_logprobs(leaf * 1, token, temperature, entropy_gradient=True)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    ours = gradient(found, leaf, through_entropy=True)
    assert ours.dtype == torch.bfloat16
    theirs = gradient(expected, exact, through_entropy=True)
    assert relative_difference(ours.double(), theirs) < 2**-8  # bfloat16 keeps 8 bits


def test_the_gradient_takes_the_place_of_the_logits_and_a_second_one_is_refused():
    leaf, token, temperature = inputs()
    logits = leaf.requires_grad_() * 1
    kept = []
    logits.register_hook(kept.append)
    total = target_logprobs(logits, token, temperature)[0].sum()
    total.backward(retain_graph=True)
    assert kept[0].data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
