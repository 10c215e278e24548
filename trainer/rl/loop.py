"""The RL loop: sample, train, load the new weights, repeat.

Driver           asks for the groups of an iteration, waits until they are whole, and audits them; after
                 the update, it has the new weights loaded
Collector        samples groups with the engine, as far ahead as `max_staleness` allows
Learning         trains on the groups in a thread of its own, in all processes together
                 (`trainer.rl.followers`), while the Collector goes on
WeightSwapEngine waits for running calls, if `weight_sync` is "wait"; then it loads the weights, for
                 which new calls wait
"""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import Accelerator

import rollout_io
from pipelines.generation.engines.base import ENDS_THE_RUN, to_its_end
from pipelines.generation.environments import USED, environment_metrics, environment_of
from pipelines.generation.generator import Generator, open_calls
from pipelines.generation.run import OpenEngine
from pipelines.generation.tasks import Task, endless_tasks, read_tasks
from rollout_io.configuration import flat
from rollout_io.retokenize.tokenizer import ChatTokenizer, load_tokenizer
from schemas.errors import RolloutError
from trainer.config.train_config import PATHS
from trainer.distributed.accelerator import make_accelerator
from trainer.distributed.liveness import watched
from trainer.distributed.meeting import together
from trainer.distributed.processes import agreed, lost_processes
from trainer.engine import open_engine as open_usual
from trainer.models.policy import Policy
from trainer.rl.config import ROLLOUTS, RlConfig
from trainer.rl.evaluation import EvaluationSet, evaluate, notes_of, read_sets
from trainer.rl.followers import SAVE, UPDATE, Orders, follow, leading
from trainer.rl.groups import Collector, Groups
from trainer.rl.learning import Learning, check_lengths
from trainer.rl.reporting import (
    SamplingProgress,
    evaluation_line,
    iteration_line,
    mean_of,
    num_greedy_rows,
    rollout_numbers,
)
from trainer.rl.resume import find_checkpoint, roll_back
from trainer.rl.weight_sync import WeightSwapEngine, WeightSync
from trainer.run.checkpoint import checkpoint_facts, checkpoint_path
from trainer.run.directory import alone_in, stays_in_place, stops_when_full
from trainer.run.messages import say, say_attention, say_learning_rate, show, warn
from trainer.run.model_checks import check_tokenizers, model_digests
from trainer.run.resume import generators, say_if_new
from trainer.run.run_log import RunLog, record_start
from trainer.run.token_records import say_size
from trainer.training import Stop

if TYPE_CHECKING:
    from pipelines.harness.launchers import Endpoint
    from pipelines.harness.recorded_calls import Calls

