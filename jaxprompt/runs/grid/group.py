"""The prepared runs of a group, and which of them have equal shapes.

`runs.train` and `runs.ppt` prepare them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxprompt import rng, tree
from jaxprompt.build import initial_params
from jaxprompt.build.initial_params import check_init_params
from jaxprompt.build.optimizer import build_optimizer
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.load import Loaded
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.batches.stacking import padding_batch, stack_batches
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.prompts import BASE
from jaxprompt.runs.grid.expand import GridRun
from jaxprompt.training.features.cache import FeatureCache
from jaxprompt.training.loop import Milestones
from jaxprompt.training.one_run import Feed
from jaxprompt.training.run_record import RunRecord
from jaxprompt.training.state import TrainState, make_state
from jaxprompt.types import Batch, Objective

LabelWordArrays = dict[str, dict[str, Any]]  # head -> its arrays, of a head that scores label words


class Member(NamedTuple):
    """One run: its data and its model, without parameters."""

    run: GridRun
    scorer: Scorer
    model: Model  # to train
    plan: Milestones
    steps_per_epoch: int
    shape: tuple  # equal in all runs of one program, besides their configs
    source: Any  # the data of its batches; runs with the same batches have the same object
    feed: Callable[[], Feed]
    longest: Callable[[], Batch]  # a training batch as long as any
    eval_data: Any  # the data for evaluation, see the scorer of its kind
    record: RunRecord  # of its data
    counts: np.ndarray | None = None  # of tokens, to initialise its prompt
    cache: FeatureCache | None = None  # cached states of frozen layers

    @property
    def has_cache(self) -> bool:
        """Returns whether its batches have cached states."""
        return self.cache is not None and bool(self.cache.splits)

    @property
    def tail_model(self) -> Model:
        """The model that continues from cached states; the whole model without a cache."""
        return self.model if self.cache is None else self.cache.model

    def add_cached(self, batch: Batch) -> Batch:
        """Adds the cached states of its rows to a training batch, if there are any."""
        return batch if self.cache is None else self.cache.add_states(self.source, batch)

    @property
    def words(self) -> LabelWordArrays:
        """The arrays of the heads that score label words."""
        return label_word_arrays(self.model)


class InitialRun(NamedTuple):
    """The initial parameters of a run."""

    state: TrainState
    frozen: tree.Flat  # randomly initialised from the run's seed
    tx: optax.GradientTransformation


class GroupInputs(NamedTuple):
    """What the runs of a group have in common."""

    config: RunConfig  # of the first run
    placement: Placement
    loaded: Loaded
    objectives: Sequence[Objective]
    make_scorer: Callable[
        [Any, Sequence[Member], Any], Any
    ]  # (GroupInputs, members, Programs) -> scorer
    log_lines: Sequence[str]  # lines for the log
    pretrains: bool = False  # whether runs train on a corpus, and are selected by held-out loss
    # (members, log): computes the cached states of these runs
    fill: Callable[[Sequence[Member], Callable[[str], None]], None] = lambda members, log: None


def check_init(shared: GroupInputs, member: Member, shapes: dict[int, tree.Params]) -> None:
    """Raises InputError where `init_params` would; computes nothing.

    `shapes` caches the parameter shapes of each model, which several members may share.
    """
    config, scorer, model = member.run.config, member.scorer, member.model
    if id(model) not in shapes:
        init = partial(model.init, choices=scorer.layout.num_rows)
        shapes[id(model)] = jax.eval_shape(init, jax.random.key(0), shared.loaded.params)
    param_shapes, fingerprint = shapes[id(model)], shared.loaded.report.fingerprint
    trainable = check_init_params(
        config, scorer, param_shapes, member.counts, fingerprint, shared.placement
    )
    build_optimizer(config, trainable, member.plan, member.steps_per_epoch)


def init_run(shared: GroupInputs, member: Member) -> tuple[InitialRun, tree.Flat]:
    """Initialises a run as if it were alone. Returns (start, frozen parameters of all runs)."""
    config = member.run.config
    weights = initial_params.init_params(
        config, member.scorer, shared.loaded, member.counts, shared.placement
    )
    tx = build_optimizer(config, weights.trainable, member.plan, member.steps_per_epoch)
    state = make_state(weights.trainable, tx, rng.key_for(config.seed, "dropout", config.rng))

    def is_common(name):
        return name.startswith("backbone/") or BASE.fullmatch(name)

    shared_frozen = {name: value for name, value in weights.frozen.items() if is_common(name)}
    run_frozen = {
        name: value for name, value in weights.frozen.items() if name not in shared_frozen
    }
    return InitialRun(state, run_frozen, tx), shared_frozen


def group_by_shape(members: Sequence[Member]) -> list[list[Member]]:
    """Groups members with equal shapes and plans, in their order."""
    groups: dict[tuple, list[Member]] = {}
    for member in members:
        groups.setdefault((member.plan, *member.shape), []).append(member)
    return list(groups.values())


def split_by_batches(members: Sequence[Member], placement: Placement) -> list[list[Member]]:
    """Groups members of equal shapes by which should train at once.

    On a CPU these are runs with the same batches, e.g. the learning rates of a seed. Other batches
    would be padded to the longest of all, and a few runs keep all cores busy.
    """
    by_batches: dict[tuple, list[Member]] = {}
    for member in members:
        by_batches.setdefault((member.run.config.seed, id(member.source)), []).append(member)
    is_cpu = jax.default_backend() == "cpu" and placement.mesh.size == 1
    split = is_cpu and max(map(len, by_batches.values())) > 1
    return list(by_batches.values()) if split else [list(members)]


def same_batches(members: Sequence[Member]) -> bool:
    """Returns whether runs train on the same batches in the same order."""
    return len({(m.run.config.seed, id(m.source)) for m in members}) == 1


def longest_group_batch(members: Sequence[Member]) -> Batch:
    """Returns the longest training batch of all runs."""
    # One run for all runs with the same batches.
    representatives = {id(member.source): member for member in members}.values()
    batches = [member.add_cached(member.longest()) for member in representatives]
    layout = members[0].scorer.layout
    return jax.tree.map(lambda array: array[0], stack_batches(batches, layout.pad_id, layout.side))


def side_by_side(
    passes: Sequence[Iterable[Batch]], layout: Layout
) -> Iterator[tuple[list[Batch], Batch]]:
    """Yields the batches of several passes, and stacked ones; a shorter pass is padded."""
    for step_batches in zip_longest(*passes):
        padding = padding_batch(next(batch for batch in step_batches if batch is not None))
        batches = [padding if batch is None else batch for batch in step_batches]
        yield batches, stack_batches(batches, layout.pad_id, layout.side)


# -- label words ----------------------------------------------------------------------------------


def label_word_arrays(model: Model) -> LabelWordArrays:
    """Returns the arrays of the heads that score label words."""
    arrays_by_head = {name: head.arrays() for name, head in model.heads.items()}
    return {name: arrays for name, arrays in arrays_by_head.items() if arrays}


def varying_label_words(members: Sequence[Member]) -> dict[str, LabelWordArrays]:
    """Returns the label words of each run by name, {} if they are equal in all runs.

    They are padded to the size of the largest ones.
    """
    names = [member.run.name for member in members]
    flat, trees = zip(*(jax.tree.flatten(member.words) for member in members), strict=True)

    def all_equal(leaves):
        return all(np.array_equal(leaves[0], leaf) for leaf in leaves)

    if all(map(all_equal, zip(*flat, strict=True))):
        return dict.fromkeys(names, {})
    padded = zip(*map(_pad_leaves, zip(*flat, strict=True)), strict=True)
    return {
        name: jax.tree.unflatten(trees[0], leaves)
        for name, leaves in zip(names, padded, strict=True)
    }


def with_label_words(model: Model, words: LabelWordArrays) -> Model:
    """Replaces the arrays of the heads that score label words; they may be traced."""
    heads = {name: model.heads[name].with_arrays(arrays) for name, arrays in words.items()}
    return dataclasses.replace(model, heads={**model.heads, **heads})


def _pad_leaves(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pads arrays to the largest one with -1, which means no word."""
    size = np.max([np.shape(leaf) for leaf in leaves], axis=0)

    def pad_width(leaf):
        return [(0, n - m) for n, m in zip(size, np.shape(leaf), strict=True)]

    return [np.pad(leaf, pad_width(leaf), constant_values=-1) for leaf in leaves]
