"""FlashAttention 3 runs where it computes what SDPA computes, and nowhere else.

A CPU has no FlashAttention, so the tests give PyTorch an implementation of its two operations, as
the package does on a GPU. It computes attention over packed rows, right or with one mistake.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library
from torch.nn import attention as switches

from tests.helpers.gpu_claims import TINY, check_bfloat16
from trainer.models import attention, varlen

CPU = torch.device("cpu")
LONG = torch.tensor([0, 5000])


class Flash:
    """Both operations of FlashAttention in float32, with PyTorch's signatures."""

    def __init__(self, mistake=""):
        self.mistake = mistake
        self.num_calls = 0
        self.library = Library("aten", "IMPL")
        self.library.impl("_flash_attention_forward", self.forward, "CPU")
        self.library.impl("_flash_attention_backward", self.backward, "CPU")

    def remove(self):
        self.library._destroy()

    def parts(
        self, query, key, value, ends, *, is_causal, scale, window_size_left, window_size_right, **_
    ):
        """Scores [heads, N, N], their scale, and query, key and value as [heads, N, size]."""
        assert ends.dtype == torch.int32
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16
        num, groups = len(query), query.shape[1] // key.shape[1]
        states = [tensor.float().transpose(0, 1) for tensor in (query, key, value)]
        states[1:] = [tensor.repeat_interleave(groups, 0) for tensor in states[1:]]
        row, at = torch.bucketize(torch.arange(num), ends, right=True), torch.arange(num)
        distance = at[:, None] - at
        seen = row[:, None] == row
        if self.mistake == "rows see each other":
            seen = torch.ones_like(seen)
        if window_size_left >= 0 and self.mistake != "no window":
            seen = seen & (distance <= window_size_left)
        if is_causal or window_size_right >= 0:
            assert window_size_right <= 0
            seen = seen & (distance >= 0)
        scale = 1.0 if self.mistake == "no scale" else scale or query.shape[-1] ** -0.5
        scores = (states[0] @ states[1].mT * scale).masked_fill(~seen, -torch.inf)
        return scores, scale, *states

    def forward(
        self, query, key, value, ends, ends_of_keys, longest, longest_keys, dropout, *flags, **how
    ):
        self.num_calls += 1
        is_causal, returns_mask = flags
        assert longest == longest_keys == ends.diff().max()
        assert ends.equal(ends_of_keys)
        assert not dropout
        assert not returns_mask
        if self.mistake == "raises":
            raise RuntimeError("no kernel image is available\nfor this device")
        scores, _, _, _, values = self.parts(query, key, value, ends, is_causal=is_causal, **how)
        output = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
        if self.mistake == "not a number":
            output[-1] = torch.nan
        nothing = torch.zeros(2, dtype=torch.uint64)
        return output, scores.logsumexp(-1), nothing, nothing[0].clone(), output.new_empty(0)

    def backward(self, gradient, query, key, value, *rest, **how):
        _output, _logsumexp, ends, _, _, _, _dropout, is_causal, *_ = rest
        scores, scale, *states = self.parts(query, key, value, ends, is_causal=is_causal, **how)
        queries, keys, values = states
        probability, gradient = scores.softmax(-1), gradient.float().transpose(0, 1)
        inner = gradient @ values.mT
        inner = probability * (inner - (inner * probability).sum(-1, keepdim=True)) * scale
        gradients = inner @ keys, inner.mT @ queries, probability.mT @ gradient
        if self.mistake == "no gradient of keys":
            gradients[1].zero_()
        shapes = [(tensor.shape[1], -1, *gradient.shape[1:]) for tensor in (query, key, value)]
        return tuple(
            tensor.view(shape).sum(1).transpose(0, 1).to(query.dtype)
            for tensor, shape in zip(gradients, shapes, strict=True)
        )


@pytest.fixture
def install(monkeypatch):
    """Makes the CPU a Hopper GPU with this FlashAttention 3."""
    if varlen.VARLEN_ATTN is None:
        pytest.skip("this torch has no varlen_attn with windows")
    monkeypatch.setattr(varlen, "_is_hopper", lambda _: True)
    varlen.flash_attention_3.cache_clear()

    def with_flash(mistake=""):
        installed = []

        def register():
            installed.append(Flash(mistake))
            return installed[-1]

        implementations = switches._registry._FLASH_ATTENTION_IMPLS
        monkeypatch.setitem(implementations, "FA3", register)
        return installed

    yield with_flash
    if switches.current_flash_attention_impl():
        switches.restore_flash_attention_impl()
    varlen.flash_attention_3.cache_clear()


def test_flash_attention_3_runs_rows_of_all_lengths_if_it_computes_what_sdpa_computes(install):
    assert not install()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), FakeTensorMode():
        assert varlen.flash_attention_3(CPU) == ""
    assert switches.current_flash_attention_impl() == "FA3"
    assert varlen.prefers_one_kernel(LONG, 5000)
    assert varlen._error_of_varlen(CPU) < varlen.TOLERANCE / 2


@pytest.mark.parametrize(
    "mistake",
    ["rows see each other", "no window", "no scale", "not a number", "no gradient of keys"],
)
def test_a_kernel_that_computes_something_else_is_not_used(mistake, install):
    installed = install(mistake)
    reason = varlen.flash_attention_3(CPU)
    assert reason.startswith("FlashAttention 3 differs from SDPA by ")
    assert installed[0].num_calls
    assert switches.current_flash_attention_impl() is None
    assert not varlen.prefers_one_kernel(LONG, 5000)
    assert varlen.prefers_one_kernel(LONG // 3, 5000 // 3)


def test_a_kernel_that_raises_is_not_used(install):
    install("raises")
    reason = "FlashAttention 3 does not run: RuntimeError: no kernel image is available"
    assert varlen.flash_attention_3(CPU) == reason
    assert switches.current_flash_attention_impl() is None


@pytest.mark.usefixtures("install")
def test_without_the_package_rows_use_flash_attention_2_and_the_reason_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    path = varlen.packed_attention(torch.device("cuda"), "bfloat16")
    assert path.startswith("FlashAttention 2 (varlen_attn), or SDPA for rows of 2,048 tokens")
    assert path.endswith("No module named 'flash_attn_interface'")


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 8])
def test_packed_rows_by_flash_attention_3_are_as_exact_as_padded_ones(window, install, monkeypatch):
    installed = install()
    assert varlen.flash_attention_3(CPU) == ""
    before = installed[0].num_calls
    monkeypatch.setattr(attention, "runs_varlen", lambda *inputs: inputs[-1].ends is not None)
    num_forests = check_bfloat16("cpu", TINY, window, "step")
    assert installed[0].num_calls - before == TINY.num_layers * num_forests
