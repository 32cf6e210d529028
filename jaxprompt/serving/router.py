"""A router: chooses the prompt of a row by its text, from the frozen backbone's states.

It is an export without a prompt, with a linear head whose classes are the names of the prompts. The
head reads the mean state of a text (of an encoder-decoder, the decoder's first state).
"""

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.prompt_artifact import Export, join_params, scorer_from_metadata
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import DataConfig, RunConfig, TaskConfig
from jaxprompt.convert.artifact import check_fingerprint, encode_tensors
from jaxprompt.convert.prompt_metadata import RouterMetadata
from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.records import Record
from jaxprompt.data.tasks.cells import is_blank, missing_column
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.specials import FED
from jaxprompt.errors import InputError, check_known, list_differences
from jaxprompt.layers.reading import States
from jaxprompt.models.scorer import Scorer
from jaxprompt.serving.adapters import ImportedPrompt, make_imported_metadata
from jaxprompt.serving.answers import Answers, make_answers
from jaxprompt.training.evaluation import predict_scores, scoring_step

KINDS = ("linear", "centroid")
MAX_ROWS = 500  # of a prompt; more hardly change a linear layer on frozen states
_MIN_ROWS, _HELD_OUT = 5, 5  # rows of a prompt; every fifth is held out
_MIN_THRESHOLD = 0.5  # a less likely prompt is more often wrong than right
_DECAY, _RATE, _STEPS = 1e-3, 0.05, 500  # of the linear kind: weight decay, Adam's rate and steps
_SCALES = np.logspace(-4, 0, 41)  # of the centroid kind's scores


class Router(NamedTuple):
    """A router on its backbone, for the prompts of a bank."""

    scorer: Scorer
    answer: Callable[[Sequence[Example]], Answers]  # of at least one example
    metadata: RouterMetadata
    names: tuple[str, ...]  # of the prompts, in the order of the bank

    def route(self, records: Sequence[Record], column: str) -> list[Record]:
        """Chooses the prompts of rows whose `column` is missing or blank.

        Returns the records in order. A routed one has the number of its prompt, and the probability
        of that as its confidence; one for which no prompt is likely enough has an error.
        """
        routed = list(records)
        texts: dict[int, str] = {}
        for index, record in enumerate(records):
            row = record.row
            if row is None or record.error or not is_blank(row.get(column)):
                continue
            texts[index] = join_columns(row, self.metadata.columns)
            if not texts[index]:
                columns = ", ".join(self.metadata.columns)
                message = missing_column(row, self.metadata.columns[0], record.origin)
                message = f"{message}; the router reads {columns}, of which a row needs one"
                routed[index] = record._replace(error=message)
                del texts[index]
        examples = [Example({"text": text}) for text in texts.values()]
        answers = self.answer(examples).columns if examples else []
        for index, answer in zip(texts, answers, strict=True):
            routed[index] = self._choose(records[index], answer["prediction"], answer["score"])
        return routed

    def _choose(self, record: Record, name: str, confidence: float) -> Record:
        threshold, error = self.metadata.threshold, ""
        if confidence < threshold:
            error = (
                f"{record.origin}: the router chose no prompt: the most likely, {name}, has a "
                f"probability of {confidence:.3f}, below {threshold:.3f}; name the prompt of the "
                "row in a column"
            )
        return record._replace(
            prompt=self.names.index(name), confidence=confidence, error=error or record.error
        )


def route_columns(name: str, confidence: float) -> dict[str, Any]:
    """Returns the output columns of a row whose prompt a router chose."""
    return {"route": name, "confidence": confidence}


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
    scorer, params = _load(backbone, router, batch, force)
    generation = router.metadata.generate
    answer = make_answers(scorer, generation=generation, placement=backbone.placement)
    return Router(scorer, functools.partial(answer, params), metadata, tuple(prompts))


def router_metadata(router: Export) -> RouterMetadata:
    """Returns the metadata of a router. Raises InputError for another export."""
    metadata = router.metadata.router
    if metadata is None:
        raise InputError(
            f"{router.path} is an export without a router; give the folder that `python -m "
            "jaxprompt router` wrote"
        )
    return metadata


def _load(
    backbone: LoadedBackbone, export: Export, batch: int, force: bool
) -> tuple[Scorer, dict[str, Any]]:
    """Returns the scorer of an export on a backbone, and its parameters."""
    metadata = export.metadata
    check_fingerprint(metadata.backbone, backbone.loaded.report.fingerprint, force=force)
    scorer = scorer_from_metadata(
        backbone.backbone, metadata, batch, backbone.placement, force=force
    ).with_backbone(backbone.backbone)
    return scorer, join_params(export.path, export.tensors, scorer, backbone)


def digests_of(prompts: Mapping[str, Export]) -> dict[str, str]:
    """Returns the SHA-256 of the tensors of each export, as in its prompt.json."""
    return {
        name: hashlib.sha256(encode_tensors(export.tensors)).hexdigest()
        for name, export in prompts.items()
    }


