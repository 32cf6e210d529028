"""Steps of several tasks that train one prompt: each batch belongs to one task and its head."""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
import optax

from jaxprompt.data.batches.stream import BatchStream
from jaxprompt.errors import InputError
from jaxprompt.training.optim import Constants, LearningRateState
from jaxprompt.training.progress import Metrics
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import TrainStep
from jaxprompt.tree import Flat
from jaxprompt.types import Batch, Tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TaskBatch:
    """A batch of one of several tasks; the task is static when the step is compiled."""

    batch: Batch
    task: str = dataclasses.field(metadata={"static": True})

    @property
    def encoder(self) -> Tokens:
        """The input."""
        return self.batch.encoder


def make_shared_step(
    steps: Mapping[str, TrainStep],
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns (state, frozen, TaskBatch, constants of the schedule) -> (state, metrics).

    It has one train step per task.

    A step changes neither the heads of other tasks nor their optimizer state, including its step
    count: with a zero gradient their momentum would still move them. Schedules advance for all. The
    optimizer must have a group for each head.
    """

    def is_schedule(state):
        return isinstance(state, optax.ScaleByScheduleState | LearningRateState)

    def step(
        state: TrainState, frozen: Flat, task_batch: TaskBatch, constants: Constants | None = None
    ):
        new_state, metrics = steps[task_batch.task](state, frozen, task_batch.batch, constants)

        def select(path: Sequence[object], updated: object, previous: object) -> object:
            if is_schedule(updated):
                return updated
            # The optimizer state has leaves of the same names, so one rule applies to both.
            path_keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
            heads = [name.split("/")[1] for name in path_keys if name.startswith("head/")]
            return previous if any(head != task_batch.task for head in heads) else updated

        trainable, opt_state = [
            jax.tree_util.tree_map_with_path(select, *trees, is_leaf=is_schedule)
            for trees in (
                (new_state.trainable, state.trainable),
                (new_state.opt_state, state.opt_state),
            )
        ]
        return new_state._replace(trainable=trainable, opt_state=opt_state), metrics

    return step


class TaskMix(NamedTuple):
    """How often each of several tasks is sampled."""

    shares: dict[str, float]  # of the batches, by task
    mean_batch: float  # examples
    steps_per_epoch: int  # steps for as many examples as all tasks have


def mix_tasks(
    sizes: Mapping[str, int], batch_sizes: Mapping[str, int], temperature: float
) -> TaskMix:
    """Mixes tasks by size: a task with n examples is sampled in proportion to n^(1 / temperature).

    Args:
      sizes: number of examples by task.
      batch_sizes: number of examples of a batch by task.
      temperature: above 0.
    """
    # Computed from logarithms, because a power of 1 / 0.01 would be infinite.
    log_weights = np.log(list(sizes.values())) / temperature
    weights = np.exp(log_weights - log_weights.max())
    shares = dict(zip(sizes, weights / weights.sum(), strict=True))
    mean = sum(batch_sizes[name] * share for name, share in shares.items())
    mean_batch = round(float(mean), 9)  # shares add up to 1 but for rounding
    return TaskMix(shares, mean_batch, max(1, int(sum(sizes.values()) / mean_batch)))


class TaskBatches(Iterator[TaskBatch]):
    """Batches of several tasks, sampled by their shares.

    The task of a batch depends only on the seed and the number of the batch.
    """

    def __init__(
        self, streams: Mapping[str, BatchStream], shares: Mapping[str, float], *, seed: int
    ):
        """Starts at batch 0. `streams` are the batches of each task."""
        self._streams, self._names, self._shares = streams, list(streams), shares
        self._seed, self._number = (seed, zlib.crc32(b"tasks")), 0

    def __next__(self) -> TaskBatch:
        """Returns the next batch."""
        # Not by JAX, whose result would wait for the steps that its device has not finished.
        bit_generator = np.random.MT19937(np.random.SeedSequence((*self._seed, self._number)))
        random_number = np.random.RandomState(bit_generator).random_sample()
        self._number += 1
        index = np.searchsorted(np.cumsum(list(self._shares.values())), random_number, side="right")
        # Rounding may leave the last cumulative sum below 1.
        name = self._names[min(int(index), len(self._names) - 1)]
        return TaskBatch(next(self._streams[name]), name)

    def get_state(self) -> dict[str, object]:
        """Returns the position, to be saved as JSON."""
        return {
            "at": self._number,
            "shares": {name: float(x) for name, x in self._shares.items()},
            "streams": {name: stream.get_state() for name, stream in self._streams.items()},
        }

    def set_state(self, state: Mapping[str, object]) -> None:
        """Restores a saved position; raises InputError if the tasks or shares differ."""
        shares = self.get_state()["shares"]
        if state["shares"] != shares:
            raise InputError(
                f"the saved position has the tasks {state['shares']}, but this run has {shares}; "
                "resume with the same shared.tasks and data, or use another workdir"
            )
        self._number = cast(int, state["at"])
        positions = cast(Mapping[str, Mapping[str, object]], state["streams"])
        for name, stream in self._streams.items():
            stream.set_state(positions[name])

    def close(self) -> None:
        """Stops the threads of all streams."""
        for stream in self._streams.values():
            stream.close()
