"""A stack of equal layers: the only module that implements scan, unroll and remat."""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.layers.attention import PROBABILITIES
from jaxprompt.layers.quantized import as_matrices, has_quantized
from jaxprompt.layers.reading import select_positions
from jaxprompt.parallel import sharding
from jaxprompt.types import Prefix

STACKS = ("unroll", "scan")
REMATS = ("none", "mlp", "dots", "full")
WATCHED = "watched"  # cfg.remat to read values of layers, without gradients


def init_stack(layer: nn.Module, length: int, *example: Any) -> Callable[[jax.Array], Any]:
    """Returns an initialiser of the parameters of `length` layers, stacked on a leading axis L.

    `example` are the arguments of one layer.
    """

    def init(key: jax.Array) -> dict[str, Any]:
        def init_layer(k):
            return layer.init(k, *example, deterministic=True)["params"]

        return jax.vmap(init_layer)(jax.random.split(key, length))

    return init


def declare_param(module: nn.Module, name: str, init: Callable[[jax.Array], Any]) -> Any:
    """Declares a parameter like `nn.Module.param`, but traces its initialiser only on creation.

    `param` traces it in every program, to compare shapes; for a stack that is a layer under vmap.
    """
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, init)


def run_stack(
    layer,
    params,
    x,
    per_layer,
    *shared,
    stack,
    remat,
    key=None,
    first=0,
    last=None,
    param_indices=None,
    after_first=None,
    output_positions=None,
    frozen_input=False,
    **flags,
):
    """Applies the layers in turn. -> x [B, T, H], and the layers' other outputs, stacked [L, ...]

    `layer(x, part, *shared, **flags)` returns (x, anything) and only has "params" as variables.

    If a prefix covers an interval of layers, given by its mask as a numpy array, the other layers
    get None instead. Below the lowest layer with a prefix, nothing is stored or differentiated for
    the prefix. If x depends on nothing trainable (`frozen_input`), that layer's input has no
    gradient either.

    Args:
      layer: the module of one layer.
      params: its parameters, stacked.
      x: the input, [B, T, H].
      per_layer: a tree of arrays [L, ...]; each layer gets its part.
      *shared: other arguments, the same for all layers.
      stack: "scan" compiles one layer, "unroll" all of them.
      remat: "mlp" stores no wide activations of the feed-forward blocks for the backward pass,
        which layers/mlp.py implements; "dots" stores only the matrix products and what attention
        needs; "full" only layer inputs.
      key: for dropout, folded with the layer's number, so that all modes agree.
      first: the first layer to run.
      last: the end of the layers to run (exclusive).
      param_indices: the index of the parameters of each layer, if layers share them; no copies are
        made.
      after_first: applied to the output of the first layer.
      output_positions: [B, M]; the last layer is called with them and only runs at these
        positions, so that x is [B, M, H].
      frozen_input: whether x depends on nothing trainable.
      **flags: keyword arguments of the layers.
    """
    length = len(param_indices) if param_indices else jax.tree.leaves(params)[0].shape[0]
    last = length if last is None else last
    if first == last:
        return x, None
    runs_after_first = after_first is not None and first == 0
    # `after_first` needs the output of the first layer at all positions.
    narrows_last = output_positions is not None and not (runs_after_first and last == 1)
    outside_loops, boundaries = set(range(first, last)), set()
    if stack == "scan":
        outside_loops = _layers_outside_loops(
            per_layer, first, last, narrows_last=narrows_last, frozen_input=frozen_input
        )
        boundaries = outside_loops | {i + 1 for i in outside_loops}
        if runs_after_first:
            boundaries.add(1)
    params = _cast_kernels(params, x.dtype)
    segments = layer_segments(per_layer, first, last, boundaries)
    # Slices of the stack would be copies of the weights.
    runs_some = len(segments) > 1 or last - first < length
    in_place = runs_some or (param_indices is not None and stack == "scan")
    apply = _make_apply(layer, params, shared, flags, key=key, param_indices=param_indices)
    checkpoint = _make_checkpoint(params, stack=stack, remat=remat, in_place=in_place)
    apply_in_loop, apply_alone = checkpoint(apply, in_loop=True), checkpoint(apply)
    apply_last = apply_alone
    if narrows_last:
        apply_last = checkpoint(functools.partial(apply, output_positions=output_positions))
    # Under scan the layers outside of loops also read their parameters in place.
    sliced_params = None if in_place and stack == "scan" else params
    outputs = []
    for index, inputs, is_loop in _layer_calls(
        segments, sliced_params, param_indices, outside_loops
    ):
        if is_loop:
            x, layer_outputs = jax.lax.scan(apply_in_loop, x, inputs)
        else:
            x, layer_outputs = (apply_last if index == last - 1 else apply_alone)(x, inputs)
            layer_outputs = jax.tree.map(lambda leaf: leaf[None], layer_outputs)
        if runs_after_first and index == 0:
            x = after_first(x)
        outputs.append(layer_outputs)
    if output_positions is not None and not narrows_last:
        x = select_positions(x, output_positions)
    return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outputs)