def join_columns(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Joins the texts of a row's columns, in the order of `columns`; the row may lack some."""
    return " ".join(text for name in columns if (text := _cell_text(row.get(name))))


def _cell_text(cell: Any) -> str:
    """Returns a cell as text: lists are joined, of messages all but those of the assistant."""
    if isinstance(cell, Mapping):
        return "" if cell.get("role") == "assistant" else _cell_text(cell.get("content"))
    if isinstance(cell, list | tuple):
        return " ".join(filter(None, map(_cell_text, cell)))
    return "" if is_blank(cell) else str(cell).strip()


# -- training -------------------------------------------------------------------------------------


def train_router(
    backbone: LoadedBackbone,
    prompts: Mapping[str, Export],
    rows: Mapping[str, Rows],
    *,
    kind: str = "linear",
    accuracy: float = 0.99,
    max_len: int = 128,
    batch: int = 64,
) -> Export:
    """Trains a router on examples of its prompts.

    Four fifths of the rows fit the head. The others choose the threshold: the lowest probability
    from 0.5 on above which this share of them is routed correctly.

    Args:
      backbone: the backbone of the prompts.
      prompts: by name.
      rows: examples of each prompt, by its name; labels are not read.
      kind: linear = multinomial logistic regression, centroid = the nearest mean state.
      accuracy: share of correctly routed rows, in (0, 1].
      max_len: tokens of a text.
      batch: texts per batch.

    Raises:
      InputError: if a value is invalid, rows are missing, or no threshold has this accuracy.
    """
    check_known("kind", kind, KINDS)
    if not 0 < accuracy <= 1:
        raise InputError(f"accuracy={accuracy} must be in (0, 1]; use e.g. 0.99")
    if len(prompts) < 2:
        raise InputError(f"a router needs at least 2 prompts, not {len(prompts)}; give more")
    names = tuple(prompts)
    inputs = [name for export in prompts.values() for name in export.metadata.task.input_columns]
    columns = tuple(dict.fromkeys(inputs))
    texts, labels, is_held_out = _collect(prompts, rows, columns)
    export = _empty_router(backbone, names, max_len)
    states = _pooled_states(*_load(backbone, export, batch, False), backbone, texts)
    fit = fit_linear if kind == "linear" else fit_centroids
    kernel, bias = fit(states[~is_held_out], labels[~is_held_out], len(names))
    states, labels = states[is_held_out], labels[is_held_out]
    if kind == "centroid":
        scale = best_scale(states @ kernel + bias, labels)
        kernel, bias = kernel * scale, bias * scale
    probabilities = np.exp(_log_softmax(states @ kernel + bias))
    chosen, confidences = probabilities.argmax(1), probabilities.max(1)
    is_right = chosen == labels
    threshold = choose_threshold(confidences, is_right, accuracy)
    is_routed = confidences >= threshold
    held_out: dict[str, Counter[str]] = {name: Counter() for name in names}
    for label, choice, sure in zip(labels, chosen, is_routed, strict=True):
        held_out[names[label]][names[choice] if sure else ""] += 1
    metrics = {
        "accuracy": float(is_right.mean()),
        "routed": float(is_routed.mean()),
        "routed_accuracy": float(is_right[is_routed].mean()),
    }
    router = RouterMetadata(
        kind=kind,
        columns=columns,
        threshold=threshold,
        prompts=digests_of(prompts),
        held_out=held_out,
    )
    metadata = dataclasses.replace(export.metadata, metrics={"held_out": metrics}, router=router)
    return Export("the router", _head_tensors(kernel, bias), metadata)


def _collect(
    prompts: Mapping[str, Export], rows: Mapping[str, Rows], columns: Sequence[str]
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Returns the texts of all prompts, their prompts int [N], and which are held out bool [N].

    Of a prompt with more rows, MAX_ROWS are sampled.
    """
    texts: list[str] = []
    labels: list[int] = []
    held_out: list[bool] = []
    rng = np.random.default_rng(0)
    for index, (name, export) in enumerate(prompts.items()):
        if name not in rows:
            raise InputError(f"prompt {name} has no examples to train the router; give its rows")
        inputs = export.metadata.task.input_columns
        examples, own_columns = rows[name], [x for x in columns if x in inputs]
        if len(examples) < _MIN_ROWS:
            raise InputError(
                f"prompt {name} has {len(examples)} examples in {examples.path}, and a router "
                f"needs at least {_MIN_ROWS}; add rows"
            )
        for count, number in enumerate(rng.permutation(len(examples))[:MAX_ROWS]):
            row = examples[number]
            text = join_columns(row, own_columns)
            if not text:
                where = examples.origin(int(number))
                remark = f" of prompt {name} with a text"
                message = missing_column(row, own_columns[0], where, remark)
                raise InputError(f"{message}; add it, or remove the row")
            texts.append(text)
            labels.append(index)
            held_out.append(count % _HELD_OUT == 0)
    return texts, np.array(labels), np.array(held_out)


def _head_tensors(kernel: np.ndarray, bias: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of the linear head. [H, P], [P]"""
    tensors = {"kernel": kernel, "bias": bias}
    return {f"head/main/out/{name}": x.astype(np.float32) for name, x in tensors.items()}


def _empty_router(backbone: LoadedBackbone, names: tuple[str, ...], max_len: int) -> Export:
    """Returns an export whose classes are the names of the prompts, with a head of zeros."""
    opened = backbone.backbone
    # The output of an encoder-decoder has no text to average.
    pooler = "cls" if opened.module.STYLE in FED else "mean"
    config = RunConfig(
        backbone=opened.config,
        task=TaskConfig(name="custom", fields=("text",), label="label", labels=names),
        data=DataConfig(max_len=max_len),
        prompt=OpenBlock("none"),
        head=OpenBlock("linear", {"pooler": pooler, "dropout": 0.0}),
    )
    imported = ImportedPrompt({}, {"name": "none"}, {})
    metadata = make_imported_metadata(config, "the router", imported, backbone)
    width = opened.module.dims.width
    tensors = _head_tensors(np.zeros((width, len(names))), np.zeros(len(names)))
    return Export("the router", tensors, metadata)


def _pooled_states(
    scorer: Scorer, params: Mapping[str, Any], backbone: LoadedBackbone, texts: Sequence[str]
) -> np.ndarray:
    """Computes the states that the head of a router reads. -> float32 [texts, H]"""
    split = scorer.encode([Example({"text": text}) for text in texts])
    states = States(scorer.model.heads["main"])
    model = dataclasses.replace(scorer.model, heads={"main": states})
    params = {name: params[name] for name in params if name != "head"}
    batches = EvalBatches(split.rows, split.labels, scorer.layout)
    step = scoring_step(backbone.placement, model)
    return predict_scores(step, {}, params, batches, len(split.rows))


def _standardise(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the standard deviation of each dimension. [N, H] -> [H], [H]"""
    return states.mean(0), np.maximum(states.std(0), 1e-6)


def _of_raw_states(
    kernel: np.ndarray, bias: np.ndarray, mean: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Converts a linear layer on standardised states to one on states. [H, P], [P]"""
    kernel = kernel / std[:, None]
    return kernel, bias - mean @ kernel


def fit_centroids(
    states: np.ndarray, labels: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a linear layer that scores prompts by their distance from a state.

    The distance is Euclidean, of standardised states to the mean state c of each prompt. It is
    least where c s - |c|^2 / 2 is greatest.

    Args:
      states: float [N, H].
      labels: prompts, int [N].
      count: number P of prompts.

    Returns:
      Kernel [H, P] and bias [P].
    """
    mean, std = _standardise(states)
    centroids = np.stack([((states - mean) / std)[labels == i].mean(0) for i in range(count)])
    return _of_raw_states(centroids.T, -(centroids**2).sum(1) / 2, mean, std)


def fit_linear(states: np.ndarray, labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Fits a multinomial logistic regression on standardised states, with weight decay.

    Every prompt has the same weight, however many rows it has. Arguments and result as those of
    `fit_centroids`.
    """
    mean, std = _standardise(states)
    weights = 1 / np.bincount(labels, minlength=count)[labels] / count
    optimizer = optax.adam(optax.cosine_decay_schedule(_RATE, _STEPS))

    def loss(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(inputs @ params["kernel"] + params["bias"])
        decay = _DECAY / 2 * (params["kernel"] ** 2).sum()
        return decay - (weights * logp[jnp.arange(len(labels)), labels]).sum()

    @jax.jit
    def fit(params: dict[str, jax.Array], inputs: jax.Array) -> dict[str, jax.Array]:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, inputs), state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=_STEPS)[0][0]

    zeros = {"kernel": jnp.zeros((states.shape[1], count)), "bias": jnp.zeros(count)}
    params = jax.tree.map(np.asarray, fit(zeros, jnp.asarray((states - mean) / std)))
    return _of_raw_states(params["kernel"], params["bias"], mean, std)


def best_scale(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the factor of scores whose softmax is the best likelihood. [N, P], [N]"""
    rows = np.arange(len(labels))
    return float(max(_SCALES, key=lambda scale: _log_softmax(scores * scale)[rows, labels].sum()))


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def choose_threshold(confidences: np.ndarray, is_right: np.ndarray, accuracy: float) -> float:
    """Returns the lowest probability, from 0.5 on, above which this share of rows is right.

    Raises:
      InputError: if there is none.
    """
    order = np.argsort(confidences)
    confidences, right = confidences[order], is_right[order]
    # Of each row and those with a higher probability.
    shares = right[::-1].cumsum()[::-1] / np.arange(len(right), 0, -1)
    thresholds = np.unique([_MIN_THRESHOLD, *confidences[confidences > _MIN_THRESHOLD]])
    for threshold, first in zip(thresholds, np.searchsorted(confidences, thresholds), strict=True):
        if first < len(shares) and shares[first] >= accuracy:
            return float(threshold)
    raise InputError(
        f"accuracy={accuracy}: no threshold routes this share of the held-out rows correctly; "
        f"without a threshold {is_right.mean():.3f} are: use a lower accuracy, or more rows"
    )