T = TypeVar("T")
Audit = Callable[[Path, int, Policy], dict[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RlResult:
    """Result of a run.

    Attributes:
        out: Directory of the run.
        checkpoint: Model directory of the final policy.
        num_iterations: Completed iterations.
        num_updates: Optimizer steps taken.
        num_skipped_updates: Mini-batches without an optimizer step.
        num_trained_groups: Groups that contributed a nonzero gradient to a step.
        num_greedy_rows: Rows masked because they were sampled at temperature 0.
        return_mean: Mean return of the last iteration's trajectories.
        evaluation: Mean return of the last evaluation; None without one.
    """

    out: str
    checkpoint: str
    num_iterations: int
    num_updates: int
    num_skipped_updates: int
    num_trained_groups: int
    num_greedy_rows: int
    return_mean: float | None
    evaluation: float | None


@stays_in_place
@watched()
@lost_processes()
def run(
    config: RlConfig,
    *,
    resume: bool = False,
    open_engine: OpenEngine | None = None,
    audit: Audit | None = None,
) -> RlResult:
    """Sample groups, train on them, and load the new weights, `num_iterations` times.

    In several processes, the main one samples, and all train and return the same result.

    Args:
        config: Configuration of the run.
        resume: Resume the run in `OUT/` from its latest checkpoint, with the groups sampled since.
        open_engine: Opens the engine; None: use the engine of `[generate]`.
        audit: Checks the rows of an iteration (the path of its dataset, its number, the policy)
            before the policy is trained on them, and returns metrics; None: no check.

    SIGINT and SIGTERM stop the run after the update of the current iteration, if one is running,
    with a checkpoint of the iterations completed so far.

    Returns:
        The result; `OUT/` then contains `config.json`, `metrics.jsonl`, `rollouts/`, `weights/`,
        `checkpoints/`, `evaluations/` and `tokens/`.

    Raises:
        RolloutError: The configuration, model, tasks or environments are not usable; the engine
            fails; every trajectory of an iteration failed; the run to resume had a different
            configuration, or is still running; or the disk is full.
    """
    t = config.training
    accelerator = make_accelerator(t)
    checkpoint, sampling = together(
        lambda: _set_up(config, accelerator, open_engine, resume=resume),
        lambda opened: _facts(config, opened[0]),
    )
    say_learning_rate(t)
    say_attention(accelerator)
    learning = Learning(
        t, checkpoint, num_iterations=config.num_iterations, accelerator=accelerator
    )
    if checkpoint:
        say(f"resuming from {checkpoint}")
    check_lengths(config, learning.opened.row_limit, None)
    for text in (*learning.notes_of_size(config), *notes_of(config)):
        say(text)
    out, orders = Path(config.run.out), Orders(accelerator)
    with ExitStack() as held:
        held.enter_context(stops_when_full(out))
        evaluated = agreed(
            accelerator,
            lambda: _open(config, learning, held) if sampling else dict[int, float | None](),
        )
        if not sampling:
            return RlResult(**follow(learning, orders))
        engine, tokenizer, tasks, evaluation_sets = sampling
        ended = held.enter_context(leading(orders))
        driver = Driver(
            config=config,
            learning=learning,
            orders=orders,
            engine=engine,
            tokenizer=tokenizer,
            tasks=tasks,
            evaluation_sets=evaluation_sets,
            evaluated=evaluated,
            audit=audit,
            log=held.enter_context(learning.open_log()),
            thread=held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="trainer")),
        )
        try:
            asyncio.run(driver.run())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        say_size(out)
        result = driver.result()
        ended |= dataclasses.asdict(result)
    return result


Sampling = tuple[WeightSwapEngine, ChatTokenizer, list[Task], dict[str, EvaluationSet]]
"""Engine, tokenizer, tasks and evaluation sets, with which the main process samples."""


def _set_up(
    config: RlConfig, accelerator: Accelerator, open_engine: OpenEngine | None, *, resume: bool
) -> tuple[Path | None, Sampling | None]:
    """Find the checkpoint, and check tasks and engine in the main process; others get None."""
    checkpoint = find_checkpoint(config, resume=resume)
    if not accelerator.is_main_process:
        return checkpoint, None
    if resume:
        say_if_new(Path(config.run.out))
    tokenizer = dataclasses.replace(
        load_tokenizer(config.model.path, config.generation.chat_template),
        template_kwargs=config.generation.chat_template_kwargs,
    )
    tasks = read_tasks(config.loop.tasks, 1)
    sets = read_sets(config, tokenizer)
    engine = WeightSwapEngine(
        (open_engine or open_usual)(config.generation), waits=config.loop.weight_sync == "wait"
    )
    Generator(engine, tokenizer, config.generation).check(tasks)
    return checkpoint, (engine, tokenizer, tasks, sets)


def _facts(config: RlConfig, checkpoint: Path | None) -> dict[str, Any]:
    """What must be the same in all processes before a model is loaded."""
    settings = flat(config.resolved())
    lasting = {key: settings[key] for key in settings if key not in (*PATHS, "run.out")}
    return lasting | model_digests(config.training) | checkpoint_facts(checkpoint)


