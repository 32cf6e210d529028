"""Flat names, masks by pattern, and the split that keeps frozen weights out of everything."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import assert_close, assert_equal, jit, make_batch, make_params, make_tiny

from jaxprompt.errors import InputError
from jaxprompt.heads import linear
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.training.optim import make_optimizer
from jaxprompt.tree import (
    cast,
    count,
    flatten,
    has_layer_lists,
    is_layer_list,
    merge,
    parameter_table,
    select_layer,
    split_layers,
    split_trainable,
    stack_layers,
    trainable_mask,
    unflatten,
)

PARAMS = {
    "prompt": {"table": np.ones((2, 3), np.float32)},
    "head": {"main": {"bias": np.zeros(3, np.float32)}},
    "backbone": {"layers": {"mlp": {"bias": np.full(4, 2, np.float32)}}},
}


def test_flatten_names_every_leaf_and_comes_back():
    flat = flatten(PARAMS)
    assert list(flat) == ["backbone/layers/mlp/bias", "head/main/bias", "prompt/table"]
    assert flat["prompt/table"] is PARAMS["prompt"]["table"]
    assert unflatten(flat) == PARAMS


def test_separate_layers_stand_for_a_stack():
    planes = {"codes": np.zeros((3, 4, 2), np.uint8), "scale": np.ones((3, 1, 2), np.float16)}
    backbone = {
        "layers": {"bias": np.arange(6.0).reshape(3, 2), "up": {"kernel": planes}},
        "later_layers": {"scale": np.ones((2, 2))},
    }
    split = split_layers(backbone)
    flat = flatten(split)
    assert list(flat) == list(flatten(backbone)) and count(split) == count(backbone) == 6 + 192 + 4
    bias = flat["layers/bias"]
    assert is_layer_list(bias) and not is_layer_list(flat["later_layers/scale"])
    assert bias.shape == (3, 2) and bias.size == 6 and bias.nbytes == 48 and len(bias) == 3
    assert bias[2].tolist() == [4, 5] and np.array_equal(bias, backbone["layers"]["bias"])
    assert_equal(select_layer(split["layers"], 1), select_layer(backbone["layers"], 1))
    assert_equal(stack_layers(split)["layers"]["up"], backbone["layers"]["up"])
    assert has_layer_lists(split) and not has_layer_lists(backbone)


@pytest.mark.parametrize(
    "patterns, names",
    [
        ([r"prompt/.*"], {"prompt/table"}),
        ([r"prompt/.*", r"head/.*"], {"prompt/table", "head/main/bias"}),
        ([r".*/bias"], {"backbone/layers/mlp/bias", "head/main/bias"}),
        ([r".*"], {"backbone/layers/mlp/bias", "head/main/bias", "prompt/table"}),
    ],
)
def test_patterns_match_whole_names(patterns, names):
    mask = flatten(trainable_mask(PARAMS, patterns))
    assert {name for name, marked in mask.items() if marked} == names
    trainable, frozen = split_trainable(PARAMS, unflatten(mask))
    assert set(trainable) == names and not set(trainable) & set(frozen)
    assert merge(trainable, frozen) == PARAMS


@pytest.mark.parametrize(
    "patterns, words",
    [
        ([r"promt/.*"], ["'promt/.*'", "matches no parameter", "nearest: prompt/table"]),
        ([r"prompt/.*", r"prompt"], ["'prompt' matches no parameter", "prompt/table"]),
        ([r"zzz"], ["known: backbone/layers/mlp/bias, head/main/bias, prompt/table"]),
        ([r"prompt/(.*"], ["is not a regular expression", "unterminated"]),
        ([], ["nothing to train", "config.trainable"]),
    ],
)
def test_patterns_that_train_nothing_are_errors(patterns, words):
    with pytest.raises(InputError) as error:
        trainable_mask(PARAMS, patterns)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_count_and_overview():
    trainable, frozen = split_trainable(PARAMS, trainable_mask(PARAMS, [r"prompt/.*"]))
    assert count(PARAMS) == 13 and count(trainable) == 6
    lines = parameter_table(trainable, frozen).splitlines()
    assert lines[0].split() == ["prompt/table", "[2,", "3]", "6"]
    assert lines[1] == "trainable 6 of 13 parameters (46.1538%)"


def test_cast_leaves_integers():
    params = cast({"x": jnp.ones(2), "n": jnp.arange(2)}, jnp.bfloat16)
    assert params["x"].dtype == jnp.bfloat16 and params["n"].dtype == jnp.int32


@pytest.mark.long_cases("patterns1")
@pytest.mark.parametrize("patterns", [(r"prompt/.*", r"head/.*"), (r"backbone/.*bias", r"head/.*")])
def test_split_equals_partition_of_the_whole_tree(patterns):
    """Gradients of everything, frozen parts set to zero by optax, give the same numbers."""
    backbone, weights = make_tiny()
    prompt = make_prompt("prefix", backbone.dims, length=3)
    model = Model(backbone, prompt, {"main": linear.Classifier(3, dropout=0.0)})
    params = make_params(model, weights)
    mask = trainable_mask(params, patterns)

    def loss(tree, batch):
        total, n = cross_entropy(model.forward(tree, batch), batch.labels, batch.weights)
        return total / n

    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1))
    labels = jax.tree.map(lambda marked: "train" if marked else "freeze", mask)
    whole_tx = optax.partition({"train": adam, "freeze": optax.set_to_zero()}, labels)
    rates = dict(prompt=0.01, head=0.01, backbone=0.01)
    split_tx = make_optimizer("adamw", lambda step: 1.0, rates, weight_decay=0.1, clip=0.5)

    @jit
    def whole_step(tree, state, batch):
        updates, state = whole_tx.update(jax.grad(loss)(tree, batch), state, tree)
        return optax.apply_updates(tree, updates), state

    @jit
    def split_step(trainable, state, frozen, batch):
        grads = jax.grad(lambda t: loss(merge(t, frozen), batch))(trainable)
        updates, state = split_tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state

    whole, whole_state = params, whole_tx.init(params)
    trainable, frozen = split_trainable(params, mask)
    state = split_tx.init(trainable)
    for seed in range(3):
        batch = make_batch(seed, shift=3)
        whole, whole_state = whole_step(whole, whole_state, batch)
        trainable, state = split_step(trainable, state, frozen, batch)
    assert_close(trainable, split_trainable(whole, mask)[0])
    assert_equal(split_trainable(whole, mask)[1], frozen)
    momenta = [x for x in jax.tree.leaves(state) if x.ndim]
    assert count(momenta) == 2 * count(trainable)
