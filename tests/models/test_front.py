"""What all rows begin with runs once: scores, gradients and texts are those of whole rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from tiny import assert_equal, jit, make_params, make_tiny

from jaxprompt.config.run import GenerateConfig
from jaxprompt.data.batches.batching import Layout, one_batch
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.errors import InputError
from jaxprompt.heads.linear import Classifier
from jaxprompt.models.generation import check_new_tokens, generate
from jaxprompt.models.model import Model
from jaxprompt.parallel.flops import count_flops
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.prompts import make_prompt
from jaxprompt.runs.grid.batched_steps import PerRun, make_group_prefixes, make_group_scores
from jaxprompt.training.evaluation import (
    compile_step,
    generation_step,
    make_search,
    predict_scores,
    scoring_step,
    shared_prefix_fn,
)
from jaxprompt.tree import merge, split_trainable, trainable_mask
from jaxprompt.types import Role, SharedPrefix

METHODS = {
    "soft": dict(length=3),
    "prefix": dict(length=2, layers="2-2"),
    "compose": dict(parts="prefix(length=2)+soft(length=3)"),
}
WORDS = [7, 9]  # of the template, behind the soft tokens
CLASSES = 3


def make_model(family, method, stack="scan"):
    backbone, weights = make_tiny(family, stack=stack, num_hidden_layers=3, n_layer=3)
    prompt = make_prompt(method, backbone.dims, **METHODS[method])
    model = Model(backbone, prompt, {"main": Classifier(CLASSES, dropout=0.0)})
    params = make_params(model, weights)
    return model, split_trainable(params, trainable_mask(params, prompt.TRAINABLE))


def make_rows(slots, count=5):
    """Makes rows of soft tokens, the template's words and texts of differing lengths."""
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        text = rng.integers(10, 50, 1 + 2 * i)
        size = slots + len(WORDS) + len(text)
        slot = np.full(size, -1, np.int32)
        slot[:slots] = np.arange(slots)
        roles = [Role.SOFT] * slots + [Role.HARD] * len(WORDS) + [Role.TEXT] * len(text)
        ids = np.array([0] * slots + WORDS + text.tolist(), np.int32)
        last, places = np.array([size - 1], np.int32), np.arange(size, dtype=np.int32)
        types = np.zeros(size, np.int32)
        rows.append([Encoded(ids, slot, types, np.array(roles, np.int8), places, last)])
    return rows


def lay(model, side):
    """Lays the same rows whole, and without their front. -> models and batches of both"""
    slots = model.prompt.num_slots()
    rows = make_rows(slots)
    front = SharedPrefix(*(tuple(x[: slots + 1].tolist()) for x in rows[0][0][:4]))
    assert front.slot == (*range(slots), -1) and front.ids[slots:] == (WORDS[0],)
    whole = Layout(5, 24, 0, side=side, shift=model.prompt.position_shift())
    layouts = whole, dataclasses.replace(whole, shared_prefix=front)
    batches = [one_batch(rows, [0, 1, 2, 0, 1], layout) for layout in layouts]
    return (model, dataclasses.replace(model, shared_prefix=front)), batches


def test_a_front_takes_its_positions_of_what_is_written():
    """Rows are without it, and what is written stands behind both."""
    model, _ = make_model("gpt2", "soft", "scan")
    (_, model), (_, batch) = lay(model, "right")
    taken = len(model.shared_prefix.ids) + int(batch.read.mask.sum(1).max())
    # Padding takes no positions.
    assert len(model.shared_prefix.ids) + batch.read.ids.shape[1] > taken
    room = model.backbone.dims.max_len - taken
    check_new_tokens(model, batch, room)
    with pytest.raises(InputError, match=f"^{taken} tokens of input .* {room} are free;"):
        check_new_tokens(model, batch, room + 1)


@pytest.mark.default_cases("llama-prefix-left")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scores_and_gradients_are_those_of_whole_rows(family, method, side):
    model, (trainable, frozen) = make_model(family, method, ("scan", "unroll")[side == "left"])
    models, batches = lay(model, side)
    weights = np.random.default_rng(1).normal(size=(5, CLASSES)).astype(np.float32)

    def look(model, batch):
        def scored(trainable):
            scores = model.forward(merge(trainable, frozen), batch)
            return (scores * weights).sum(), scores

        gradient, scores = jit(jax.grad(scored, has_aux=True))(trainable)
        return np.asarray(ravel_pytree(gradient)[0]), np.asarray(scores)

    whole, shared = (look(*pair) for pair in zip(models, batches, strict=True))
    for actual, expected in zip(shared, whole, strict=True):
        assert np.linalg.norm(actual - expected) <= 1e-6 * np.linalg.norm(expected)
        assert np.linalg.norm(expected) > 0.01


