"""Quantized matrices: what a code stands for, and what is never kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, make_batch, make_params, make_quantizable, quantize_params

from jaxprompt.backbones import families
from jaxprompt.convert.quantize import quantize, quantize_outputs
from jaxprompt.heads import label_rows, linear, verbalizer
from jaxprompt.layers.output import score_targets
from jaxprompt.layers.product import einsum
from jaxprompt.layers.quantized import (
    QUANTIZED,
    as_matrices,
    as_table,
    block_product,
    dequantize,
    dequantize_tree,
    input_axes,
    quantized_shapes,
)
from jaxprompt.models.generation import generate
from jaxprompt.models.model import Model, backbone_shapes
from jaxprompt.models.prompt_attention import attend_prompt
from jaxprompt.models.text_keys import text_keys
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.tree import BLOCK, count, flatten
from jaxprompt.types import TaskInfo


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("mean", "scale"), [(0.1, 1e-3), (0.1, 1.0), (0.1, 300.0), (0, 1e-4), (0, 1e-5), (0, 1e-6)]
)
def test_a_number_moves_by_half_a_step_at_most(bits, mean, scale):
    numbers = np.random.default_rng(0).normal(mean, scale, (6, 3 * BLOCK)).astype(np.float32)
    actual = np.asarray(dequantize(*quantize(numbers, bits), dtype=jnp.float32))
    blocks = numbers.reshape(6, 3, BLOCK)
    spread = np.ptp(blocks, axis=-1, keepdims=True)
    moved = np.abs(actual.reshape(blocks.shape) - blocks)
    rounding = 2.0**-10 * np.abs(blocks).max(-1, keepdims=True)  # of float16, minimum and scale
    assert (moved <= 0.5 * spread / (2**bits - 1) + rounding + 2.0**-24).all()
    assert actual.std() > 0.9 * numbers.std()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_what_the_definition_says(bits):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 2**bits, (2, 2, BLOCK))
    scale, minimum = (rng.normal(size=(2, 2)).astype(np.float16) for _ in range(2))
    expected = codes * scale[..., None].astype(float) + minimum[..., None]
    bytes_ = codes if bits == 8 else codes[..., :16] + 16 * codes[..., 16:]
    values = dequantize(bytes_.reshape(2, -1).astype(np.uint8), scale, minimum, jnp.float32)
    np.testing.assert_allclose(values, expected.reshape(2, -1), rtol=1e-6, atol=1e-6)


def test_constant_and_empty_blocks_are_exact():
    numbers = np.repeat(np.float32([[0.0, -1.5, 1e-9]]), BLOCK, axis=1)
    values = dequantize(*quantize(numbers, 4), dtype=jnp.float32)
    np.testing.assert_allclose(values, numbers, atol=1e-7)


def test_numbers_beyond_float16_are_refused():
    with pytest.raises(ValueError, match="float16"):
        quantize(np.full((1, BLOCK), 1e5, np.float32), 8)


def test_a_table_is_looked_up_as_an_array():
    numbers = np.random.default_rng(2).normal(size=(11, 2 * BLOCK)).astype(np.float32)
    table = as_table(quantize(numbers, 8)._asdict(), jnp.float32)
    whole = table.astype(jnp.float32)
    assert table.shape == whole.shape == numbers.shape and len(table) == 11
    ids = np.array([[0, 10], [3, -1]])
    np.testing.assert_array_equal(table[ids], whole[ids])


# A Llama whose embeddings are scaled, and whose local layers see a window.
GEMMA = dict(
    model_type="gemma2", head_dim=32, sliding_window=4, query_pre_attn_scalar=32,
    hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip


def make_both(family, storage, **how):
    """-> model, its params quantized, and the same as numbers"""
    if family == "gemma":
        family, how = "llama", how | GEMMA
    backbone, weights = make_quantizable(family, **how)
    codes = quantize_params(weights, storage)
    prompt = make_prompt("compose", backbone.dims, parts="soft(length=2)+prefix(length=3)")
    model = Model(backbone, prompt, {"main": linear.Classifier(3)})
    params = make_params(model, codes)
    return model, params, params | {"backbone": dequantize_tree(codes, jnp.float32)}


@pytest.mark.default_cases("bert", "t5")
@pytest.mark.parametrize("family", families())
def test_every_matrix_of_a_layer_is_quantized(family):
    backbone, weights = make_quantizable(family)
    names = flatten({"backbone": weights})
    unquantized = {name for name in names if not input_axes(name.partition("/")[2], "int8")}
    stacks = ("backbone/layers/", "backbone/decoder_layers/", "backbone/later_layers/")
    left = {name for name in unquantized if name.startswith(stacks) and name.endswith("kernel")}
    assert not left and "backbone/embed/word/table" not in unquantized
    for kind in (*QUANTIZED, "int8_blocks"):
        actual = {n: (x.shape, x.dtype) for n, x in backbone_shapes(backbone, kind).items()}
        flat = flatten({"backbone": quantize_params(weights, kind)})
        assert actual == {n: (x.shape, x.dtype) for n, x in flat.items()}
        assert count(flat) == count(names)
        assert quantized_shapes(names, kind).keys() == flat.keys()


@functools.partial(jax.jit, static_argnums=0)
def scores_and_slopes(model, params, batch):
    def loss(init_params):
        scores = model.forward(params | init_params, batch)
        return cross_entropy(scores, batch.labels, batch.weights)[0], scores

    return jax.grad(loss, has_aux=True)({"prompt": params["prompt"]})


# As the contract has it: by default those of different layers, and two of them quickly.
OFTEN = ("bert", "t5", "gpt2", "llama", "gemma", "modernbert", "deberta_v2")
CASES = [
    pytest.param(
        family, "scan", "none", "int4", id=family,
        marks=[pytest.mark.slow] * (family not in OFTEN[:2])
        + [pytest.mark.long] * (family not in OFTEN),
    )
    for family in (*families(), "gemma")
] + [
    pytest.param(family, stack, remat, storage, id=f"{family}-{stack}-{remat}-{storage}",
                 marks=pytest.mark.slow)
    for family, stack, remat, storage in (
        ("bert", "unroll", "none", "int8"), ("bert", "scan", "mlp", "int8"),
        ("bert", "scan", "full", "int8_blocks"), ("llama", "scan", "mlp", "int8_blocks"),
        ("t5", "unroll", "dots", "int4"), ("llama", "unroll", "full", "int8"),
        ("deberta", "scan", "none", "int8"), ("gpt2", "scan", "none", "int8"),
    )
]  # fmt: skip


@pytest.mark.default_cases(
    "albert", "bert", "deberta", "electra", "glm", "roberta", "bert-unroll-none-int8"
)
@pytest.mark.parametrize("family, stack, remat, storage", CASES)
def test_the_function_is_that_of_the_numbers(family, stack, remat, storage):
    model, codes, numbers = make_both(family, storage, stack=stack, remat=remat)
    family = "llama" if family == "gemma" else family
    prompt = model.prompt
    batch = make_batch(
        slots=prompt.num_slots(), shift=prompt.position_shift(), family=family,
        decoder_slots=prompt.num_decoder_slots(), decoder_shift=prompt.decoder_shift(),
    )  # fmt: skip
    actual, expected = (scores_and_slopes(model, p, batch) for p in (codes, numbers))
    # A scale per output multiplies sums, not values, so these are rounded differently.
    loose = 3e-5 if storage == "int8" else 1e-5
    assert_close(actual, expected, loose if family == "t5" or storage == "int8" else 1e-6)
    assert float(jnp.abs(jax.tree.leaves(expected[0])[0]).max()) > 0


@pytest.mark.default_cases("bert-scan-dots-int4")
@pytest.mark.long_cases("bert-scan-dots-int4", "llama-scan-dots-*", "bert-unroll-none-int8")
@pytest.mark.parametrize("storage", ["int4", "int8"])
@pytest.mark.parametrize("stack, remat", [("scan", "none"), ("scan", "dots"), ("unroll", "none")])
@pytest.mark.parametrize("family", ["bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_no_number_of_a_matrix_is_kept_for_the_backward_pass(family, stack, remat, storage):
    model, codes, numbers = make_both(family, storage, stack=stack, remat=remat)
    prompt = model.prompt
    batch = make_batch(slots=prompt.num_slots(), shift=prompt.position_shift(), family=family)

    def stores_matrix(params):
        def loss(prompt):
            scores = model.forward(params | {"prompt": prompt}, batch)
            return cross_entropy(scores, batch.labels, batch.weights)[0]

        stored = kept_of(loss, params["prompt"])
        return any(is_matrix(model, x.shape) for x in stored if x.dtype == jnp.float32)

    assert not stores_matrix(codes)
    assert stores_matrix(numbers)


def kept_of(loss, params):
    """Lists what the backward pass takes; nothing is computed."""
    return jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(loss, x)[1], params))


def is_matrix(model, shape):
    """Tells whether a shape is that of a layer's matrix, or of a stack of these."""
    leaves = backbone_shapes(model.backbone)
    whole = {x.shape for n, x in leaves.items() if input_axes(n.partition("/")[2], "int8")}
    whole |= {shape[1:] for shape in whole if len(shape) > 2}
    return shape in whole


