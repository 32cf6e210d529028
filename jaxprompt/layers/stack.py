"""A stack of equal layers: the only place that knows scan, unroll and remat."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

STACKS = ("unroll", "scan")
REMATS = ("none", "dots", "full")


def init_stack(layer: nn.Module, length: int, *example: Any) -> Callable[[jax.Array], Any]:
    """Makes an initialiser of the parameters of `length` layers, stacked on a leading axis L.

    `example` is what one layer is called with.
    """

    def init(key: jax.Array) -> dict[str, Any]:
        one = lambda k: layer.init(k, *example, deterministic=True)["params"]
        return jax.vmap(one)(jax.random.split(key, length))

    return init


def run_stack(layer, params, x, per_layer, *shared, stack, remat, key=None, **flags):
    """Applies the layers in turn. -> x [B, T, H], what the layers gave besides, stacked [L, ...]

    `layer(x, part, *shared, **flags)` gives (x, anything) and holds no variables but "params";
    `part` is its share of `per_layer`, a tree of arrays [L, ...]. "scan" compiles one layer,
    "unroll" all of them; remat "dots" keeps the matrix products for the backward pass, "full" only
    the layers' inputs. `key` feeds dropout, folded with the layer's number, so all agree.
    """

    def apply(x, item):
        index, layer_params, part = item
        rngs = None if key is None else {"dropout": jax.random.fold_in(key, index)}
        return layer.apply({"params": layer_params}, x, part, *shared, rngs=rngs, **flags)

    if remat != "none":
        policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
        # Merging of common subexpressions would undo the recomputation, except in a loop's body.
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=stack == "unroll")
    length = jax.tree.leaves(params)[0].shape[0]
    items = (jnp.arange(length), params, per_layer)
    if stack == "scan":
        return jax.lax.scan(apply, x, items)
    found = []
    for i in range(length):
        x, more = apply(x, jax.tree.map(lambda leaf, i=i: leaf[i], items))
        found.append(more)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
