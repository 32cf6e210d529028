"""cuDNN's flash attention, for GPUs."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.layers.kernels import score_mask
from jaxprompt.layers.recompute import instantiate_zeros
from jaxprompt.parallel import sharding
from jaxprompt.types import AttentionMask, AttentionWindow

_LENGTH_MULTIPLE = 2  # in training


def cudnn_attention(q, k, v, mask: AttentionMask, bias, scale: float):
    """Attends by cuDNN. [B, T, N, D], [B, S, N, D] x 2, bias [B|1, N, T, S] -> [B, T, N, D]"""
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    has_lengths = mask.lengths is not None and _is_cudnn_window(mask.window, bias)
    window_size = None
    if has_lengths and mask.window is not None and mask.window.local:
        window_size = mask.window.columns - 1, 0
    # The kernel aligns causal queries with the first key; queries are added for earlier keys.
    num_earlier = keys - queries if has_lengths and mask.causal else 0
    padding = (num_earlier + queries) % _LENGTH_MULTIPLE, keys % _LENGTH_MULTIPLE
    q = jnp.pad(q, [(0, 0), (num_earlier, padding[0]), (0, 0), (0, 0)])
    # Fewer key heads are passed as they are: cuDNN shares them among the query heads.
    k, v = (jnp.pad(x, [(0, 0), (0, padding[1]), (0, 0), (0, 0)]) for x in (k, v))
    # Much larger values trigger a bug of cuDNN, as a comment in JAX's code says.
    mask_value = -(2.0**41) if q.dtype == jnp.bfloat16 else -(2.0**14)
    lengths = None
    # At least 1: the result of no keys is NaN, for rows that only fill the batch.
    if mask.lengths is not None and has_lengths:
        key_lengths = jnp.maximum(mask.lengths, 1).astype(jnp.int32)
        # The windows of padding may have no keys; beyond the lengths, cuDNN's result is 0.
        lengths = jnp.full(batch, q.shape[1], jnp.int32), key_lengths
        lengths = (key_lengths, key_lengths) if window_size else lengths
    else:
        is_seen = jnp.broadcast_to(score_mask(mask), (batch, 1, queries, keys))
        mask_bias = jnp.where(is_seen, 0.0, mask_value)
        bias = mask_bias if bias is None else bias + mask_bias
    if bias is not None:
        # Padding is below the masked keys, so that a row that sees nothing attends uniformly over
        # real keys. 2 * mask_value is still finite in float16.
        key_padding = [(0, 0), (0, 0), (0, 0), (0, padding[1])]
        bias = jnp.pad(bias.astype(q.dtype), key_padding, constant_values=2 * mask_value)
        bias = jnp.pad(bias, [(0, 0), (0, 0), (num_earlier, padding[0]), (0, 0)])
        if sharding.maps_runs():  # the kernel's rule for jax.vmap needs the whole array
            bias = jnp.broadcast_to(bias, (batch, heads, *bias.shape[2:]))

    def attend(q, k, v, bias, lengths):
        q, k, v, bias, lengths = _batch_all((q, k, v, bias, lengths))
        num_queries, num_keys = lengths or (None, None)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            scale=scale,
            is_causal=has_lengths and mask.causal,
            query_seq_lengths=num_queries,
            key_value_seq_lengths=num_keys,
            local_window_size=window_size,
            implementation="cudnn",
        )

    y = (attend if bias is None else _with_bias(attend))(q, k, v, bias, lengths)
    return y[:, num_earlier : num_earlier + queries]


def _is_cudnn_window(window: AttentionWindow | None, bias) -> bool:
    """Returns whether cuDNN hides the keys outside of a window itself.

    It supports no columns that every query sees, no bias, and no choice when the program runs.
    """
    if window is None:
        return True
    is_static = isinstance(window.local, bool | np.bool_)
    return is_static and not (window.local and (window.num_global or bias is not None))


def _with_bias(attend: Callable) -> Callable:
    """Wraps attend(q, k, v, bias, lengths), whose backward pass writes no unused dbias.

    It is as large as the scores of a batch, and JAX always requests it.
    """

    @jax.custom_vjp
    def wrapped(q, k, v, bias, lengths):
        return attend(q, k, v, bias, lengths)

    def forward(*args):
        trains_bias = args[3].perturbed
        q, k, v, bias, lengths = jax.tree.map(
            lambda arg: arg.value, args, is_leaf=lambda arg: hasattr(arg, "perturbed")
        )
        if trains_bias:
            return jax.vjp(lambda q, k, v, bias: attend(q, k, v, bias, lengths), q, k, v, bias)
        with _without_dbias():
            return jax.vjp(lambda q, k, v: attend(q, k, v, bias, lengths), q, k, v)

    def backward(vjp, g):
        grads = vjp(instantiate_zeros(g))
        return *grads, *[None] * (5 - len(grads))

    wrapped.defvjp(forward, backward, symbolic_zeros=True)
    return wrapped


_TRACES_DBIAS = threading.RLock()


@contextlib.contextmanager
def _without_dbias() -> Iterator[None]:
    """Traces calls of cuDNN attention whose backward pass returns no gradient of the bias.

    XLA only computes it if the call returns it (openxla/xla#24203). JAX 0.10 has no option for
    that, but asks a function, which an earlier JAX may not have.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    name = "should_export_dbias"
    if not hasattr(fused, name):
        yield
        return
    with _TRACES_DBIAS:
        original = getattr(fused, name)
        setattr(fused, name, lambda *_: False)
        try:
            yield
        finally:
            setattr(fused, name, original)


@jax.custom_vjp
def _batch_all(arrays):
    """Returns its arguments; under jax.vmap all of them have the mapped axis, and have it first.

    cuDNN's rule for jax.vmap needs that.
    """
    return _batch_all_inner(arrays)


@jax.custom_batching.custom_vmap
def _batch_all_inner(arrays):
    return arrays


@_batch_all_inner.def_vmap
def _batch_all_rule(size, is_mapped, arrays):
    def broadcast(x, mapped):
        return x if mapped else jnp.broadcast_to(x, (size, *x.shape))

    return jax.tree.map(broadcast, arrays, *is_mapped), jax.tree.map(lambda _: True, *is_mapped)


_batch_all.defvjp(lambda arrays: (_batch_all_inner(arrays), None), lambda _, grads: (grads,))