def label_words():
    words = np.arange(3)[:, None, None]
    return verbalizer.LabelWords(np.arange(5, 8), words, 0 * words, "full")


@pytest.mark.long_cases("rows")
@pytest.mark.parametrize(
    "prompt, head",
    [
        ("soft", label_words()),
        ("dart", label_rows.LabelRows((1, 1, 1), "full")),
    ],
    ids=["words", "rows"],
)
def test_scores_of_a_whole_vocabulary_keep_codes_alone(prompt, head):
    backbone, weights = make_quantizable("bert")
    codes = quantize_params(weights, "int4")
    task_info = TaskInfo(3, (((5,),), ((6,),), ((7,),)), mask=3)
    model = Model(backbone, make_prompt(prompt, backbone.dims, task_info, length=2), {"main": head})
    params = make_params(model, codes)
    numbers = params | {"backbone": dequantize_tree(codes, jnp.float32)}
    batch = make_batch(slots=model.prompt.num_slots())

    def loss(prompt_params, params):
        scores = model.forward(params | {"prompt": prompt_params}, batch)
        return cross_entropy(scores[:, :3], batch.labels, batch.weights)[0]

    actual, expected = (jax.jit(jax.grad(loss))(params["prompt"], p) for p in (params, numbers))
    assert_close(actual, expected, 1e-6)
    table = (backbone.dims.vocab, backbone.dims.embed)

    def kept(params):
        return {
            x.shape
            for x in kept_of(lambda prompt_params: loss(prompt_params, params), params["prompt"])
        }

    assert table in kept(numbers) and table not in kept(params)


