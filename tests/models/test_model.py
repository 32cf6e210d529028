"""The composition of backbone, method and heads."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, assert_equal, jit, make_batch, make_params, make_tiny

from jaxprompt.data.batches.stacking import stack_batches
from jaxprompt.heads import linear, tags, verbalizer
from jaxprompt.models.bank import Bank
from jaxprompt.models.model import Model, positions_read
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.prompts import make_prompt
from jaxprompt.training.evaluation import scoring_step
from jaxprompt.tree import flatten, merge, split_trainable, trainable_mask
from jaxprompt.types import Injection, Role, SharedPrefix

HEAD = linear.Classifier(3, dropout=0.0)


def make_model(method="soft", family="bert", **fields):
    backbone, weights = make_tiny(family)
    model = Model(backbone, make_prompt(method, backbone.dims, **fields), {"main": HEAD})
    return model, weights


def test_init_keeps_the_backbone_and_draws_the_rest():
    model, weights = make_model(length=4)
    params = model.init(jax.random.key(0), weights)
    assert params["backbone"] is weights
    shapes = {name: leaf.shape for name, leaf in flatten(params).items() if "backbone" not in name}
    expected = {
        "head/main/out/bias": (3,),
        "head/main/out/kernel": (16, 3),
        "prompt/table": (4, 16),
    }
    assert shapes == expected
    assert_equal(params["prompt"], model.init(jax.random.key(0), weights)["prompt"])
    other = model.init(jax.random.key(1), weights)
    assert np.abs(other["prompt"]["table"] - params["prompt"]["table"]).max() > 0


def test_equal_models_share_their_programs():
    step = functools.partial(scoring_step, make_placement(1, 1))
    first, other = step(make_model(length=4)[0]), step(make_model(length=5)[0])
    assert step(make_model(length=4)[0]) is first is not other


@pytest.mark.long_cases("1")
@pytest.mark.parametrize("masks", [1, 7])
def test_padding_changes_no_dropout(masks):
    """Nor where it makes few of what is read: 7 of 24 positions, and not of 12."""
    backbone, weights = make_tiny("bert", dropout=0.3)
    prompt = make_prompt("prefix", backbone.dims, length=2)
    model = Model(backbone, prompt, {"main": tags.TagScores(5, 0.0)})
    batch, longer = make_batch(masks=masks), make_batch(1, masks=masks, length=24)
    wide = jax.tree.map(lambda x: x[0], stack_batches([batch, longer], 9, "right"))
    assert (positions_read(batch) is None) == (masks == 7) and positions_read(wide) is not None
    params, key = make_params(model, weights), jax.random.key(0)
    draws = dict(deterministic=False, key=key)
    score = jit(lambda batch: model.forward(params, batch, **draws))
    alone, beside = map(score, (batch, wide))
    assert_close(alone, beside, 1e-5)
    assert np.abs(alone - jit(model.forward)(params, batch)).max() > 0.01
    # Where all batches are of one length it may be picked, and dropout is another.
    steady = dataclasses.replace(model, varies=False)
    actual = jit(lambda batch: steady.forward(params, batch, **draws))(wide)
    assert np.allclose(actual, beside, atol=1e-5) == (masks == 1)


def test_init_with_choices():
    backbone, weights = make_tiny()
    model = Model(backbone, make_prompt("none", backbone.dims), {"main": linear.Classifier(1)})
    params = model.init(jax.random.key(0), weights, choices=4)
    assert params["head"]["main"]["out"]["kernel"].shape == (16, 1)
    assert jit(model.forward)(params, make_batch(rows=2, choices=4)).shape == (2, 4)


def test_a_model_without_prompt_is_the_backbone():
    model, weights = make_model("none")
    batch = make_batch()
    hidden = jit(model.hidden)(make_params(model, weights), batch)
    run = lambda p, b: model.backbone.apply({"params": p}, b, Injection(), deterministic=True)
    plain = jit(run)(weights, batch)
    assert_equal(hidden, plain)


def test_parts_without_numbers_survive_split_and_merge():
    """Neither the method nor the head has a parameter, so the merged tree names neither."""
    backbone, weights = make_tiny()
    where = np.array([[[0]], [[1]]])
    head = verbalizer.LabelWords(np.array([7, 9]), where, np.zeros_like(where))
    model = Model(backbone, make_prompt("none", backbone.dims), {"main": head})
    params = model.init(jax.random.key(0), weights)
    merged = merge(*split_trainable(params, trainable_mask(params, [r"backbone/.*"])))
    assert set(merged) == {"backbone"}
    forward = jit(model.forward)
    assert_equal(forward(merged, make_batch()), forward(params, make_batch()))


def with_words(rows, scores="restricted"):
    backbone, _ = make_tiny()
    where = np.array([[[0]], [[1]]])
    words = verbalizer.LabelWords(np.array(rows), where, np.zeros_like(where), scores)
    heads = {"main": verbalizer.AnswerHead(words, words), "other": words}
    return Model(backbone, make_prompt("soft", backbone.dims, length=2), heads)


@pytest.mark.parametrize("make", [lambda m: m, lambda m: Bank(m.backbone, (*m.heads.values(),))])
def test_equal_label_words_are_the_same_program(make):
    """Their arrays have no hash of their own: else nothing that is compiled would be shared."""
    one, equal = make(with_words([7, 9])), make(with_words([7, 9]))
    assert one == equal and hash(one) == hash(equal)
    others = [make(with_words(*words)) for words in (([7, 8], "restricted"), ([7, 9], "full"))]
    assert all(one != other for other in others) and one != "a text"


def test_no_gradient_reaches_the_words_through_the_method():
    """A method that starts from the word table must not train it by that way."""
    model, weights = make_model(length=2)

    class Reads(type(model.prompt)):
        def __call__(self, batch, embed, *, deterministic):
            slots = embed[None, :2]
            return Injection(encoder=Injection().encoder._replace(slots=slots))

    model = Model(model.backbone, Reads(model.prompt.dims, length=2), model.heads)
    params = make_params(model, weights)
    batch = make_batch(slots=2)
    words = jax.grad(lambda p: model.inject(p, batch).encoder.slots.sum())(params)
    assert float(jnp.abs(words["backbone"]["embed"]["word"]["table"]).max()) == 0


def test_dropout_needs_a_key_and_follows_it():
    backbone, weights = make_tiny(dropout=0.3)
    model = Model(backbone, make_prompt("prefix", backbone.dims, length=2), {"main": HEAD})
    params, batch = make_params(model, weights), make_batch(shift=2)
    run = jit(lambda key: model.forward(params, batch, deterministic=False, key=key))
    first, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))
    assert_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


def test_each_part_of_a_model_has_a_key_of_its_own():
    """By the numbers of earlier versions: equal keys would drop alike in prompt and head."""
    keys = {}

    def part(name, **fields):
        def apply(variables, *inputs, rngs, method=name, **how):
            keys[method] = rngs
            return Injection() if name == "prompt" else jnp.zeros((2, 3, 4))

        return SimpleNamespace(apply=apply, **fields)

    bound = SimpleNamespace(words=lambda: jnp.zeros((9, 4)))
    cfg = SimpleNamespace(dropout=0.1, attention_dropout=0.1)
    model = Model(
        part("backbone", bind=lambda params: bound, cfg=cfg),
        part("prompt", position_shift=lambda: 0), {"main": part("head", reads_all=True)},
        shared_prefix=SharedPrefix((7,), (-1,), (0,), (Role.HARD,)),
    )  # fmt: skip
    key = jax.random.key(3)
    model.forward({"backbone": {}}, make_batch(rows=2), deterministic=False, key=key)
    numbers = {"prompt": 0, "backbone": 1, "head": 2, "encode_shared_prefix": 4}
    assert keys.keys() == numbers.keys()
    for name, number in numbers.items():
        assert keys[name]["dropout"] == jax.random.fold_in(key, number)
        assert keys[name]["draw"] == jax.random.fold_in(key, 3)


def test_bfloat16_backbone_with_float32_parameters():
    backbone, weights = make_tiny()
    half = backbone.clone(
        cfg=backbone.cfg.__class__(**vars(backbone.cfg) | {"dtype": jnp.bfloat16})
    )
    prompt, batch = make_prompt("prefix", backbone.dims, length=2), make_batch(shift=2)
    full, low = (Model(b, prompt, {"main": HEAD}) for b in (backbone, half))
    params = make_params(full, weights)
    scores = jit(low.forward)(params, batch)
    assert (
        jax.eval_shape(low.hidden, params, batch).dtype == jnp.bfloat16
        and scores.dtype == jnp.float32
    )
    assert_close(scores, jit(full.forward)(params, batch), rtol=0.1)