def _layers_outside_loops(
    per_layer: Any, first: int, last: int, *, narrows_last: bool, frozen_input: bool
) -> set[int]:
    """Lists the layers with other outputs, or another gradient, than the layers of a loop."""
    outside_loops = {last - 1} if narrows_last else set()
    if frozen_input:
        segments = layer_segments(per_layer, first, last)
        prefixed = [low for low, _, part in segments if _has_prefix(part)]
        outside_loops |= set(prefixed[:1])
    return outside_loops


def _layer_calls(
    segments, params, param_indices, outside_loops: Collection[int]
) -> Iterator[tuple[int, Any, bool]]:
    """Yields (lowest layer, inputs of `apply`, whether to loop over them), from the lowest up.

    Each segment is a loop, or one call for each layer if these are in `outside_loops`. `params` is
    None if `apply` reads the parameters of each layer from the stack.
    """
    for low, high, part in segments:
        if low not in outside_loops:
            yield low, (jnp.arange(low, high), params, part), True
            continue
        for i in range(low, high):
            param_index = i if param_indices is None else param_indices[i]
            layer_params = jax.tree.map(lambda leaf, at=param_index: leaf[at], params)
            layer_part = jax.tree.map(lambda leaf, at=i - low: leaf[at], part)
            yield i, (i, layer_params, layer_part), False


def _make_apply(layer, params, shared, flags, *, key, param_indices):
    """Makes (x, (layer index, its parameters, its part), **flags) -> (x, anything).

    If the parameters are None, they are read from the stack `params`.
    """

    def apply(x, inputs, **more_flags):
        index, layer_params, part = inputs
        rngs = None if key is None else {"dropout": jax.random.fold_in(key, index)}
        if layer_params is None:
            # Under scan the index is traced, and can only index an array.
            param_index = index if param_indices is None else jnp.asarray(param_indices)[index]
            read = functools.partial(
                jax.lax.dynamic_index_in_dim, index=param_index, keepdims=False
            )
            layer_params = jax.tree.map(read, params)
        # Inside of the checkpoint: the backward pass gathers and dequantizes again, and stores no
        # whole layer. Codes are gathered, which are smaller than weights.
        layer_params = as_matrices(sharding.gather_params(layer_params))
        variables, options = {"params": layer_params}, flags | more_flags
        x, layer_outputs = layer.apply(variables, x, part, *shared, rngs=rngs, **options)
        return sharding.constrain(x, "act_batch", None, None), layer_outputs

    return apply


def _make_checkpoint(params, *, stack: str, remat: str, in_place: bool):
    """Makes (function of a layer, in_loop) -> that function, recomputed in the backward pass."""
    computes_weights = sharding.gathers_params() or has_quantized(params)
    # Even without remat: otherwise the weights of every layer that are read from the stack,
    # gathered or dequantized would be stored for the backward pass.
    stores_products_only = remat not in ("none", "mlp")
    if remat == WATCHED or not (stores_products_only or in_place or computes_weights):
        return lambda apply, in_loop=False: apply
    # Merging of common subexpressions would undo the recomputation, except in a loop's body. A
    # single layer may store its weights: a barrier would materialise the symbolic zeros of
    # gradients that are not needed.
    prevents_merging = stack == "unroll" or stores_products_only or computes_weights

    def checkpoint(apply, in_loop=False):
        prevent_cse = prevents_merging and not in_loop
        return jax.checkpoint(apply, policy=_POLICIES[remat], prevent_cse=prevent_cse)

    return checkpoint