EQUATIONS = {"...x,vx->...v": 1, "btk,kn->btn": 0, "btnd,ndh->bth": (0, 1), "btnd,hnd->btnh": 0}


@pytest.mark.parametrize("equation, inputs", EQUATIONS.items())
def test_a_scale_of_an_output_multiplies_the_product(equation, inputs):
    """Also where the scaled axes are those of x, as in a gradient, and for rows of zeros."""
    rng, letters = np.random.default_rng(6), equation.replace("...", "bt")
    sizes = dict(zip("btxvkndh", (2, 3, 8, 5, 8, 3, 4, 6), strict=True))
    left, right, _ = letters.replace("->", ",").split(",")
    codes = rng.integers(-127, 128, [sizes[letter] for letter in right]).astype(np.int8)
    scale = np.abs(rng.normal(size=codes.shape).astype(np.float32)).max(inputs, keepdims=True)
    scale[(0,) * scale.ndim] = 0
    x = rng.normal(size=[sizes[letter] for letter in left]).astype(np.float32)
    matrix = as_matrices({"codes": jnp.asarray(codes), "scale": jnp.asarray(scale)})
    expected = np.einsum(letters, x.astype(float), codes * scale.astype(float))
    weights = rng.normal(size=expected.shape).astype(np.float32)
    y, grad = jax.vjp(lambda x: einsum(equation, x, matrix), x)
    assert_close(y, expected, 1e-6)
    back = f"{letters.split('->')[1]},{right}->{left}"
    assert_close(grad(weights)[0], np.einsum(back, weights, codes * scale.astype(float)), 1e-6)


