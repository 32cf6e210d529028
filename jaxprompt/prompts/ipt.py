"""Instance-wise prompt tuning: a prompt computed from each text (Jiang et al. 2022)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.errors import InputError
from jaxprompt.layers.instance import ENCODERS, instance_vectors
from jaxprompt.layers.prefix import parse_layers, vectors_to_prefix
from jaxprompt.layers.word_rows import WordRows, export_rows, init_table, pack_ids, restore_rows
from jaxprompt.prompts import InitSource, LoadExport, Method
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

    INIT, STATIC_FIELDS, reads = "pretrained", ("scale",), ("encoder",)
    READ_WITH = {"encoder=cnn,lstm,mlp": "hidden", "on=prefix": "layers added coefficient shift"}

    length: int = kinds.option(
        20, "number of soft tokens, or of keys and values per layer", "at least 1"
    )
    on: str = kinds.option(
        "prompt",
        "kind of prompt. prompt: soft tokens; prefix: keys and values",
        ("prompt", "prefix"),
    )
    fixed: bool = kinds.option(False, "freeze the word embeddings of the prompt")
    encoder: str = kinds.option(
        "none", "encoder that computes the prompt from the word embeddings", ENCODERS
    )
    hidden: int = kinds.option(
        0, "encoder: channels, or LSTM units per direction; 0 = 48, for mlp 256", "at least 0"
    )
    utilization: float = kinds.option(
        1.0,
        "share of the words of a text, from the first on, that the prompt is computed from",
        "in (0, 1]",
    )
    pretrained: str = kinds.option(
        "", "an export of ipt that initialises the word embeddings and the encoder"
    )
    rows: str = kinds.option(
        "seen",
        "words with trained embeddings. seen: those of the training texts; all: the vocabulary",
        ("seen", "all"),
    )
    scale: float = kinds.option(
        0.5, "word embeddings are initialised from U(-scale, scale)", "at least 0"
    )
    layers: str = kinds.option("1", 'prefix: layers that it is in, e.g. "17-24"; "" = all')
    added: bool = kinds.option(
        True, "prefix: add it to a trained prefix of the task, which is in every layer"
    )
    coefficient: float = kinds.option(0.05, "prefix: factor of its keys and values")
    shift: bool = kinds.option(
        True, "prefix: the positions of the text start at `length`, not at 0"
    )
    shuffled: bool = kinds.option(
        False, "control experiment: use the prompt of another text of the batch"
    )

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""
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
        return ["on"] if self.encoder == "none" else ["on", "encoder", "hidden", "length"]

    def with_vocabulary(self, ids: np.ndarray) -> Method:
        """Stores the vectors of only these words."""
        return self.clone(seen="" if self.fixed or self.rows == "all" else pack_ids(ids))

    def with_base(self, params: dict[str, Any], load_export: LoadExport) -> dict[str, Any]:
        """Adds the vectors of all words, and the padding rows. -> params"""
        return restore_rows(self.table(), self.pretrained, params, load_export)

    def exported(self, params: dict[str, Any]) -> dict[str, Any]:
        """Removes the padding rows. -> params"""
        return export_rows(self.table(), params)

    def begin(self, params: dict[str, Any], source: InitSource) -> dict[str, Any]:
        """Initialises the vectors and the encoder from those of the export. -> params"""
        if not self.pretrained:
            return params
        method, exported = source.load_export(self.pretrained)
        encoder = {"encoder": exported["encoder"]} if "encoder" in params else {}
        words = params.get("words", {})
        words = init_table(self.table(), self.pretrained, words, method, exported)
        return params | encoder | {"words": words}

    @nn.nowrap
    def table(self) -> WordRows:
        """Returns the module of the word vectors."""
        dims = self.dims
        # For a prefix, a key and a value are concatenated.
        width = dims.embed if self.on == "prompt" else 2 * dims.heads * dims.head_dim
        is_whole = self.rows == "all" and not self.fixed
        seen = "" if is_whole else self.seen
        has_base = bool(self.pretrained) and not is_whole
        return WordRows(dims.vocab, width, self.scale, seen, self.fixed, has_base, name="words")

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Computes a prompt per text. -> slots [B, S, E], or k, v [L, B, P, N, D]"""
        vectors, mask = instance_vectors(
            self.table(),
            batch.encoder,
            length=self.length,
            share=self.utilization,
            kind=self.encoder,
            hidden=self.hidden,
            scale=self.scale,
        )
        if self.shuffled:
            vectors, mask = jnp.roll(vectors, 1, axis=0), jnp.roll(mask, 1, axis=0)
        if self.on == "prompt":
            return Injection(Stream(slots=vectors, slots_mask=mask))
        dims, task = self.dims, None
        if self.added:
            shape = (dims.layers, 2, self.length, dims.heads, dims.head_dim)
            task = self.param("task", nn.initializers.normal(0.02), shape)
        interval = parse_layers(self.layers, dims.layers)
        vectors = self.coefficient * vectors
        prefix = vectors_to_prefix(vectors, mask, interval, dims, self.shift, task)
        return Injection(Stream(prefix=prefix))
