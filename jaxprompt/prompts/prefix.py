"""P-tuning v2: trained keys and values in every layer (Liu et al. 2022, section 3)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.text.words import choose_rows
from jaxprompt.errors import InputError, at_least
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.prefix import PrefixMlp, PrefixSpec, make_prefix, prefix_specs
from jaxprompt.prompts import InitSource, Method
from jaxprompt.types import Batch, Injection, Prefix, Stream


class Prompt(Method):
    """Trains `length` keys and values for each layer of the interval `layers`.

    An encoder-decoder has two more attentions: the decoder's self-attention, and that over the
    encoder's output, which has no positions.

    `shift` moves the text's positions by the length of the prefix before it, as in the paper's
    code. A relative bias then covers both, with the prefix at 0 .. P - 1, like past keys in
    transformers and PEFT. Without `shift` the text's positions do not change, as in `adapters`, and
    a relative bias is 0 for the prefix.

    `start` "text" uses the keys and values of the frozen model for the first tokens of `text` (Li
    and Liang 2021, section 7.4); if the text is too short, the rest is sampled from the vocabulary.

    hidden > 0 computes each table from [P, hidden] embeddings through a two-layer tanh MLP (section
    3.3), which is not part of an export. Dropout applies to keys and values, separately for every
    example.
    """

    PLAIN = "prompt.hidden=0"
    START_FIELDS = ("text",)
    READ_WITH = {"start=normal": "scale", "decoder": "decoder_layers", "cross": "cross_layers"}
    length: int = kinds.option(20, "number of keys and values per layer")
    layers: str = kinds.option("", 'layers with a prefix, e.g. "17-24"; "" = all')
    decoder: int = kinds.option(
        0, "T5: length in the self-attention of the decoder; 0 = none", "at least 0"
    )
    decoder_layers: str = kinds.option(
        "", 'T5: layers of the decoder with a prefix, e.g. "1-6"; "" = all'
    )
    cross: int = kinds.option(
        0, "T5: length in the cross attention of the decoder; 0 = none", "at least 0"
    )
    cross_layers: str = kinds.option(
        "", 'T5: layers with a prefix in the cross attention; "" = all'
    )
    hidden: int = kinds.option(
        0, "width of the MLP that computes the prefix; 0 = none", "at least 0"
    )
    dropout: float = kinds.option(0.0, "dropout of keys and values", "in [0, 1)")
    shift: bool = kinds.option(True, "the positions of the text start at `length`, not at 0")
    start: str = kinds.option(
        "normal", "initial keys and values. text: those of a text", ("normal", "zero", "text")
    )
    scale: float = kinds.option(0.02, "start=normal: standard deviation", "at least 0")
    text: str = kinds.option("", "start=text: the text")

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""
        self.check_decoder("decoder", "decoder_layers", "cross", "cross_layers")
        at_least("prompt.length", self.length, 0 if self.decoder or self.cross else 1)
        self.check_start()
        if self.start != "normal" and self.hidden:
            raise InputError(
                f"prompt.start={self.start} initialises keys and values, but prompt.hidden="
                f"{self.hidden} computes them; set prompt.hidden=0, or use prompt.start=normal"
            )
        self._places()

    def position_shift(self) -> int:
        """Returns the shift of the text's positions."""
        return self.length if self.shift else 0

    def decoder_shift(self) -> int:
        """Returns the shift of the positions of the decoder's input."""
        return self.decoder if self.shift else 0

    def is_computed(self) -> bool:
        """Returns whether folding saves work, that of the MLP."""
        return self.hidden > 0

    def begin(self, params: dict[str, Any], source: InitSource) -> dict[str, Any]:
        """Replaces the initial keys and values by those of a text. -> params"""
        if self.start != "text":
            return params
        rows = choose_rows(
            "text",
            source.tokenizer,
            length=max(self.length, self.decoder, self.cross),
            seed=source.seed,
            vocab_size=self.dims.vocab,
            text=self.text,
        )
        ids = [row[0] for row in rows]
        tables = {}
        for place in self._places():
            # An encoder is bidirectional, so the keys depend on the length of the text.
            pair = source.keys(ids[: place.length])[place.stream]
            tables[f"{place.name}table"] = np.stack(
                [x[place.first : place.last] for x in pair], axis=1
            )
        return params | tables

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Returns the prefixes. -> k, v [L, 1 (B under dropout), P, N, D]"""
        batch_size = batch.encoder.ids.shape[0] if self.dropout and not deterministic else None
        return Injection(
            **{
                place.stream: Stream(prefix=self._make(place, batch_size))
                for place in self._places()
            }
        )

    def _places(self) -> list[PrefixSpec]:
        return prefix_specs(
            self.dims,
            self.shift,
            encoder=(self.length, self.layers),
            decoder=(self.decoder, self.decoder_layers),
            cross=(self.cross, self.cross_layers),
        )

    def _make(self, place: PrefixSpec, batch_size: int | None) -> Prefix:
        d, std = self.dims, 0.0 if self.start == "zero" else self.scale
        shape = (place.last - place.first, 2, place.length, d.heads, d.head_dim)
        if self.hidden:
            table = PrefixMlp(shape, d.width, self.hidden, std, name=f"{place.name}mlp")()
        else:
            table = self.param(f"{place.name}table", nn.initializers.normal(std), shape)
        table = table[:, :, None]  # [L, 2, 1, P, N, D]
        if batch_size is not None:
            table = jnp.broadcast_to(table, (*shape[:2], batch_size, *shape[2:]))
            table = Dropout(self.dropout)(table, deterministic=False)
        return make_prefix(table[:, 0], table[:, 1], place.first, place.layers, place.has_positions)
