"""The softmax over a vocabulary, block by block: the logits of all positions are never stored."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxprompt.layers.capping import soft_cap
from jaxprompt.parallel.sharding import constrain, num_shards
from jaxprompt.types import ABSENT, Array

GROUP_SIZE = 128  # tokens
TINY, BELOW_ONE = 1e-30, 1 - 2**-24  # of float32


class VocabScores(NamedTuple):
    """The scores of each target. Arrays are [B, M]."""

    logp: Array  # float32, its log-probability, ABSENT = there is no target
    hit: Array  # bool, no token is more likely
    drawn: Array | None = None  # int32, a token drawn from the distribution


def score_targets(
    features, table, bias, targets, *, block: int, chances=None, cap: float = 0.0
) -> VocabScores:
    """Scores targets among the whole vocabulary; with chances, also samples a token with each.

    [B, M, X], [V, X], [V] or None, int [B, M] with -1 = none, float32 [B, M] in [0, 1) -> [B, M]

    `cap` is the soft cap of the logits, see `soft_cap`. At most `block` positions a device have
    logits at a time, in float32; the backward pass computes them again.
    """
    rows, width = targets.shape
    # Blocks are cut inside of each device's rows: across devices every block would have its
    # features sent around.
    devices = num_shards("act_batch")
    devices = devices if rows % devices == 0 else 1
    own = rows // devices * width  # positions of a device
    # Blocks of even size: else the last one might be padding for the most part.
    count = -(-own // block)
    size = -(-own // count)

    def cut(x):  # [B, M, ...] -> [J, D, R, ...]
        x = x.reshape(devices, own, *x.shape[2:])
        x = jnp.pad(x, [(0, 0), (0, count * size - own)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(devices, count, size, *x.shape[2:]).swapaxes(0, 1)
        return constrain(x, None, "act_batch", *[None] * (x.ndim - 2))

    def join(x):  # [J, D, R] -> [B, M]
        x = x.swapaxes(0, 1).reshape(devices, count * size)[:, :own].reshape(rows, width)
        return constrain(x, "act_batch", None)

    there = targets >= 0
    chances = None if chances is None else cut(chances)
    found = _score(cap)(cut(features), table, bias, cut(jnp.where(there, targets, 0)), chances)
    logp, hit, drawn = jax.tree.map(join, found)
    return VocabScores(jnp.where(there, logp, ABSENT), hit & there, drawn)


# J blocks, D devices that a batch is divided over, R positions of a device in a block.


@functools.cache
def _score(cap: float):
    """[J, D, R, X], [V, X], [V] or None, [J, D, R] x 2 -> logp, hit, drawn, each [J, D, R]"""

    @jax.custom_vjp
    def score(features, table, bias, targets, chances):
        return _run(features, table, bias, targets, chances, cap)[0]

    forward, backward = (functools.partial(part, cap) for part in (_forward, _backward))
    score.defvjp(forward, backward, symbolic_zeros=True)
    return score


def _run(features, table, bias, targets, chances, cap):
    """Computes what `_score` gives, and the norms. -> logp, hit, drawn; [J, D, R]"""
    narrow = table.astype(features.dtype)

    def one(_, part):
        x, target, chance = part
        logits = _logits(x, narrow, bias, cap)  # [D, R, V]
        # Kept besides the results: the backward pass needs a norm per position to compute p again.
        norm = jax.nn.logsumexp(logits, axis=-1)
        own = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        drawn = None if chance is None else _draw(logits, norm, chance)
        # An argmax takes many times longer than the maximum, which the norm needs anyway.
        return None, (own - norm, own >= logits.max(-1), drawn, norm)

    _, (*found, norms) = jax.lax.scan(one, None, (features, targets, chances))
    return tuple(found), norms


def _forward(cap, *args):
    features, table, bias, targets, chances = jax.tree.map(lambda x: x.value, args)
    found, norms = _run(features, table, bias, targets, chances, cap)
    # Of a frozen table no gradient is summed up, which takes as much room in float32, and one that
    # is quantized has none. What is kept must be arrays: an empty one says yes.
    trains = [
        jnp.zeros(0) if any(x.perturbed for x in jax.tree.leaves(own)) else None
        for own in args[1:3]
    ]
    return found, (features, table, bias, targets, norms, trains)


def _backward(cap, kept, given):
    features, table, bias, targets, norms, (table_trains, bias_trains) = kept
    devices, (vocab, width) = features.shape[1], table.shape
    narrow, slopes = table.astype(features.dtype), given[0]
    # A loss may read `hit` or `drawn` alone, which have no gradient.
    if isinstance(slopes, jax.custom_derivatives.SymbolicZero):
        slopes = jnp.zeros(slopes.shape, slopes.dtype)

    def one(sums, part):
        x, target, norm, slope = part
        p = jnp.exp(_logits(x, narrow, bias, cap) - norm[..., None])
        own = jnp.arange(vocab) == target[..., None]
        wide = slope[..., None] * (own - p)  # [D, R, V]
        through = wide
        if cap:
            # The derivative of the cap. It is not the bias's: that is added behind the cap.
            through = wide * (1.0 - jnp.tanh(_logits(x, narrow, None, 0.0) / cap) ** 2)
        # The products of the backward pass are in the type of the forward one, and sum in float32.
        g = through.astype(x.dtype)
        dx = jnp.einsum("drv,vx->drx", g, narrow, preferred_element_type=jnp.float32)
        # Summed over the devices once, behind the loop.
        dtable, dbias = sums
        if dtable is not None:
            more = jnp.einsum("drv,drx->dvx", g, x, preferred_element_type=jnp.float32)
            dtable = dtable + more
        if dbias is not None:
            dbias = dbias + wide.sum(1)
        return (dtable, dbias), dx.astype(x.dtype)

    dtable = dbias = None
    if table_trains is not None:
        dtable = constrain(jnp.zeros((devices, vocab, width)), "act_batch", "act_vocab", None)
    if bias_trains is not None:
        dbias = constrain(jnp.zeros((devices, vocab)), "act_batch", "act_vocab")
    (dtable, dbias), dx = jax.lax.scan(one, (dtable, dbias), (features, targets, norms, slopes))
    dtable = None if dtable is None else dtable.sum(0).astype(table.dtype)
    dbias = None if dbias is None else dbias.sum(0).astype(bias.dtype)
    return dx, dtable, dbias, None, None


def _logits(x, table, bias, cap):
    logits = jnp.einsum("drx,vx->drv", x, table, preferred_element_type=jnp.float32)
    logits = soft_cap(logits, cap)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    return constrain(logits, "act_batch", None, "act_vocab")


def _draw(logits, norm, chance):
    """Finds the tokens in whose shares the chances fall. [D, R, V], [D, R] x 2 -> int [D, R]

    First the group of tokens, then the token in it: a running sum over the vocabulary is slow, and
    the Gumbel-max trick, which needs a random number for each token, far slower.
    """
    *rows, vocab = logits.shape
    widths = [(0, 0), (0, 0), (0, -vocab % GROUP_SIZE)]
    wide = jnp.pad(logits, widths, constant_values=-jnp.inf).reshape(*rows, -1, GROUP_SIZE)
    group, rest = _fall(jnp.exp(wide - norm[..., None, None]).sum(-1), chance)
    own = jnp.take_along_axis(wide, group[..., None, None], axis=2)[..., 0, :]
    place, _ = _fall(jnp.exp(own - norm[..., None]), rest)
    return jnp.minimum(group * GROUP_SIZE + place, vocab - 1)  # rounding may point behind the last


def _fall(shares, chance):
    """Lays shares end to end. -> the one in which a chance of the whole falls, and where in it"""
    ends = shares.cumsum(-1)
    # Of their sum, which is not 1: that of a group is a part of it, and rounding moves the whole.
    goal = (chance * ends[..., -1])[..., None]
    at = (ends > goal).argmax(-1)
    pick = lambda x: jnp.take_along_axis(x, at[..., None], axis=-1)
    # Where in its share the chance falls is uniform again, and serves as the next chance.
    inside = (goal - pick(ends)) / jnp.maximum(pick(shares), TINY) + 1.0
    return at, jnp.clip(inside[..., 0], 0.0, BELOW_ONE)
