"""A stack of equal layers: the only module that implements scan, unroll and remat."""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.layers.quantized import dequantize_tree, has_quantized
from jaxprompt.layers.reading import select_positions
from jaxprompt.parallel import sharding
from jaxprompt.types import Prefix

STACKS = ("unroll", "scan")
REMATS = ("none", "dots", "full")
WATCHED = "watched"  # of cfg.remat, for who takes values out of the layers and no gradient


def init_stack(layer: nn.Module, length: int, *example: Any) -> Callable[[jax.Array], Any]:
    """Returns an initialiser of the parameters of `length` layers, stacked on a leading axis L.

    `example` are the arguments of one layer.
    """

    def init(key: jax.Array) -> dict[str, Any]:
        one = lambda k: layer.init(k, *example, deterministic=True)["params"]
        return jax.vmap(one)(jax.random.split(key, length))

    return init


def declare_param(module: nn.Module, name: str, init: Callable[[jax.Array], Any]) -> Any:
    """Declares a parameter like `nn.Module.param`, but traces its initialiser only on creation.

    `param` traces it in every program, to compare shapes; for a stack that is a layer under vmap.
    """
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, init)


def run_stack(
    layer, params, x, per_layer, *shared, stack, remat, key=None, first=0, last=None, takes=None,
    behind_first=None, reads=None, fresh=False, **flags,
):  # fmt: skip
    """Applies the layers in turn. -> x [B, T, H], and the layers' other outputs, stacked [L, ...]

    `layer(x, part, *shared, **flags)` returns (x, anything) and has no variables but "params".

    A layer's quantised parameters are dequantised when it runs, and again in the backward pass.

    If a prefix covers an interval of layers, given by its mask as a numpy array, the other layers
    get None instead. Below the lowest layer with a prefix, nothing is stored or differentiated for
    the prefix's sake. If x depends on nothing trainable (`fresh`), that layer's input has no
    gradient either.

    Args:
      layer: the module of one layer.
      params: its parameters, stacked.
      x: the input, [B, T, H].
      per_layer: a tree of arrays [L, ...]; each layer gets its part.
      *shared: other arguments, the same for all layers.
      stack: "scan" compiles one layer, "unroll" all of them.
      remat: "dots" stores the matrix products for the backward pass, "full" only layer inputs.
      key: for dropout, folded with the layer's number, so that all modes agree.
      first: the first layer to run.
      last: the end of the layers to run (exclusive).
      takes: the index of the parameters of each layer, if layers share them; no copies are made.
      behind_first: applied to the output of the first layer.
      reads: [B, M]; the last layer runs only at these positions: it is called with them, and x is
        [B, M, H].
      fresh: whether x depends on nothing trainable.
      **flags: keyword arguments of the layers.
    """
    length = len(takes) if takes else jax.tree.leaves(params)[0].shape[0]
    last = length if last is None else last
    if first == last:
        return x, None
    follows = behind_first is not None and first == 0
    # What follows the first layer needs all that it gives.
    narrows = reads is not None and not (follows and last == 1)
    unlooped, cuts = set(range(first, last)), set()
    if stack == "scan":
        unlooped = _unlooped_layers(per_layer, first, last, narrows=narrows, fresh=fresh)
        cuts = unlooped | {i + 1 for i in unlooped} | ({1} if follows else set())
    params, parts = _cast_kernels(params, x.dtype), layer_segments(per_layer, first, last, cuts)
    # Slices of the stack would be copies of the weights.
    in_place = len(parts) > 1 or last - first < length or (takes is not None and stack == "scan")
    apply = _make_apply(layer, params, shared, flags, key=key, takes=takes)
    checkpoint = _make_checkpoint(params, stack=stack, remat=remat, in_place=in_place)
    looped, alone = checkpoint(apply, in_loop=True), checkpoint(apply)
    narrowed = checkpoint(functools.partial(apply, reads=reads)) if narrows else alone
    # Under scan the one layer outside of loops reads its parameters as these do.
    sliced = None if in_place and stack == "scan" else params
    extras = []
    for number, item, is_loop in _items(parts, sliced, takes, unlooped):
        if is_loop:
            x, extra = jax.lax.scan(looped, x, item)
        else:
            x, extra = (narrowed if number == last - 1 else alone)(x, item)
        if follows and number == 0:
            x = behind_first(x)
        extras.append(extra if is_loop else jax.tree.map(lambda leaf: leaf[None], extra))
    if reads is not None and not narrows:
        x = select_positions(x, reads)
    return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *extras)


def _unlooped_layers(
    per_layer: Any, first: int, last: int, *, narrows: bool, fresh: bool
) -> set[int]:
    """Lists layers for no loop, whose layers all give as much, and are differentiated alike."""
    unlooped = {last - 1} if narrows else set()
    if fresh:
        parts = layer_segments(per_layer, first, last)
        prefixed = [low for low, _, part in parts if _has_prefix(part)]
        unlooped |= set(prefixed[:1])
    return unlooped


