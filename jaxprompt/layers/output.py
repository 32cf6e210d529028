"""The softmax over a vocabulary, block by block: the logits of all positions are never stored."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxprompt.layers.capping import soft_cap
from jaxprompt.layers.product import cast_matrix, einsum
from jaxprompt.layers.recompute import instantiate_zeros
from jaxprompt.parallel.sharding import constrain, num_shards
from jaxprompt.types import ABSENT, Array

GROUP_SIZE = 128  # tokens
TINY, MAX_UNIFORM = 1e-30, 1 - 2**-24  # of float32


class VocabScores(NamedTuple):
    """The scores of each target. Arrays are [B, M]."""

    logp: Array  # float32, its log-probability, ABSENT = there is no target
    hit: Array  # bool, no token is more likely
    sampled: Array | None = None  # int32, a token drawn from the distribution


def score_targets(
    features, table, bias, targets, *, block: int, uniforms=None, cap: float = 0.0
) -> VocabScores:
    """Scores targets among the whole vocabulary; with chances, also samples a token with each.

    [B, M, X], [V, X], [V] or None, int [B, M] with -1 = none, float32 [B, M] in [0, 1) -> [B, M]

    `cap` is the soft cap of the logits, see `soft_cap`. At most `block` positions a device have
    logits at a time, in float32; the backward pass computes them again.
    """
    batch, width = targets.shape
    # Blocks are parts of one device's rows: across devices the features of every block would be
    # communicated.
    devices = num_shards("act_batch")
    devices = devices if batch % devices == 0 else 1
    per_device = batch // devices * width  # positions of a device
    # Blocks of even size: otherwise the last one might be mostly padding.
    num_blocks = -(-per_device // block)
    block_size = -(-per_device // num_blocks)

    def to_blocks(x):  # [B, M, ...] -> [J, D, R, ...]
        x = x.reshape(devices, per_device, *x.shape[2:])
        padding = (0, num_blocks * block_size - per_device)
        x = jnp.pad(x, [(0, 0), padding] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(devices, num_blocks, block_size, *x.shape[2:]).swapaxes(0, 1)
        return constrain(x, None, "act_batch", *[None] * (x.ndim - 2))

    def from_blocks(x):  # [J, D, R] -> [B, M]
        x = x.swapaxes(0, 1).reshape(devices, num_blocks * block_size)
        x = x[:, :per_device].reshape(batch, width)
        return constrain(x, "act_batch", None)

    has_target = targets >= 0
    uniforms = None if uniforms is None else to_blocks(uniforms)
    features = to_blocks(features)
    targets = to_blocks(jnp.where(has_target, targets, 0))
    scores = _make_score(cap)(features, table, bias, targets, uniforms)
    logp, hit, sampled = jax.tree.map(from_blocks, scores)
    return VocabScores(jnp.where(has_target, logp, ABSENT), hit & has_target, sampled)


# J blocks, D devices that a batch is divided over, R positions of a device in a block.


@functools.cache
def _make_score(cap: float):
    """[J, D, R, X], [V, X], [V] or None, [J, D, R] x 2 -> logp, hit, sampled, each [J, D, R]"""

    @jax.custom_vjp
    def score(features, table, bias, targets, uniforms):
        return _score_blocks(features, table, bias, targets, uniforms, cap)[0]

    forward, backward = (functools.partial(rule, cap) for rule in (_forward, _backward))
    score.defvjp(forward, backward, symbolic_zeros=True)
    return score


def _score_blocks(features, table, bias, targets, uniforms, cap):
    """Scores block by block. -> (logp, hit, sampled), the log normalisers; each [J, D, R]"""
    words = cast_matrix(table, features.dtype)

    def score_block(_, block):
        x, target, uniform = block
        logits = _logits(x, words, bias, cap)  # [D, R, V]
        # Also stored: the backward pass needs it to compute the probabilities again.
        log_norm = jax.nn.logsumexp(logits, axis=-1)
        target_logits = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        sampled = None if uniform is None else _sample(logits, log_norm, uniform)
        # An argmax is many times slower than the maximum, which logsumexp needs anyway.
        return None, (target_logits - log_norm, target_logits >= logits.max(-1), sampled, log_norm)

    _, (*scores, log_norms) = jax.lax.scan(score_block, None, (features, targets, uniforms))
    return tuple(scores), log_norms


def _forward(cap, *args):
    features, table, bias, targets, uniforms = jax.tree.map(lambda x: x.value, args)
    scores, log_norms = _score_blocks(features, table, bias, targets, uniforms, cap)
    # A frozen table needs no gradient, which would be as large in float32, and a quantized one has
    # none. Residuals must be arrays: an empty one means True.
    is_trained = [
        jnp.zeros(0) if any(x.perturbed for x in jax.tree.leaves(argument)) else None
        for argument in args[1:3]
    ]
    return scores, (features, table, bias, targets, log_norms, is_trained)


def _backward(cap, residuals, grads):
    features, table, bias, targets, log_norms, (table_trains, bias_trains) = residuals
    devices, (vocab, width) = features.shape[1], table.shape
    words = cast_matrix(table, features.dtype)
    # A loss may read `hit` or `sampled` alone, which have no gradient.
    logp_grads = instantiate_zeros(grads[0])

    def block_gradients(sums, block):
        x, target, log_norm, logp_grad = block
        probs = jnp.exp(_logits(x, words, bias, cap) - log_norm[..., None])
        is_target = jnp.arange(vocab) == target[..., None]
        bias_grad = logp_grad[..., None] * (is_target - probs)  # [D, R, V]
        logits_grad = bias_grad
        if cap:
            # The derivative of the cap; the bias is added after the cap.
            logits_grad = bias_grad * (1.0 - jnp.tanh(_logits(x, words, None, 0.0) / cap) ** 2)
        # The products of the backward pass have the forward pass's type, and sum in float32.
        g = logits_grad.astype(x.dtype)
        dx = einsum("drv,vx->drx", g, words, jnp.float32)
        # Summed over the devices once, after the loop.
        dtable, dbias = sums
        if dtable is not None:
            block_grad = jnp.einsum("drv,drx->dvx", g, x, preferred_element_type=jnp.float32)
            dtable = dtable + block_grad
        if dbias is not None:
            dbias = dbias + bias_grad.sum(1)
        return (dtable, dbias), dx.astype(x.dtype)

    dtable = dbias = None
    if table_trains is not None:
        dtable = constrain(jnp.zeros((devices, vocab, width)), "act_batch", "act_vocab", None)
    if bias_trains is not None:
        dbias = constrain(jnp.zeros((devices, vocab)), "act_batch", "act_vocab")
    (dtable, dbias), dx = jax.lax.scan(
        block_gradients, (dtable, dbias), (features, targets, log_norms, logp_grads)
    )
    dtable = None if dtable is None else dtable.sum(0).astype(table.dtype)
    dbias = None if dbias is None else dbias.sum(0).astype(bias.dtype)
    return dx, dtable, dbias, None, None


def _logits(x, table, bias, cap):
    logits = einsum("drx,vx->drv", x, table, jnp.float32)
    logits = soft_cap(logits, cap)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    return constrain(logits, "act_batch", None, "act_vocab")


def _sample(logits, log_norm, uniform):
    """Samples tokens by inverting the cumulative distribution. [D, R, V], [D, R] x 2 -> int [D, R]

    First the group of tokens, then the token in it: a cumulative sum over the vocabulary is slow,
    and the Gumbel-max trick, which needs a random number for each token, is much slower.
    """
    *batch_dims, vocab = logits.shape
    widths = [(0, 0), (0, 0), (0, -vocab % GROUP_SIZE)]
    grouped = jnp.pad(logits, widths, constant_values=-jnp.inf).reshape(*batch_dims, -1, GROUP_SIZE)
    group, remaining = _select_share(jnp.exp(grouped - log_norm[..., None, None]).sum(-1), uniform)
    group_logits = jnp.take_along_axis(grouped, group[..., None, None], axis=2)[..., 0, :]
    offset, _ = _select_share(jnp.exp(group_logits - log_norm[..., None]), remaining)
    return jnp.minimum(group * GROUP_SIZE + offset, vocab - 1)  # rounding may exceed it


def _select_share(shares, uniform):
    """Returns the index at which the cumulative sum passes a fraction of it, and where inside."""
    ends = shares.cumsum(-1)
    # A fraction of their sum, which is below 1 for a group, and inexact for all.
    target = (uniform * ends[..., -1])[..., None]
    index = (ends > target).argmax(-1)

    def at_index(x):
        return jnp.take_along_axis(x, index[..., None], axis=-1)

    # The position inside the share is uniform again, and serves as the next random number.
    position = (target - at_index(ends)) / jnp.maximum(at_index(shares), TINY) + 1.0
    return index, jnp.clip(position[..., 0], 0.0, MAX_UNIFORM)
