"""An exported prompt: the constants that a trained method folds to."""

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.errors import InputError, at_least
from jaxprompt.layers.prefix import make_prefix
from jaxprompt.prompts import Method
from jaxprompt.types import Batch, Injection, Prefix, Stream

# Prefixes of the names of fields and parameters, by stream; the encoder has none, as in `prefix`.
PARTS = {"encoder": "", "decoder": "decoder_", "cross": "cross_"}


class Prompt(Method):
    """Contains `slots` vectors and a prefix of `length` in layers `first` to `last` (half-open).

    The decoder of an encoder-decoder has separate ones, and a prefix before the encoder's output.
    `rows` are further vectors for the head, which come after the slots if a head puts them into the
    input.
    """

    slots: int = 0
    first: int = 0
    last: int = 0
    shift: int = 0
    decoder_slots: int = 0
    decoder_length: int = 0
    decoder_first: int = 0
    decoder_last: int = 0
    shift_decoder: int = 0
    cross_length: int = 0
    cross_first: int = 0
    cross_last: int = 0
    rows: int = 0

    def check(self) -> None:
        """Raises InputError for a negative count, and if the prompt does not fit the backbone."""
        for field, value in self.block().items():
            if isinstance(value, int):
                at_least(f"prompt.{field}", value, 0)
        self.check_decoder("decoder_slots", "decoder_length", "cross_length")
        for stream, name in PARTS.items():
            first, last, layers = *self._span(name), self._layers(stream)
            if not 0 <= first <= last <= layers:
                raise InputError(
                    f"the prompt is in layers {first + 1}-{last} of the {stream}, but this "
                    f"backbone has {layers}; use the backbone that it was trained on"
                )

    def num_slots(self) -> int:
        """Returns the number of soft tokens in the input."""
        return self.slots

    def num_decoder_slots(self) -> int:
        """Returns the number of soft tokens in the decoder's input."""
        return self.decoder_slots

    def position_shift(self) -> int:
        """Returns the shift of the text's positions."""
        return self.shift

    def decoder_shift(self) -> int:
        """Returns the shift of the positions of the decoder's input."""
        return self.shift_decoder

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns the constants. -> slots [1, S, E], k, v [L, 1, P, N, D] a stream"""
        slots = self._rows("slots")
        rows = self._param("rows", self.rows) if self.rows else None
        if rows is not None:
            slots = rows[None] if slots is None else jnp.concatenate([slots[0], rows])[None]
        return Injection(
            # A prefix that shifts the text is part of a relative bias, see `prefix`.
            Stream(slots, self._prefix("encoder", self.shift > 0)),
            Stream(self._rows("decoder_slots"), self._prefix("decoder", self.shift_decoder > 0)),
            Stream(prefix=self._prefix("cross", False)),
            rows,
        )

    def _rows(self, name: str):
        count = getattr(self, name)
        return self._param(name, count)[None] if count else None

    def _param(self, name: str, count: int):
        return self.param(name, nn.initializers.zeros, (count, self.dims.embed))

    def _prefix(self, stream: str, inside: bool) -> Prefix | None:
        d, name = self.dims, PARTS[stream]
        length, (first, last) = getattr(self, f"{name}length"), self._span(name)
        if not length:
            return None
        shape = (last - first, length, d.heads, d.head_dim)
        k, v = (self.param(name + part, nn.initializers.zeros, shape)[:, None] for part in "kv")
        return make_prefix(k, v, first, self._layers(stream), inside)

    def _span(self, name: str) -> tuple[int, int]:
        return getattr(self, f"{name}first"), getattr(self, f"{name}last")

    def _layers(self, stream: str) -> int:
        return self.dims.layers if stream == "encoder" else self.dims.decoder_layers
