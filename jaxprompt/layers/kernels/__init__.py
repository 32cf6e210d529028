"""Which attention kernel is used where.

Two matrix products and a softmax work everywhere. The kernels of cuDNN (GPUs: cudnn.py) and JAX
(TPUs: tpu.py) store no scores, and support only some shapes and masks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxprompt.parallel.roofline import CAUSAL_SCOPE, FUSED_SCOPE
from jaxprompt.parallel.sharding import Target
from jaxprompt.types import AttentionMask

KERNELS = ("auto", "einsum", "fused")  # values of a config
MIN_FLASH_LENGTH = 512  # tokens; "auto" uses no TPU kernel for fewer, whose scores are small


def choose_kernel(
    kernel: str,
    target: Target,
    *,
    dtype,
    head_dim: int,
    has_dropout: bool,
    length: int,
    has_key_mask: bool,
    has_cap: bool = False,
) -> str:
    """Returns the kernel for a config's choice: einsum, recompute, cudnn or pallas.

    "recompute" is "einsum" with scores that are recomputed in the backward pass. `length` counts
    the queries; `has_key_mask` says whether `AttentionMask.keys` and its related fields describe
    the whole mask.
    """
    if kernel == "einsum" or has_dropout:  # kernels have other dropout than layers/dropout.py
        return "einsum"
    supports_heads = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0
    # cuDNN's flash attention supports head dims up to 128 on all GPUs from capability 8.0 on, and
    # up to 256 on Hopper, whose backward pass Blackwell has not. JAX's call of it has no soft cap.
    is_flash_gpu = target.platform == "gpu" and target.capability >= 8
    max_head_dim = 256 if 9 <= target.capability < 10 else 128
    if supports_heads and is_flash_gpu and head_dim <= max_head_dim and not has_cap:
        return "cudnn"
    is_long = length >= MIN_FLASH_LENGTH or kernel == "fused"
    # Above 128 the kernel only supports 256.
    fits_head_dim = head_dim <= 128 or head_dim == 256
    if supports_heads and target.platform == "tpu" and fits_head_dim and has_key_mask and is_long:
        return "pallas"
    return "recompute" if kernel == "fused" else "einsum"


def has_fused_kernel(
    cfg: Any, head_dim: int, target: Target, length: int, *, has_dropout: bool
) -> bool:
    """Returns whether a target has a fused kernel for a backbone's attention over a text."""
    kernel = choose_kernel(
        cfg.attention,
        target,
        dtype=cfg.dtype,
        head_dim=head_dim,
        has_dropout=has_dropout,
        length=length,
        has_key_mask=True,
        has_cap=getattr(cfg, "cap", 0.0) > 0,
    )
    return kernel in ("cudnn", "pallas")


def fused_scope(is_causal: bool):
    """Names the operations that a fused kernel computes, or would, for the estimates of `plan`."""
    return jax.named_scope(CAUSAL_SCOPE if is_causal else FUSED_SCOPE)


def score_mask(mask: AttentionMask):
    """Returns the mask with the axes of scores. -> [B, 1, 1|T, S]"""
    return mask.mask[:, None, None] if mask.mask.ndim == 2 else mask.mask[:, None]
