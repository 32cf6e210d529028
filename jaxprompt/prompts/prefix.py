"""P-tuning v2: trained keys and values in every layer (Liu et al. 2022, section 3)."""

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.errors import InputError, at_least
from jaxprompt.layers.dropout import Dropout
from jaxprompt.prompts import Method
from jaxprompt.types import Batch, Injection, Prefix, Stream


def parse_layers(text: str, total: int) -> tuple[int, int]:
    """Reads a layer interval "17-24" (one-based, both ends in; "" = all) as a half-open range.

    Raises InputError where it is malformed or leaves the model.
    """
    if not text:
        return 0, total
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise InputError(f"prompt.layers={text!r} must be FIRST-LAST, as in 17-24, or empty")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= total:
        raise InputError(f"prompt.layers={text!r} must be FIRST-LAST within 1-{total}")
    return low - 1, high


class Prompt(Method):
    """Learns `length` keys and values for each layer of the interval `layers`.

    hidden > 0 computes them from [P, hidden] embeddings through a two-layer tanh MLP (section 3.3),
    which export folds away. `shift` moves the text's positions by `length`, as the paper's code
    does. Dropout falls on keys and values, drawn anew for every example.
    """

    length: int = 20
    layers: str = ""
    hidden: int = 0
    dropout: float = 0.0
    shift: bool = True
    scale: float = 0.02

    def check(self) -> None:
        """Raises InputError for a hyper-parameter out of its range."""
        at_least("prompt.length", self.length, 1)
        at_least("prompt.hidden", self.hidden, 0)
        at_least("prompt.scale", self.scale, 0)
        if not 0 <= self.dropout < 1:
            raise InputError(f"prompt.dropout={self.dropout} must be in [0, 1)")
        parse_layers(self.layers, self.dims.layers)

    def position_shift(self) -> int:
        """Tells by how much the text's positions move."""
        return self.length if self.shift else 0

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Makes the prefix. -> k, v [L, 1 (B under dropout), P, N, D]"""
        d = self.dims
        low, high = parse_layers(self.layers, d.layers)
        shape = (high - low, 2, self.length, d.heads, d.head_dim)
        draw = nn.initializers.normal(self.scale)
        if self.hidden:
            rows = self.param("rows", draw, (self.length, d.width))  # [P, H]
            dense = lambda width, name: nn.Dense(width, kernel_init=draw, name=name)
            flat = dense(shape[0] * 2 * d.width, "up")(jnp.tanh(dense(self.hidden, "down")(rows)))
            table = flat.reshape(self.length, *shape[:2], d.heads, d.head_dim)
            table = table.transpose(1, 2, 0, 3, 4)  # [P, L, 2, N, D] -> [L, 2, P, N, D]
        else:
            table = self.param("table", draw, shape)  # [L, 2, P, N, D]
        table = table[:, :, None]  # [L, 2, 1, P, N, D]
        if self.dropout and not deterministic:
            examples = batch.encoder.ids.shape[0]
            table = jnp.broadcast_to(table, (*shape[:2], examples, *shape[2:]))
            table = Dropout(self.dropout)(table, deterministic=False)
        outside = [(low, d.layers - high)]
        table = jnp.pad(table, outside + [(0, 0)] * 5)  # masked below: a zero key still takes mass
        mask = (jnp.arange(d.layers) >= low) & (jnp.arange(d.layers) < high)
        mask = jnp.broadcast_to(mask[:, None, None], (d.layers, 1, self.length))
        return Injection(encoder=Stream(prefix=Prefix(table[:, 0], table[:, 1], mask)))