def _items(parts, params, takes, unlooped: Collection[int]) -> Iterator[tuple[int, Any, bool]]:
    """Yields (lowest layer, what `apply` is called with, whether to loop over it), from below.

    A segment of `parts` is a loop, or one item for each layer where these are `unlooped`. `params`
    is None where `apply` reads each layer's from the stack.
    """
    for low, high, part in parts:
        if low not in unlooped:
            yield low, (jnp.arange(low, high), params, part), True
            continue
        for i in range(low, high):
            stored = i if takes is None else takes[i]
            layer_params = jax.tree.map(lambda leaf, at=stored: leaf[at], params)
            share = jax.tree.map(lambda leaf, at=i - low: leaf[at], part)
            yield i, (i, layer_params, share), False


def _make_apply(layer, params, shared, flags, *, key, takes):
    """Makes (x, (layer's number, its parameters, its share), **flags) -> (x, anything).

    Where its parameters are None, they are read from the stack `params`.
    """

    def apply(x, item, **more_flags):
        index, layer_params, part = item
        rngs = None if key is None else {"dropout": jax.random.fold_in(key, index)}
        if layer_params is None:
            # Under scan the index is traced, and can pick from an array alone.
            stored = index if takes is None else jnp.asarray(takes)[index]
            pick = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, stored, keepdims=False)
            layer_params = jax.tree.map(pick, params)
        # Inside of what is checkpointed: the backward pass gathers and dequantizes again, and keeps
        # no whole layer. Codes are gathered, which are smaller than numbers.
        layer_params = dequantize_tree(sharding.gather_params(layer_params), x.dtype)
        how = flags | more_flags
        x, more = layer.apply({"params": layer_params}, x, part, *shared, rngs=rngs, **how)
        return sharding.constrain(x, "act_batch", None, None), more

    return apply


def _make_checkpoint(params, *, stack: str, remat: str, in_place: bool):
    """Makes (function of a layer, in_loop) -> that function, recomputed in the backward pass."""
    computes_weights = sharding.gathers_params() or has_quantized(params)
    # Even without remat: else the weights of every layer, read, gathered or dequantized, would be
    # kept for the backward pass.
    if remat == WATCHED or not (remat != "none" or in_place or computes_weights):
        return lambda apply, in_loop=False: apply
    # Merging of common subexpressions would undo the recomputation, except in a loop's body. Of one
    # layer by itself the weights may be kept: a barrier would make arrays of the zeroes that stand
    # for gradients which are not needed.
    barred = stack == "unroll" or remat != "none" or computes_weights

    def checkpoint(apply, in_loop=False):
        prevent_cse = barred and not in_loop
        return jax.checkpoint(apply, policy=_POLICIES[remat], prevent_cse=prevent_cse)

    return checkpoint


def _cast_kernels(params, dtype):
    """Casts what products multiply: in a loop the casts would be kept for the backward pass too."""
    # Biases and norms stay: they are small, and the norms' scales are used in float32.
    is_kernel = lambda path: path[-1].key == "kernel"
    cast = lambda path, leaf: leaf.astype(dtype) if is_kernel(path) else leaf
    return jax.tree_util.tree_map_with_path(cast, params)


def read_cached_states(kept, dtype):
    """Reads cached states of the layers below, if these were run before. -> [B, T, H]"""
    return sharding.constrain(kept.astype(dtype), "act_batch", None, None)


def _keep_but_weights(primitive, *_, **__) -> bool:
    """Keeps all for the backward pass but weights read from the stack, gathered or dequantized."""
    # The first two are what `dynamic_index_in_dim` consists of, the third of `gather_params`.
    return primitive.name not in ("dynamic_slice", "squeeze", "sharding_constraint", "dequantize")


_POLICIES = {
    "none": _keep_but_weights,
    "dots": jax.checkpoint_policies.dots_saveable,
    "full": None,
}


def layer_segments(
    per_layer: Any, first: int, last: int, more: Collection[int] = ()
) -> list[tuple[int, int, Any]]:
    """Cuts layers where a prefix begins or ends, and at `more`.

    -> (low, high, its part of `per_layer`)

    A prefix whose mask is a numpy array and empty throughout a segment is None there; the mask of
    one that is full is None.
    """
    prefixes = [p for p in jax.tree.leaves(per_layer, is_leaf=_is_prefix) if _is_prefix(p)]
    known = [p for p in prefixes if isinstance(p.mask, np.ndarray)]
    stands = [p.mask.any(axis=(1, 2)) for p in known]
    # Only where a mask begins or ends: every cut is one more loop to compile.
    inner = {i for there in stands for i in range(first + 1, last) if there[i] != there[i - 1]}
    inner |= {i for i in more if first < i < last}
    bounds = [first, *sorted(inner), last]

    def cut(part, low: int, high: int):
        if _is_prefix(part) and isinstance(part.mask, np.ndarray):
            here = part.mask[low:high]
            if not here.any():
                return None
            part = part._replace(mask=None) if here.all() else part
        return jax.tree.map(lambda leaf: leaf[low:high], part)

    return [
        (a, b, jax.tree.map(lambda p, a=a, b=b: cut(p, a, b), per_layer, is_leaf=_is_prefix))
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def _is_prefix(leaf: Any) -> bool:
    return isinstance(leaf, Prefix)


def _has_prefix(part: Any) -> bool:
    return any(map(_is_prefix, jax.tree.leaves(part, is_leaf=_is_prefix)))