@pytest.mark.long_cases("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_texts_are_those_behind_whole_rows(family):
    model, (trainable, frozen) = make_model(family, "compose")
    models, batches = lay(model, "right")
    write = lambda model, batch: generate(
        model, merge(trainable, frozen), batch, max_new_tokens=4, eos=1, pad=0, num_beams=2
    )
    whole, shared = (
        jit(write, static_argnums=0)(*pair) for pair in zip(models, batches, strict=True)
    )
    assert_equal(shared[:2], whole[:2])
    np.testing.assert_allclose(shared.scores, whole.scores, rtol=1e-5)


@pytest.mark.default_cases("prefix")
@pytest.mark.parametrize("method", METHODS)
def test_an_evaluation_runs_the_front_once(method, monkeypatch):
    """Its batches hold no work of the front, and their scores are those of one program."""
    model, (trainable, frozen) = make_model("llama", method)
    (_, shared), (_, batch) = lay(model, "right")
    begun = []

    def run_shared_prefix(self, params):
        begun.append(self.shared_prefix)
        return original(self, params)

    original = Model.run_shared_prefix
    monkeypatch.setattr(Model, "run_shared_prefix", run_shared_prefix)
    params = merge(trainable, frozen)
    expected = jit(shared.forward)(params, batch)
    scores = predict_scores(
        scoring_step(make_placement(1, 1), shared), trainable, frozen, [batch] * 3, 5
    )
    assert len(begun) == 1  # traced once, and run once a pass
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)
    shared_kv = shared.run_shared_prefix(params)
    assert shared_kv[0].shape[1:3] == (
        1,
        model.prompt.position_shift() + len(shared.shared_prefix.ids),
    )
    whole = count_flops(lambda p, b: shared.forward(p, b), params, batch)
    front = count_flops(lambda p: shared.run_shared_prefix(p), params)
    rest = count_flops(lambda p, b, r: shared.forward(p, b, shared_kv=r), params, batch, shared_kv)
    assert 0 < front and whole - rest == pytest.approx(front, rel=0.02)


@pytest.mark.long
def test_runs_of_a_grid_have_fronts_of_their_own():
    model, (trainable, frozen) = make_model("gpt2", "soft")
    (_, shared), (_, batch) = lay(model, "right")
    each = [trainable, jax.tree.map(lambda x: 2 * x, trainable)]
    both, per_run = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), PerRun({}, {})
    shared_kv = jit(make_group_prefixes(shared))(both, frozen, per_run)
    scores = jit(make_group_scores(shared, is_shared=True))(both, frozen, batch, per_run, shared_kv)
    expected = [jit(shared.forward)(merge(run_params, frozen), batch) for run_params in each]
    assert np.linalg.norm(scores - np.array(expected)) <= 1e-6 * np.linalg.norm(expected)
    assert float(jnp.abs(expected[0] - expected[1]).max()) > 0.01


@pytest.mark.long
def test_texts_of_a_pass_are_those_of_one_program():
    model, (trainable, frozen) = make_model("gpt2", "compose")
    (_, shared), (_, batch) = lay(model, "left")
    how = dict(max_new_tokens=4, eos=1, pad=0, num_beams=2)
    expected = jit(lambda t, b: generate(shared, merge(t, frozen), b, **how).ids)(trainable, batch)
    generation, layout = GenerateConfig(max_new_tokens=4, num_beams=2), Layout(5, 24, 0, ends=(1,))
    step = generation_step(shared, make_search(generation, layout))
    step = compile_step(make_placement(1, 1), step, shared_prefix_fn(shared))
    index, (actual, *_) = step(trainable, frozen)(batch)
    np.testing.assert_array_equal(index, batch.index)
    np.testing.assert_array_equal(actual, expected)


def test_a_row_that_begins_otherwise_is_no_row_of_the_layout():
    rows = make_rows(3)
    front = SharedPrefix(*(tuple(x[:4].tolist()) for x in rows[0][0][:4]))
    rows[1][0].ids[3] = 11
    with pytest.raises(ValueError, match="does not begin with"):
        one_batch(rows, [0] * 5, Layout(5, 24, 0, shared_prefix=front))


@pytest.mark.long
def test_dropout_of_the_front_is_drawn_once():
    backbone, weights = make_tiny("gpt2", dropout=0.3)
    prompt = make_prompt("soft", backbone.dims, length=4)
    model = Model(backbone, prompt, {"main": Classifier(CLASSES)})
    params = make_params(model, weights)
    rows = make_rows(4, 2)[:1] * 4
    front = SharedPrefix(*(tuple(x[:4].tolist()) for x in rows[0][0][:4]))
    model = dataclasses.replace(model, shared_prefix=front)
    batch = one_batch(rows, [0] * 4, Layout(4, 16, 0, shared_prefix=front))
    injection = model.inject(params, batch)
    draw = lambda seed: (
        model.add_shared_prefix(
            params, injection, deterministic=False, key=jax.random.key(seed)
        ).encoder.prefix.k
    )
    first, again, other = (jnp.asarray(draw(seed)) for seed in (0, 0, 1))
    assert first.shape[1:3] == (1, 4)
    np.testing.assert_array_equal(first, again)
    assert float(jnp.abs(first - other).max()) > 0
