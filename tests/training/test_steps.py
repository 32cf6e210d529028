"""The train step: accumulation, filler rows, steps that are not finite, repeats, many runs."""

import functools
import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import assert_close, assert_equal, jit, make_batch, make_params, make_tiny

from jaxprompt.heads import linear
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.training.optim import make_optimizer
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_count_step, make_eval_step, make_train_step
from jaxprompt.tree import merge, split_trainable, trainable_mask
from jaxprompt.types import Objective

SGD = optax.sgd(0.3)
OBJECTIVES = (Objective("main", cross_entropy),)
UNEVEN = np.array([1, 0.5, 0, 2, 1, 0, 1, 3], np.float32)


@functools.cache
def make_parts(dropout=0.0, choices=1):
    """Makes (model, trainable, frozen)."""
    backbone, weights = make_tiny(dropout=dropout)
    prompt = make_prompt("prefix", backbone.dims, length=3, dropout=dropout)
    model = Model(
        backbone, prompt, {"main": linear.Classifier(1 if choices > 1 else 3, dropout=dropout)}
    )
    params = make_params(model, weights, choices=choices)
    return model, *split_trainable(params, trainable_mask(params, prompt.TRAINABLE))


def make(tx=SGD, *, dropout=0.0, objectives=OBJECTIVES, choices=1, seed=0, **options):
    """Makes (jitted step, fresh state, frozen)."""
    _, trainable, frozen = make_parts(dropout, choices)
    step = make_step(tx, tuple(objectives), dropout, choices, **options)
    return step, make_state(trainable, tx, jax.random.key(seed)), frozen


@functools.cache  # so that tests share what is compiled
def make_step(tx, objectives, dropout, choices, **options):
    model, _, _ = make_parts(dropout, choices)
    return jit(make_train_step(model, tx, objectives, **options))


def batch_of(seed=0, weights=UNEVEN, **changes):
    return make_batch(seed, shift=3, **changes)._replace(weights=weights)


def test_one_step_is_gradient_descent_on_the_weighted_mean():
    model, trainable, frozen = make_parts()
    batch = batch_of()

    def loss(trainable):
        logp = jax.nn.log_softmax(model.forward(merge(trainable, frozen), batch))
        each = -jnp.stack([logp[i, label] for i, label in enumerate(batch.labels)])
        return (UNEVEN * each).sum() / UNEVEN.sum()

    value, grads = jit(jax.value_and_grad(loss))(trainable)
    step, state, frozen = make()
    state, metrics = step(state, frozen, batch)
    assert_close(metrics["loss"], value)
    assert_close(metrics["grad_norm"], optax.tree.norm(grads))
    assert_close(state.trainable, {n: trainable[n] - 0.3 * g for n, g in grads.items()})
    assert int(state.step) == 1 and int(state.skipped) == int(state.streak) == 0


@pytest.mark.default_cases("4-1")
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_is_exact(accumulate, choices):
    """Parts of uneven weight, one of them 0 in all, add up to the whole batch."""
    batch = batch_of(weights=np.array([0, 0, 1, 0.5, 2, 0, 1, 3], np.float32), choices=choices)
    batch = batch._replace(labels=batch.labels % 2)
    whole, state, frozen = make(choices=choices)
    parts, _, _ = make(choices=choices, accumulate=accumulate)
    expected, actual = whole(state, frozen, batch), parts(state, frozen, batch)
    assert_close(actual, expected)
    assert float(expected[1]["grad_norm"]) > 1e-3


def test_filler_rows_change_nothing():
    step, state, frozen = make()
    batch = batch_of()
    other = make_batch(9, shift=3)
    filler = UNEVEN == 0
    swap = lambda a, b: np.where(filler.reshape(-1, *[1] * (a.ndim - 1)), b, a)
    spoilt = jax.tree.map(swap, batch, other)._replace(weights=UNEVEN)
    spoilt = spoilt._replace(labels=np.where(filler, -1, batch.labels))
    empty = spoilt.encoder.mask & ~filler[:, None]  # rows without a token to attend to
    spoilt = spoilt._replace(encoder=spoilt.encoder._replace(mask=empty))
    assert (spoilt.encoder.ids != batch.encoder.ids).any()
    assert_close(step(state, frozen, spoilt), step(state, frozen, batch), rtol=1e-6)


