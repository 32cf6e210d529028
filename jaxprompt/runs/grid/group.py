"""The runs of a group, ready to train, and which of them have the same shapes.

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
from jaxprompt.build.initial_params import check_all
from jaxprompt.build.optimizer import build_optimizer
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.load import Loaded
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.batches.stacking import empty, stack
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
    """One run: its data and its model, without numbers."""

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
        """Tells whether its batches are given states."""
        return self.kept is not None and bool(self.kept.parts)

    @property
    def rest(self) -> Model:
        """What goes on from states that are kept; the model itself where none are."""
        return self.model if self.kept is None else self.kept.model

    def give(self, batch: Batch) -> Batch:
        """Puts the states of its rows into a training batch, where they are kept."""
        return batch if self.kept is None else self.kept.give(self.source, batch)

    @property
    def words(self) -> Words:
        """The arrays of the heads that score label words."""
        arrays_by_head = {name: head.arrays() for name, head in self.model.heads.items()}
        return {name: arrays for name, arrays in arrays_by_head.items() if arrays}


class Start(NamedTuple):
    """The numbers of a run before its first step."""

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
    """Raises InputError for what `start` would refuse; nothing is computed.

    `shapes` keeps those of the numbers of each model, which several members may have.
    """
    config, scorer, model = member.run.config, member.scorer, member.model
    if id(model) not in shapes:
        init = partial(model.init, choices=scorer.layout.num_rows)
        shapes[id(model)] = jax.eval_shape(init, jax.random.key(0), shared.loaded.params)
    param_shapes, fingerprint = shapes[id(model)], shared.loaded.report.fingerprint
    trainable = check_all(
        config, scorer, param_shapes, member.counts, fingerprint, shared.placement
    )
    build_optimizer(config, trainable, member.plan, member.steps_per_epoch)


def start(shared: Shared, member: Member) -> tuple[Start, tree.Flat]:
    """Draws the first numbers of a run, as if it were alone. -> them, what is frozen for all"""
    config = member.run.config
    weights = initial_params.start(
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
    """Divides members into those of equal shapes and plans, in the order in which they come."""
    groups: dict[tuple, list[Member]] = {}
    for member in members:
        groups.setdefault((member.plan, *member.shape), []).append(member)
    return list(groups.values())


def at_once(members: Sequence[Member], placement: Placement) -> list[list[Member]]:
    """Divides members of equal shapes into those that are worth training at once.

    On a CPU these are runs with the same batches, such as the rates of a seed. Batches of others
    would be filled up to the longest of all, and its cores are busy with a few runs.
    """
    sets: dict[tuple, list[Member]] = {}
    for member in members:
        sets.setdefault((member.run.config.seed, id(member.source)), []).append(member)
    is_cpu = jax.default_backend() == "cpu" and placement.mesh.size == 1
    worth = is_cpu and max(map(len, sets.values())) > 1
    return list(sets.values()) if worth else [list(members)]


def same_batches(members: Sequence[Member]) -> bool:
    """Tells whether runs train on the same batches in the same order."""
    return len({(m.run.config.seed, id(m.source)) for m in members}) == 1


def longest(members: Sequence[Member]) -> Batch:
    """Makes a training batch of one run as long as any of all runs."""
    # Runs with the same batches are asked once.
    some = {id(member.source): member for member in members}.values()
    each = [member.give(member.longest()) for member in some]
    layout = members[0].scorer.layout
    return jax.tree.map(lambda x: x[0], stack(each, layout.pad_id, layout.side))


def side_by_side(
    passes: Sequence[Iterable[Batch]], layout: Layout
) -> Iterator[tuple[list[Batch], Batch]]:
    """Yields the batches of passes, and them as one. A pass that ends early gives filling."""
    for each in zip_longest(*passes):
        filling = empty(next(batch for batch in each if batch is not None))
        batches = [filling if batch is None else batch for batch in each]
        yield batches, stack(batches, layout.pad_id, layout.side)


# -- label words ----------------------------------------------------------------------------------


def varying_words(members: Sequence[Member]) -> dict[str, Words]:
    """Gives the label words of each run by its name; {} each where they are all the same.

    Where there are fewer of them than in another run, they are filled up to those.
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
    """Puts other arrays into the heads that score label words; they may be traced."""
    heads = {name: model.heads[name].with_arrays(arrays) for name, arrays in words.items()}
    return dataclasses.replace(model, heads={**model.heads, **heads})


def _fill(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Fills arrays up to the largest with -1, which stands for no word."""
    size = np.max([np.shape(leaf) for leaf in leaves], axis=0)
    room = lambda leaf: [(0, n - m) for n, m in zip(size, np.shape(leaf), strict=True)]
    return [np.pad(leaf, room(leaf), constant_values=-1) for leaf in leaves]
