"""Runs that train as one program end where they end alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import PAD, assert_close, assert_equal, jit, make_batch, make_params, make_tiny, widen

from jaxprompt.data.batches.stacking import padding_batch, stack_batches
from jaxprompt.heads import linear
from jaxprompt.heads.verbalizer import AnswerHead, LabelWords
from jaxprompt.models.model import Model
from jaxprompt.parallel.hlo import count_work
from jaxprompt.parallel.sharding import make_placement, put_global
from jaxprompt.prompts import make_prompt
from jaxprompt.runs.grid import memory
from jaxprompt.runs.grid.batched_runs import program_sizes
from jaxprompt.runs.grid.batched_steps import PerRun, Programs, make_group_scores, make_group_step
from jaxprompt.runs.grid.expand import GridRun, select_best_runs
from jaxprompt.runs.grid.group import Member, varying_label_words
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.training.optim import make_optimizer
from jaxprompt.training.progress import Progress
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_eval_step, make_train_step
from jaxprompt.tree import split_trainable, trainable_mask
from jaxprompt.types import ABSENT, Objective

OBJECTIVES = (Objective("main", cross_entropy),)
RATES = (0.1, 0.03, 0.3)
NONE = PerRun({}, {})
SLOTS = dict(slots=3)
CASES = {  # family, method, its fields, of batches, patterns of what trains
    "soft": ("bert", "soft", dict(length=3), SLOTS, None),
    "prefix": ("bert", "prefix", dict(length=3), dict(shift=3), None),
    "head_only": ("bert", "none", {}, {}, (r"head/.*",)),
    "t5": ("t5", "prefix", dict(length=2, decoder=2, cross=2), dict(decoder_shift=2), None),
    "gpt2": ("gpt2", "soft", dict(length=3), SLOTS, None),
    "computed": ("bert", "prefix", dict(length=3, hidden=4), dict(shift=3), None),
}
EXACT = ("soft", "prefix", "head_only", "t5", "gpt2")


def sgd(rate):
    """Gradient descent whose rate is in the state."""
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)


def adamw(rate):
    """The optimizer of a config."""
    parts = dict.fromkeys(("prompt", "head", "backbone"), rate)
    return make_optimizer("adamw", lambda step: 1.0, parts, clip=1.0)


@functools.cache
def parts(case, dropout=0.0, head=None):
    """Makes (model, trainable of each run, frozen)."""
    family, method, fields, _, patterns = CASES[case]
    # A vocabulary that two devices divide.
    backbone, weights = make_tiny(family, dropout=dropout, vocab_size=54)
    prompt = make_prompt(method, backbone.dims, **fields)
    model = Model(backbone, prompt, {"main": head or linear.Classifier(3, "cls", dropout)})
    results = []
    for seed in range(len(RATES)):
        params = make_params(model, weights, seed)
        trains = patterns or (prompt.TRAINABLE if head is None else (r"prompt/.*",))
        results.append(split_trainable(params, trainable_mask(params, trains)))
    return model, [trainable for trainable, _ in results], results[0][1]


def batch_of(case, seed, **changes):
    family, *_, laid, _ = CASES[case]
    return make_batch(seed, family=family, **laid | changes)


def stack_trees(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def train(case, make_tx, steps, dropout=0.0, lengths=None):
    """Trains runs alone and together. -> states alone, states together, losses of both"""
    model, starts, frozen = parts(case, dropout)
    txs = [make_tx(rate) for rate in RATES]
    alone = [
        make_state(t, tx, jax.random.key(i))
        for i, (t, tx) in enumerate(zip(starts, txs, strict=True))
    ]
    together = stack_trees(alone)
    one = jit(make_train_step(model, txs[0], OBJECTIVES))
    many = jit(make_group_step(model, txs[0], OBJECTIVES))
    losses = []
    for number in range(steps):
        change = lambda i: {} if lengths is None else dict(length=lengths[i])
        batches = [batch_of(case, 100 * i + number % 5, **change(i)) for i in range(len(RATES))]
        actual = [one(state, frozen, batch) for state, batch in zip(alone, batches, strict=True)]
        alone = [state for state, _ in actual]
        together, measured = many(together, frozen, stack_batches(batches, PAD, "right"), NONE)
        losses.append(([float(m["loss"]) for _, m in actual], measured["loss"]))
    expected, losses = (np.array(x) for x in zip(*losses, strict=True))
    return stack_trees(alone), together, losses, expected


@pytest.mark.default_cases("prefix")
@pytest.mark.parametrize("case", EXACT)
def test_gradient_descent_ends_where_it_ends_alone(case):
    alone, together, _, _ = train(case, sgd, 50)
    assert_close(together.trainable, alone.trainable, rtol=1e-5)
    for start, end in zip(parts(case)[1], alone.trainable["head/main/out/kernel"], strict=True):
        assert np.abs(end - start["head/main/out/kernel"]).max() > 1e-2


@pytest.mark.long
@pytest.mark.parametrize(
    "case, steps, lengths", [("prefix", 50, (9, 12, 10)), ("t5", 12, (9, 9, 11))]
)
def test_adam_and_dropout_follow_the_curve_of_a_run_alone(case, steps, lengths):
    """The same keys draw the same masks, though batches are filled up to the longest."""
    _, _, losses, expected = train(case, adamw, steps, 0.2, lengths)
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert len({round(loss, 4) for loss in losses[0]}) == 3


@pytest.mark.parametrize("family, side", [("bert", "left"), ("bert", "right"), ("t5", "left")])
def test_batches_are_widened_to_the_longest(family, side):
    """Padding, and places to read that move with it, as laid out by another hand."""
    small, large = (make_batch(s, family=family, length=n, side=side) for s, n in ((0, 9), (1, 12)))
    actual = jax.tree.map(lambda x: x[0], stack_batches([small, large], PAD, side))
    expected = widen(small, 3, side)
    if family == "t5":
        expected = expected._replace(decoder=actual.decoder)
        width = small.decoder.ids.shape[1]
        assert_equal(jax.tree.map(lambda x: x[:, :width], actual.decoder), small.decoder)
    assert_equal(actual, expected)
    filling = padding_batch(large)
    assert (filling.index == -1).all() and not filling.weights.any()
    assert filling.encoder is large.encoder


@pytest.mark.long
@pytest.mark.parametrize("scores, two_parts", [("restricted", False), ("full", True)])
def test_runs_with_fewer_label_words_are_filled_up(scores, two_parts):
    """Of 2 classes beside 3, as if they were alone."""
    word = lambda n: np.arange(n).reshape(n, 1, 1)
    make = lambda rows: LabelWords(np.array(rows), word(len(rows)), 0 * word(len(rows)), scores)
    heads = [make([5, 9, 20]), make([7, 30])]
    model, starts, frozen = parts(
        "soft", head=LabelWords((5, 9, 20), (((0,),),), (((0,),),), scores)
    )
    wrap = AnswerHead if two_parts else lambda head, _: head
    models = [dataclasses.replace(model, heads={"main": wrap(head, head)}) for head in heads]
    members = [
        Member(GridRun(str(i), {}, None, None), None, model, *[None] * 8)
        for i, model in enumerate(models)
    ]
    words = [PerRun(label_words, {}) for label_words in varying_label_words(members).values()]
    batch = batch_of("soft", 3)
    group = jit(make_group_scores(models[0], is_shared=True))
    actual = group(stack_trees(starts[:2]), frozen, batch, stack_trees(words), None)
    for i, label_words in enumerate(models):
        expected = jit(make_eval_step(label_words))(starts[i], frozen, batch)
        pairs = zip(actual, expected, strict=True) if two_parts else [(actual, expected)]
        for part, right in pairs:
            n = len(heads[i].rows)
            assert_close(part[i][:, :n], right[:, :n])
            assert_close(part[i][:, 3:], right[:, n:])  # the best of all other words
            assert (part[i][:, n:3] == ABSENT).all()


def make_programs(case, mesh, runs, **options):
    """Makes (programs, states, batch, own) on a mesh."""
    placement = make_placement(*mesh, devices=jax.devices()[: mesh[0] * mesh[1]], **options)
    model, starts, frozen = parts(case)
    frozen = put_global(frozen, placement.param_shardings(frozen))
    tx = adamw(0.01)
    states = [make_state(starts[i % 3], tx, jax.random.key(i)) for i in range(runs)]
    programs = Programs(placement, model, tx, OBJECTIVES, frozen, states[0])
    batches = [batch_of(case, i) for i in range(runs)]
    batch = programs.put_batch(stack_batches(batches, PAD, "right"), runs)
    return programs, programs.stack(states), batch, programs.put_per_run([NONE] * runs)


@pytest.mark.long
@pytest.mark.parametrize(
    "case, mesh, runs, apart",
    [("prefix", (4, 1), 8, True), ("soft", (4, 2), 4, True), ("prefix", (4, 1), 3, False),
     ("soft", (2, 1), 4, True)],
)  # fmt: skip
def test_runs_divide_over_the_data_axis(case, mesh, runs, apart):
    fsdp = mesh == (2, 1)
    programs, state, batch, per_run = make_programs(case, mesh, runs, fsdp=fsdp)
    one, expected, same, _ = make_programs(case, (1, 1), runs)
    assert programs.is_apart(runs) == apart
    work = count_work(programs.compile(state, batch, per_run).as_text())
    if fsdp:  # weights are joined, and nothing is summed
        assert set(work.counts) == {"all-gather"}
    elif apart and mesh[1] == 1:
        assert not work.counts, "the devices have nothing to tell each other"
    elif apart:  # the parts of heads, words and layers are joined; each device has its own runs
        whole = count_work(one.compile(expected, same, per_run).as_text())
        assert work.flops < whole.flops / 4
    state, measured = programs.train(state, batch, per_run)
    expected, right = one.train(expected, same, one.put_per_run([NONE] * runs))
    assert_close(jax.device_get(measured), jax.device_get(right), rtol=1e-4)
    # AdamW's first step is the gradient's sign: what is compared is the gradient's moments.
    assert_close(*(jax.device_get(s.opt_state) for s in (state, expected)), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(1, 1), (4, 1)])
def test_computed_prompts_are_folded(mesh):
    """What is scored with holds what the prompt gives, and nothing that computes it."""
    programs, state, _, per_run = make_programs("computed", mesh, 4)
    batch = batch_of("computed", 7)
    model = programs._model
    expected = programs.scores(model.prompt, state.trainable, batch, per_run, 4, is_shared=True)
    again, *_ = make_programs("computed", mesh, 4)
    prompt, folded = again.fold(state.trainable, batch_of("computed", 1), per_run, 4)
    assert {name for name in folded if name.startswith("prompt/")} == {"prompt/k", "prompt/v"}
    assert folded["prompt/k"].shape[:2] == (4, model.backbone.dims.layers)
    actual = again.scores(prompt, folded, batch, per_run, 4, is_shared=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert np.ptp(expected, axis=0).max() > 0.01


def test_rows_are_picked_kept_and_renewed():
    programs, state, _, _ = make_programs("prefix", (4, 1), 8)
    whole = jax.device_get(state.trainable)
    assert_equal(programs.select_run(state.trainable, 5), jax.tree.map(lambda x: x[5], whole))
    better = np.arange(8) % 2 == 0
    twice = jax.tree.map(lambda x: 2 * x, state.trainable)
    best = programs.update_best(jax.tree.map(jnp.copy, state.trainable), twice, better)
    for row in range(8):
        expected = jax.tree.map(lambda x, row=row: x[row] * (2 if better[row] else 1), whole)
        assert_equal(jax.tree.map(lambda x, row=row: x[row], best), expected)
    remaining, best = programs.take(state, best, [1, 2, 5, 6])
    assert_equal(remaining.trainable, jax.tree.map(lambda x: x[np.array([1, 2, 5, 6])], whole))
    assert remaining.step.shape == (4,) and programs.round(7) == 4 and programs.round(3) == 3


@pytest.mark.long
def test_memory_grows_with_the_runs_and_cuts_them():
    programs, _, _, _ = make_programs("prefix", (1, 1), 1)
    batch = batch_of("prefix", 0)
    one, two, four = (memory.bytes_needed(programs, n, batch, NONE) for n in (1, 2, 4))
    assert 0 < one < two < four
    assert four - two == pytest.approx(2 * (two - one), rel=0.2)
    fit = lambda wanted, free: memory.max_runs_in_memory(programs, wanted, batch, NONE, free)
    assert fit(4, 2 * four) == 4
    assert fit(4, two / memory.USABLE_SHARE + 1) == 2
    assert fit(4, one) == 1
    assert 2**20 < memory.free_bytes(programs.placement.mesh) < 2**50


def test_the_best_rate_of_each_seed_is_chosen_on_dev():
    result = lambda dev, test: RunResult(
        best_step=1, dev={"accuracy": dev}, test={"accuracy": test}
    )
    tried = [(10, 1, 0.5, 0.9), (10, 2, 0.7, 0.3), (20, 1, 0.6, 0.4), (20, 2, 0.6, 0.8)]
    runs = [({"seed": s, "optim.lr": r}, result(dev, test)) for s, r, dev, test in tried]
    assert select_best_runs(runs) == [1, 2]
    broken = [*runs, ({"seed": 10, "optim.lr": 3}, result(float("nan"), 0.9))]
    assert select_best_runs(broken) == select_best_runs(runs)  # NaN is below all else


def test_a_dev_value_of_nan_is_beaten():
    stand = Progress()
    values = (float("nan"), -3.0, float("nan"), -1.0)
    options = dict(dev={}, last=False, patience=0)
    better = [stand.note_dev(step, value, **options) for step, value in enumerate(values)]
    assert better == [True, True, False, True] and stand.best.step == 3


def test_the_mean_over_folds_chooses():
    """Of each seed all folds of the best learning rate; one that lacks a fold is not compared."""
    dev = {
        1e-3: {0: (0.9, 0.5), 1: (0.4, 0.7)}, 1e-2: {0: (0.8, 0.7), 1: (0.5, 0.5)},
        1e-1: {0: (0.99,), 1: (0.1, 0.1)},
    }  # fmt: skip
    runs = [
        (
            {"data.seed": seed, "data.protocol.fold": fold, "optim.lr": rate},
            RunResult(best_step=1, dev={"accuracy": score}),
        )
        for rate, seeds in dev.items()
        for seed, scores in seeds.items()
        for fold, score in enumerate(scores)
    ]
    chosen = [runs[i][1].dev["accuracy"] for i in select_best_runs(runs)]
    assert chosen == [0.8, 0.7, 0.4, 0.7]  # means 0.75 > 0.7 of seed 0, 0.55 > 0.5 of seed 1


def test_programs_are_compiled_for_few_numbers_of_runs():
    assert program_sizes(20) == [20, 10, 5, 3, 2, 1] and program_sizes(1) == [1]
