"""Computes prompts from the words of a text (Jiang et al. 2022, section 4.2)."""

from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.recurrent import BiLstm, LinearStack
from jaxprompt.types import Injection, Role, Tokens

ENCODERS = ("none", "cnn", "lstm", "mlp")
_HIDDEN_SIZES = {"cnn": 48, "lstm": 48, "mlp": 256}  # see `InstanceEncoder.hidden`
_KERNEL_SIZES = (3, 4, 5)  # of the convolutions in words, as in the released code
_SHARE_STEPS = 100_000  # a share is rounded to so many parts, so that counting is exact


class FirstWords(NamedTuple):
    """The first words of texts."""

    ids: jnp.ndarray  # int32 [B, W], 0 where there is none
    mask: jnp.ndarray  # bool [B, W], False = the text has no such word


def first_words(tokens: Tokens, share: float, count: int = 0) -> FirstWords:
    """Returns the first `count` tokens of each text, 0 = all, within its first `share`.

    Only tokens of Role.TEXT count, not those of the template, special tokens or padding. A share of
    n tokens is rounded up.
    """
    text = tokens.mask & (tokens.roles == Role.TEXT)  # [B, T]
    count = count or max(_share_of_count(text.shape[1], share), 1)
    order = jnp.argsort(~text, axis=1, stable=True)[:, :count]  # text first
    ids = jnp.take_along_axis(tokens.ids, order, axis=1)
    # `count` may exceed the number of columns.
    ids = jnp.pad(ids, ((0, 0), (0, count - ids.shape[1])))
    num_words = _share_of_count(text.sum(1, dtype=jnp.int32), share)
    mask = jnp.arange(count) < num_words[:, None]
    return FirstWords(jnp.where(mask, ids, 0), mask)


def _share_of_count(count, share: float):
    """Returns a share of a number, rounded up."""
    # In lowest terms, so that the product does not overflow.
    exact = Fraction(max(round(share * _SHARE_STEPS), 1), _SHARE_STEPS)
    return -(-count * exact.numerator // exact.denominator)


class InstanceEncoder(nn.Module):
    """Computes vectors from word embeddings. [B, W, E], bool [B, W] -> [B, P, width]

    The kinds are those of the paper (appendix A.3): "cnn" is three convolutions and max-pooling
    over the words, "lstm" three bidirectional layers, "mlp" the mean over the words; the latter two
    are followed by linear layers. The last linear layer of the released code has features x P x
    width weights, 10 to 100 million; here features, positions and width have a factor each (its CP
    decomposition), so that the whole stays below 0.5% of RoBERTa-large.
    """

    kind: str
    hidden: int  # channels of a convolution, width of a direction, or of a linear layer
    length: int
    width: int
    scale: float  # of the initial vectors

    @nn.compact
    def __call__(self, x, mask):
        """Computes the vectors."""
        # Convolutions read beyond the last word, and the mean sums all columns: padding must be 0.
        x = jnp.where(mask[..., None], x, 0.0)
        count = jnp.maximum(mask.sum(1, keepdims=True), 1)  # [B, 1]
        if self.kind == "cnn":
            features = jnp.concatenate([self._pool(x, mask, size) for size in _KERNEL_SIZES], -1)
        elif self.kind == "lstm":
            states = BiLstm(self.hidden, 3, name="lstm")(x, mask.sum(1, dtype=jnp.int32))
            mean = jnp.where(mask[..., None], states, 0.0).sum(1) / count
            features = nn.relu(LinearStack((2 * self.hidden,) * 2, name="linear")(mean))
        else:
            widths = (self.hidden,) * 2
            features = nn.relu(LinearStack(widths, name="linear")(x.sum(1) / count))
        size = features.shape[-1]  # X
        position_factors = self.param("places", nn.initializers.normal(1.0), (self.length, size))
        init = nn.initializers.normal(self.scale)
        basis = self.param("basis", init, (size, self.width))
        bias = self.param("shared", init, (self.length, self.width))
        return bias + (features[:, None] * position_factors) @ basis  # [B, P, width]

    def _pool(self, x, mask, size: int):
        """Convolves, and takes the maximum over the words where a window starts. -> [B, X]"""
        # Padded only at the end, so that a window starts at every word, even of a text that is
        # shorter than the window.
        conv = nn.Conv(self.hidden, (size,), padding=[(0, size - 1)], name=f"conv{size}")
        activations = nn.relu(conv(x))  # [B, W, X], at least 0
        return jnp.where(mask[..., None], activations, 0.0).max(1)


def instance_vectors(
    rows: nn.Module,
    tokens: Tokens,
    *,
    length: int,
    share: float,
    kind: str,
    hidden: int,
    scale: float,
):
    """Computes the vectors of texts: float32 [B, P, width], and a mask, bool [B, P].

    Without an encoder there is one per word; with one there are `length` for any text with words.
    Call it in the module of a method, which then owns the parameters of `encoder`.
    """
    if kind == "none":
        words = first_words(tokens, share, length)
        return rows(words.ids), words.mask
    words = first_words(tokens, share)
    hidden = hidden or _HIDDEN_SIZES[kind]
    encoder = InstanceEncoder(kind, hidden, length, rows.width, scale, name="encoder")
    has_words = words.mask.any(1, keepdims=True)
    vectors = encoder(rows(words.ids), words.mask)
    return vectors, jnp.broadcast_to(has_words, vectors.shape[:2])


def mean_prompt_vector(injection: Injection):
    """Averages the unmasked vectors of each text's prompt. -> float32 [B, X]

    These are soft tokens, or the concatenated keys and values of all layers with a prefix. The mean
    of no vectors is zero.
    """
    slots, prefix, mask = injection.encoder
    if slots is not None:
        vectors, mask = slots[None], None if mask is None else mask[None]  # [1, B, S, E]
    else:
        assert prefix is not None  # a prompt has one of them
        keys_values = jnp.stack([prefix.k, prefix.v], axis=-2)  # [L, B, P, N, 2, D]
        vectors, mask = keys_values.reshape(*keys_values.shape[:3], -1), prefix.mask
    is_present = jnp.broadcast_to(True if mask is None else mask, vectors.shape[:3])
    total = jnp.where(is_present[..., None], vectors, 0.0).sum((0, 2))
    return total / jnp.maximum(is_present.sum((0, 2)), 1)[:, None]
