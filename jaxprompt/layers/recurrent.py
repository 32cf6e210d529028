"""A bidirectional LSTM and a stack of linear layers, which start as torch's do."""

import jax
import jax.numpy as jnp
from flax import linen as nn


def uniform(limit: float, terms: int = 1):
    """Makes a draw of `terms` added numbers from U(-limit, limit)."""

    def draw(key, shape, dtype=jnp.float32):
        keys = jax.random.split(key, terms)
        return sum(jax.random.uniform(one, shape, dtype, -limit, limit) for one in keys)

    return draw


class BiLstm(nn.Module):
    """Reads sequences in both directions. [B, T, E] -> [B, T, 2 * hidden]"""

    hidden: int
    layers: int = 1

    @nn.compact
    def __call__(self, x, lengths=None):
        """`lengths` int32 [B]: how much of each sequence is read; None = all."""
        limit = self.hidden**-0.5
        for layer in range(self.layers):
            # torch has two biases where one is enough.
            forward, backward = (
                nn.RNN(nn.OptimizedLSTMCell(
                    self.hidden, kernel_init=uniform(limit), recurrent_kernel_init=uniform(limit),
                    bias_init=uniform(limit, terms=2), name=f"{name}{layer}",
                ))
                for name in ("forward", "backward")
            )  # fmt: skip
            x = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
        return x


class LinearStack(nn.Module):
    """Linear layers with ReLU between them. [..., X] -> [..., widths[-1]]"""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        """Computes them."""
        for number, width in enumerate(self.widths):
            draw = uniform(x.shape[-1] ** -0.5)
            x = nn.relu(x) if number else x
            x = nn.Dense(width, kernel_init=draw, bias_init=draw, name=f"linear{number}")(x)
        return x