def _cast_kernels(params, dtype):
    """Casts kernels before a loop, which would store the casts for the backward pass too."""

    # Biases and norms stay: they are small, and the norms' scales are used in float32.
    def cast_kernel(path, leaf):
        return leaf.astype(dtype) if path[-1].key == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(cast_kernel, params)


def stack_options(backbone: nn.Module, deterministic: bool) -> dict[str, Any]:
    """Returns the arguments of `run_stack` that a backbone's config sets, in its `__call__`."""
    has_dropout = not deterministic and backbone.has_rng("dropout")
    return dict(
        stack=backbone.cfg.stack,
        remat=backbone.cfg.remat,
        deterministic=deterministic,
        key=backbone.make_rng("dropout") if has_dropout else None,
    )


def read_cached_states(states, dtype):
    """Casts and shards the cached states that enter the first layer to run. -> [B, T, H]"""
    return sharding.constrain(states.astype(dtype), "act_batch", None, None)


def _save_all_but_weights(primitive, *_, **__) -> bool:
    """Stores everything but weights that are read from the stack, gathered or dequantized."""
    # The first two are what `dynamic_index_in_dim` consists of, the third of `gather_params`.
    return primitive.name not in ("dynamic_slice", "squeeze", "sharding_constraint", "dequantize")


def _save_products(primitive, *args, **params) -> bool:
    """Stores matrix products, and the results of attention that its backward pass reads."""
    if primitive.name == "name":
        return params["name"] == PROBABILITIES
    # cuDNN's attention is no product for JAX: it would run again.
    is_attention = primitive.name == "dot_product_attention_fwd_wrapper"
    return is_attention or jax.checkpoint_policies.dots_saveable(primitive, *args, **params)


_POLICIES = {
    "none": _save_all_but_weights,
    "mlp": _save_all_but_weights,
    "dots": _save_products,
    "full": None,
}


def layer_segments(
    per_layer: Any, first: int, last: int, extra_boundaries: Collection[int] = ()
) -> list[tuple[int, int, Any]]:
    """Splits layers where a prefix begins or ends, and at `extra_boundaries`.

    A prefix whose mask is a numpy array is None in segments where the mask is False throughout; if
    it is True throughout, the mask is None.

    Returns:
      (low, high, the part of `per_layer`) of each segment.
    """
    prefixes = [p for p in jax.tree.leaves(per_layer, is_leaf=_is_prefix) if _is_prefix(p)]
    static = [p for p in prefixes if isinstance(p.mask, np.ndarray)]
    has_prefix = [p.mask.any(axis=(1, 2)) for p in static]
    # Only where a mask begins or ends: every cut is one more loop to compile.
    boundaries = {
        i for layers in has_prefix for i in range(first + 1, last) if layers[i] != layers[i - 1]
    }
    boundaries |= {i for i in extra_boundaries if first < i < last}
    bounds = [first, *sorted(boundaries), last]

    def cut(part, low: int, high: int):
        if _is_prefix(part) and isinstance(part.mask, np.ndarray):
            mask = part.mask[low:high]
            if not mask.any():
                return None
            part = part._replace(mask=None) if mask.all() else part
        return jax.tree.map(lambda leaf: leaf[low:high], part)

    return [
        (a, b, jax.tree.map(lambda p, a=a, b=b: cut(p, a, b), per_layer, is_leaf=_is_prefix))
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def _is_prefix(leaf: Any) -> bool:
    return isinstance(leaf, Prefix)


def _has_prefix(part: Any) -> bool:
    return any(map(_is_prefix, jax.tree.leaves(part, is_leaf=_is_prefix)))
