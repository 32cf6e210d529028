"""Activations and the feed-forward block against torch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, draw_params, exact_jit

from jaxprompt.layers.mlp import ACTIVATIONS, GatedMlp, MixtureMlp, Mlp, activate, gelu, tanh_gelu
from jaxprompt.parallel.sharding import Target, make_placement, with_placement

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
X = np.linspace(-9, 9, 1001, dtype=np.float32)
TORCH = {
    "gelu": torch.nn.functional.gelu,
    "gelu_fast": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_values_and_slopes_are_torchs(name):
    x = torch.tensor(X, requires_grad=True)
    y = TORCH[name](x)
    y.sum().backward()
    ours = ACTIVATIONS[name]
    np.testing.assert_allclose(exact_jit(ours)(X), y.detach(), atol=2e-6)
    inner = X != 0  # the slope of relu at 0 is a convention
    slopes = exact_jit(jax.vmap(jax.grad(ours)))(X)
    np.testing.assert_allclose(slopes[inner], x.grad.numpy()[inner], atol=5e-6)


@pytest.mark.parametrize("gelu", [gelu, tanh_gelu])
def test_gelu_in_bfloat16_is_the_rounded_float32(gelu):
    x = jnp.asarray(X, jnp.bfloat16)
    y, slope = gelu(x), jax.grad(lambda x: gelu(x).astype(jnp.float32).sum())(x)
    wide = x.astype(jnp.float32)
    assert y.dtype == slope.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, gelu(wide).astype(jnp.bfloat16))
    exact = jax.vmap(jax.grad(gelu))(wide)
    np.testing.assert_allclose(slope.astype(jnp.float32), exact, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("gelu", [gelu, tanh_gelu])
def test_gelu_keeps_one_array_for_the_backward_pass(gelu):
    _, backward = jax.vjp(gelu, jnp.asarray(X))
    arrays = [leaf for leaf in jax.tree.leaves(backward) if getattr(leaf, "size", 0) == X.size]
    assert len(arrays) == 1


WIDE = [
    Mlp(32, "gelu"),
    GatedMlp(32, "silu", gated=True),
    MixtureMlp(4, 2, False, 0.0, 0.0, 32, "silu"),
    MixtureMlp(4, 2, True, 1.7, 0.5, 32, "silu"),
]


@pytest.mark.parametrize("module", WIDE)
def test_wide_activations_are_recomputed(module):
    """The gradients stay; of the arrays [..., F], the frozen block stores none."""
    x = np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32)
    flags = {} if isinstance(module, Mlp) else dict(deterministic=True)
    params = draw_params(module, x, **flags)

    def grads_and_wide(module):
        run = lambda params, x: module.apply({"params": params}, x, **flags)
        y, backward = jax.vjp(run, params, x)
        stored = jax.tree.leaves(jax.vjp(lambda x: run(params, x), x)[1])
        is_wide = lambda a: a.shape[:2] == (5, 3) and a.shape[-1] in (32, 64)
        return (y, backward(y)), list(filter(is_wide, stored))

    expected, stored = grads_and_wide(module)
    actual, stored_again = grads_and_wide(module.clone(recomputed=True))
    assert_close(actual, expected, rtol=1e-6)
    assert stored and not stored_again


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_accelerators_store_one_array(platform, name):
    """For the backward pass, with the same values and slopes as on a CPU."""
    placement = dataclasses.replace(
        make_placement(devices=jax.devices()[:1]), compiled_for=Target(platform)
    )
    apply = with_placement(placement, lambda x: activate(name, x))
    y, backward = jax.vjp(apply, X)
    arrays = [leaf for leaf in jax.tree.leaves(backward) if getattr(leaf, "size", 0) == X.size]
    assert len(arrays) == 1 or platform == "cpu"
    (slopes,) = backward(np.ones_like(X))
    expected, plain_backward = jax.vjp(ACTIVATIONS[name], X)
    assert_close((y, slopes), (expected, *plain_backward(np.ones_like(X))), rtol=1e-6)


def test_mlp_is_two_maps():
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    module = Mlp(12, "relu")
    params = draw_params(module, x)
    up, down = params["up"], params["down"]
    expected = np.maximum(x @ up["kernel"] + up["bias"], 0) @ down["kernel"] + down["bias"]
    assert_close(module.apply({"params": params}, x), expected)


def draw_gated(activation, gated, dtype=jnp.float32, **options):
    """Makes T5's block of width 8. -> (module, params, x)"""
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(dtype)
    module = GatedMlp(12, activation, gated, dtype=dtype, **options)
    return module, draw_params(module, x, deterministic=True), x


@pytest.mark.parametrize("activation", ["relu", "gelu_new", "silu"])
@pytest.mark.parametrize("gated", [True, False])
def test_t5s_block_is_torchs(activation, gated):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    module, params, x = draw_gated(activation, gated)
    names = {"up": "wi_1", "gate": "wi_0", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
    assert set(params) == set(names) and all(set(p) == {"kernel"} for p in params.values())
    kind = t5.T5DenseGatedActDense if gated else t5.T5DenseActDense
    config = t5.T5Config(d_model=8, d_ff=12, dropout_rate=0.0)
    config.dense_act_fn = activation
    theirs = kind(config)
    for ours, name in names.items():
        getattr(theirs, name).weight.data = torch.tensor(np.array(params[ours]["kernel"].T))
    wide = torch.tensor(x, requires_grad=True)
    y = theirs(wide)
    (y**2).sum().backward()
    run = lambda params, x: module.apply({"params": params}, x, deterministic=True)
    assert_close(run(params, x), y.detach().numpy())
    grads, dx = jax.grad(lambda *a: (run(*a) ** 2).sum(), argnums=(0, 1))(params, x)
    assert_close(dx, wide.grad.numpy())
    for ours, name in names.items():
        assert_close(grads[ours]["kernel"], getattr(theirs, name).weight.grad.numpy().T)


@pytest.mark.parametrize("gated", [True, False])
def test_t5s_block_in_bfloat16(gated):
    """Three roundings to 8 bits: a hundredth of the greatest number."""
    module, params, x = draw_gated("gelu_new", gated)
    half, _, _ = draw_gated("gelu_new", gated, jnp.bfloat16)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x))
    actual = half.apply({"params": rounded[0]}, rounded[1], deterministic=True)
    assert actual.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)
    expected = module.apply({"params": wide[0]}, wide[1], deterministic=True)
    assert_close(actual.astype(jnp.float32), expected, rtol=0.02)


def test_t5s_block_drops_hidden_elements():
    module, params, x = draw_gated("relu", False, dropout=0.5)
    rngs = {"dropout": jax.random.key(0)}
    still = module.apply({"params": params}, x, deterministic=True)
    actual = module.apply({"params": params}, x, deterministic=False, rngs=rngs)
    assert np.abs(actual - still).max() > 0.1
    params["up"]["kernel"] = jnp.zeros_like(params["up"]["kernel"])
    actual = module.apply({"params": params}, x, deterministic=False, rngs=rngs)
    assert np.abs(actual).max() == 0