@pytest.mark.long_cases("nan")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_the_counters_alone(poison):
    tx = make_optimizer("adamw", lambda step: 1.0, dict(prompt=0.01, head=0.01), clip=1.0)
    step, state, frozen = make(tx)
    good, bad = batch_of(), batch_of(weights=np.where(UNEVEN == 2, poison, UNEVEN))
    state, _ = step(state, frozen, good)
    before = state
    for streak in (1, 2):
        state, metrics = step(state, frozen, bad)
        assert not np.isfinite(metrics["loss"])
        assert (int(metrics["skipped"]), int(metrics["streak"])) == (streak, streak)
    assert_equal((state.trainable, state.opt_state), (before.trainable, before.opt_state))
    assert int(state.step) == 3
    state, metrics = step(state, frozen, good)
    assert (int(state.skipped), int(state.streak)) == (2, 0)
    assert all(np.isfinite(leaf).all() for leaf in state.trainable.values())
    assert np.abs(state.trainable["prompt/table"] - before.trainable["prompt/table"]).max() > 0


def test_a_gradient_that_is_not_finite_is_skipped_too():
    """The loss is 0 here; its gradient is NaN."""
    root = lambda scores, labels, weights: (jnp.sqrt(0.0 * scores).sum(), weights.sum())
    step, state, frozen = make(objectives=[Objective("main", root)])
    after, metrics = step(state, frozen, batch_of())
    assert float(metrics["loss"]) == 0 and int(after.skipped) == 1
    assert_equal(after.trainable, state.trainable)


def test_same_seed_same_bits_other_seed_other_dropout():
    runs = []
    for seed in (0, 0, 1):
        step, state, frozen = make(dropout=0.2, seed=seed)
        for number in range(2):
            state, _ = step(state, frozen, batch_of(number))
        runs.append(state)
    assert_equal(runs[0], runs[1])
    assert (
        np.abs(runs[0].trainable["prompt/table"] - runs[2].trainable["prompt/table"]).max() > 1e-6
    )


def test_objectives_add_up_with_their_weights_and_views():
    """A second reading of the batch, over its last rows alone, normalised by its own weight."""
    tail = np.arange(8) >= 5
    view = lambda batch, key: batch._replace(weights=batch.weights * tail)
    second = Objective("tail", cross_entropy, weight=0.25, view=view)
    both, state, frozen = make(objectives=[*OBJECTIVES, second])
    one, _, _ = make()
    _, metrics = both(state, frozen, batch_of())
    _, main = one(state, frozen, batch_of())
    _, last = one(state, frozen, batch_of(weights=UNEVEN * tail))
    assert_close(metrics["loss"], main["loss"] + 0.25 * last["loss"])


def drawing(name):
    """Makes an objective whose view draws the weights, and which counts them."""
    view = lambda batch, key: batch._replace(weights=jax.random.uniform(key, batch.weights.shape))
    count = lambda scores, labels, weights: {"drawn": weights.sum()}
    return Objective(name, cross_entropy, view=view, sums=count)


def forward(params, batch, **how):
    return jnp.broadcast_to(params["prompt"]["table"], (len(batch.labels), 3))


BIASES = SimpleNamespace(forward=forward)  # a model of three scores, whatever the text
TABLE = {"prompt/table": jnp.zeros(3)}


def drawn_by(key, number, rows):
    """The weights of objective `number` where a step, or a part of one, has this key."""
    key = jax.random.fold_in(jax.random.fold_in(key, number), zlib.crc32(b"view"))
    return float(jax.random.uniform(key, (rows,)).sum())


