"""What every method owes every backbone. A new file in prompts/ or backbones/ joins by itself.

So does one in tests/probes, which holds methods of kinds that do not ship yet.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import probes
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny import assert_close, jit, make_batch, make_params, make_tiny, widen

from jaxprompt import registry
from jaxprompt.backbones import families
from jaxprompt.heads import linear
from jaxprompt.models.folding import _injection, fields_read, fold
from jaxprompt.models.model import Model, positions_read, without_absent_slots
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_eval_step, make_train_step
from jaxprompt.tree import (
    flatten,
    merge,
    split_layers,
    split_trainable,
    trainable_mask,
    unflatten,
)
from jaxprompt.types import Injection, Objective, Stream, TaskInfo

METHODS = sorted([*registry.METHODS.names(), *probes.NAMES])
FIELDS = {
    "none": {},
    "prefix": dict(length=3, layers="2-2", dropout=0.2),
    "constant": dict(slots=2, length=3, first=1, last=2, shift=3),
    "compose": dict(parts="soft(length=2)+prefix(length=3,layers='2-2')+soft(length=1)"),
}
DEFAULT = dict(length=3)
# What an encoder-decoder takes besides: prefixes in all three attentions, rows in the decoder.
DECODER_FIELDS = {
    "none": {},
    "prefix": dict(decoder=2, decoder_layers="1-2", cross=4),
    "constant": dict(
        decoder_slots=2, decoder_length=2, decoder_first=0, decoder_last=2, shift_decoder=2,
        cross_length=4, cross_first=1, cross_last=3,
    ),
}  # fmt: skip
DECODER_FIELDS["compose"] = dict(
    parts="prefix(length=2,decoder=2,cross=3)+soft(length=2,decoder=1)+prefix(length=1,cross=1)"
)
DECODER_DEFAULT = dict(decoder=2)
CLASSES = 3
TX = optax.sgd(0.5)  # moves a leaf if and only if it has a gradient


class Case(NamedTuple):
    """A model with random parameters, divided as its method says."""

    method: str
    family: str
    model: Model
    params: dict
    trainable: dict
    frozen: dict
    step: Callable
    scores: Callable

    def batch(self, seed=0, **changes):
        prompt = self.model.prompt
        batch = make_batch(
            seed, slots=prompt.num_slots(), shift=prompt.position_shift(), family=self.family,
            decoder_slots=prompt.num_decoder_slots(), decoder_shift=prompt.decoder_shift(),
            classes=CLASSES, **changes,
        )  # fmt: skip
        if "prompt" in prompt.reads:
            batch = batch._replace(prompt=batch.index % prompt.size)
        return batch

    def state(self):
        return make_state(jax.tree.map(jnp.copy, self.trainable), TX, jax.random.key(1))


# One with an encoder alone, and one with a decoder: what `launch/test.sh --fast` runs.
FAST = ("bert", "t5")
# By default every method runs on the first of them, those with tokens in a decoder on the second
# too, and a prefix on each kind of backbone: the rest is left to `launch/test.sh --all`.
BESIDES = {
    "prefix": ("t5", "bart", "gpt2", "albert", "deberta_v2", "modernbert", "glm", "llama"),
    "soft": ("t5", "gpt2"),
    "constant": ("t5",),
}
BESIDES |= {"compose": ("t5",)}
ALL = [
    pytest.param(
        (method, family), id=f"{method}-{family}",
        marks=[
            *[pytest.mark.slow] * (family not in FAST),
            *[pytest.mark.long] * (family not in ("bert", *BESIDES.get(method, ()))),
        ],
    )
    for method in METHODS
    for family in families()
]  # fmt: skip


def cases(**methods):
    """Returns the ids of cases from the methods of each family."""
    return [f"{method}-{family}" for family, names in methods.items() for method in names.split()]


def method_of(name):
    with probes.known():
        return registry.METHODS.load(name)


@pytest.fixture(scope="module", params=ALL)
def case(request):
    # Every method and every backbone sees both ways; that these agree, layers/test_stack.py shows.
    method, family = request.param
    turn = METHODS.index(method) + families().index(family)
    backbone, weights = make_tiny(family, stack=("unroll", "scan")[turn % 2])
    fields = FIELDS.get(method, DEFAULT)
    if backbone.dims.decoder_layers:
        declared = method_of(method).__dataclass_fields__
        decoder_fields = DECODER_FIELDS.get(method, DECODER_DEFAULT)
        fields = fields | {
            name: decoder_fields[name] for name in decoder_fields if name in declared
        }
    with probes.known():
        prompt = make_prompt(method, backbone.dims, TaskInfo(CLASSES), **fields)
    heads = {"main": linear.Classifier(CLASSES, dropout=0.1)} | prompt.modules()
    model = Model(backbone, prompt, heads)
    params = make_params(model, weights)
    parts = split_trainable(params, trainable_mask(params, prompt.TRAINABLE))
    objectives = [Objective("main", cross_entropy), *prompt.objectives()]
    step = make_train_step(model, TX, objectives)
    return Case(method, family, model, params, *parts, step, jit(make_eval_step(model)))


@pytest.mark.long_cases("compose-t5", "constant-t5")
def test_injects_the_declared_shapes(case):
    dims, batch = case.model.backbone.dims, case.batch(rows=5)
    shapes = jax.eval_shape(lambda p: case.model.inject(p, batch), case.params)
    declared = {"encoder": case.model.prompt.num_slots(), "cross": 0}
    declared["decoder"] = case.model.prompt.num_decoder_slots()
    if shapes.rows is not None:
        assert shapes.rows.shape[1:] == (dims.embed,)
    for name in declared:
        stream = getattr(shapes, name)
        assert (declared[name] > 0) == (stream.slots is not None)
        if stream.slots is not None:
            rows, count, width = stream.slots.shape
            assert rows in (1, 5) and width == dims.embed
            beyond = 0 if shapes.rows is None else len(shapes.rows)
            assert count in (declared[name], declared[name] + beyond)
        if stream.slots_mask is not None:
            assert stream.slots_mask.shape in [(rows, count), (1, count)]
            assert stream.slots_mask.dtype == bool
        if stream.prefix is not None:
            layers, rows, length, *rest = stream.prefix.k.shape
            assert layers == (dims.layers if name == "encoder" else dims.decoder_layers)
            assert rows in (1, 5) and rest == [dims.heads, dims.head_dim]
            assert stream.prefix.v.shape == stream.prefix.k.shape
            assert stream.prefix.mask.shape == (layers, rows, length)
            assert stream.prefix.mask.dtype == bool
    hidden = jax.eval_shape(lambda p: case.model.hidden(p, batch), case.params)
    assert hidden.shape == (*batch.read.ids.shape, dims.width)


@pytest.mark.long_cases(
    *cases(
        bert="bank compose constant labels none p_tuning reading soft",
        t5="compose constant soft",
        gpt2="prefix soft",
        albert="prefix",
        bart="prefix",
        deberta_v2="prefix",
        glm="prefix",
        modernbert="prefix",
    )
)
def test_padding_changes_nothing(case):
    batch = case.batch()
    assert len(set(batch.encoder.mask.sum(1))) > 1
    scores = case.scores(case.trainable, case.frozen, batch)
    assert scores.shape == (8, CLASSES) and float(scores.std()) > 1e-3
    # Every method and every backbone sees both sides.
    side = ("right", "left")[(METHODS.index(case.method) + families().index(case.family)) % 2]
    padded = case.scores(case.trainable, case.frozen, widen(batch, 4, side))
    assert_close(padded, scores)


@pytest.mark.long_cases("compose-t5", "constant-t5")
def test_what_is_masked_changes_nothing(case):
    """Rubbish is never read: in masked columns and rows, and in rows that no token points at."""
    batch = case.batch()
    rubbish = lambda x, keep: jnp.where(keep, x, 7.5)

    def litter(stream, spoil):
        slots, prefix, slots_mask = stream
        if prefix is not None:
            keep = (prefix.mask | ~spoil)[..., None, None]
            prefix = prefix._replace(k=rubbish(prefix.k, keep), v=rubbish(prefix.v, keep))
        if slots_mask is not None:
            slots = rubbish(slots, (slots_mask | ~spoil)[..., None])
            slots_mask = jnp.pad(slots_mask, [(0, 0), (0, 1)])
        if slots is not None:
            slots = jnp.concatenate([slots, jnp.where(spoil, 7.5, 0.0) + slots[:, :1]], 1)
        return Stream(slots, prefix, slots_mask)

    @jit
    def hidden(params, batch, spoil):
        injection = case.model.inject(params, batch)
        visible = without_absent_slots(batch, injection)
        injection = Injection(*(litter(stream, spoil) for stream in injection[:3]))
        backbone = {"params": params["backbone"]}
        states = case.model.backbone.apply(backbone, visible, injection, deterministic=True)
        left_out = batch.read.mask & ~visible.read.mask  # by slots_mask
        return jnp.where(left_out[..., None], 0.0, states)

    clean, spoilt = (hidden(case.params, batch, spoil) for spoil in (False, True))
    np.testing.assert_array_equal(clean, spoilt)


@pytest.mark.long_cases(
    *cases(
        bert="bank compose constant dart dpt ipt labels none p_tuning prefix reading soft",
        t5="compose constant soft",
        albert="prefix",
        deberta_v2="prefix",
        bart="prefix",
        glm="prefix",
        gpt2="prefix soft",
        llama="prefix",
        modernbert="prefix",
    )
)
def test_positions_that_no_head_reads_are_left_out(case):
    """Scores and gradients are those of a last layer that runs at every position."""
    batch = case.batch()
    assert positions_read(batch) is not None
    every = dataclasses.replace(case.model, last_layer="all")
    weights = np.random.default_rng(0).normal(size=(8, CLASSES)).astype(np.float32)

    @jit
    def look(trainable):
        def scored(trainable, model):
            scores = model.forward(merge(trainable, case.frozen), batch)
            return (scores * weights).sum(), scores

        parts = (jax.grad(scored, has_aux=True)(trainable, m) for m in (case.model, every))
        # As one vector: a leaf with a small gradient is a sum of terms that are not.
        results = [(ravel_pytree(gradient)[0], scores) for gradient, scores in parts]
        return *results, case.model.hidden(case.params, batch)

    needed, full, states = look(case.trainable)
    for results, expected in zip(needed, full, strict=True):
        assert np.linalg.norm(results - expected) <= 1e-6 * np.linalg.norm(expected)
    assert states.shape[1] == batch.read.ids.shape[1]


@pytest.mark.long_cases(
    *cases(
        t5="compose constant prefix",
        bert="bank compose constant dpt none soft",
        gpt2="prefix soft",
        albert="prefix",
        deberta_v2="prefix",
        bart="prefix",
        glm="prefix",
        modernbert="prefix",
    )
)
def test_what_is_exported_scores_other_batches_as_what_is_live(case):
    """What is folded was computed from one batch; it must be right for another."""
    prompt, arrays = fold(case.model, case.params, case.batch())
    model = dataclasses.replace(case.model, prompt=prompt)
    for name in ("num_slots", "num_decoder_slots", "position_shift", "decoder_shift"):
        assert getattr(prompt, name)() == getattr(case.model.prompt, name)()
    for head in model.heads:
        exported, live = (jit(partial(m.forward, head=head)) for m in (model, case.model))
        for seed in (0, 1):
            batch = case.batch(seed)
            scores = exported(case.params | {"prompt": arrays}, batch)
            assert_close(scores, live(case.params, batch))


@pytest.mark.default_cases("prefix-llama")
def test_separate_layers_compute_what_a_scan_does(case):
    """The loss and every gradient, with dropout."""
    cfg = dataclasses.replace(case.model.backbone.cfg, stack="scan", dropout=0.1)
    model = dataclasses.replace(case.model, backbone=case.model.backbone.clone(cfg=cfg))
    backbone = split_layers(unflatten(case.frozen)["backbone"])
    separate = case.frozen | flatten({"backbone": backbone})
    batch = case.batch()

    def loss(trainable, frozen):
        params, key = merge(trainable, frozen), jax.random.key(2)
        scores = model.forward(params, batch, deterministic=False, key=key)
        return -jax.nn.log_softmax(scores)[:, 0].mean()

    results = [jit(jax.value_and_grad(loss))(case.trainable, x) for x in (case.frozen, separate)]
    (scanned, expected), (unrolled, gradient) = results
    assert abs(unrolled - scanned) <= 1e-6 * abs(scanned)
    expected, gradient = ravel_pytree(expected)[0], ravel_pytree(gradient)[0]
    assert np.linalg.norm(gradient - expected) <= 1e-6 * np.linalg.norm(expected) > 0


def test_folding_again_compiles_nothing(case):
    """A run folds its prompt in every evaluation."""
    if case.model.prompt.reads:
        return
    equal = dataclasses.replace(case.model)
    compiled = _injection(case.model)
    for _ in range(2):
        fold(equal, case.params, case.batch())
    assert _injection(equal) is compiled and compiled._cache_size() == 1


def test_it_says_what_it_reads(case):
    assert set(fields_read(case.model, case.params, case.batch())) == set(case.model.prompt.reads)
    if not case.model.prompt.reads:
        return
    cls = type("Silent", (type(case.model.prompt),), {"reads": ()})
    silent = cls(dims=case.model.prompt.dims, **DEFAULT)
    model = dataclasses.replace(case.model, prompt=silent)
    fields = ", ".join(case.model.prompt.reads)
    with pytest.raises(TypeError, match=f"reads {fields}; add them to `reads`"):
        fold(model, case.params, case.batch())


def train(case, place):
    """Takes two steps by one compilation. -> (state, metrics of both)"""
    step = jit(lambda *args: case.step(*args), donate_argnums=0)
    state, frozen, each = place(case.state()), place(case.frozen), []
    for seed in (0, 1):
        state, metrics = step(state, frozen, place(case.batch(seed), "data"))
        assert np.isfinite(metrics["loss"])
        each.append(metrics)
    assert int(state.step) == 2 and step._cache_size() == 1
    return state, each


@pytest.mark.long_cases(
    *cases(
        bert="bank compose constant dart ipt labels none p_tuning reading soft",
        t5="compose constant prefix soft",
        albert="prefix",
        deberta_v2="prefix",
        bart="prefix",
        glm="prefix",
        gpt2="prefix",
        llama="prefix",
        modernbert="prefix",
    )
)
def test_trains_what_it_says(case):
    """Every trainable leaf moves, nothing else does, and on eight devices it is the same.

    The latter for each method on one backbone, and for each backbone with a prefix.
    """
    state, metrics = train(case, lambda tree, *axes: tree)
    if case.method == "prefix" or case.family == "bert":
        assert len(jax.devices()) == 8
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        divide = lambda tree, *axes: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))
        spread, spread_metrics = train(case, divide)
        assert_close(spread_metrics, metrics)
        assert_close(spread.trainable, state.trainable)
    frozen = case.frozen
    before, after = flatten(case.params), frozen | state.trainable
    assert before.keys() == after.keys()
    for name in before:
        moved = float(jnp.abs(after[name] - before[name]).max())
        expected = any(re.fullmatch(p, name) for p in case.model.prompt.TRAINABLE)
        assert (moved > 0) == expected, (name, moved)
