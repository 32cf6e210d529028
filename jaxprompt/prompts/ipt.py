"""Instance-wise prompt tuning: a prompt computed from each text (Jiang et al. 2022)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.errors import InputError, at_least, check_known
from jaxprompt.layers.instance import ENCODERS, instance_vectors
from jaxprompt.layers.prefix import parse_layers, vectors_to_prefix
from jaxprompt.layers.word_rows import WordRows, export_rows, init_table, pack_ids, restore_rows
from jaxprompt.prompts import Method, Source, Take
from jaxprompt.types import Batch, Injection, Stream


class Prompt(Method):
    """Trains a vector per word, or an encoder; the first words of a text determine its prompt.

    Random IPT trains the vectors. Pretrained IPT initialises them from `pretrained`, an export of a
    topic classifier. Encoder IPT has `fixed` vectors and an `encoder` that computes `length`
    vectors from them. Padding adds nothing: a prompt has at most as many vectors as the text has
    words.

    With "prompt" the vectors are soft tokens. With "prefix" they are keys and values of `layers`,
    times `coefficient`, either `added` to trained ones of the task in every layer, or alone.
    """

    INIT, LASTING, reads = "pretrained", ("scale",), ("encoder",)
    READ_WITH = {"encoder=cnn,lstm,mlp": "hidden", "on=prefix": "layers added coefficient shift"}

    length: int = kinds.option(20, "soft tokens, or keys and values of a layer")
    on: str = kinds.option("prompt", "prompt: soft tokens | prefix: keys and values")
    fixed: bool = kinds.option(False, "the rows of words do not train")
    encoder: str = kinds.option(
        "none", "none | cnn | lstm | mlp: what computes the vectors from the rows"
    )
    hidden: int = kinds.option(
        0, "encoder: channels, LSTM units of a direction; 0 = 48, of an mlp 256"
    )
    utilization: float = kinds.option(1.0, "share of a text's words, from its first, that are read")
    pretrained: str = kinds.option("", "an export of ipt whose rows, and encoder, it starts from")
    rows: str = kinds.option(
        "seen", "seen: the words of the training text train | all: the vocabulary"
    )
    scale: float = kinds.option(0.5, "rows start in U(-scale, scale)")
    layers: str = kinds.option("1", 'prefix: interval of layers that the vectors are for; "" = all')
    added: bool = kinds.option(
        True, "prefix: to trained keys and values of the task in every layer"
    )
    coefficient: float = kinds.option(0.05, "prefix: what vectors are multiplied by")
    shift: bool = kinds.option(True, "prefix: the text's positions start at `length`")
    shuffled: bool = kinds.option(False, "a control: the prompt of another text of the batch")

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""
        for field, limit in (("length", 1), ("hidden", 0), ("scale", 0)):
            at_least(f"prompt.{field}", getattr(self, field), limit)
        check_known("prompt.on", self.on, ("prompt", "prefix"))
        check_known("prompt.encoder", self.encoder, ENCODERS)
        check_known("prompt.rows", self.rows, ("seen", "all"))
        if not 1e-5 <= self.utilization <= 1:
            raise InputError(f"prompt.utilization={self.utilization} must be in (0, 1]")
        parse_layers(self.layers, self.dims.layers)
        if self.fixed and self.encoder == "none":
            raise InputError(
                "prompt.fixed=True needs an encoder; set prompt.encoder=cnn, lstm or mlp"
            )

    def num_slots(self) -> int:
        """Returns the number of soft tokens in the input."""
        return self.length if self.on == "prompt" else 0

    def position_shift(self) -> int:
        """Returns the shift of the text's positions."""
        return self.length if self.on == "prefix" and self.shift else 0

    def inherits(self) -> list[tuple[str, Method]]:
        """Returns the export that it is initialised from."""
        return [(self.pretrained, self)] if self.pretrained else []

    def must_match(self) -> list[str]:
        """Lists the fields that must equal those of that export."""
        return ["on"] + ["encoder", "hidden", "length"] * (self.encoder != "none")

    def with_vocabulary(self, ids: np.ndarray) -> Method:
        """Stores the vectors of only these words."""
        return self.clone(seen="" if self.fixed or self.rows == "all" else pack_ids(ids))

    def with_base(self, params: dict[str, Any], take: Take) -> dict[str, Any]:
        """Adds the vectors of all words, and the padding rows. -> params"""
        return restore_rows(self.table(), self.pretrained, params, take)

    def exported(self, params: dict[str, Any]) -> dict[str, Any]:
        """Removes the padding rows. -> params"""
        return export_rows(self.table(), params)

    def begin(self, params: dict[str, Any], source: Source) -> dict[str, Any]:
        """Initialises the vectors and the encoder from those of the export. -> params"""
        if not self.pretrained:
            return params
        taken, words = source.take(self.pretrained), params.get("words", {})
        own = {"encoder": taken[1]["encoder"]} if "encoder" in params else {}
        return params | own | {"words": init_table(self.table(), self.pretrained, words, *taken)}

    @nn.nowrap
    def table(self) -> WordRows:
        """Returns the module of the word vectors."""
        d = self.dims  # a key and a value are a row
        width = d.embed if self.on == "prompt" else 2 * d.heads * d.head_dim
        whole = self.rows == "all" and not self.fixed
        own = (d.vocab, width, self.scale, "" if whole else self.seen, self.fixed)
        return WordRows(*own, bool(self.pretrained) and not whole, name="words")

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Computes a prompt per text. -> slots [B, S, E], or k, v [L, B, P, N, D]"""
        vectors, there = instance_vectors(
            self.table(), batch.encoder, length=self.length, share=self.utilization,
            kind=self.encoder, hidden=self.hidden, scale=self.scale,
        )  # fmt: skip
        if self.shuffled:
            vectors, there = jnp.roll(vectors, 1, axis=0), jnp.roll(there, 1, axis=0)
        if self.on == "prompt":
            return Injection(Stream(slots=vectors, slots_mask=there))
        d, task, span = self.dims, None, parse_layers(self.layers, self.dims.layers)
        if self.added:
            shape = (d.layers, 2, self.length, d.heads, d.head_dim)
            task = self.param("task", nn.initializers.normal(0.02), shape)
        vectors = self.coefficient * vectors
        return Injection(
            Stream(prefix=vectors_to_prefix(vectors, there, span, d, self.shift, task))
        )
