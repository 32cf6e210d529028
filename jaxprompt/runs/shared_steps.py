"""Steps of several tasks that train one prompt: each batch is of one task, and of its head."""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
import optax

from jaxprompt.data.batches.stream import BatchStream
from jaxprompt.errors import InputError
from jaxprompt.training.optim import RateState
from jaxprompt.training.progress import Metrics
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import TrainStep
from jaxprompt.tree import Flat
from jaxprompt.types import Batch, Tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TaskBatch:
    """A batch of one of several tasks, which is known when its step is compiled."""

    batch: Batch
    task: str = dataclasses.field(metadata={"static": True})

    @property
    def encoder(self) -> Tokens:
        """The input."""
        return self.batch.encoder


def make_shared_step(
    steps: Mapping[str, TrainStep],
) -> Callable[[TrainState, Flat, TaskBatch], tuple[TrainState, Metrics]]:
    """Makes (state, frozen, TaskBatch) -> (state, metrics) of the train step of each task.

    A step leaves the heads of other tasks as they are, with what the optimizer holds of them, its
    count of their steps too: a gradient of zero would still move them by their momentum. Schedules
    go on for all. The optimizer must have a group for each head.
    """
    goes_on = lambda state: isinstance(state, optax.ScaleByScheduleState | RateState)

    def step(state: TrainState, frozen: Flat, task_batch: TaskBatch):
        new, measured = steps[task_batch.task](state, frozen, task_batch.batch)

        def keep(path: Sequence[object], moved: object, old: object) -> object:
            if goes_on(moved):
                return moved
            # The optimizer's state holds leaves under the same flat names, so one rule serves both.
            names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)]
            others = [name for name in names if name.startswith("head/")]
            return old if any(name.split("/")[1] != task_batch.task for name in others) else moved

        trainable, opt_state = [
            jax.tree_util.tree_map_with_path(keep, *pair, is_leaf=goes_on)
            for pair in ((new.trainable, state.trainable), (new.opt_state, state.opt_state))
        ]
        return new._replace(trainable=trainable, opt_state=opt_state), measured

    return step


class TaskMix(NamedTuple):
    """How often each of several tasks is trained on."""

    shares: dict[str, float]  # of the batches, by task
    mean_batch: float  # examples
    steps_per_epoch: int  # that take as many examples as all tasks have


def mix_tasks(sizes: Mapping[str, int], rows: Mapping[str, int], temperature: float) -> TaskMix:
    """Mixes tasks by the number of their examples: n of them have a share of n^(1 / temperature).

    Args:
      sizes: examples, by task.
      rows: examples of a batch, by task.
      temperature: above 0.
    """
    # Of the logarithm: a power of 1 / 0.01 would be infinite.
    weights = np.log(list(sizes.values())) / temperature
    parts = np.exp(weights - weights.max())
    shares = dict(zip(sizes, parts / parts.sum(), strict=True))
    mean = sum(rows[name] * share for name, share in shares.items())
    mean_batch = round(float(mean), 9)  # shares add up to 1 but for rounding
    return TaskMix(shares, mean_batch, max(1, int(sum(sizes.values()) / mean_batch)))


class TaskBatches(Iterator[TaskBatch]):
    """Batches of several tasks, drawn by their shares.

    Which task a batch is of depends on the seed and the number of the batch alone.
    """

    def __init__(
        self, streams: Mapping[str, BatchStream], shares: Mapping[str, float], *, seed: int
    ):
        """Starts at batch 0. `streams` give each task's batches."""
        self._streams, self._names, self._shares = streams, list(streams), shares
        self._seed, self._at = (seed, zlib.crc32(b"tasks")), 0

    def __next__(self) -> TaskBatch:
        """Returns the next batch."""
        # Not by JAX: its number would wait for the steps that its device has yet to do.
        bits = np.random.MT19937(np.random.SeedSequence((*self._seed, self._at)))
        draw = np.random.RandomState(bits).random_sample()
        self._at += 1
        number = np.searchsorted(np.cumsum(list(self._shares.values())), draw, side="right")
        # Rounding may leave the last of the sums below 1.
        name = self._names[min(int(number), len(self._names) - 1)]
        return TaskBatch(next(self._streams[name]), name)

    def get_state(self) -> dict[str, object]:
        """Returns the position, to be saved as JSON."""
        return {
            "at": self._at, "shares": {name: float(x) for name, x in self._shares.items()},
            "streams": {name: stream.get_state() for name, stream in self._streams.items()},
        }  # fmt: skip

    def set_state(self, state: Mapping[str, object]) -> None:
        """Goes to a saved position; raises InputError where the tasks or shares are others."""
        shares = self.get_state()["shares"]
        if state["shares"] != shares:
            raise InputError(
                f"the saved position has the tasks {state['shares']}, but this run has {shares}; "
                "resume with the same shared.tasks and data, or use another workdir"
            )
        self._at = cast(int, state["at"])
        positions = cast(Mapping[str, Mapping[str, object]], state["streams"])
        for name, stream in self._streams.items():
            stream.set_state(positions[name])

    def close(self) -> None:
        """Stops the threads of all streams."""
        for stream in self._streams.values():
            stream.close()
