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
from jaxprompt.runs.grid.group import LabelWordArrays, with_label_words
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import make_count_step, make_eval_step, make_train_step
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch, Objective

_Tree = TypeVar("_Tree")


class PerRun(NamedTuple):
    """Arrays that differ between runs but do not train. Leaves [R, ...]"""

    words: LabelWordArrays  # {} if the words of all runs are the same
    frozen: Flat  # randomly initialised from a run's seed


@dataclasses.dataclass(frozen=True)
class RunsPlacement(Placement):
    """A mesh whose data axis shards runs instead of examples."""

    @property
    def rules(self) -> dict[str, str]:
        """The mesh axis of each logical axis."""
        return {name: axis for name, axis in super().rules.items() if name != "act_batch"}


def make_group_step(
    model: Model,
    tx: optax.GradientTransformation,
    objectives: Sequence[Objective],
    *,
    accumulate=1,
    axis=None,
    shares_states=False,
):
    """Returns (states, frozen, batches, per_run) -> (states, metrics): the train step of R runs.

    All but `frozen` have a leading axis R; with `shares_states` cached states have none either.
    `axis` is the mesh axis of the runs.
    """

    def run_step(state: TrainState, frozen: Flat, batch: Batch, per_run: PerRun):
        run_model = with_label_words(model, per_run.words)
        step = make_train_step(run_model, tx, objectives, accumulate=accumulate)
        return step(state, frozen | per_run.frozen, batch)

    batches = Batch._make([0] * len(Batch._fields))._replace(cached=None if shares_states else 0)
    # With the name of the axis, constraints within a run keep the sharding of runs.
    return jax.vmap(run_step, in_axes=(0, None, batches, 0), spmd_axis_name=axis)


def make_group_scores(model: Model, *, is_shared: bool, axis=None):
    """Returns (trainables, frozen, batches, per_run, shared_kv) -> scores [R, B, C].

    A shared batch has no R. `shared_kv` is the result of `make_group_prefixes`,
    None without a shared prefix.
    """

    def run_scores(
        trainable: Flat, frozen: Flat, batch: Batch, per_run: PerRun, shared_kv: KeyValues | None
    ):
        step = make_eval_step(with_label_words(model, per_run.words))
        return step(trainable, frozen | per_run.frozen, batch, shared_kv)

    in_axes = (0, None, None if is_shared else 0, 0, 0)
    return jax.vmap(run_scores, in_axes=in_axes, spmd_axis_name=axis)


def make_group_prefixes(model: Model, *, axis=None):
    """Returns (trainables, frozen, per_run) -> shared prefix of each run [R, L, B|1, ...]."""

    def run_prefix(trainable: Flat, frozen: Flat, per_run: PerRun):
        return model.run_shared_prefix(merge(trainable, frozen | per_run.frozen))

    return jax.vmap(run_prefix, in_axes=(0, None, 0), spmd_axis_name=axis)


def make_group_counts(model: Model, objectives: Sequence[Objective], *, is_shared: bool, axis=None):
    """Returns (trainables, frozen, batches, per_run) -> sums of objectives [R], without dropout.

    A shared batch has no R. Objectives must not be random.
    """

    def run_counts(trainable: Flat, frozen: Flat, batch: Batch, per_run: PerRun):
        count = make_count_step(with_label_words(model, per_run.words), objectives)
        # Any key will do, because nothing is sampled.
        return count(trainable, frozen | per_run.frozen, batch, jax.random.key(0))

    return jax.vmap(run_counts, in_axes=(0, None, None if is_shared else 0, 0), spmd_axis_name=axis)


def _is_shared_cache(batch: Batch) -> bool:
    """Returns whether the cached states are shared by all runs, [B*K, T, H]."""
    return batch.cached is not None and batch.cached.ndim == 3


def _stack_trees(trees: Sequence[_Tree], shardings: _Tree) -> _Tree:
    """Stacks the leaves of trees with the shardings of the tree `shardings`."""

    def stack_leaves(*trees):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    return jax.jit(stack_leaves, out_shardings=shardings)(*trees)


