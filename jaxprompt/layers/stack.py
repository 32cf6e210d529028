"""A stack of equal layers: the only place that knows scan, unroll and remat."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

STACKS = ("unroll", "scan")
REMATS = ("none", "dots", "full")


def init_stack(layer: nn.Module, length: int, width: int) -> Callable[[jax.Array], dict[str, Any]]:
    """Makes an initialiser of the parameters of `length` layers, stacked on a leading axis L."""
    x, mask = jnp.zeros((1, 2, width)), jnp.ones((1, 2), bool)

    def init(key: jax.Array) -> dict[str, Any]:
        one = lambda k: layer.init(k, x, mask, None, deterministic=True)["params"]
        return jax.vmap(one)(jax.random.split(key, length))

    return init


def run_stack(layer, params, x, mask, prefix, *, stack, remat, deterministic, key=None):
    """Applies the layers in turn. [B, T, H], bool [B, T], Prefix [L, ...] or None -> [B, T, H]

    `layer(x, mask, prefix, deterministic=...)` holds no variables but "params". "scan" compiles one
    layer, "unroll" all of them; remat "dots" keeps the matrix products for the backward pass,
    "full" only the layers' inputs. `key` feeds dropout, folded with the layer's
    number, so all agree.
    """

    def apply(x, per_layer):
        index, layer_params, layer_prefix = per_layer
        rngs = None if key is None else {"dropout": jax.random.fold_in(key, index)}
        return layer.apply(
            {"params": layer_params}, x, mask, layer_prefix, deterministic=deterministic, rngs=rngs
        )

    if remat != "none":
        policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
        # Merging of common subexpressions would undo the recomputation, except in a loop's body.
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=stack == "unroll")
    length = jax.tree.leaves(params)[0].shape[0]
    xs = (jnp.arange(length), params, prefix)
    if stack == "scan":
        return jax.lax.scan(lambda x, per_layer: (apply(x, per_layer), None), x, xs)[0]
    for i in range(length):
        x = apply(x, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
    return x