@pytest.mark.parametrize("accumulate, number", [(1, 0), (2, 3)])
def test_each_step_objective_and_part_of_a_batch_draws_for_itself(accumulate, number):
    """One objective more changes nothing of what the others draw."""
    key = jax.random.fold_in(jax.random.key(0), number)  # of the seed and of the step
    keys = [key] if accumulate == 1 else jax.random.split(key, 2)
    expected = [sum(drawn_by(key, i, 8 // accumulate) for key in keys) for i in range(2)]
    assert expected[0] != expected[1]
    terms = drawing("first"), drawing("second")
    for objectives in (terms[:1], terms):
        step = make_train_step(BIASES, SGD, objectives, accumulate=accumulate)
        state = make_state(TABLE, SGD, jax.random.key(0))._replace(step=jnp.int32(number))
        _, metrics = jit(step)(state, {}, batch_of())
        for term, value in zip(objectives, expected, strict=False):
            assert_close(metrics["sums"][term.name]["drawn"], value)


def test_each_objective_draws_for_itself_where_losses_are_counted():
    key = jax.random.key(5)
    count = make_count_step(BIASES, [drawing("first"), drawing("second")])
    actual = jit(count)(TABLE, {}, batch_of(), key)
    for number, name in enumerate(("first", "second")):
        assert_close(actual[name]["drawn"], drawn_by(key, number, 8))


@pytest.mark.long
def test_runs_train_together_as_they_train_alone():
    """One program for several rates and starts, with the frozen weights shared."""
    rates = (0.1, 0.01, 0.0)
    txs = [
        make_optimizer("adamw", lambda step: 1.0, dict(prompt=r, head=r), eps=1e-3) for r in rates
    ]
    model, trainable, frozen = make_parts(0.2)
    draw = lambda i: jax.tree.map(lambda x: x * (1 + i), trainable)
    states = [make_state(draw(i), tx, jax.random.key(i)) for i, tx in enumerate(txs)]
    step = make_train_step(model, txs[0], OBJECTIVES)
    together = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    many = jit(jax.vmap(step, in_axes=(0, None, None)))
    alone = jit(step)
    for number in range(2):
        together, _ = many(together, frozen, batch_of(number))
        states = [alone(state, frozen, batch_of(number))[0] for state in states]
    for i, state in enumerate(states):
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), state, rtol=1e-4)
    assert_equal(states[2].trainable, draw(2))
    assert np.abs(states[0].trainable["prompt/table"] - trainable["prompt/table"]).max() > 0.01


def test_hidden_dropout_is_the_same_with_a_fused_kernel():
    """Its masks, too: the reference is a checkpoint without attention dropout."""
    batch = batch_of(rows=2, length=8)._replace(weights=np.ones(2, np.float32))

    def loss_and_grads(**fields):
        backbone, weights = make_tiny(dropout=0.2, num_hidden_layers=1, **fields)
        prompt = make_prompt("prefix", backbone.dims, length=3)
        model = Model(backbone, prompt, {"main": linear.Classifier(3, dropout=0.0)})
        params = make_params(model, weights)
        trainable, frozen = split_trainable(params, trainable_mask(params, prompt.TRAINABLE))
        key = jax.random.key(1, impl="rbg")

        def loss(trainable):
            scores = model.forward(merge(trainable, frozen), batch, deterministic=False, key=key)
            return (scores**2).sum()

        return jit(jax.value_and_grad(loss))(trainable)

    expected = loss_and_grads(attention_probs_dropout_prob=0.0, attention="einsum")
    actual = loss_and_grads(attention_dropout=0.0, attention="fused")
    assert_close(actual, expected, rtol=1e-6)


def test_eval_step_has_no_dropout():
    model, trainable, frozen = make_parts(0.2)
    scores = jit(make_eval_step(model))(trainable, frozen, batch_of())
    plain, plain_trainable, _ = make_parts(0.0)
    assert_equal(scores, jit(make_eval_step(plain))(plain_trainable, frozen, batch_of()))
