"""The runs of a group, ready to train, and which of them have the same shapes."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt import build, rng, tree
from jaxprompt.data.batching import EvalBatches
from jaxprompt.data.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.group.grid import Run
from jaxprompt.heads import lm
from jaxprompt.model import Model
from jaxprompt.scorer import Scorer, Split, load_weights
from jaxprompt.sharding import Placement
from jaxprompt.state import TrainState, make_state
from jaxprompt.types import Batch

Words = dict[str, dict[str, Any]]  # head -> its arrays, of a head that scores label words
_ARRAYS = ("rows", "where", "at")


class Member(NamedTuple):
    """One run: its data and its model, without numbers."""

    run: Run
    scorer: Scorer
    splits: dict[str, Split]
    plan: build.Plan
    steps_per_epoch: int

    @property
    def words(self) -> Words:
        """The arrays of the heads that score label words."""
        return words_of(self.scorer.model)

    def shape(self) -> tuple:
        """Sums up what runs of one program have in common besides their configs."""
        words = {n: [part[x].shape for x in _ARRAYS] for n, part in self.words.items()}
        return self.plan, self.steps_per_epoch, self.scorer.layout, self.scorer.classes, str(words)


class Start(NamedTuple):
    """The numbers of a run before its first step."""

    state: TrainState
    own: tree.Flat  # frozen, yet drawn from the run's seed
    tx: Any


class Shared(NamedTuple):
    """What the runs of a group have in common."""

    config: Any  # of the first run
    placement: Placement
    loaded: Any
    family: str

    @property
    def fingerprint(self) -> str:
        """Of the backbone's weights."""
        return self.loaded.report.fingerprint


def words_of(model: Model) -> Words:
    """Takes the arrays out of the heads that score label words."""
    heads = model.heads.items()
    return {
        name: {x: getattr(head, x) for x in _ARRAYS}
        for name, head in heads
        if isinstance(head, lm.Head)
    }


def prepare(runs: Sequence[Run], failed: Callable[[Run, Exception], None]):
    """Reads what runs need that differ in fields of `grid.VARIES`. -> Shared, [Member]

    What is equal between them is read and encoded once. A run that cannot be is handed to `failed`.
    """
    c = runs[0].config
    placement = build.build_placement(c)
    backbone = build.open_fitting(c, placement)
    backbone = backbone._replace(tokenizer=load_tokenizer(backbone.folder))
    scorers, encoded, same = {}, {}, {}
    members = []
    for run in runs:
        own = run.config
        key = json.dumps([own.data.to_dict(), own.task.to_dict()], sort_keys=True)
        try:
            if key not in encoded:
                examples = build.read_examples(own)
                scorers[key] = build.scorer_from_config(own, backbone, examples, placement)
                splits = build.encode_splits(scorers[key], examples)
                # A split that is the same in all runs is laid out once.
                encoded[key] = {
                    name: same.setdefault((name, part.digest()), part)
                    for name, part in splits.items()
                }
        except InputError as error:
            failed(run, error)
            continue
        epoch = math.ceil(len(encoded[key]["train"].rows) / own.data.batch)
        plan = build.make_plan(own.train, epoch, own.data.batch)
        members.append(Member(run, scorers[key], encoded[key], plan, epoch))
    backbone, loaded = load_weights(backbone, placement)
    models: dict[str, Model] = {}  # one for all that are equal: its programs are compiled once
    for i, member in enumerate(members):
        words = [array.tolist() for part in member.words.values() for array in part.values()]
        prompt = member.run.config.prompt.to_dict()
        key = json.dumps([prompt, member.scorer.classes, words])
        own = member.scorer.with_backbone(backbone)
        scorer = own._replace(model=models.setdefault(key, own.model))
        members[i] = member._replace(scorer=scorer)
    return Shared(c, placement, loaded, backbone.family), members


def start(shared: Shared, member: Member) -> tuple[Start, tree.Flat]:
    """Draws the first numbers of a run, as if it were alone. -> them, what is frozen for all"""
    c = member.run.config
    weights = build.start(c, member.scorer, shared.loaded, member.splits["train"], shared.placement)
    tx = build.build_optimizer(c, weights.trainable, member.plan, member.steps_per_epoch)
    state = make_state(weights.trainable, tx, rng.key_for(c.seed, "dropout"))
    common = {n: leaf for n, leaf in weights.frozen.items() if n.startswith("backbone/")}
    own = {n: leaf for n, leaf in weights.frozen.items() if n not in common}
    return Start(state, own, tx), common


def by_shape(members: Sequence[Member]) -> list[list[Member]]:
    """Divides members into those of equal shapes and plans, in the order in which they come."""
    groups: dict[tuple, list[Member]] = {}
    for member in members:
        groups.setdefault(member.shape(), []).append(member)
    return list(groups.values())


def at_once(members: Sequence[Member], placement: Placement) -> list[list[Member]]:
    """Divides members of equal shapes into those that are worth training at once.

    On a CPU these are runs with the same batches, such as the rates of a seed. Batches of others
    would be filled up to the longest of all, and its cores are busy with a few runs.
    """
    sets: dict[tuple, list[Member]] = {}
    for member in members:
        sets.setdefault((member.run.config.seed, id(member.splits["train"])), []).append(member)
    is_cpu = jax.default_backend() == "cpu" and placement.mesh.size == 1
    worth = is_cpu and max(map(len, sets.values())) > 1
    return list(sets.values()) if worth else [list(members)]


def is_shared(members: Sequence[Member], split: str) -> bool:
    """Tells whether a split is the same for all runs."""
    return all(member.splits[split] is members[0].splits[split] for member in members)


def varying_words(members: Sequence[Member]) -> dict[str, Words]:
    """Gives the label words of each run by its name; {} each where they are all the same."""
    words = {member.run.name: member.words for member in members}
    first = members[0].words
    same = all(
        np.array_equal(first[head][x], own[head][x])
        for own in words.values()
        for head in first
        for x in _ARRAYS
    )
    return dict.fromkeys(words, {}) if same else words


def longest(members: Sequence[Member]) -> Batch:
    """Makes a training batch of one run as long as any of all runs."""
    batches = []
    for member in members:
        layout = dataclasses.replace(member.scorer.layout, batch=member.run.config.data.batch)
        train = member.splits["train"]
        batches.append(next(iter(EvalBatches(train.rows, train.labels, layout))))
    return max(batches, key=lambda batch: batch.encoder.ids.shape[1])


def with_words(model: Model, words: Mapping[str, Mapping[str, Any]]) -> Model:
    """Puts other arrays into the heads that score label words; they may be traced."""
    heads = {name: model.heads[name].clone(**arrays) for name, arrays in words.items()}
    return dataclasses.replace(model, heads={**model.heads, **heads})
