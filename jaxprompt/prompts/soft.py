"""Prompt tuning: trained vectors at the level of word embeddings (Lester et al. 2021)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.text.words import choose_rows
from jaxprompt.errors import InputError, at_least
from jaxprompt.prompts import InitSource, Method
from jaxprompt.types import Batch, Injection, Stream

# Random vectors, a file of vectors, or embeddings of tokens.
STARTS = ("normal", "uniform", "file", "vocab", "frequent", "labels", "text", "task")


def symmetric_uniform(key, shape, dtype=jnp.float32):
    """Samples from U(-0.5, 0.5), as in the paper (flax's uniform is one-sided)."""
    return nn.initializers.uniform(1.0)(key, shape, dtype) - 0.5


class Prompt(Method):
    """Trains `length` vectors; the template says where they are.

    An encoder-decoder has `decoder` more vectors in the decoder's input. They are the last of the
    single table, so that every initialisation applies to both.

    `start` "normal" samples N(0, scale^2), "uniform" U(-0.5, 0.5). The other values replace these
    samples: by the vectors in `file`, or by embeddings of token ids (`warm_start`), including those
    of `text`. `top` is the number of most common tokens that "vocab" and "frequent" sample from.
    """

    START_FIELDS = ("text", "file")
    READ_WITH = {"start=normal": "scale", "start=vocab,frequent": "top"}
    length: int = kinds.option(20, "number of soft tokens")
    decoder: int = kinds.option(
        0, "T5: number of soft tokens before the decoder input", "at least 0"
    )
    start: str = kinds.option(
        "normal", "initialisation: random vectors, a file, or embeddings of tokens", STARTS
    )
    scale: float = kinds.option(0.02, "start=normal: standard deviation", "at least 0")
    top: int = kinds.option(
        0,
        "number of tokens to sample from. vocab: the first ids, 0 = all; frequent: 0 = 1,000",
        "at least 0",
    )
    text: str = kinds.option("", "start=text: the text whose words initialise the soft tokens")
    file: str = kinds.option(
        "", "start=file: an .npy array [length, width], an export, or a PEFT adapter"
    )

    def check(self) -> None:
        """Raises InputError if a hyperparameter is out of range."""
        self.check_decoder("decoder")
        at_least("prompt.length", self.length, 0 if self.decoder else 1)
        self.check_start()

    def num_slots(self) -> int:
        """Returns the number of soft tokens in the input."""
        return self.length

    def num_decoder_slots(self) -> int:
        """Returns the number of soft tokens in the decoder's input."""
        return self.decoder

    def begin(self, params: dict[str, Any], source: InitSource) -> dict[str, Any]:
        """Replaces the samples by vectors of a file or embeddings of tokens. -> params"""
        if self.start in ("normal", "uniform"):
            return params
        if self.start == "file":
            return {"table": source.read(self, self.file)}
        rows = choose_rows(
            self.start,
            source.tokenizer,
            length=self.length + self.decoder,
            seed=source.seed,
            vocab_size=self.dims.vocab,
            counts=source.counts,
            text=self.text,
            top=self.top,
            labels=source.labels() if self.start == "labels" else (),
        )
        # Each id is embedded once, even if several vectors use it.
        ids = sorted({i for row in rows for i in row})
        return warm_start(params, source.embed(ids), [[ids.index(i) for i in row] for row in rows])

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Adds the same vectors to every example. -> slots [1, S, E] a stream"""
        init = symmetric_uniform if self.start == "uniform" else nn.initializers.normal(self.scale)
        table = self.param("table", init, (self.length + self.decoder, self.dims.embed))  # [S, E]
        parts = jnp.split(table[None], [self.length], axis=1)
        encoder, decoder = (Stream(slots=part if part.shape[1] else None) for part in parts)
        return Injection(encoder, decoder)


def warm_start(
    params: dict[str, Any], embeddings: np.ndarray, token_lists: list[list[int]]
) -> dict[str, Any]:
    """Initialises vector i with the mean embedding of the tokens rows[i]. -> params

    Raises:
      InputError: if the number of rows is not the prompt's length.
    """
    table = np.array(params["table"])
    if len(token_lists) != len(table):
        raise InputError(
            f"{len(token_lists)} lists of tokens for {len(table)} soft tokens; give one for each"
        )
    for i, ids in enumerate(token_lists):
        table[i] = np.asarray(embeddings[np.asarray(ids)], np.float32).mean(0)
    return params | {"table": table}
