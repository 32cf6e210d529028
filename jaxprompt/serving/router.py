"""A router: chooses the prompt of a row by its text, from states of the frozen backbone.

The states are those of the middle layer, averaged over the tokens of the text: there, texts of
different tasks differ most, and the layers above need not run. A linear layer scores the prompts.
"""

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.prompt_artifact import Export, scorer_from_metadata
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import DataConfig, RunConfig, TaskConfig
from jaxprompt.convert.artifact import check_fingerprint, encode_tensors
from jaxprompt.convert.prompt_metadata import RouterMetadata
from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.records import Record
from jaxprompt.data.tasks.cells import is_blank
from jaxprompt.data.tasks.task import Example
from jaxprompt.errors import InputError, at_least, check_known, list_differences, with_article
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.compilation import cached_factory
from jaxprompt.parallel.sharding import Placement
from jaxprompt.serving.adapters import ImportedPrompt, make_imported_metadata
from jaxprompt.serving.router_fit import (
    LinearLayer,
    best_scale,
    choose_threshold,
    fit_centroids,
    fit_linear,
    softmax,
)
from jaxprompt.training.evaluation import StartPass, compile_step, predict_scores
from jaxprompt.tree import Flat, Params
from jaxprompt.types import Batch, Role

KINDS = ("centroid", "linear")
COLUMNS = ("route", "confidence")  # of the output, for a row whose prompt a router chose
_TENSORS = ("router/kernel", "router/bias")
_MAX_ROWS = 500  # of a prompt
_FOLDS = 5  # of the cross-validation; a prompt needs as many rows


class Router(NamedTuple):
    """A router on its backbone, for the prompts of a bank."""

    scorer: Scorer  # encodes the texts
    params: Params  # of the backbone
    placement: Placement
    layer: LinearLayer
    metadata: RouterMetadata
    names: tuple[str, ...]  # of the prompts, in the order of the bank and of the layer
    inputs: tuple[tuple[str, ...], ...]  # their input columns

    def route(self, records: Sequence[Record], column: str) -> list[Record]:
        """Chooses the prompts of rows whose `column` is missing or blank; "" = of all rows.

        Only prompts whose input columns a row has are compared, unless none fits. Returns the
        records in order. A routed one has the number of its prompt, and the probability of that as
        its confidence; one for which no prompt is likely enough has an error.
        """
        routed = list(records)
        texts: dict[int, str] = {}
        for index, record in enumerate(records):
            if record.row is None or record.error:
                continue
            if column and not is_blank(record.row.get(column)):
                continue
            if text := join_columns(record.row, self.metadata.columns):
                texts[index] = text
                continue
            message = _no_text_message(record.origin, self.metadata.columns)
            routed[index] = record._replace(error=message)
        if texts:
            states = text_states(self.scorer, self.params, self.placement, list(texts.values()))
            rows = [records[index].row or {} for index in texts]
            kernel, bias = (x.astype(np.float64) for x in self.layer)
            scores = mask_prompts(states @ kernel + bias, rows, self.inputs)
            for index, probabilities in zip(texts, softmax(scores), strict=True):
                routed[index] = self._choose(records[index], probabilities)
        return routed

    def _choose(self, record: Record, probabilities: np.ndarray) -> Record:
        prompt, confidence = int(probabilities.argmax()), float(probabilities.max())
        threshold, error = self.metadata.threshold, ""
        if confidence < threshold:
            error = (
                f"{record.origin}: the router chose no prompt: the most likely, "
                f"{self.names[prompt]}, has a probability of {confidence:.4f}, below "
                f"{threshold:.4f}; name its prompt in a column (--column, by=)"
            )
        return record._replace(prompt=prompt, confidence=confidence, error=error)


