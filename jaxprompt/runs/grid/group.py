"""The prepared runs of a group, and which of them have equal shapes.

`train` and `pretrain` prepare them.
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

Words = dict[str, dict[str, Any]]  # head -> its arrays, of a head that scores label words


class Member(NamedTuple):
    """One run: its data and its model, without parameters."""

    run: GridRun
    scorer: Scorer
    model: Model  # what trains
    plan: Milestones
    steps_per_epoch: int
    shape: tuple  # what runs of one program have in common besides their configs
    source: Any  # what its batches are made of; of runs with the same batches the same object
    feed: Callable[[], Feed]
    longest: Callable[[], Batch]  # a training batch as long as any
    held: Any  # what it is scored by, see the scorer of its kind
    record: RunRecord  # what it learns from
    counts: np.ndarray | None = None  # of the text that its prompt starts from
    kept: FeatureCache | None = None  # states of frozen layers, of `source` too

    @property
    def keeps(self) -> bool:
        """Returns whether its batches have cached states."""
        return self.kept is not None and bool(self.kept.splits)

    @property
    def rest(self) -> Model:
        """The model that continues from cached states; the whole model without a cache."""
        return self.model if self.kept is None else self.kept.model

    def give(self, batch: Batch) -> Batch:
        """Adds the cached states of its rows to a training batch, if there are any."""
        return batch if self.kept is None else self.kept.add_states(self.source, batch)

    @property
    def words(self) -> Words:
        """The arrays of the heads that score label words."""
        arrays_by_head = {name: head.arrays() for name, head in self.model.heads.items()}
        return {name: arrays for name, arrays in arrays_by_head.items() if arrays}


class Start(NamedTuple):
    """The initial parameters of a run."""

    state: TrainState
    own: tree.Flat  # frozen, yet drawn from the run's seed
    tx: optax.GradientTransformation


class Shared(NamedTuple):
    """What the runs of a group have in common."""

    config: RunConfig  # of the first run
    placement: Placement
    loaded: Loaded
    objectives: Sequence[Objective]
    make_scorer: Callable[
        [Any, Sequence[Member], Any], Any
    ]  # (Shared, members, Programs) -> scorer
    says: Sequence[str]  # what is told at the start
    pretrains: bool = False  # on a corpus, and chooses by held-out documents of it
    # (members, say): computes the states that these runs keep
    fill: Callable[[Sequence[Member], Callable[[str], None]], None] = lambda members, say: None


def check_start(shared: Shared, member: Member, shapes: dict[int, tree.Params]) -> None:
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


def start(shared: Shared, member: Member) -> tuple[Start, tree.Flat]:
    """Initialises a run as if it were alone. Returns (start, frozen parameters of all runs)."""
    config = member.run.config
    weights = initial_params.init_params(
        config, member.scorer, shared.loaded, member.counts, shared.placement
    )
    tx = build_optimizer(config, weights.trainable, member.plan, member.steps_per_epoch)
    key = rng.key_for(config.seed, "dropout", config.rng)
    state = make_state(weights.trainable, tx, key)
    is_common = lambda name: name.startswith("backbone/") or BASE.fullmatch(name)
    common = {n: leaf for n, leaf in weights.frozen.items() if is_common(n)}
    own = {n: leaf for n, leaf in weights.frozen.items() if n not in common}
    return Start(state, own, tx), common


def by_shape(members: Sequence[Member]) -> list[list[Member]]:
    """Groups members with equal shapes and plans, in their order."""
    groups: dict[tuple, list[Member]] = {}
    for member in members:
        groups.setdefault((member.plan, *member.shape), []).append(member)
    return list(groups.values())


def at_once(members: Sequence[Member], placement: Placement) -> list[list[Member]]:
    """Groups members of equal shapes that are worth training at once.

    On a CPU these are runs with the same batches, e.g. the learning rates of a seed. Other batches
    would be padded to the longest of all, and a few runs keep all cores busy.
    """
    sets: dict[tuple, list[Member]] = {}
    for member in members:
        sets.setdefault((member.run.config.seed, id(member.source)), []).append(member)
    is_cpu = jax.default_backend() == "cpu" and placement.mesh.size == 1
    worth = is_cpu and max(map(len, sets.values())) > 1
    return list(sets.values()) if worth else [list(members)]


def same_batches(members: Sequence[Member]) -> bool:
    """Returns whether runs train on the same batches in the same order."""
    return len({(m.run.config.seed, id(m.source)) for m in members}) == 1


def longest(members: Sequence[Member]) -> Batch:
    """Returns the longest training batch of all runs."""
    # Runs with the same batches are asked once.
    some = {id(member.source): member for member in members}.values()
    each = [member.give(member.longest()) for member in some]
    layout = members[0].scorer.layout
    return jax.tree.map(lambda x: x[0], stack_batches(each, layout.pad_id, layout.side))


def side_by_side(
    passes: Sequence[Iterable[Batch]], layout: Layout
) -> Iterator[tuple[list[Batch], Batch]]:
    """Yields the batches of several passes, and stacked ones; a shorter pass is padded."""
    for each in zip_longest(*passes):
        filling = padding_batch(next(batch for batch in each if batch is not None))
        batches = [filling if batch is None else batch for batch in each]
        yield batches, stack_batches(batches, layout.pad_id, layout.side)


# -- label words ----------------------------------------------------------------------------------


def varying_words(members: Sequence[Member]) -> dict[str, Words]:
    """Returns the label words of each run by name, {} if they are equal in all runs.

    They are padded to the size of the largest ones.
    """
    names = [member.run.name for member in members]
    flat, trees = zip(*(jax.tree.flatten(member.words) for member in members), strict=True)
    same = lambda leaves: all(np.array_equal(leaves[0], leaf) for leaf in leaves)
    if all(map(same, zip(*flat, strict=True))):
        return dict.fromkeys(names, {})
    filled = zip(*map(_fill, zip(*flat, strict=True)), strict=True)
    return {
        name: jax.tree.unflatten(trees[0], leaves)
        for name, leaves in zip(names, filled, strict=True)
    }


def with_words(model: Model, words: Words) -> Model:
    """Replaces the arrays of the heads that score label words; they may be traced."""
    heads = {name: model.heads[name].with_arrays(arrays) for name, arrays in words.items()}
    return dataclasses.replace(model, heads={**model.heads, **heads})


def _fill(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pads arrays to the largest one with -1, which means no word."""
    size = np.max([np.shape(leaf) for leaf in leaves], axis=0)
    room = lambda leaf: [(0, n - m) for n, m in zip(size, np.shape(leaf), strict=True)]
    return [np.pad(leaf, room(leaf), constant_values=-1) for leaf in leaves]
