"""Compares texts with their prompts: nearest words, and texts as mean embeddings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import tree
from jaxprompt.build.task import eval_batches
from jaxprompt.data.text.encoded import Split
from jaxprompt.inspection.learned_rows import normalize_rows, readable_tokens
from jaxprompt.layers.instance import mean_prompt_vector
from jaxprompt.models.scorer import Scorer
from jaxprompt.runs.restore import RestoredRun
from jaxprompt.training.evaluation import compile_step, predict_scores
from jaxprompt.types import Batch, Injection, Role


class Instance(NamedTuple):
    """The words of a text and their similarity to its prompt."""

    tokens: tuple[str, ...]
    cosines: np.ndarray  # float32 [tokens], the maximum over the vectors of the prompt
    nearest: tuple[int, ...]  # positions of the nearest words, in the order of the text
    label: str  # its class, "" = not known


class TextMeans(NamedTuple):
    """Texts as the mean of their word embeddings, and as the mean of their prompts."""

    names: tuple[str, ...]  # of the classes
    labels: np.ndarray  # int32 [n]
    embeddings: np.ndarray  # float32 [n, E]
    prompts: np.ndarray  # float32 [n, X]


class Instances(NamedTuple):
    """A few texts with marked words, and all texts as mean embeddings."""

    shown: list[Instance]  # a few texts; [] if the prompt consists of keys and values
    places: TextMeans | None  # None if the prompt is the same for every text


def find_instances(
    trained: RestoredRun,
    part: Split,
    labels: np.ndarray,
    names: Sequence[str],
    *,
    shown: int,
    top: int,
) -> Instances:
    """Compares texts with their prompts (Jiang et al. 2022, sections 5.3 and 5.4).

    In each of the first `shown` texts the `top` words are marked whose embeddings have the highest
    cosine with any vector of the prompt: the vectors computed from the text, or the soft tokens of
    the task, as in table 4. `labels` [texts] are class indices, -1 = unknown.
    """
    scorer, (trainable, frozen, _) = trained.scorer, trained.weights
    prompt, marked = scorer.model.prompt, []
    if prompt.num_slots():
        params, inject = tree.merge(trainable, frozen), jax.jit(scorer.model.inject)
        for text, class_index in zip(
            part.rows[:shown], labels[:: scorer.layout.num_rows].tolist(), strict=False
        ):
            label = names[class_index] if class_index >= 0 else ""
            batch = scorer.one_batch([text])
            marked.append(_compare_text(scorer, inject, params, batch, top, label))
    reads = "encoder" in prompt.reads
    return Instances(marked, _text_means(trained, part, labels, names) if reads else None)


def _text_means(
    trained: RestoredRun, part: Split, labels: np.ndarray, names: Sequence[str]
) -> TextMeans:
    scorer, (trainable, frozen, _) = trained.scorer, trained.weights
    choices = scorer.layout.num_rows

    def compute_means(trainable_params: tree.Flat, frozen_params: tree.Flat, batch: Batch):
        params = tree.merge(trainable_params, frozen_params)
        prompts = mean_prompt_vector(scorer.model.inject(params, batch))
        vectors = jnp.concatenate([_mean_embeddings(scorer, params, batch), prompts], -1)
        return vectors.reshape(-1, choices, vectors.shape[-1])

    step = compile_step(trained.placement, compute_means)
    means = predict_scores(step, trainable, frozen, eval_batches(scorer, part), len(part.rows))
    means = means.reshape(-1, means.shape[-1])
    width, is_known = scorer.model.backbone.dims.embed, labels >= 0
    return TextMeans(
        tuple(names), labels[is_known], means[is_known, :width], means[is_known, width:]
    )


def _mean_embeddings(scorer: Scorer, params: Mapping[str, Any], batch: Batch):
    """Returns the mean word embedding of each text, float32 [B, E]."""
    words, tokens = _word_embeddings(scorer, params), batch.encoder
    text = (tokens.mask & (tokens.roles == Role.TEXT))[..., None]  # [B, T, 1]
    total = jnp.where(text, words[tokens.ids].astype(jnp.float32), 0.0).sum(1)
    return total / jnp.maximum(text.sum(1), 1)


def _word_embeddings(scorer: Scorer, params: Mapping[str, Any]):
    return scorer.model.backbone.bind({"params": params["backbone"]}).words()


def _compare_text(
    scorer: Scorer,
    inject: Callable[..., Injection],
    params: Mapping[str, Any],
    batch: Batch,
    top: int,
    label: str,
) -> Instance:
    """Compares the first text of a batch with its prompt, which `inject` computes."""
    slots, _, mask = jax.device_get(inject(params, batch).encoder)
    is_slot = np.ones(slots.shape[:2], bool) if mask is None else np.asarray(mask)
    vectors = np.asarray(slots[0], np.float32)[np.broadcast_to(is_slot, slots.shape[:2])[0]]
    vectors = vectors[: scorer.model.prompt.num_slots()]  # label rows come after them
    ids = batch.encoder.ids[0][(batch.encoder.roles[0] == Role.TEXT) & batch.encoder.mask[0]]
    word_vectors = np.asarray(_word_embeddings(scorer, params)[np.asarray(ids)], np.float32)
    cosines = (normalize_rows(word_vectors) @ normalize_rows(vectors).T).max(
        1, initial=-1.0
    )  # [tokens]
    order = np.argsort(-cosines, kind="stable")[: top if len(vectors) else 0]
    tokens = tuple(readable_tokens(scorer.tokenizer, ids))
    return Instance(tokens, cosines, tuple(sorted(int(i) for i in order)), label)
