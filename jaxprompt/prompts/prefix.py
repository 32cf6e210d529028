"""P-tuning v2: trained keys and values in every layer (Liu et al. 2022, section 3)."""

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.errors import InputError, at_least
from jaxprompt.layers.dropout import Dropout
from jaxprompt.prompts import Method, place_prefix
from jaxprompt.types import Batch, Injection, Prefix, Stream


def parse_layers(text: str, total: int, field: str = "layers") -> tuple[int, int]:
    """Reads a layer interval "17-24" (one-based, both ends in; "" = all) as a half-open range.

    Raises InputError where it is malformed or leaves the model.
    """
    if not text:
        return 0, total
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise InputError(f"prompt.{field}={text!r} must be FIRST-LAST, as in 17-24, or empty")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= total:
        raise InputError(f"prompt.{field}={text!r} must be FIRST-LAST within 1-{total}")
    return low - 1, high


class Prompt(Method):
    """Learns `length` keys and values for each layer of the interval `layers`.

    An encoder-decoder has two attentions more: the decoder's own (`decoder` of them, in the
    interval `decoder_layers`) and that over the encoder's output (`cross`, `cross_layers`). A
    length of 0 leaves one out.

    `shift` moves the text's positions by the length of the prefix in front of it, as the paper's
    code does, and a relative bias then runs over prefix and text, the prefix at 0 .. P - 1: the
    convention of past keys in transformers and of PEFT. Without it the text stays where it is and
    the prefix outside of a relative bias, which adds 0 to it: the convention of `adapters`. The
    attention over the encoder's output knows no positions.

    hidden > 0 computes each table from [P, hidden] embeddings through a two-layer tanh MLP (section
    3.3), which export folds away. Dropout falls on keys and values, drawn anew for every example.
    """

    length: int = 20  # keys and values of a layer
    layers: str = ""  # interval of layers, as in "17-24"; "" = all
    decoder: int = 0  # T5: length in the decoder's own attention; 0 = none
    decoder_layers: str = ""  # interval of the decoder's layers, as in "1-6"; "" = all
    cross: int = 0  # T5: length in the decoder's attention over the encoder; 0 = none
    cross_layers: str = ""  # interval of layers of that attention
    hidden: int = 0  # width of the MLP that computes the prefix; 0 = none
    dropout: float = 0.0  # of keys and values
    shift: bool = True  # the text's positions start at `length`
    scale: float = 0.02  # standard deviation of the initial values

    def check(self) -> None:
        """Raises InputError for a hyper-parameter out of its range."""
        self.needs_decoder("decoder", "decoder_layers", "cross", "cross_layers")
        at_least("prompt.length", self.length, 0 if self.decoder or self.cross else 1)
        for field in ("decoder", "cross", "hidden", "scale"):
            at_least(f"prompt.{field}", getattr(self, field), 0)
        if not 0 <= self.dropout < 1:
            raise InputError(f"prompt.dropout={self.dropout} must be in [0, 1)")
        for length in ("length", "decoder", "cross"):
            field = "layers" if length == "length" else f"{length}_layers"
            layers = getattr(self, field)
            if layers and not getattr(self, length):
                raise InputError(f"prompt.{field}={layers!r} needs prompt.{length} above 0")
            parse_layers(layers, getattr(self.dims, field.replace("cross", "decoder")), field)

    def position_shift(self) -> int:
        """Tells by how much the text's positions move."""
        return self.length if self.shift else 0

    def decoder_shift(self) -> int:
        """Tells by how much the positions of what the decoder is fed move."""
        return self.decoder if self.shift else 0

    def is_computed(self) -> bool:
        """Tells whether folding spares work: the MLP's."""
        return self.hidden > 0

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Makes the prefixes. -> k, v [L, 1 (B under dropout), P, N, D]"""
        total, inner = self.dims.layers, self.dims.decoder_layers
        drops = self.dropout > 0.0 and not deterministic
        rows = batch.encoder.ids.shape[0] if drops else None
        make = lambda *part: Stream(prefix=self._make(rows, *part))
        return Injection(
            encoder=make("", self.length, self.layers, total, self.shift),
            decoder=make("decoder_", self.decoder, self.decoder_layers, inner, self.shift),
            cross=make("cross_", self.cross, self.cross_layers, inner, False),
        )

    def _make(
        self, rows: int | None, name: str, length: int, layers: str, total: int, inside: bool
    ) -> Prefix | None:
        if not length:
            return None
        d = self.dims
        low, high = parse_layers(layers, total)
        shape = (high - low, 2, length, d.heads, d.head_dim)
        draw = nn.initializers.normal(self.scale)
        if self.hidden:
            embeds = self.param(f"{name}rows", draw, (length, d.width))  # [P, H]
            dense = lambda width, part: nn.Dense(width, kernel_init=draw, name=name + part)
            inner = jnp.tanh(dense(self.hidden, "down")(embeds))
            flat = dense(shape[0] * 2 * d.heads * d.head_dim, "up")(inner)  # N * D need not be H
            table = flat.reshape(length, *shape[:2], d.heads, d.head_dim)
            table = table.transpose(1, 2, 0, 3, 4)  # [P, L, 2, N, D] -> [L, 2, P, N, D]
        else:
            table = self.param(f"{name}table", draw, shape)  # [L, 2, P, N, D]
        table = table[:, :, None]  # [L, 2, 1, P, N, D]
        if rows is not None:
            table = jnp.broadcast_to(table, (*shape[:2], rows, *shape[2:]))
            table = Dropout(self.dropout)(table, deterministic=False)
        return place_prefix(table[:, 0], table[:, 1], low, total, inside)
