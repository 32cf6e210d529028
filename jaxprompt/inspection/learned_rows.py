"""Vectors that a run trained at the level of word embeddings, and their nearest words."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import tree
from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.build.initial_params import count_tokens, init_params
from jaxprompt.build.method import prompt_starts
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.load import Loaded
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.words import FROM_TEXT
from jaxprompt.errors import InputError
from jaxprompt.models.scorer import Scorer
from jaxprompt.runs.restore import RestoredRun
from jaxprompt.types import Batch, Injection

SOFT, DECODER, LABEL = "soft token", "decoder's soft token", "label row"


class Word(NamedTuple):
    """A token of the vocabulary near a trained vector."""

    token: str
    id: int
    cosine: float
    vector: np.ndarray  # float32 [E]


class LearnedRow(NamedTuple):
    """A trained vector with the width of the word embeddings."""

    kind: str  # SOFT, DECODER or LABEL
    name: str  # its number from 1, or its class, with the word or subword if a class has several
    vector: np.ndarray  # float32 [E]
    nearest: list[Word]
    start: np.ndarray | None  # float32 [E], None = not known
    start_nearest: Word | None
    cosine: float | None  # with its initial value


def recompute_init_params(config: RunConfig, trained: RestoredRun) -> tuple[tree.Flat | None, str]:
    """Recomputes the initial parameters of a run.

    They are randomly initialised from its seed, or read as prompt.init or prompt.start says.

    Args:
      config: config of the run.
      trained: result of `restore_run`, with the training examples if prompt.start=task.

    Returns:
      The initial parameters, or None and the reason why they are not known.
    """
    scorer, weights = trained.scorer, trained.weights
    if not weights.trainable:
        return {}, ""
    text_starts = [start for start in prompt_starts(config) if start in FROM_TEXT]
    if text_starts and "train" not in trained.splits:
        return None, f"prompt.start={text_starts[0]} needs its text, which is not read here"
    # Other training examples may have other initial words.
    if any(line.startswith("train:") for line in trained.changed_splits):
        return None, "the training examples are not those of the run"
    tuned = any(name.startswith("backbone/") for name in weights.trainable)
    try:
        if tuned:
            _, loaded = load_weights(open_backbone(config.backbone), trained.placement)
        else:
            loaded = Loaded(tree.unflatten(weights.frozen)["backbone"], weights.report)
        counts = count_tokens(config, trained.splits.get("train"), _no_corpus)
        return init_params(config, scorer, loaded, counts, trained.placement).trainable, ""
    except InputError as error:  # an export or a file that does not exist any more
        return None, str(error)


def _no_corpus() -> np.ndarray:
    raise InputError("the corpus that initialised it is not read here")


def find_rows(
    scorer: Scorer, params: Any, initial: Any | None, batch: Batch, top: int
) -> list[LearnedRow]:
    """Returns the vectors that a method adds, each with the `top` nearest words by cosine.

    `initial` are the initial params of the run. Vectors that are computed from a text are those of
    the first text of `batch`.
    """
    inject = jax.jit(scorer.model.inject)
    rows_now = _injected_rows(scorer, jax.device_get(inject(params, batch)))
    rows_at_init = _injected_rows(scorer, jax.device_get(inject(initial, batch))) if initial else {}
    learned = []
    for kind, rows in rows_now.items():
        names = _label_names(scorer, len(rows)) if kind == LABEL else []
        if len(names) != len(rows):
            names = [str(index) for index in range(1, len(rows) + 1)]
        words = nearest_words(scorer, params, rows, top, kind)
        starts: Any = [None] * len(rows)
        start_words = starts
        if kind in rows_at_init:
            starts = rows_at_init[kind]
            start_words = [word for (word,) in nearest_words(scorer, initial, starts, 1, kind)]
        for name, row, nearest, start, word in zip(
            names, rows, words, starts, start_words, strict=True
        ):
            cosine = None if word is None else float(normalize_rows(row) @ normalize_rows(start))
            learned.append(LearnedRow(kind, name, row, nearest, start, word, cosine))
    return learned


def _label_names(scorer: Scorer, count: int) -> list[str]:
    """Names the label rows: one per class, per label word, or per subword of the first word."""
    labels, verbalizer = scorer.task.labels, scorer.verbalizer
    if count == scorer.classes or verbalizer is None:
        return list(labels)
    if scorer.head.LISTS_CLASSES:  # the rows are copies of the subwords in the list
        parts = [readable_tokens(scorer.tokenizer, ids[0][ids[0] >= 0]) for ids in verbalizer.ids]
    else:
        parts = [list(words) for words in verbalizer.words]
    return [
        f"{label} ({part})" for label, words in zip(labels, parts, strict=True) for part in words
    ]


def _injected_rows(scorer: Scorer, injection: Injection) -> dict[str, np.ndarray]:
    """Returns the soft tokens and label rows of an injection by kind, float32 [R, E].

    Soft tokens are those of the first text, which may have fewer of them than there are slots.
    """
    prompt, rows_by_kind = scorer.model.prompt, {}
    streams = {
        SOFT: (injection.encoder, prompt.num_slots()),
        DECODER: (injection.decoder, prompt.num_decoder_slots()),
    }
    for kind, (stream, count) in streams.items():
        if stream.slots is not None and count:
            is_slot = slice(None) if stream.slots_mask is None else stream.slots_mask[0, :count]
            rows_by_kind[kind] = stream.slots[0, :count][is_slot]
    if injection.rows is not None:
        rows_by_kind[LABEL] = injection.rows
    return {kind: np.asarray(rows, np.float32) for kind, rows in rows_by_kind.items()}


def normalize_rows(rows: np.ndarray) -> np.ndarray:
    """Normalises rows to length 1; rows of zeros stay zero."""
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)


def nearest_words(
    scorer: Scorer, params: Any, rows: np.ndarray, top: int, kind: str = SOFT
) -> list[list[Word]]:
    """Returns for each row the tokens whose embeddings have the highest cosine, best first.

    Rows that score classes, like the output embeddings score words, are compared with these.
    """
    backbone = scorer.model.backbone.bind({"params": params["backbone"]})
    vocab = scorer.model.backbone.dims.vocab
    scores_classes = kind == LABEL and not scorer.head.LISTS_CLASSES
    table = backbone.lm_table()[0] if scores_classes else backbone.words()
    cosines, ids, vectors = jax.device_get(
        _nearest_ids(table, normalize_rows(rows), vocab, min(top, vocab))
    )
    words_by_row = []
    for row_ids, row_cosines, row_vectors in zip(ids, cosines, vectors, strict=True):
        tokens = readable_tokens(scorer.tokenizer, row_ids)
        columns = zip(tokens, row_ids, row_cosines, row_vectors, strict=True)
        words_by_row.append([Word(t, int(i), float(cosine), v) for t, i, cosine, v in columns])
    return words_by_row


@functools.partial(jax.jit, static_argnums=(2, 3))
def _nearest_ids(words, rows, vocab: int, top: int):
    """Ranks the vocabulary by cosine. [V, E], [R, E] -> [R, top], ids [R, top], [R, top, E]"""
    table = words[:vocab].astype(jnp.float32)  # without the padding of a mesh
    norms = jnp.maximum(jnp.linalg.norm(table, axis=-1), 1e-30)
    # Accelerators round the inputs of a product by default, which would reorder close words.
    cosines, ids = jax.lax.top_k(jnp.dot(rows, table.T, precision="highest") / norms, top)
    return cosines, ids, table[ids]


def readable_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns readable tokens: WordPiece subwords keep ##, and marks of spaces are removed.

    An id that the tokenizer does not know becomes [id N].
    """
    texts = []
    for token_id in map(int, ids):
        subword: Any = None
        if token_id < len(tokenizer):
            subword = tokenizer.convert_ids_to_tokens(token_id)
        if subword is None:
            texts.append(f"[id {token_id}]")
            continue
        text = tokenizer.convert_tokens_to_string([subword]).strip()
        is_word = text and text.isprintable() and "\ufffd" not in text  # no part of a character
        texts.append(text if is_word and not subword.startswith("##") else subword)
    return texts