def make_router(
    backbone: LoadedBackbone,
    router: Export,
    prompts: Mapping[str, Export],
    *,
    batch: int,
    force: bool,
) -> Router:
    """Puts a router on the backbone of a bank.

    Raises:
      InputError: if it is no router, or was trained for other prompts or other weights; with
        `force` only the names of the prompts must be equal.
    """
    metadata = router_metadata(router)
    recorded, digests = dict(metadata.prompts), digests_of(prompts)
    if recorded != digests and not (force and recorded.keys() == digests.keys()):
        short = ({name: x[:12] for name, x in part.items()} for part in (recorded, digests))
        raise InputError(
            f"{router.path} is a router of other prompts: {list_differences(*short)}; train a "
            "router for these prompts, or give its prompts"
        )
    check_fingerprint(router.metadata.backbone, backbone.loaded.report.fingerprint, force=force)
    scorer = _make_encoder(backbone, router, batch, force)
    order = [router.metadata.task.labels.index(name) for name in prompts]
    kernel, bias = (router.tensors[name][..., order] for name in _TENSORS)
    return Router(
        scorer,
        backbone.loaded.params,
        backbone.placement,
        (kernel, bias),
        metadata,
        tuple(prompts),
        tuple(export.metadata.task.input_columns for export in prompts.values()),
    )


def router_metadata(router: Export) -> RouterMetadata:
    """Returns the metadata of a router. Raises InputError for another export."""
    metadata = router.metadata.router
    if metadata is None:
        raise InputError(
            f"{router.path} is an export without a router; give the folder that `python -m "
            "jaxprompt router` wrote"
        )
    return metadata


def digests_of(prompts: Mapping[str, Export]) -> dict[str, str]:
    """Returns the SHA-256 of the tensors of each export, as in its prompt.json."""
    return {
        name: hashlib.sha256(encode_tensors(export.tensors)).hexdigest()
        for name, export in prompts.items()
    }


def mask_prompts(
    scores: np.ndarray, rows: Iterable[Mapping[str, Any]], inputs: Sequence[Sequence[str]]
) -> np.ndarray:
    """Sets the scores of prompts to -inf whose input columns a row lacks, unless none fits.

    -> float64 [N, P]
    """
    fits = np.array(
        [[not any(is_blank(row.get(x)) for x in names) for names in inputs] for row in rows]
    )
    return np.where(fits | ~fits.any(1, keepdims=True), scores, -np.inf)


