"""Self-attention with a prefix, and the one place where its kernel is chosen."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.dropout import draw_keep, thin
from jaxprompt.types import Prefix

KERNELS = ("auto", "einsum", "fused")


def choose_kernel(kernel: str, dtype: jnp.dtype, head_dim: int, dropout: bool) -> str:
    """Resolves "auto": "fused" where the backend has a kernel for these inputs, else "einsum".

    cuDNN's flash attention takes 16-bit floats, head widths up to 128 in steps of 8, and no dropout
    of the probabilities.
    """
    if kernel != "auto":
        return kernel
    fits = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128 and not dropout
    return "fused" if fits and jax.default_backend() == "gpu" else "einsum"


def attend(q, k, v, mask, *, kernel="auto", dropout=0.0, key=None):
    """Attends from q over k, v. [B, T, N, D], [B, S, N, D] x 2, bool [B, S] -> [B, T, N, D]

    The softmax is float32. A row whose keys are all masked attends evenly, so that filler rows stay
    finite. `key` turns dropout of the probabilities on.
    """
    dropped = dropout > 0.0 and key is not None
    if choose_kernel(kernel, q.dtype, q.shape[-1], dropped) == "fused" and not dropped:
        full = jnp.broadcast_to(mask[:, None, None, :], (q.shape[0], 1, q.shape[1], k.shape[1]))
        on_gpu = jax.default_backend() == "gpu" and q.dtype.itemsize == 2
        return jax.nn.dot_product_attention(
            q, k, v, mask=full, implementation="cudnn" if on_gpu else "xla"
        )
    bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]  # [B, 1, 1, S]
    scores = jnp.einsum("btnd,bsnd->bnts", q * q.shape[-1] ** -0.5, k).astype(jnp.float32) + bias
    probs = softmax(scores).astype(q.dtype)  # [B, N, T, S]
    if not dropped:
        return jnp.einsum("bnts,bsnd->btnd", probs, v)
    keep = draw_keep(probs.shape, dropout, key)
    # Of what has the size of the scores, `probs` and `keep` alone are kept for the backward pass.
    mix = jax.checkpoint(lambda p, v: jnp.einsum("bnts,bsnd->btnd", thin(p, keep, dropout), v))
    return mix(probs, v)


@jax.custom_vjp
def softmax(x):
    """Computes the softmax over the last axis. [...] -> [...]"""
    return jax.nn.softmax(x, axis=-1)


def _softmax(x):
    y = jax.nn.softmax(x, axis=-1)
    return y, y


def _softmax_gradient(y, g):
    part = y * g
    return (part - y * part.sum(-1, keepdims=True),)


# The result alone is kept for the backward pass: automatic differentiation keeps the exponentials.
softmax.defvjp(_softmax, _softmax_gradient)


class SelfAttention(nn.Module):
    """Multi-head self-attention. [B, T, H], bool [B, T], Prefix of one layer -> [B, T, H]"""

    heads: int
    head_dim: int
    dropout: float = 0.0
    kernel: str = "auto"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, mask, prefix: Prefix | None = None, *, deterministic: bool):
        """Attends over the prefix and x."""
        project = functools.partial(
            nn.DenseGeneral, features=(self.heads, self.head_dim), dtype=self.dtype
        )
        q = project(name="query")(x)  # [B, T, N, D]
        k = project(name="key")(x)
        v = project(name="value")(x)
        if prefix is not None:  # [B|1, P, N, D] in front of the text's own keys and values
            rows, length = x.shape[0], prefix.k.shape[1]
            spread = functools.partial(jnp.broadcast_to, shape=(rows, *prefix.k.shape[1:]))
            k = jnp.concatenate([spread(prefix.k.astype(k.dtype)), k], axis=1)  # [B, P+T, N, D]
            v = jnp.concatenate([spread(prefix.v.astype(v.dtype)), v], axis=1)
            mask = jnp.concatenate([jnp.broadcast_to(prefix.mask, (rows, length)), mask], axis=1)
        drops = self.dropout > 0.0 and not deterministic
        key = self.make_rng("dropout") if drops else None
        x = attend(q, k, v, mask, kernel=self.kernel, dropout=self.dropout, key=key)
        return nn.DenseGeneral(
            features=q.shape[-1] * self.heads, axis=(-2, -1), dtype=self.dtype, name="out"
        )(x)
