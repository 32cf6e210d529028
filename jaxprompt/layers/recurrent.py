"""A bidirectional LSTM and a stack of linear layers, initialised as in torch."""

import jax
import jax.numpy as jnp
from flax import linen as nn


def uniform_init(limit: float, terms: int = 1):
    """Returns an initialiser: the sum of `terms` samples of U(-limit, limit)."""

    def draw(key, shape, dtype=jnp.float32):
        both = jax.random.uniform(key, (terms, *shape), dtype, -limit, limit)
        return both.sum(0)

    return draw


class BiLstm(nn.Module):
    """Reads sequences in both directions. [B, T, E] -> [B, T, 2 * hidden]

    The two directions of a layer are one scan, and its four gates one matrix, in torch's order
    (input, forget, cell, output). flax's nn.RNN has a scan per direction and a matrix per gate:
    the initial values of two layers alone took 7 s to compile, where these take 1 s.
    """

    hidden: int
    layers: int = 1

    @nn.compact
    def __call__(self, x, lengths=None):
        """Runs the layers; `lengths` int32 [B] is how much of each sequence is read, None = all.

        States after the end of a sequence are meaningless.
        """
        # torch draws all weights of an LSTM from U(-k, k) with k = 1 / sqrt(hidden).
        length, gates, limit = x.shape[1], 4 * self.hidden, self.hidden**-0.5
        at = jnp.arange(length)
        ends = jnp.full(x.shape[:1], length) if lengths is None else lengths
        # Reads a sequence from its end; what stands behind that stays.
        turned = jnp.where(at < ends[:, None], ends[:, None] - 1 - at, at)[..., None]  # [B, T, 1]
        turn = lambda x: jnp.take_along_axis(x, turned, axis=1)
        for layer in range(self.layers):
            weight = lambda name, terms, *shape, layer=layer: self.param(
                f"{name}{layer}", uniform_init(limit, terms), (2, *shape, gates)
            )
            kernel, recurrent = weight("input", 1, x.shape[-1]), weight("recurrent", 1, self.hidden)
            bias = weight("bias", 2)  # torch has two where one is enough
            both = jnp.stack([x, turn(x)])  # [2, B, T, E]
            # One large product for the inputs of all steps: the recurrent one alone is in the loop.
            terms = jnp.einsum("dbte,deg->tdbg", both, kernel) + bias[:, None]
            states = _scan(terms, recurrent)  # [2, B, T, hidden]
            x = jnp.concatenate([states[0], turn(states[1])], -1)
        return x


def _scan(terms, recurrent):
    """Runs LSTMs over the terms of their inputs. [T, D, B, 4H], [D, H, 4H] -> [D, B, T, H]"""

    def step(state, term):
        hidden, cell = state
        i, f, g, o = jnp.split(term + jnp.einsum("dbh,dhg->dbg", hidden, recurrent), 4, -1)
        cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(g)
        hidden = nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    start = jnp.zeros((*terms.shape[1:3], recurrent.shape[1]), terms.dtype)
    _, found = jax.lax.scan(step, (start, start), terms)
    # [T, D, B, H] -> [D, B, T, H]
    return jnp.moveaxis(found, 0, 2)


class LinearStack(nn.Module):
    """Linear layers with ReLU between them. [..., X] -> [..., widths[-1]]"""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        """Applies the layers."""
        for number, width in enumerate(self.widths):
            draw = uniform_init(x.shape[-1] ** -0.5)
            x = nn.relu(x) if number else x
            x = nn.Dense(width, kernel_init=draw, bias_init=draw, name=f"linear{number}")(x)
        return x
