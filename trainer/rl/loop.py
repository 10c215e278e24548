"""The loop: sample, train, give the engine the new weights, and again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pipelines.generation.engine import Engine
from pipelines.generation.generator import Generator
from pipelines.generation.run import OpenEngine
from pipelines.generation.tasks import Task, read_tasks
from pipelines.generation.trajectory import ENDS_THE_RUN
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from schemas.errors import RolloutError
from trainer.checkpoint import checkpoint_path
from trainer.engines import open_engine as open_usual
from trainer.log import RunLog, say
from trainer.resume import alone_in, stops_when_full
from trainer.rl.collector import Collector
from trainer.rl.config import ROLLOUTS, RlConfig
from trainer.rl.draws import check_names, draw
from trainer.rl.evaluation import evaluate
from trainer.rl.figures import evaluation_line, iteration_line, mean_of, rollout_figures
from trainer.rl.gate import Gate
from trainer.rl.groups import Groups
from trainer.rl.resume import find_checkpoint, prepare
from trainer.rl.updates import Learning
from trainer.same_tokenizer import check_tokenizers

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RlResult:
    """What a run came to.

    Attributes:
        out: Directory of the run.
        checkpoint: Model directory of the final policy.
        num_iterations: Iterations trained.
        num_updates: Optimizer steps made.
        num_skipped_updates: Mini-batches without a step.
        num_trained_groups: Groups that gave an optimizer step a gradient that is not zero.
        return_mean: Of the last iteration's trajectories.
        evaluation: Mean return of the last evaluation; None without one.
    """

    out: str
    checkpoint: str
    num_iterations: int
    num_updates: int
    num_skipped_updates: int
    num_trained_groups: int
    return_mean: float | None
    evaluation: float | None


def run(
    config: RlConfig, *, resume: bool = False, open_engine: OpenEngine | None = None
) -> RlResult:
    """Sample groups, train on them, give the engine the new weights; `num_iterations` times.

    Args:
        config: The run's configuration.
        resume: Go on with the run in `OUT/`: from its latest checkpoint, by what was sampled since.
        open_engine: Makes the engine; None: as `[generate]` says.

    Returns:
        The result; `OUT/` then holds `config.json`, `metrics.jsonl`, `rollouts/`, `weights/`,
        `checkpoints/` and `evaluations/`.

    Raises:
        RolloutError: Configuration, model, tasks or environments are not usable; the engine has
            gone; every trajectory of an iteration failed; the run to resume had another
            configuration, or goes on; the disk is full.
    """
    _refuse_several_processes()
    checkpoint = find_checkpoint(config, resume=resume)
    tokenizer = load_tokenizer(config.model, config.generation.chat_template)
    tasks = _read(config)
    engine = Gate(
        (open_engine or open_usual)(config.generation), waits=config.weight_sync == "wait"
    )
    Generator(engine, tokenizer, config.generation).check(tasks)
    learning = Learning(config, checkpoint)
    out = Path(config.out)
    with ExitStack() as held:
        held.enter_context(stops_when_full(out))
        out.mkdir(parents=True, exist_ok=True)
        held.enter_context(alone_in(out))
        evaluated = prepare(config, learning.progress)
        loop = Loop(
            config=config,
            learning=learning,
            engine=engine,
            tokenizer=tokenizer,
            tasks=tasks,
            evaluated=evaluated,
            log=held.enter_context(learning.open_log()),
            thread=held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="trainer")),
        )
        asyncio.run(loop.run())
    return loop.result()


def _refuse_several_processes() -> None:
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if num_processes != "1":
        got, hint = f"{num_processes} processes", "rollouts train takes several"
        raise RolloutError("launch", "WORLD_SIZE", got, "one: rollouts rl has one trainer", hint)


def _read(config: RlConfig) -> list[Task]:
    """The tasks, one attempt each; those of an evaluation are looked at too."""
    tasks = read_tasks(config.tasks, 1)
    check_names({task.instance_id for task in tasks})
    planned = config.evaluation(0)
    if planned is not None:
        read_tasks(planned.tasks, 1)
    return tasks


@dataclass(kw_only=True)
class Loop:
    """A run that is ready to begin, or to go on."""

    config: RlConfig
    learning: Learning
    engine: Engine
    tokenizer: ChatTokenizer
    tasks: Sequence[Task]
    log: RunLog
    thread: ThreadPoolExecutor
    evaluated: dict[int, float | None]
    sync_s: float = 0.0
    return_mean: float | None = None

    async def run(self) -> None:
        """All iterations that are left."""
        config, learning, groups = self.config, self.learning, Groups(self.config)
        if (
            threading.current_thread() is threading.main_thread()
        ):  # ended kindly, it is an interrupt
            interrupt = partial(signal.raise_signal, signal.SIGINT)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, interrupt)
        with _says_how_to_go_on(config):
            async with self.engine:
                generator = Generator(self.engine, self.tokenizer, config.generation)
                for text in check_tokenizers(config.training, generator.metadata):
                    say(text)
                await self._begin_engine()
                draws = draw(self.tasks, config.seed)
                async with Collector(generator, draws, groups, config) as collector:
                    while learning.iteration < config.num_iterations:
                        await self._evaluate()
                        collector.advance(learning.iteration)
                        await self._iterate(collector, groups)
                await self._evaluate()

    async def _iterate(self, collector: Collector, groups: Groups) -> None:
        """One iteration: wait for its groups, train them, give the engine what came of it."""
        learning, iteration = self.learning, self.learning.iteration
        begun = time.perf_counter()
        await collector.whole(iteration)
        times = {"wait_seconds": time.perf_counter() - begun, "sync_seconds": self.sync_s}
        path = groups.path(iteration)
        dropped = {"num_dropped_groups": collector.num_newly_dropped()}
        figures = rollout_figures(path, iteration) | dropped | times
        lines = await self._in_thread(lambda: learning.update(path, figures, self.log))
        every, last = self.config.save_every_iterations, self.config.num_iterations
        if learning.iteration == last or (every and learning.iteration % every == 0):
            await self._in_thread(lambda: learning.save(self.log))
        await self._sync()
        self.return_mean = mean_of(lines, "return_mean")
        for text in collector.new_warnings():
            say(f"warning: {text}")
        say(iteration_line(lines, last, self.sync_s))

    async def _begin_engine(self) -> None:
        """Bring the engine to the run's weights, whatever it had: servers outlive runs."""
        version = self.learning.iteration
        if version:
            await self._sync()
        elif self.config.generation.engine != "transformers":
            await self.engine.load_weights(self.config.model, policy_version=0)

    async def _sync(self) -> None:
        begun = time.perf_counter()
        path = await self._in_thread(self.learning.write_weights)
        await self.engine.load_weights(str(path), policy_version=self.learning.iteration)
        self.sync_s = time.perf_counter() - begun

    async def _evaluate(self) -> None:
        """Evaluate the weights as they are, if that is due."""
        version = self.learning.iteration
        if version in self.evaluated or not self.config.evaluates(version):
            return
        found = await evaluate(self.engine, self.tokenizer, self.config, version)
        step = self.learning.progress.global_step
        self.log.write_line({"iteration": version, "global_step": step} | found)
        self.evaluated[version] = found["evaluation/return_mean"]
        say(evaluation_line(found, version))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Do what blocks where the trainer works, while sampling goes on."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def result(self) -> RlResult:
        """What the run came to."""
        progress, out = self.learning.progress, self.config.out
        return RlResult(
            out=out,
            checkpoint=str(checkpoint_path(Path(out), progress.global_step)),
            num_iterations=self.learning.iteration,
            num_updates=progress.global_step,
            num_skipped_updates=progress.num_skipped,
            num_trained_groups=len(progress.trained),
            return_mean=self.return_mean,
            evaluation=self.evaluated[max(self.evaluated)] if self.evaluated else None,
        )


@contextmanager
def _says_how_to_go_on(config: RlConfig) -> Iterator[None]:
    try:
        yield
    except RolloutError as error:
        if error.rule not in ENDS_THE_RUN:
            raise
        kept = f"what finished is in {config.out}/{ROLLOUTS}: go on with --resume"
        hint = f"{error.hint}; {kept}" if error.hint else kept
        raise RolloutError(error.rule, error.where, error.got, error.expected, hint) from error
