"""A bidirectional LSTM and a stack of linear layers, initialised as in torch."""

import jax
import jax.numpy as jnp
from flax import linen as nn


def uniform_init(limit: float, num_samples: int = 1):
    """Returns an initialiser: the sum of `num_samples` samples of U(-limit, limit)."""

    def init(key, shape, dtype=jnp.float32):
        samples = jax.random.uniform(key, (num_samples, *shape), dtype, -limit, limit)
        return samples.sum(0)

    return init


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
        # torch samples all weights of an LSTM from U(-k, k) with k = 1 / sqrt(hidden).
        length, gates, limit = x.shape[1], 4 * self.hidden, self.hidden**-0.5
        columns = jnp.arange(length)
        ends = jnp.full(x.shape[:1], length) if lengths is None else lengths
        # Reverses each sequence; padding stays.
        is_read = columns < ends[:, None]
        reversed_columns = jnp.where(is_read, ends[:, None] - 1 - columns, columns)[..., None]

        def reverse(x):  # [B, T, E]
            return jnp.take_along_axis(x, reversed_columns, axis=1)

        for layer in range(self.layers):
            init = uniform_init(limit)
            kernel = self.param(f"input{layer}", init, (2, x.shape[-1], gates))
            recurrent = self.param(f"recurrent{layer}", init, (2, self.hidden, gates))
            # torch has two biases and adds them.
            bias = self.param(f"bias{layer}", uniform_init(limit, 2), (2, gates))
            directions = jnp.stack([x, reverse(x)])  # [2, B, T, E]
            # One large product for the inputs of all steps: only the recurrent one is in the loop.
            gate_inputs = jnp.einsum("dbte,deg->tdbg", directions, kernel) + bias[:, None]
            states = _run_lstms(gate_inputs, recurrent)  # [2, B, T, hidden]
            x = jnp.concatenate([states[0], reverse(states[1])], -1)
        return x


def _run_lstms(gate_inputs, recurrent):
    """Runs LSTMs over the terms of their inputs. [T, D, B, 4H], [D, H, 4H] -> [D, B, T, H]"""

    def step(state, gate_input):
        hidden, cell = state
        i, f, g, o = jnp.split(gate_input + jnp.einsum("dbh,dhg->dbg", hidden, recurrent), 4, -1)
        cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(g)
        hidden = nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((*gate_inputs.shape[1:3], recurrent.shape[1]), gate_inputs.dtype)
    _, states = jax.lax.scan(step, (zeros, zeros), gate_inputs)
    # [T, D, B, H] -> [D, B, T, H]
    return jnp.moveaxis(states, 0, 2)


class LinearStack(nn.Module):
    """Linear layers with ReLU between them. [..., X] -> [..., widths[-1]]"""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        """Applies the layers."""
        for index, width in enumerate(self.widths):
            init = uniform_init(x.shape[-1] ** -0.5)
            x = nn.relu(x) if index else x
            x = nn.Dense(width, kernel_init=init, bias_init=init, name=f"linear{index}")(x)
        return x