def join_columns(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Joins the texts of a row's columns, in the order of `columns`; the row may lack some."""
    return " ".join(text for name in columns if (text := _cell_text(row.get(name))))


def _no_text_message(where: str, columns: Sequence[str]) -> str:
    return (
        f"{where}: there is no text in {', '.join(columns)}, which the router reads; add one, or "
        "remove the row"
    )


def _cell_text(cell: Any) -> str:
    """Returns a cell as text: lists are joined, of messages all but those of the assistant."""
    if isinstance(cell, Mapping):
        content = cell.get("content", cell.get("text"))  # of a message, or of a part of one
        return "" if cell.get("role") == "assistant" else _cell_text(content)
    if isinstance(cell, list | tuple):
        return " ".join(filter(None, map(_cell_text, cell)))
    return "" if is_blank(cell) else str(cell).strip()


# -- states ---------------------------------------------------------------------------------------


def _make_encoder(backbone: LoadedBackbone, router: Export, batch: int, force: bool) -> Scorer:
    """Returns a scorer that encodes texts for a router."""
    scorer = scorer_from_metadata(
        backbone.backbone, router.metadata, batch, backbone.placement, force=force
    )
    return scorer.with_backbone(backbone.backbone)


def text_states(
    scorer: Scorer, params: Params, placement: Placement, texts: Sequence[str]
) -> np.ndarray:
    """Computes the mean state of each text. -> float32 [texts, H]"""
    split = scorer.encode([Example({"text": text}) for text in texts])
    batches = EvalBatches(split.rows, split.labels, scorer.layout)
    step = states_step(placement, scorer.model.backbone)
    return predict_scores(step, {}, {"backbone": params}, batches, len(split.rows))


@cached_factory
def states_step(placement: Placement, backbone: nn.Module) -> StartPass:
    """Compiles the states of texts, once for all equal backbones of a process."""

    def step(trainable: Flat, frozen: Flat, batch: Batch) -> jax.Array:
        return mean_states(backbone, frozen["backbone"], batch)

    return compile_step(placement, step)


def mean_states(backbone: nn.Module, params: Params, batch: Batch) -> jax.Array:
    """Averages the states of texts in the middle layer, of an encoder-decoder in its encoder.

    -> float32 [B, H]
    """
    layer = (backbone.dims.layers + 1) // 2
    hidden: Any = backbone.apply({"params": params}, batch, layer, method="enter")  # [B, T, H]
    is_text = (batch.encoder.roles == Role.TEXT)[..., None]
    total = jnp.where(is_text, hidden.astype(jnp.float32), 0.0).sum(1)
    return total / jnp.maximum(is_text.sum(1), 1)


# -- training -------------------------------------------------------------------------------------


def train_router(
    backbone: LoadedBackbone,
    prompts: Mapping[str, Export],
    rows: Mapping[str, Rows],
    *,
    kind: str = "centroid",
    accuracy: float = 0.95,
    max_len: int = 128,
    batch: int = 64,
    force: bool = False,
) -> Export:
    """Trains a router on examples of its prompts.

    Five-fold cross-validation gives a probability of every row. From these the threshold is
    chosen: the lowest from 0.5 on above which this share of the rows is routed correctly.

    Args:
      backbone: the backbone of the prompts.
      prompts: by name.
      rows: examples of each prompt, by its name; labels are not read.
      kind: centroid = the nearest mean state, linear = multinomial logistic regression.
      accuracy: share of correctly routed rows, in (0, 1].
      max_len: tokens of a text; at most as many as the backbone has positions.
      batch: texts per batch.
      force: accept prompts that were trained on other weights.

    Raises:
      InputError: if a value is invalid, rows are missing, or no threshold has this accuracy.
    """
    check_known("kind", kind, KINDS)
    if not 0 < accuracy <= 1:
        raise InputError(f"accuracy={accuracy} must be in (0, 1]; use e.g. 0.95")
    at_least("max_len", max_len, 1)
    at_least("batch", batch, 1)
    _check_prompts(prompts, backbone, force=force)
    names = tuple(prompts)
    inputs = [export.metadata.task.input_columns for export in prompts.values()]
    columns = tuple(dict.fromkeys(itertools.chain.from_iterable(inputs)))
    texts, labels, folds, examples = _collect(prompts, rows, columns)
    export = _empty_router(backbone, names, min(max_len, backbone.backbone.module.dims.max_len))
    scorer = _make_encoder(backbone, export, batch, False)
    states = text_states(scorer, backbone.loaded.params, backbone.placement, texts)
    fit = fit_linear if kind == "linear" else fit_centroids
    scores = mask_prompts(_held_out_scores(fit, states, labels, folds), examples, inputs)
    scale = best_scale(scores, labels) if kind == "centroid" else 1.0
    kernel, bias = fit(states, labels, len(names))
    probabilities = softmax(scores * scale)
    chosen, confidences = probabilities.argmax(1), probabilities.max(1)
    is_right = chosen == labels
    threshold = choose_threshold(confidences, is_right, accuracy)
    is_routed = confidences >= threshold
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    for label, choice, routed in zip(labels, chosen, is_routed, strict=True):
        counts[names[label]][names[choice] if routed else ""] += 1
    metrics = {
        "accuracy": float(is_right.mean()),
        "routed": float(is_routed.mean()),
        "routed_accuracy": float(is_right[is_routed].mean()),
    }
    digests = digests_of(prompts)
    router = RouterMetadata(
        kind=kind, columns=columns, threshold=threshold, prompts=digests, held_out=counts
    )
    metadata = dataclasses.replace(export.metadata, metrics={"held_out": metrics}, router=router)
    tensors = (x.astype(np.float32) for x in (kernel * scale, bias * scale))
    return Export("the router", dict(zip(_TENSORS, tensors, strict=True)), metadata)


def _check_prompts(prompts: Mapping[str, Export], backbone: LoadedBackbone, *, force: bool) -> None:
    """Raises InputError for less than two prompts, and for one of other weights or a router."""
    if len(prompts) < 2:
        raise InputError(f"a router needs at least 2 prompts, not {len(prompts)}; give more")
    for name, prompt in prompts.items():
        if prompt.metadata.router is not None:
            raise InputError(f"prompt {name}: {prompt.path} is a router; give a prompt")
        try:
            fingerprint = backbone.loaded.report.fingerprint
            check_fingerprint(prompt.metadata.backbone, fingerprint, force=force)
        except InputError as error:
            raise InputError(f"prompt {name}: {error}") from error


def _held_out_scores(
    fit: Callable[[np.ndarray, np.ndarray, int], LinearLayer],
    states: np.ndarray,
    labels: np.ndarray,
    folds: np.ndarray,
) -> np.ndarray:
    """Scores the states of each fold by a layer that is fitted to the others. -> [N, P]"""
    count = labels.max() + 1
    scores = np.zeros((len(labels), count))
    for fold in range(_FOLDS):
        others, mine = folds != fold, folds == fold
        kernel, bias = fit(states[others], labels[others], count)
        scores[mine] = states[mine] @ kernel + bias
    return scores


def _collect(
    prompts: Mapping[str, Export], rows: Mapping[str, Rows], columns: Sequence[str]
) -> tuple[list[str], np.ndarray, np.ndarray, list[Mapping[str, Any]]]:
    """Returns the texts of all prompts, their prompts and their folds, int [N] each, and the rows.

    Of a prompt with more rows, _MAX_ROWS are sampled.
    """
    texts: list[str] = []
    labels: list[int] = []
    folds: list[int] = []
    used: list[Mapping[str, Any]] = []
    rng = np.random.default_rng(0)
    for index, (name, export) in enumerate(prompts.items()):
        if name not in rows:
            raise InputError(f"prompt {name} has no examples to train the router; give its rows")
        examples = rows[name]
        inputs = [x for x in columns if x in export.metadata.task.input_columns]
        if len(examples) < _FOLDS:
            raise InputError(
                f"prompt {name} has {len(examples)} examples in {examples.path}, and a router "
                f"needs at least {_FOLDS}; add rows"
            )
        for count, number in enumerate(rng.permutation(len(examples))[:_MAX_ROWS]):
            row = examples[number]
            text = join_columns(row, inputs)
            if not text:
                message = _no_text_message(examples.origin(int(number)), inputs)
                raise InputError(f"prompt {name}: {message}")
            texts.append(text)
            labels.append(index)
            folds.append(count % _FOLDS)
            used.append(row)
    return texts, np.array(labels), np.array(folds), used


def _empty_router(backbone: LoadedBackbone, names: tuple[str, ...], max_len: int) -> Export:
    """Returns an export without tensors whose classes are the names of the prompts.

    Raises InputError for a backbone whose layers cannot be computed by themselves.
    """
    opened = backbone.backbone
    if not hasattr(opened.module, "enter"):
        raise InputError(
            f"a router is not supported for {with_article(opened.family)}; name the prompt of "
            "each row in a column"
        )
    config = RunConfig(
        backbone=opened.config,
        task=TaskConfig(name="custom", fields=("text",), label="label", labels=names),
        data=DataConfig(max_len=max_len),
        prompt=OpenBlock("none"),
        head=OpenBlock("linear", {"pooler": "cls"}),
    )
    imported = ImportedPrompt({}, {"name": "none"}, {})
    return Export(
        "the router", {}, make_imported_metadata(config, "the router", imported, backbone)
    )
