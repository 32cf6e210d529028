"""Steps that run on a GPU, beside the same steps without its kernel and on the CPU.

Needs a GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lowering import H100, KINDS, Case, make_model, make_shapes
from tiny import CONFIGS

from jaxprompt.parallel.sharding import make_placement, with_placement
from jaxprompt.rng import key_for
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_eval_step, make_train_step
from jaxprompt.tree import is_plane

TX = optax.sgd(1.0)  # what moves is the gradient
CASES = [
    *(Case(family, method=method) for family in CONFIGS for method in ("soft", "prefix")),
    *(Case("llama", kind=kind, length=4) for kind in KINDS if kind != "mask_decoder"),
    *(Case(family, "pretrain") for family in ("bert", "gpt2", "t5")),
    *(Case(family, "adapt") for family in ("bert", "electra", "llama", "t5")),
    *(Case(family, quantize=kind) for family in ("bert", "llama") for kind in ("int8", "int4")),
    *(Case(family, side="left") for family in ("gpt2", "llama")),
    Case("gpt2", method="soft", front=True), Case("bert", method="dart"),
    Case("bert", tokens=31), Case("bert", tokens=600), Case("llama", tokens=600),
    Case("bert", dropout=0.1), Case("t5", dropout=0.1),
    *(Case(family, "evaluate") for family in ("bert", "llama", "t5")),
]  # fmt: skip

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def devices():
    """A GPU and the CPU beside it."""
    devices = {}
    for platform in ("gpu", "cpu"):
        try:
            devices[platform] = jax.devices(platform)[0]
        except RuntimeError:
            pytest.skip(f"needs a {platform} that JAX_PLATFORMS names")
    return devices


def fill(leaves, seed, levels=1):
    """Draws numbers of the shapes that are described; a norm's are near 1.

    They are so small that rounding to bfloat16 moves no step far. Codes have so many `levels`.
    """
    draws, planes = np.random.RandomState(seed), {"scale": 0.3 / levels, "minimum": -0.15}

    def draw(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if jnp.issubdtype(x.dtype, jnp.integer):
            info = np.iinfo(x.dtype)
            return draws.randint(info.min, info.max + 1, x.shape).astype(x.dtype)
        if name.endswith("/codes"):  # of float8
            return (127 * draws.uniform(-1, 1, x.shape)).astype(x.dtype)
        if is_plane(name):
            return np.full(x.shape, planes[name.rpartition("/")[2]], x.dtype)
        return (name.endswith("scale") + 0.1 * draws.randn(*x.shape)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(draw, leaves)


def run(case, device):
    """Takes one step on a device. -> float32 numbers that it gives"""
    model, objectives = make_model(case)
    trainable, frozen, batch = make_shapes(case, model)
    levels = 15 if case.quantize == "int4" else 255
    trainable, frozen = fill(trainable, 0), fill(frozen, 1, levels)
    place = make_placement(devices=[device])
    if case.work == "evaluate":
        step, args = make_eval_step(model), (trainable, frozen, batch)
    else:
        state = make_state(trainable, TX, key_for(0, "dropout"))
        step, args = make_train_step(model, TX, objectives), (state, frozen, batch)
    result = jax.jit(with_placement(place, step))(*jax.device_put(args, device))
    if case.work == "evaluate":
        return {"scores": np.float32(jax.tree.leaves(result)[0])}
    state, metrics = result
    moved = jax.tree.map(lambda new, old: np.float32(new) - old, state.trainable, trainable)
    moved = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(moved)}
    return {"loss": np.float32(metrics["loss"])} | moved


def relative_error(actual, expected):
    """Gives the norm of a difference over that of what is expected."""
    norm = lambda numbers: np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in numbers))
    names = [name for name in expected if name != "loss"]
    difference = norm(actual[name] - expected[name] for name in names)
    return difference / norm(expected[name] for name in names)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step(case, devices, record_property):
    """Of bfloat16 numbers, of which the sums are in another order on each."""
    case = dataclasses.replace(case, target=H100)
    ours = run(case, devices["gpu"])
    plain = run(dataclasses.replace(case, attention="einsum"), devices["gpu"])
    other = run(dataclasses.replace(case, attention="einsum"), devices["cpu"])
    assert all(np.isfinite(x).all() for x in ours.values())
    errors = relative_error(ours, plain), relative_error(plain, other)
    record_property("relative errors", " ".join(f"{error:.4f}" for error in errors))
    # On the CPU alone, with and without XLA's excess precision, the error is up to 0.025.
    assert max(errors) < 0.08
    if "loss" in ours:
        np.testing.assert_allclose([ours["loss"], plain["loss"]], other["loss"], rtol=0.02)