def test_rows_are_quantized_to_127_steps_a_side():
    numbers = np.random.default_rng(7).normal(size=(4, 70)).astype(np.float32)
    numbers[1], numbers[2, 3] = 0, -9e4
    codes, scale = quantize_outputs(numbers)
    assert codes.dtype == np.int8 and scale.shape == (4, 1) and codes[2, 3] == -127
    limit = np.abs(numbers).max(1, keepdims=True) / 254 * (1 + 1e-6)
    assert (np.abs(codes * scale - numbers) <= limit).all()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_kernel_multiplies_a_few_rows_by_blocks(bits, platform):
    rng = np.random.default_rng(8)
    planes = quantize(rng.normal(0, 0.02, (128, 256)).astype(np.float32), bits)
    x = jnp.asarray(rng.normal(size=(5, 256)), jnp.bfloat16)
    planes[1][3, 2] = np.float16(3e-6)  # subnormal
    values = np.asarray(dequantize(*planes, dtype=jnp.bfloat16), float)
    codes = map(jnp.asarray, planes.T)
    actual = block_product.multiply_blocks(x, *codes, platform=platform, interpret=True)
    assert_close(actual, np.asarray(x, float) @ values.T, 1e-6)


def test_what_is_quantized_has_no_gradient():
    matrix = as_matrices({"codes": jnp.ones((2, 2), jnp.int8), "scale": jnp.ones((1, 2))})
    product = lambda s: einsum("bk,kn->bn", jnp.ones((1, 2)), dataclasses.replace(matrix, scale=s))
    with pytest.raises(ValueError, match="no gradient"):
        jax.grad(lambda s: product(s).sum())(matrix.scale)
    table = quantize(np.ones((2, BLOCK), np.float32), 8)
    with pytest.raises(NotImplementedError, match="dequantize"):
        jax.grad(lambda s: dequantize(table.codes, s, table.minimum, jnp.float32).sum())(
            jnp.float32(table.scale)
        )


@pytest.mark.long
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_attention_is_looked_at_through_codes(family):
    model, codes, numbers = make_both(family, "int8")
    prompt = model.prompt
    batch = make_batch(slots=prompt.num_slots(), shift=prompt.position_shift(), family=family)
    actual, expected = (attend_prompt(model, p, batch) for p in (codes, numbers))
    assert actual.keys() == {"encoder"}
    assert_close(actual, expected, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "t5", "glm", "llama"])
def test_texts_are_written_through_codes(family):
    model, codes, numbers = make_both(family, "int4")
    prompt = model.prompt
    batch = make_batch(
        rows=4, slots=prompt.num_slots(), shift=prompt.position_shift(), family=family,
        decoder_slots=prompt.num_decoder_slots(), decoder_shift=prompt.decoder_shift(),
    )  # fmt: skip
    write = jax.jit(
        lambda p: generate(model, p, batch, max_new_tokens=6, eos=1, pad=0, num_beams=2)
    )
    actual, expected = write(codes), write(numbers)
    np.testing.assert_array_equal(actual.ids, expected.ids)
    np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_prefix_starts_from_a_text_read_through_codes(family):
    model, codes, numbers = make_both(family, "int4")
    read = jax.jit(functools.partial(text_keys, model.backbone))
    actual, expected = (read(p["backbone"], np.arange(5, 9)) for p in (codes, numbers))
    assert_close(actual, expected, 1e-6)


def test_a_trained_bias_scores_a_table_of_codes():
    """As bias-only tuning with the whole vocabulary's scores does, tables trained or not."""
    rng = np.random.default_rng(5)
    numbers = rng.normal(size=(12, BLOCK)).astype(np.float32)
    table = as_table(quantize(numbers, 8)._asdict(), jnp.float32)
    features = rng.normal(size=(2, 3, BLOCK)).astype(np.float32)
    targets, bias = rng.integers(0, 12, (2, 3)), jnp.asarray(rng.normal(size=12), jnp.float32)

    def total(bias, table):
        return score_targets(features, table, bias, targets, block=4).logp.sum()

    grads = jax.grad(total)(bias, table)
    expected, of_table = jax.grad(total, argnums=(0, 1))(bias, table.astype(jnp.float32))
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(of_table).max()) > 0


def test_a_block_far_from_zero_is_no_constant():
    numbers = np.linspace(100.0, 100.5, BLOCK, dtype=np.float32)[None]
    planes = quantize(numbers, 8)
    assert planes.scale[0, 0] > 0 and planes.minimum[0, 0] <= 100.0
    actual = np.asarray(dequantize(*planes, dtype=jnp.float32))
    assert np.abs(actual - numbers).max() < 0.11 and np.ptp(actual) > 0.4