def _open(config: RlConfig, learning: Learning, held: ExitStack) -> dict[int, float | None]:
    """Lock the run's directory, and roll it back to the state to resume from; see `roll_back`."""
    out = Path(config.run.out)
    out.mkdir(parents=True, exist_ok=True)
    held.enter_context(alone_in(out))
    evaluated = roll_back(config, learning.progress)
    record_start(out, learning.accelerator, learning.training, learning.progress.global_step)
    return evaluated


@dataclass(kw_only=True)
class Driver:
    """A run that is ready to start or resume; only the main process has one."""

    config: RlConfig
    learning: Learning
    orders: Orders
    engine: WeightSwapEngine
    tokenizer: ChatTokenizer
    tasks: Sequence[Task]
    evaluation_sets: Mapping[str, EvaluationSet]
    audit: Audit | None
    log: RunLog
    thread: ThreadPoolExecutor
    evaluated: dict[int, float | None]
    return_mean: float | None = None

    def __post_init__(self) -> None:
        self.sync = WeightSync(
            self.config, self.learning, self.engine, self._in_all, self._in_thread
        )

    async def run(self) -> None:
        """Run all remaining iterations."""
        config, learning, groups = self.config, self.learning, Groups(self.config)
        task, events = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        # Unlike `add_signal_handler`, this leaves the wakeup file descriptor to the command line,
        # which handles signals while the trainer computes.
        stop = Stop(lambda: events.call_soon_threadsafe(task.cancel))
        with (
            stop.requested_by_signals(),
            _hints_at_resuming(config),
            self._saved_when_it_ends(),
        ):
            async with self.engine, self._open_calls() as calls:
                sampling, store = config.generation, groups.store
                generator = Generator(self.engine, self.tokenizer, sampling, calls, store=store)
                metadata, training = generator.metadata, config.training
                for remark in check_tokenizers(training, metadata, notes_match=False):
                    show(remark)
                check_lengths(config, learning.opened.row_limit, self.engine.context_tokens)
                await self.sync.begin()
                async with Collector(generator, self._visits(), groups, config) as collector:
                    while learning.iteration < config.num_iterations:
                        await self._evaluate(calls)
                        collector.advance(learning.iteration)
                        await self._iterate(collector, groups)
                await self._evaluate(calls)

    def _visits(self) -> Iterator[Task]:
        return endless_tasks(self.tasks, self.config.loop.task_order, self.config.run.seed)

    def _open_calls(self) -> AbstractAsyncContextManager[Calls | Endpoint | None]:
        usual = self.config.generation
        configs = (usual, *self.config.evaluations(0).values())
        sampling = next((one for one in configs if one.harness or one.generator), usual)
        return open_calls(sampling, self.engine.engine, self.tokenizer, self.engine.turn)

    async def _iterate(self, collector: Collector, groups: Groups) -> None:
        """Run one iteration: wait for its groups, train on them, and load the new weights."""
        learning, iteration = self.learning, self.learning.iteration
        begun = time.perf_counter()
        total = groups.size * self.config.generation.group_size
        subject = f"iteration {iteration + 1} of {self.config.num_iterations}"
        with SamplingProgress(self.log.bar, subject, total) as shown:
            await collector.whole(iteration, shown.show)
        times = {"wait_seconds": time.perf_counter() - begun, "sync_seconds": self.sync.duration_s}
        path = groups.path(iteration)
        dropped = {"num_dropped_groups": collector.num_newly_dropped()}
        environment = await self._environment_metrics(path)
        numbers = rollout_numbers(path, iteration) | environment | dropped | times
        policy = learning.policy
        async with self.sync.devices():
            if audit := self.audit:
                numbers |= await self._in_thread(lambda: audit(path, iteration, policy))
            lines = await self._in_thread(lambda: self._update(path, numbers))
            every, last = self.config.loop.save_every_iterations, self.config.num_iterations
            is_due = learning.iteration in {1, last} or (every and learning.iteration % every == 0)
            if is_due:
                await self._in_thread(self._save)
            await self.sync.give()
        self.return_mean = mean_of(lines, "return_mean")
        for text in collector.new_warnings():
            warn(text)
        say(iteration_line(lines, last, self.sync.duration_s))
        self.log.next_iteration()

    async def _environment_metrics(self, path: Path) -> dict[str, float]:
        config = self.config.generation
        if not config.uses_environments:
            return {}
        scanned = rollout_io.scan(path)
        columns = [name for name in USED if name in scanned.collect_schema()]
        rows = scanned.select(columns).collect().to_arrow()
        ids = set(rows.column("instance_id").unique().to_pylist())
        visits = (task for task in self._visits() if task.instance_id in ids)
        names = {t.instance_id: environment_of(t, config) for t in islice(visits, len(ids))}
        metrics, problems = await environment_metrics(rows, names, config.env_timeout_s)
        for text in problems:
            warn(text)
        return metrics

    async def _evaluate(self, calls: Calls | Endpoint | None) -> None:
        """Evaluate the current weights, if due."""
        version = self.learning.iteration
        if version in self.evaluated or not self.config.is_evaluation_due(version):
            return
        metrics = await evaluate(
            self.engine, self.evaluation_sets, self.config, version, calls, self.log.bar
        )
        step = self.learning.progress.global_step
        self.log.write_line({"iteration": version, "global_step": step} | metrics)
        self.evaluated[version] = metrics["evaluation/return_mean"]
        say(evaluation_line(metrics, version, self.config.evaluations(version)))

    def _update(self, dataset: Path, numbers: dict[str, Any]) -> list[dict[str, Any]]:
        # Environments and engines may have drawn from the generators of the main process.
        order = {"do": UPDATE, "dataset": str(dataset), "generators": generators()}
        return self._in_all(order, lambda: self.learning.update(dataset, numbers, self.log))

    def _save(self) -> Path:
        return self._in_all({"do": SAVE}, lambda: self.learning.save(self.log))

    def _in_all(self, order: Mapping[str, Any], work: Callable[[], T]) -> T:
        """Give an order to the other processes, and carry it out in this one."""
        self.orders.give(order)
        with self.orders.under_way():
            return work()

    @contextmanager
    def _saved_when_it_ends(self) -> Iterator[None]:
        """Save the progress if an error or a signal ends the run between two iterations."""
        try:
            yield
        except (RolloutError, asyncio.CancelledError):
            if self.learning.has_unsaved_iterations and self.orders.is_between:
                self._save()
            raise

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking work in the trainer's thread while sampling continues.

        When the loop is cancelled, the work is completed, so that its result can be saved.
        """
        in_context = copy_context().run  # so that -q applies in the thread as well
        events = asyncio.get_running_loop()
        return await to_its_end(events.run_in_executor(self.thread, in_context, work))

    def result(self) -> RlResult:
        """Summarise the run."""
        progress, out = self.learning.progress, self.config.run.out
        return RlResult(
            out=out,
            checkpoint=str(checkpoint_path(Path(out), progress.global_step)),
            num_iterations=self.learning.iteration,
            num_updates=progress.global_step,
            num_skipped_updates=progress.num_skipped,
            num_trained_groups=len(progress.trained_groups),
            num_greedy_rows=0
            if self.config.loss.is_supervised
            else num_greedy_rows(Path(out) / ROLLOUTS),
            return_mean=self.return_mean,
            evaluation=self.evaluated[max(self.evaluated)] if self.evaluated else None,
        )


@contextmanager
def _hints_at_resuming(config: RlConfig) -> Iterator[None]:
    try:
        yield
    except RolloutError as error:
        if error.rule not in ENDS_THE_RUN:
            raise
        again = f"--resume {shlex.quote(config.run.out)}"
        resuming = f"continue with {again}: finished groups are kept in {ROLLOUTS}/"
        hint = f"{error.hint}; then {resuming}" if error.hint else resuming
        raise error.at(error.where, hint) from error
