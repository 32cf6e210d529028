"""Scan, unroll and remat are one computation."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    assert_close,
    assert_equal,
    exact_jit,
    jit,
    make_batch,
    make_tiny,
    quantize_params,
)

from jaxprompt.backbones.bert import EncoderLayer
from jaxprompt.layers.stack import REMATS, init_stack, layer_segments, run_stack
from jaxprompt.parallel.hlo import count_work
from jaxprompt.tree import LayerList, flatten, split_layers
from jaxprompt.types import AttentionMask, Injection, Prefix, Stream

STACKS = ("unroll", "scan")
WAYS = list(itertools.product(STACKS, REMATS))
LAYERS = 3
# Wide enough for XLA's library kernels: what LLVM makes of smaller products depends on the loop
# around them, to the last bit.
SIZES = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4)
MASK = np.array([[[True, True]], [[False, False]], [[True, False]]])


@functools.cache
def run(stack, remat, dropout=0.0, wide=True):
    """Gives hidden states, then those under grad and the gradients of weights and prefix."""
    backbone, params = make_tiny(
        stack=stack,
        remat=remat,
        dropout=dropout,
        num_hidden_layers=LAYERS,
        **(SIZES if wide else {}),
    )
    dims = backbone.dims
    shape = (2, LAYERS, 1, 2, dims.heads, dims.head_dim)
    k, v = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    rngs = {"dropout": jax.random.key(3)} if dropout else None

    def forward(params, k, v, mask, batch):
        injection = Injection(encoder=Stream(prefix=Prefix(k, v, mask)))
        return backbone.apply(
            {"params": params}, batch, injection, deterministic=rngs is None, rngs=rngs
        )

    def loss(*args):
        hidden = forward(*args)
        return (hidden**2 * jnp.arange(hidden.shape[-1])).sum() / 1000, hidden

    args = params, k, v, MASK, make_batch(shift=2)
    compiled = exact_jit if wide else jit
    grad = compiled(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, hidden), grads = grad(*args)
    return None if dropout else exact_jit(forward)(*args), hidden, grads


@pytest.mark.long
@pytest.mark.parametrize("stack, remat", WAYS[1:])
def test_every_way_is_bit_equal_forward(stack, remat):
    expected, actual = run("unroll", "none"), run(stack, remat)
    assert_equal(actual[0], expected[0])
    assert_equal(actual[1], expected[1])
    assert_close(actual[2], expected[2], rtol=1e-5)
    weights, k, v = actual[2]
    assert np.abs(weights["layers"]["mlp"]["up"]["kernel"]).max(axis=(1, 2)).min() > 0
    for grad in (k, v):
        assert np.abs(grad[1]).max() == 0 and np.abs(grad[2][:, 1]).max() == 0  # masked
        assert np.abs(grad[0]).max() > 0 and np.abs(grad[2][:, 0]).max() > 0


@pytest.mark.long
@pytest.mark.parametrize("stack, remat", [("scan", "none"), ("unroll", "full"), ("scan", "dots")])
def test_every_way_drops_the_same_elements(stack, remat):
    expected, actual = run("unroll", "none", 0.2, False), run(stack, remat, 0.2, False)
    assert_close(actual[1], expected[1], rtol=1e-5)
    assert_close(actual[2], expected[2], rtol=1e-5)
    assert np.abs(expected[1] - run("unroll", "none", 0.0, False)[1]).max() > 0.1


class Recorder:
    """A layer that adds its number and dropout, and gives what it saw."""

    def apply(self, variables, x, part, shared, *, deterministic, rngs, return_kv=True):
        noise = jax.random.uniform(rngs["dropout"]) if rngs else 0.0
        y = x * shared + variables["params"]["scale"] * (noise + part["k"].sum())
        return y, {"x": x, "k": part["k"] + 1} if return_kv else None


def test_layers_draw_dropout_of_their_own():
    """Layers of equal weights on an input of zeros: what each drops must differ."""
    params, none = {"scale": jnp.array([1.0, 100.0, 10000.0])}, {"k": jnp.zeros((3, 2))}
    options = dict(remat="none", deterministic=False, key=jax.random.key(0))
    (one, _), (other, _) = (
        run_stack(Recorder(), params, jnp.zeros(()), none, 1.0, stack=stack, **options)
        for stack in STACKS
    )
    assert one == other
    draws = [jax.random.uniform(jax.random.fold_in(jax.random.key(0), i)) for i in range(3)]
    np.testing.assert_allclose(one, draws[0] + 100 * draws[1] + 10000 * draws[2], rtol=1e-6)
    assert len({float(draw) for draw in draws}) == 3


@pytest.mark.parametrize(
    "stack, remat, is_separate", [*((*way, False) for way in WAYS), ("auto", "none", True)]
)
def test_what_layers_give_is_collected(stack, remat, is_separate):
    """Each layer sees its share of the tree, all of the shared arguments, and the flags."""
    params, parts = {"scale": jnp.array([1.0, 10.0, 100.0])}, {"k": jnp.arange(6.0).reshape(3, 2)}
    options = dict(stack=stack, remat=remat, deterministic=True)
    if is_separate:
        params = {"scale": LayerList(params["scale"])}
    x, collected = run_stack(Recorder(), params, jnp.ones(()), parts, 2.0, **options)
    inputs = [1.0, 2 * 1 + 1, 2 * 3 + 10 * 5]
    assert x == 2 * inputs[-1] + 100 * 9
    assert_equal(collected, {"x": np.float32(inputs), "k": np.float32([[1, 2], [3, 4], [5, 6]])})
    y, none = run_stack(Recorder(), params, jnp.ones(()), parts, 2.0, return_kv=False, **options)
    assert y == x and none is None


@pytest.mark.long_cases("none")
@pytest.mark.parametrize("remat", REMATS)
def test_gradients_flow_through_what_is_collected(remat):
    params, parts = {"scale": jnp.array([1.0, 10.0, 100.0])}, {"k": jnp.arange(6.0).reshape(3, 2)}

    def loss(params, parts, stack):
        options = dict(stack=stack, remat=remat, deterministic=True)
        x, collected = run_stack(Recorder(), params, jnp.ones(()), parts, 2.0, **options)
        return x + (collected["x"] * jnp.array([0.0, 3.0, 7.0])).sum() + collected["k"].sum()

    one, other = (jax.grad(loss, argnums=(0, 1))(params, parts, stack) for stack in STACKS)
    assert_close(one, other, rtol=1e-6)
    # k of layer 0 reaches the sum by itself, by x of layers 1 and 2 and by the result.
    assert_close(one[1]["k"][0], np.full(2, 1 + 3 + 7 * 2 + 4, np.float32))


@pytest.mark.parametrize("remat", ["mlp", "full"])
def test_unrolled_layers_in_16_bits_are_recomputed(remat):
    """The first layer has a gradient through its prefix alone."""
    backbone, params = make_tiny(stack="unroll", remat=remat)
    backbone = backbone.clone(cfg=dataclasses.replace(backbone.cfg, dtype=jnp.bfloat16))
    dims = backbone.dims

    def loss(table):
        injection = Injection(encoder=Stream(prefix=Prefix(*table, None)))
        batch = make_batch(rows=2, shift=2)
        return backbone.apply({"params": params}, batch, injection, deterministic=True).sum()

    table = jnp.zeros((2, dims.layers, 1, 2, dims.heads, dims.head_dim))
    assert jax.eval_shape(jax.grad(loss), table).shape == table.shape


@pytest.mark.long
@pytest.mark.parametrize("family, remat", [
    ("t5", "mlp"), ("llama", "mlp"), ("gpt2", "mlp"), ("modernbert", "mlp"), ("bart", "mlp"),
    ("deberta_v2", "mlp"), ("t5", "dots"), ("llama", "dots"),
])  # fmt: skip
def test_every_family_recomputes_what_it_computed(family, remat):
    """With dropout, whose elements must be the same again; gradients of all matrices."""
    batch = make_batch(rows=2, family=family)

    def loss_and_grads(remat):
        backbone, params = make_tiny(family, stack="scan", remat=remat, dropout=0.2)
        keys = {"dropout": jax.random.key(1)}

        def loss(params):
            states = backbone.apply(
                {"params": params}, batch, Injection(), deterministic=False, rngs=keys
            )
            return sum((x * jnp.arange(x.shape[-1])).mean() for x in jax.tree.leaves(states))

        value, grads = jit(jax.value_and_grad(loss))(params)
        # The gradient of a key's bias is rounding alone.
        return value, {n: g for n, g in flatten(grads).items() if n.endswith("kernel")}

    assert_close(loss_and_grads(remat), loss_and_grads("none"), rtol=1e-5)


@pytest.mark.long
def test_remat_keeps_less():
    """Bytes that the compiled gradient needs beside arguments and results; layers in a loop."""
    batch, needed = make_batch(rows=32, length=32), {}
    for remat in REMATS:
        backbone, params = make_tiny(
            stack="scan", remat=remat, num_hidden_layers=8, intermediate_size=64
        )
        run = lambda p, b, m=backbone: m.apply({"params": p}, b, Injection(), deterministic=True)
        grad = jax.jit(jax.grad(lambda p, b, run=run: (run(p, b) ** 2).sum()))
        needed[remat] = grad.lower(params, batch).compile().memory_analysis().temp_size_in_bytes
    assert needed["full"] < needed["dots"] < needed["mlp"] < 0.9 * needed["none"]


def test_stacked_parameters_are_drawn_layer_by_layer():
    backbone, _ = make_tiny(num_hidden_layers=LAYERS)
    one = EncoderLayer(backbone.cfg)
    example = jnp.zeros((1, 2, 16)), None, AttentionMask(jnp.ones((1, 2), bool))
    params = jit(init_stack(one, LAYERS, *example))(jax.random.key(0))
    kernel = params["mlp"]["up"]["kernel"]
    assert kernel.shape == (LAYERS, 16, 24)
    assert np.abs(kernel[0] - kernel[1]).max() > 0.01
    keys = jax.random.split(jax.random.key(0), LAYERS)
    init = lambda k: one.init(k, *example, deterministic=True)["params"]
    second = jit(init)(keys[1])
    assert_close(jax.tree.map(lambda leaf: leaf[1], params), second, rtol=1e-6)


def interval(first, last, layers=6):
    number = np.arange(layers)[:, None, None]
    return np.broadcast_to((number >= first) & (number < last), (layers, 1, 4))


def tuned(stack, remat, mask, reads=None, **sizes):
    """Makes the loss of a prefix in a BERT of 6 layers, and its arguments."""
    backbone, params = make_tiny(stack=stack, remat=remat, num_hidden_layers=6, **SIZES | sizes)
    dims, batch = backbone.dims, make_batch(rows=4, length=32, shift=4)
    shape = (2, 6, 1, 4, dims.heads, dims.head_dim)
    table = np.random.default_rng(1).normal(size=shape).astype(np.float32)

    def loss(table, params):
        injection = Injection(encoder=Stream(prefix=Prefix(*table, mask)))
        hidden = backbone.apply(
            {"params": params}, batch, injection, deterministic=True, output_positions=reads
        )
        return (hidden**2 * jnp.arange(hidden.shape[-1])).mean()

    return loss, (table, params)


@pytest.mark.long
@pytest.mark.parametrize("stack, remat", WAYS)
def test_layers_without_the_prefix_are_spared_it(stack, remat):
    """The mask as a numpy array cuts the stack, as a traced one it hides columns: one result."""
    places = dict(max_position_embeddings=64)
    results = []
    for is_static in (True, False):
        mask = interval(2, 4) if is_static else jnp.asarray(interval(2, 4))
        loss, args = tuned(stack, remat, mask, **places)
        results.append(jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args))
    assert_close(*results)
    table = results[0][1][0]
    assert np.abs(table[:, 2:4]).min(axis=(0, 2, 3, 4, 5)).min() >= 0 < np.abs(table[:, 2:4]).max()
    assert np.abs(np.delete(table, [2, 3], axis=1)).max() == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8", "intervals", *REMATS])
def test_separate_layers_compute_what_a_scan_does(kind):
    """With codes, with a prefix in some layers and with every kind of remat."""
    mask, remat = interval(2 if kind == "intervals" else 0, 5), kind if kind in REMATS else "none"
    sizes = dict(max_position_embeddings=64, num_attention_heads=2)
    loss, (table, params) = tuned("scan", remat, mask, **sizes)
    if kind == "int8":
        params = quantize_params(params, 8)
    grad = jit(jax.value_and_grad(loss))
    (scanned, expected), (unrolled, gradient) = (
        grad(table, x) for x in (params, split_layers(params))
    )
    assert abs(unrolled - scanned) <= 1e-6 * abs(scanned)
    assert np.linalg.norm(gradient - expected) <= 1e-6 * np.linalg.norm(expected) > 0


@pytest.mark.long_cases("unroll")
@pytest.mark.parametrize("stack", STACKS)
def test_backward_work_ends_below_the_lowest_prompted_layer(stack):
    """A frozen layer costs one product forward and one backward where a gradient passes it; the
    lowest needs none through its own projections.
    """
    work, memory = {}, {}
    for first in (0, 3, 5):
        loss, args = tuned(stack, "none", interval(first, 6), max_position_embeddings=64)
        program = jax.jit(jax.grad(loss)).lower(*args).compile()
        work[first] = count_work(program.as_text()).flops
        memory[first] = program.memory_analysis().temp_size_in_bytes
    assert work[3] / work[0] == pytest.approx((6 + 3) / (6 + 6), abs=0.04)
    assert 6 / (6 + 6) < work[5] / work[0] < (6 + 1) / (6 + 6)
    assert memory[5] < memory[3] < memory[0]


def test_what_is_not_read_and_what_changes_nothing_is_not_computed():
    """In the compiled program: by H^2 per token a layer has 8 products each way, of which the first
    needs no gradient through its q, k and v, and the last its keys and values alone.
    """
    work = {}
    for stack, reads in itertools.product(STACKS, (None, np.zeros((4, 1), np.int32))):
        loss, args = tuned(stack, "none", interval(0, 6), reads, max_position_embeddings=64)
        program = jax.jit(jax.grad(loss)).lower(*args).compile()
        work[stack, reads is None] = count_work(program.as_text()).flops
    for everything in (True, False):
        assert work["scan", everything] == pytest.approx(work["unroll", everything], rel=1e-3)
    assert work["scan", False] / work["scan", True] == pytest.approx((96 - 15) / (96 - 3), abs=0.01)


def test_a_stack_is_cut_where_any_prefix_begins_or_ends():
    prefix = Prefix(np.zeros((6, 1, 4, 2, 2)), np.zeros((6, 1, 4, 2, 2)), interval(1, 4))
    cross = prefix._replace(mask=interval(2, 6), k=np.arange(6.0))
    cuts = layer_segments((prefix, cross, None), 0, 6)
    assert [cut[:2] for cut in cuts] == [(0, 1), (1, 2), (2, 4), (4, 6)]
    assert [tuple(part is not None for part in cut[2]) for cut in cuts] == [
        (False, False, False), (True, False, False), (True, True, False), (False, True, False),
    ]  # fmt: skip
    assert cuts[2][2][1].k.tolist() == [2, 3]
    everywhere = prefix._replace(mask=interval(0, 6))
    assert (
        len(layer_segments((everywhere, None), 0, 6))
        == len(layer_segments((None, None), 0, 6))
        == 1
    )
