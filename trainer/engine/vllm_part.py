"""vLLM in one of the trainer's processes: each holds a part of the model, and all take the same steps."""

from __future__ import annotations

import dataclasses
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from schemas.errors import ConfigError, EngineError
from trainer.run.state import generators, restore_generators

WHERE = "vLLM in this process"
_ARGUMENTS = "[generate] engine_args"
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
_USUAL = {"gpu_memory_utilization": 0.5, "disable_log_stats": True, "use_tqdm_on_load": False}
"""vLLM's default of 0.92 leaves no memory for the trainer."""
_OURS = {
    "model": "set `model`",
    "dtype": "set `dtype`",
    "tensor_parallel_size": "it is the number of processes: pass --num-processes",
    "pipeline_parallel_size": "all processes share each layer",
    "data_parallel_size": "all processes share each layer",
    "distributed_executor_backend": "the number of processes determines it",
    "logprobs_mode": "log-probabilities are those of the sampled distribution",
    "enable_sleep_mode": "vLLM sleeps during updates wherever it can",
}
_RELOADING = "vllm.model_executor.model_loader.reload.layerwise"

NamedTensors = Iterable[tuple[str, Tensor]]
Request = tuple[str, list[int], dict[str, Any]]
"""Name, prompt, and fields of `SamplingParams`."""


def _vllm() -> Any:
    """Import vLLM, whose environment must be set before."""
    os.environ |= _ENVIRONMENT | os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import vllm

    return vllm


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the names of arguments for vLLM.

    Raises:
        ConfigError: `config_key`: vLLM has no such argument, or it is set here.
        ImportError: vLLM is not installed.
    """
    names = [field.name for field in dataclasses.fields(_vllm().EngineArgs)]
    for name in arguments:
        if name in _OURS:
            raise ConfigError("config_key", _ARGUMENTS, f"`{name}`", hint=_OURS[name])
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean `{near[0]}`?" if near else "use an argument of vLLM's EngineArgs"
            raise ConfigError("config_key", _ARGUMENTS, f"unknown argument `{name}`", hint=hint)


class VllmPart:
    """The part of vLLM in one process.

    Each process holds 1 / `num_processes` of every weight and of the cache, schedules the same
    requests, and samples the same tokens. All processes therefore call the same methods with the
    same arguments, in the same order.

    Args:
        model: Path of the model on this machine.
        weights: Yields the trainer's current weights, named as in model directories.

    Attributes:
        digest: Checksum of all responses so far, by which processes notice that they differ.
    """

    def __init__(self, model: str, weights: Callable[[], NamedTensors] = tuple) -> None:
        self._model, self.weights = model, weights
        self.digest = 0
        self._engine: Any = None
        self._forked = ExitStack()

    def start(self, arguments: dict[str, Any], num_processes: int) -> dict[str, int]:
        """Start vLLM, and return the size of its context and of its vocabulary.

        Raises:
            EngineError: `engine_start`: vLLM cannot be started with these arguments.
        """
        vllm = _vllm()
        from vllm.platforms import current_platform

        several = {"distributed_executor_backend": "external_launcher"} if num_processes > 1 else {}
        before = generators()
        try:
            engine_args = vllm.EngineArgs(
                model=self._model,
                tensor_parallel_size=num_processes,
                logprobs_mode="processed_logprobs",
                enable_sleep_mode=current_platform.is_sleep_mode_available(),
                **_USUAL | several | arguments,
            )
            self._engine = vllm.LLMEngine.from_engine_args(engine_args)
        except Exception as error:
            reason = " ".join(str(error).split())
            hint = "change engine_args in [generate]: see vLLM's EngineArgs"
            finding = f"vLLM cannot start: {type(error).__name__}: {reason[:500]}"
            raise EngineError("engine_start", self._model, finding, hint=hint) from error
        # For each rotary embedding, which has no weights, it warns that it failed to load weights.
        logging.getLogger(_RELOADING).setLevel(logging.ERROR)
        restore_generators(before)
        self._seed(0)
        model = self._engine.model_config
        return {"context_tokens": model.max_model_len, "vocab_size": model.get_vocab_size()}

    def step(
        self, requests: Sequence[Request], aborted: Sequence[str], digest: int
    ) -> tuple[list[Any], dict[str, str]]:
        """Add and abort requests, sample one token of each, and return the finished ones.

        Returns:
            The finished requests, as vLLM's `RequestOutput`; why requests were refused, by name.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._check(digest)
        self._engine.abort_request(list(aborted))
        refused = {}
        for name, ids, fields in requests:
            try:
                parameters = SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)
                (prompt,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": ids}])
                self._engine.add_request(name, prompt, parameters)
            except (ValueError, TypeError, VLLMClientError) as error:
                refused[name] = str(error)
        outputs = self._engine.step() if self._engine.has_unfinished_requests() else []
        finished = [output for output in outputs if output.finished]
        for output in finished:
            self.digest = zlib.crc32(repr(output.outputs[0].token_ids).encode(), self.digest)
        return finished, refused

    def sleep(self, digest: int) -> None:
        """Free the devices' memory, and restore torch's random number generators."""
        self._check(digest)
        if self._engine.model_config.enable_sleep_mode:
            self._engine.sleep(level=1)
        self._forked.close()

    def wake(self, policy_version: int) -> None:
        """Take the trainer's weights, to sample with them."""
        sleeps = self._engine.model_config.enable_sleep_mode
        if sleeps:
            torch.accelerator.empty_cache()
            self._engine.wake_up(tags=["weights"])
        weights = {"weights_iterator": iter(self.weights())}
        self._engine.collective_rpc("reload_weights", kwargs=weights)
        self._engine.reset_prefix_cache()  # its keys and values come from the old weights
        if sleeps:
            self._engine.wake_up(tags=["kv_cache"])
        self._seed(policy_version)

    def stop(self, num_processes: int) -> None:
        """Free everything that vLLM holds."""
        from vllm.distributed import parallel_state

        self._engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        if num_processes == 1:  # otherwise, the trainer made the group of all processes
            parallel_state.destroy_distributed_environment()

    def _seed(self, policy_version: int) -> None:
        """Seed torch's generators, with which vLLM samples: equally in all processes."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        self._forked.enter_context(torch.random.fork_rng(devices))
        torch.manual_seed((self._engine.model_config.seed << 32) + policy_version)

    def _check(self, digest: int) -> None:
        if digest != self.digest:
            finding = "this process sampled other tokens than the main process"
            raise EngineError("engine_answer", WHERE, finding, "the same tokens in all processes")