class Programs:
    """The programs of a group, compiled on demand, for any number of runs at once."""

    def __init__(
        self,
        placement: Placement,
        model: Model,
        tx: optax.GradientTransformation,
        objectives: Sequence[Objective],
        frozen: Flat,
        state: TrainState,
        *,
        accumulate: int = 1,
        tail_model: Model | None = None,
    ):
        """Takes the state of one run for its shapes; `tx` must be equal for all runs.

        `tail_model` trains, and scores batches with cached states; `model` scores other batches.
        """
        self.placement, self.frozen = placement, frozen
        self.compiled: dict[tuple, Any] = {}  # shapes -> train step
        self._make_step = functools.partial(
            make_group_step, tail_model or model, tx, objectives, accumulate=accumulate
        )
        self._model, self._tail_model = model, tail_model or model
        self._objectives = objectives
        self._run_state = jax.eval_shape(lambda x: x, state)
        self._specs = shardings_like(
            placement, self._run_state, placement.param_shardings(state.trainable)
        )
        data_size = placement.mesh.shape[DATA]
        params_sharded = any(
            DATA in str(sharding.spec) for sharding in jax.tree.leaves(self._specs)
        )
        # An axis of the mesh cannot divide two axes of one array.
        self._divisor = 0 if data_size == 1 or params_sharded else data_size
        # Cached per object: a cache on the method would never free an object.
        self._jitted = functools.cache(self._make_jitted)
        self._scores = functools.cache(self._make_scores)
        self._prefixes = functools.cache(self._make_prefixes)
        self._counts = functools.cache(self._make_counts)

    def is_apart(self, runs: int) -> bool:
        """Returns whether this number of runs is sharded over the data axis."""
        return bool(self._divisor) and runs % self._divisor == 0

    def round(self, runs: int) -> int:
        """Rounds a number of runs down to a multiple of the data axis, if possible."""
        return runs // self._divisor * self._divisor or runs if self._divisor else runs

    # -- shardings -------------------------------------------------------------------------------

    def _sharding(self, runs: int, *spec: str | None) -> NamedSharding:
        axis = DATA if self.is_apart(runs) else None
        return NamedSharding(self.placement.mesh, PartitionSpec(axis, *spec))

    def _state_shardings(self, runs: int) -> TrainState:
        return jax.tree.map(lambda s: self._sharding(runs, *s.spec), self._specs)

    def stack(self, states: Sequence[TrainState]) -> TrainState:
        """Stacks the states of runs, leaves [R, ...]."""
        return _stack_trees(states, self._state_shardings(len(states)))

    def stack_trainable(self, params: Sequence[Flat]) -> Flat:
        """Stacks the trained parameters of runs, leaves [R, ...]."""
        return _stack_trees(params, self._state_shardings(len(params)).trainable)

    def put_per_run(self, per_run: Sequence[PerRun]) -> PerRun:
        """Stacks the other values that differ between runs, leaves [R, ...]."""
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *per_run)
        return jax.device_put(stacked, self._sharding(len(per_run)))

    def put_batch(self, batch: Batch, runs: int, *, is_shared: bool = False) -> Batch:
        """Shards a batch [R, ...], or one [B, ...] for all runs, as the steps expect it.

        Cached states may be [B, ...] in both cases.
        """
        is_apart = self.is_apart(runs)
        # Devices with their own runs get a full copy of what all runs share.
        shared_sharding = self.placement.replicated if is_apart else self.placement.batch
        sharding = self._sharding(runs) if is_apart else self._sharding(runs, DATA)
        if is_shared:
            sharding = shared_sharding
        cached_sharding = shared_sharding if _is_shared_cache(batch) else sharding
        cached = jax.device_put(batch.cached, cached_sharding)  # None without cached states
        return jax.device_put(batch._replace(cached=None), sharding)._replace(cached=cached)

    def template(self, runs: int) -> tuple[TrainState, Flat]:
        """Returns shapes of the state and best parameters of runs, to restore a checkpoint."""

        def with_sharding(x, sharding):
            return jax.ShapeDtypeStruct((runs, *x.shape), x.dtype, sharding=sharding)

        state = jax.tree.map(with_sharding, self._run_state, self._state_shardings(runs))
        return state, state.trainable

    def one_trainable(self) -> Flat:
        """Returns shapes of the trainable parameters of one run."""
        shardings = self.placement.param_shardings(self._run_state.trainable)

        def with_sharding(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(with_sharding, self._run_state.trainable, shardings)

    # -- steps -----------------------------------------------------------------------------------

    def _make_jitted(self, runs: int, shares_states: bool):
        is_apart = self.is_apart(runs)
        step = self._make_step(axis=DATA if is_apart else None, shares_states=shares_states)
        return jit(
            with_placement(self._within(runs), step),
            donate_argnums=0,
            out_shardings=(self._state_shardings(runs), self._sharding(runs)),
        )

    def _within(self, runs: int) -> Placement:
        placement = dataclasses.replace(self.placement, maps_runs=True)
        return RunsPlacement(**vars(placement)) if self.is_apart(runs) else placement

    def compile(self, state: TrainState, batch: Batch, per_run: PerRun):
        """Compiles the train step for these shapes, once. Returns the executable."""
        key = tuple(x.shape for x in jax.tree.leaves(batch))
        if key not in self.compiled:
            step = self._jitted(batch.index.shape[0], _is_shared_cache(batch))
            # Compiled ahead of time, so that `memory` can read the bytes that a step needs.
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

        Returns the method and the parameters, for `shared_prefix` and `scores`.
        """
        if not self._model.prompt.folds():
            return self._model.prompt, trainable
        injections = jax.device_get(self._inject(trainable, self.frozen, batch, per_run))
        by_run = [
            jax.tree.map(lambda x, index=index: x[index], injections) for index in range(runs)
        ]
        prompts, arrays = zip(
            *(as_constants(self._model.prompt, injection) for injection in by_run), strict=True
        )
        arrays = jax.tree.map(lambda *leaves: np.stack(leaves), *arrays)
        params = replace_prompt(trainable, jax.device_put(arrays, self._sharding(runs)))
        return prompts[0], params  # all of equal fields

    @functools.cached_property
    def _inject(self):
        def inject(trainable: Flat, frozen: Flat, batch: Batch, per_run: PerRun):
            return self._model.inject(merge(trainable, frozen | per_run.frozen), batch)

        mapped = jax.vmap(inject, in_axes=(0, None, None, 0))
        return jax.jit(with_placement(dataclasses.replace(self.placement, maps_runs=True), mapped))

    def _make_scores(self, prompt: Method, runs: int, is_shared: bool, from_cache: bool):
        axis = DATA if self.is_apart(runs) else None
        model = self._tail_model if from_cache else self._model
        model = dataclasses.replace(model, prompt=prompt)
        scores = make_group_scores(model, is_shared=is_shared, axis=axis)
        return jax.jit(
            with_placement(self._within(runs), scores), out_shardings=self._sharding(runs)
        )

    def shared_prefix(
        self, prompt: Method, trainable: Flat, per_run: PerRun, runs: int
    ) -> KeyValues | None:
        """Computes the shared prefix of every run, once for all batches of a pass.

        Returns the argument of `scores`; None without a shared prefix.
        """
        if self._model.shared_prefix is None:
            return None
        return self._prefixes(prompt, runs)(trainable, self.frozen, per_run)

    def _make_prefixes(self, prompt: Method, runs: int):
        model = dataclasses.replace(self._model, prompt=prompt)
        prefixes = make_group_prefixes(model, axis=DATA if self.is_apart(runs) else None)
        return jax.jit(
            with_placement(self._within(runs), prefixes), out_shardings=self._sharding(runs)
        )

    def scores(
        self,
        prompt: Method,
        trainable: Flat,
        batch: Batch,
        per_run: PerRun,
        runs: int,
        *,
        is_shared: bool,
        prefix_kv: KeyValues | None = None,
    ):
        """Scores a batch with every run, [R, B, C]; `prefix_kv` is that of `shared_prefix`."""
        batch = self.put_batch(batch, runs, is_shared=is_shared)
        step = self._scores(prompt, runs, is_shared, batch.cached is not None)
        return step(trainable, self.frozen, batch, per_run, prefix_kv)

    def _make_counts(self, runs: int, is_shared: bool):
        axis = DATA if self.is_apart(runs) else None
        counts = make_group_counts(self._model, self._objectives, is_shared=is_shared, axis=axis)
        return jit(with_placement(self._within(runs), counts), out_shardings=self._sharding(runs))

    def counts(self, trainable: Flat, batch: Batch, per_run: PerRun, runs: int, *, is_shared: bool):
        """Sums the objectives of a batch with every run: {objective: {name: [R]}}."""
        batch = self.put_batch(batch, runs, is_shared=is_shared)
        return self._counts(runs, is_shared)(trainable, self.frozen, batch, per_run)

    # -- rows ------------------------------------------------------------------------------------

    @functools.cached_property
    def _select_run(self):
        shardings = self.placement.param_shardings(self._run_state.trainable)
        return jax.jit(
            lambda tree, row: jax.tree.map(lambda x: x[row], tree), out_shardings=shardings
        )

    def select_run(self, trainable: Flat, row: int) -> Flat:
        """Returns the parameters of one run."""
        return self._select_run(trainable, row)

    def take(self, state: TrainState, best: Flat, rows: Sequence[int]) -> tuple[TrainState, Flat]:
        """Selects some runs of a state and of the best parameters."""
        shardings = self._state_shardings(len(rows))

        def select(tree, rows):
            return jax.tree.map(lambda x: x[rows], tree)

        jitted = jax.jit(select, out_shardings=(shardings, shardings.trainable))
        return jitted((state, best), np.array(rows))

    @functools.cached_property
    def _update_best(self):
        def update(best: Flat, trainable: Flat, is_better: jax.Array) -> Flat:
            def select(old, new):
                return jnp.where(is_better.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            return jax.tree.map(select, best, trainable)

        return jax.jit(update, donate_argnums=0)

    def update_best(self, best: Flat, trainable: Flat, is_better: np.ndarray) -> Flat:
        """Replaces the best parameters of the runs where `is_better`, bool [R]."""
        return self._update_best(best, trainable, is_better)
