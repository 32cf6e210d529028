"""The steps of several runs as one program each: `jax.vmap` over a leading axis R of runs.

If the data axis of the mesh divides R, every device has whole runs, and there is no communication
over that axis; otherwise the batch of every run is sharded over it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxprompt.models.folding import as_constants, replace_prompt
from jaxprompt.models.model import KeyValues, Model
from jaxprompt.parallel.compilation import jit
from jaxprompt.parallel.sharding import DATA, Placement, shardings_like, with_placement
from jaxprompt.prompts import Method
from jaxprompt.runs.grid.group import Words, with_words
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import make_count_step, make_eval_step, make_train_step
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch, Objective

_Tree = TypeVar("_Tree")


class PerRun(NamedTuple):
    """What differs between runs but does not train. Leaves [R, ...]"""

    words: Words  # {} where the words of all runs are the same
    frozen: Flat  # drawn from a run's seed


@dataclasses.dataclass(frozen=True)
class RunsPlacement(Placement):
    """A mesh whose data axis shards runs instead of examples."""

    @property
    def rules(self) -> dict[str, str]:
        """The mesh axis of each logical axis."""
        return {name: axis for name, axis in super().rules.items() if name != "act_batch"}


def make_group_step(
    model: Model, tx: optax.GradientTransformation, objectives: Sequence[Objective], *,
    accumulate=1, axis=None, shares=False,
):  # fmt: skip
    """Returns (states, frozen, batches, per_run) -> (states, metrics): the train step of R runs.

    All but `frozen` have a leading axis R; with `shares` cached states have none either. `axis` is
    the mesh axis of the runs.
    """

    def one(state: TrainState, frozen: Flat, batch: Batch, per_run: PerRun):
        run = with_words(model, per_run.words)
        step = make_train_step(run, tx, objectives, accumulate=accumulate)
        return step(state, frozen | per_run.frozen, batch)

    batches = Batch._make([0] * len(Batch._fields))._replace(cached=None if shares else 0)
    # With the axis's name constraints inside of a run leave the runs where they lie.
    return jax.vmap(one, in_axes=(0, None, batches, 0), spmd_axis_name=axis)


def make_group_scores(model: Model, *, is_shared: bool, axis=None):
    """Returns (trainables, frozen, batches, per_run, shared_kv) -> scores [R, B, C].

    A shared batch has no R. `shared_kv` is the result of `make_group_fronts` for these parameters,
    None without a shared prefix.
    """

    def one(
        trainable: Flat, frozen: Flat, batch: Batch, per_run: PerRun, shared_kv: KeyValues | None
    ):
        step = make_eval_step(with_words(model, per_run.words))
        return step(trainable, frozen | per_run.frozen, batch, shared_kv)

    mapped = (0, None, None if is_shared else 0, 0, 0)
    return jax.vmap(one, in_axes=mapped, spmd_axis_name=axis)


def make_group_fronts(model: Model, *, axis=None):
    """Returns (trainables, frozen, per_run) -> shared prefix of each run [R, L, B|1, ...]."""

    def one(trainable: Flat, frozen: Flat, per_run: PerRun):
        return model.run_shared_prefix(merge(trainable, frozen | per_run.frozen))

    return jax.vmap(one, in_axes=(0, None, 0), spmd_axis_name=axis)


def make_group_counts(model: Model, objectives: Sequence[Objective], *, is_shared: bool, axis=None):
    """Returns (trainables, frozen, batches, per_run) -> sums of objectives [R], without dropout.

    A shared batch has no R. Objectives must not be random.
    """

    def one(trainable: Flat, frozen: Flat, batch: Batch, per_run: PerRun):
        count = make_count_step(with_words(model, per_run.words), objectives)
        # Any key will do, since nothing is drawn.
        return count(trainable, frozen | per_run.frozen, batch, jax.random.key(0))

    return jax.vmap(one, in_axes=(0, None, None if is_shared else 0, 0), spmd_axis_name=axis)


def _is_once(batch: Batch) -> bool:
    """Returns whether the cached states are shared by all runs, [B*K, T, H]."""
    return batch.cached is not None and batch.cached.ndim == 3


def _join(trees: Sequence[_Tree], where: _Tree) -> _Tree:
    """Stacks the leaves of trees with the shardings of the tree `where`."""
    join = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    return jax.jit(join, out_shardings=where)(*trees)


class Programs:
    """The programs of a group, compiled on demand, for any number of runs at once."""

    def __init__(
        self, placement: Placement, model: Model, tx: optax.GradientTransformation,
        objectives: Sequence[Objective], frozen: Flat, state: TrainState, *, accumulate: int = 1,
        rest: Model | None = None,
    ):  # fmt: skip
        """Takes the state of one run for its shapes; `tx` must be equal for all runs.

        `rest` trains, and scores batches with cached states; `model` scores other batches.
        """
        self.placement, self.frozen = placement, frozen
        self.compiled: dict[tuple, Any] = {}  # shapes -> train step
        self._make_step = functools.partial(
            make_group_step, rest or model, tx, objectives, accumulate=accumulate
        )
        self._model, self._rest = model, rest or model
        self._objectives = objectives
        self._one = jax.eval_shape(lambda x: x, state)
        self._specs = shardings_like(
            placement, self._one, placement.param_shardings(state.trainable)
        )
        data = placement.mesh.shape[DATA]
        divided = any(DATA in str(s.spec) for s in jax.tree.leaves(self._specs))
        # An axis of the mesh cannot divide two axes of one array.
        self._divisor = 0 if data == 1 or divided else data
        # Kept per object: a cache on the method would hold every object as long as the process
        # lives.
        self._jitted = functools.cache(self._make_jitted)
        self._scores = functools.cache(self._make_scores)
        self._fronts = functools.cache(self._make_fronts)
        self._counts = functools.cache(self._make_counts)

    def is_apart(self, runs: int) -> bool:
        """Returns whether this number of runs is sharded over the data axis."""
        return bool(self._divisor) and runs % self._divisor == 0

    def round(self, runs: int) -> int:
        """Rounds a number of runs down to a multiple of the data axis, if possible."""
        return runs // self._divisor * self._divisor or runs if self._divisor else runs

    # -- where things are ------------------------------------------------------------------------

    def _lay(self, runs: int, *spec: str | None) -> NamedSharding:
        axis = DATA if self.is_apart(runs) else None
        return NamedSharding(self.placement.mesh, PartitionSpec(axis, *spec))

    def _state_shardings(self, runs: int) -> TrainState:
        return jax.tree.map(lambda s: self._lay(runs, *s.spec), self._specs)

    def stack(self, states: Sequence[TrainState]) -> TrainState:
        """Stacks the states of runs, leaves [R, ...]."""
        return _join(states, self._state_shardings(len(states)))

    def stack_trained(self, numbers: Sequence[Flat]) -> Flat:
        """Stacks the trained parameters of runs, leaves [R, ...]."""
        return _join(numbers, self._state_shardings(len(numbers)).trainable)

    def put_own(self, owns: Sequence[PerRun]) -> PerRun:
        """Stacks the other values that differ between runs, leaves [R, ...]."""
        joined = jax.tree.map(lambda *leaves: np.stack(leaves), *owns)
        return jax.device_put(joined, self._lay(len(owns)))

    def put_batch(self, batch: Batch, runs: int, *, is_shared: bool = False) -> Batch:
        """Shards a batch [R, ...], or one [B, ...] for all runs, as the steps expect it.

        Cached states may be [B, ...] in both cases.
        """
        apart = self.is_apart(runs)
        # Devices with runs of their own take the whole of what all runs share.
        once = self.placement.replicated if apart else self.placement.batch
        where = once if is_shared else self._lay(runs) if apart else self._lay(runs, DATA)
        kept = None
        if batch.cached is not None:
            kept = jax.device_put(batch.cached, once if _is_once(batch) else where)
        return jax.device_put(batch._replace(cached=None), where)._replace(cached=kept)

    def template(self, runs: int) -> tuple[TrainState, Flat]:
        """Returns shapes of the state and best parameters of runs, to restore a checkpoint."""
        describe = lambda x, s: jax.ShapeDtypeStruct((runs, *x.shape), x.dtype, sharding=s)
        state = jax.tree.map(describe, self._one, self._state_shardings(runs))
        return state, state.trainable

    def one_trainable(self) -> Flat:
        """Returns shapes of the trainable parameters of one run."""
        where = self.placement.param_shardings(self._one.trainable)
        describe = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(describe, self._one.trainable, where)

    # -- steps -----------------------------------------------------------------------------------

    def _make_jitted(self, runs: int, shares: bool):
        apart = self.is_apart(runs)
        step = self._make_step(axis=DATA if apart else None, shares=shares)
        return jit(
            with_placement(self._within(runs), step), donate_argnums=0,
            out_shardings=(self._state_shardings(runs), self._lay(runs)),
        )  # fmt: skip

    def _within(self, runs: int) -> Placement:
        at = dataclasses.replace(self.placement, maps_runs=True)
        return RunsPlacement(**vars(at)) if self.is_apart(runs) else at

    def compile(self, state: TrainState, batch: Batch, per_run: PerRun):
        """Compiles the train step for these shapes, once. Returns the executable."""
        key = tuple(x.shape for x in jax.tree.leaves(batch))
        if key not in self.compiled:
            step = self._jitted(batch.index.shape[0], _is_once(batch))
            # Compiled ahead, so that `memory` can read what a step takes before any is run.
            self.compiled[key] = step.lower(state, self.frozen, batch, per_run).compile()
        return self.compiled[key]

    def is_new(self, batch: Batch) -> bool:
        """Returns whether no step is compiled for the shapes of a batch."""
        return tuple(x.shape for x in jax.tree.leaves(batch)) not in self.compiled

    def train(self, state: TrainState, batch: Batch, per_run: PerRun):
        """Takes a step of every run; donates the state. Returns (states, metrics [R])."""
        return self.compile(state, batch, per_run)(state, self.frozen, batch, per_run)

    def fold(
        self, trainable: Flat, batch: Batch, per_run: PerRun, runs: int
    ) -> tuple[Method, Flat]:
        """Computes the prompt of every run once. `batch` is any batch of one run.

        Returns the method that reads the result, and the parameters, for `front` and `scores`.
        """
        if not self._model.prompt.folds():
            return self._model.prompt, trainable
        streams = jax.device_get(self._inject(trainable, self.frozen, batch, per_run))
        each = [jax.tree.map(lambda x, i=i: x[i], streams) for i in range(runs)]
        prompts, arrays = zip(*(as_constants(self._model.prompt, one) for one in each), strict=True)
        arrays = jax.tree.map(lambda *leaves: np.stack(leaves), *arrays)
        numbers = replace_prompt(trainable, jax.device_put(arrays, self._lay(runs)))
        return prompts[0], numbers  # all of equal fields

    @functools.cached_property
    def _inject(self):
        def one(trainable: Flat, frozen: Flat, batch: Batch, per_run: PerRun):
            return self._model.inject(merge(trainable, frozen | per_run.frozen), batch)

        mapped = jax.vmap(one, in_axes=(0, None, None, 0))
        return jax.jit(with_placement(dataclasses.replace(self.placement, maps_runs=True), mapped))

    def _make_scores(self, prompt: Method, runs: int, is_shared: bool, goes_on: bool):
        axis = DATA if self.is_apart(runs) else None
        model = self._rest if goes_on else self._model
        model = dataclasses.replace(model, prompt=prompt)
        scores = make_group_scores(model, is_shared=is_shared, axis=axis)
        return jax.jit(with_placement(self._within(runs), scores), out_shardings=self._lay(runs))

    def front(
        self, prompt: Method, trainable: Flat, per_run: PerRun, runs: int
    ) -> KeyValues | None:
        """Computes the shared prefix of every run, once for all batches of a pass.

        Returns the argument of `scores`; None without a shared prefix.
        """
        if self._model.shared_prefix is None:
            return None
        return self._fronts(prompt, runs)(trainable, self.frozen, per_run)

    def _make_fronts(self, prompt: Method, runs: int):
        model = dataclasses.replace(self._model, prompt=prompt)
        fronts = make_group_fronts(model, axis=DATA if self.is_apart(runs) else None)
        return jax.jit(with_placement(self._within(runs), fronts), out_shardings=self._lay(runs))

    def scores(
        self, prompt: Method, trainable: Flat, batch: Batch, per_run: PerRun, runs: int, *,
        is_shared: bool, shared_kv: KeyValues | None = None,
    ):  # fmt: skip
        """Scores a batch with every run, [R, B, C]; `shared_kv` is the result of `front`."""
        batch = self.put_batch(batch, runs, is_shared=is_shared)
        step = self._scores(prompt, runs, is_shared, batch.cached is not None)
        return step(trainable, self.frozen, batch, per_run, shared_kv)

    def _make_counts(self, runs: int, is_shared: bool):
        axis = DATA if self.is_apart(runs) else None
        counts = make_group_counts(self._model, self._objectives, is_shared=is_shared, axis=axis)
        return jit(with_placement(self._within(runs), counts), out_shardings=self._lay(runs))

    def counts(self, trainable: Flat, batch: Batch, per_run: PerRun, runs: int, *, is_shared: bool):
        """Sums the objectives of a batch with every run: {objective: {name: [R]}}."""
        batch = self.put_batch(batch, runs, is_shared=is_shared)
        return self._counts(runs, is_shared)(trainable, self.frozen, batch, per_run)

    # -- rows ------------------------------------------------------------------------------------

    @functools.cached_property
    def _pick(self):
        where = self.placement.param_shardings(self._one.trainable)
        return jax.jit(lambda tree, row: jax.tree.map(lambda x: x[row], tree), out_shardings=where)

    def pick(self, trainable: Flat, row: int) -> Flat:
        """Returns the parameters of one run."""
        return self._pick(trainable, row)

    def take(self, state: TrainState, best: Flat, rows: Sequence[int]) -> tuple[TrainState, Flat]:
        """Selects some runs of a state and of the best parameters."""
        where = self._state_shardings(len(rows))
        keep = lambda tree, rows: jax.tree.map(lambda x: x[rows], tree)
        cut = jax.jit(keep, out_shardings=(where, where.trainable))
        return cut((state, best), np.array(rows))

    @functools.cached_property
    def _renew(self):
        def renew(best: Flat, trainable: Flat, better):
            choose = lambda old, new: jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            return jax.tree.map(choose, best, trainable)

        return jax.jit(renew, donate_argnums=0)

    def renew(self, best: Flat, trainable: Flat, better: np.ndarray) -> Flat:
        """Replaces the best parameters of the runs that are `better` now, bool [R]."""
        return self._renew(best, trainable, better)
