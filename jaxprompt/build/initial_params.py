"""The initial parameters of a run, divided into trainable and frozen ones."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import rng, tree
from jaxprompt.build.corpus import read_corpus
from jaxprompt.build.inheritance import check_init, inherit, inherit_head, rescaled
from jaxprompt.build.method import starts_of
from jaxprompt.build.prompt_artifact import numbers_of, read_export, soft_tokens
from jaxprompt.config.run import RunConfig
from jaxprompt.convert import artifact, load, peft
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.identity import check_id
from jaxprompt.data.text.tokenizer import encode_texts
from jaxprompt.data.text.words import text_ids
from jaxprompt.errors import InputError
from jaxprompt.files import user_path
from jaxprompt.models.scorer import Scorer
from jaxprompt.models.text_keys import text_keys
from jaxprompt.parallel.sharding import Placement, check_padding, put, within
from jaxprompt.prompts import BASE, InitSource, Method

T = TypeVar("T")


class Weights(NamedTuple):
    """The parameters of a run before its first step."""

    trainable: tree.Flat
    frozen: tree.Flat
    report: load.Report


def start(
    config: RunConfig,
    scorer: Scorer,
    loaded: load.Loaded,
    counts: np.ndarray | None,
    placement: Placement,
    *,
    restored: bool = False,
) -> Weights:
    """Initialises prompt and head, and divides parameters into trainable (float32) and frozen.

    Args:
      config: the config of the run.
      scorer: its scorer.
      loaded: the backbone's weights.
      counts: token counts of the text that a prompt is initialised from, see `count_tokens`.
      placement: where parameters go.
      restored: if True, the values of trainable parameters do not matter because a checkpoint
        replaces them; a prompt that is entirely trainable is then not initialised.
    """
    params = scorer.model.init(
        rng.key_for(config.seed, "init"), loaded.params, choices=scorer.layout.num_rows,
        placement=placement,
    )  # fmt: skip
    # What is frozen of them is in no checkpoint: it is made again in any case.
    frozen = divide(config, scorer, params)[1]
    is_made = lambda part: not restored or any(name.startswith(part) for name in frozen)
    fingerprint, labels = loaded.report.fingerprint, scorer.task.labels
    if not is_made("prompt/"):
        pass
    elif init := config.prompt.get("init", ""):
        params["prompt"] = inherit(config, fingerprint, labels, init, params["prompt"])
    else:
        source = _make_source(
            config, scorer, counts, _read_tables(scorer, params, placement),
            functools.partial(inherit, config, fingerprint, labels), fingerprint,
        )  # fmt: skip
        params["prompt"] = scorer.model.prompt.begin(params["prompt"], source)
    if config.train.init_head and is_made("head/"):
        params["head"] = inherit_head(config, fingerprint, labels, params["head"])
    for head in () if config.train.init_head else params["head"].values():
        # A head's own pooler starts as that of the checkpoint.
        if "pooler" in head and "pooler" in loaded.params:
            head["pooler"] = loaded.params["pooler"]
    trainable, frozen = divide(config, scorer, params)
    prompt = {name: leaf for name, leaf in frozen.items() if name.startswith("prompt/")}
    frozen |= put(prompt, placement.parameters(prompt))
    check_padding(placement, trainable, scorer.model.backbone.dims.vocab)
    # Copied: a step takes the state's buffers over, and a pooler is also among what is frozen.
    copy = lambda flat: jax.tree.map(jnp.copy, tree.cast(flat, jnp.float32))
    trainable = jax.jit(copy, out_shardings=placement.parameters(trainable))(trainable)
    return Weights(trainable, frozen, loaded.report)


def divide(config: RunConfig, scorer: Scorer, params: tree.Params) -> tuple[tree.Flat, tree.Flat]:
    """Divides parameters into trainable and frozen ones."""
    patterns = tuple(config.trainable) or scorer.model.prompt.TRAINABLE
    if not any(params["head"].values()):  # a verbalizer has no numbers of its own
        patterns = tuple(p for p in patterns if p != r"head/.*")
    trainable, frozen = tree.split_trainable(params, tree.trainable_mask(params, patterns))
    if codes := next(filter(tree.is_plane, trainable), None):
        raise InputError(
            f"backbone.quantize={config.backbone.quantize} quantises {codes.rpartition('/')[0]}, "
            "which then cannot be trained; use backbone.quantize=none, or exclude it from "
            "config.trainable"
        )
    # What another export holds never trains, whatever the patterns hit.
    base = {name: trainable.pop(name) for name in [*trainable] if BASE.fullmatch(name)}
    return trainable, frozen | base


# -- rows of the vocabulary, or of a file ---------------------------------------------------------


class _Tables(NamedTuple):
    """What a InitSource reads of the backbone."""

    embed: Callable[[Sequence[int]], np.ndarray]
    rows: Callable[[Sequence[int]], np.ndarray]
    keys: Callable[[Sequence[int]], dict[str, tuple[np.ndarray, np.ndarray]]]


def check_start(
    config: RunConfig, scorer: Scorer, shapes: tree.Params, counts: np.ndarray | None
) -> None:
    """Raises InputError if a prompt cannot be initialised; needs no weights of the backbone.

    `shapes` are those of all parameters. prompt.init is checked by `check_init`, and a corpus
    (prompt.start=frequent) is not read.
    """
    if config.prompt.get("init") or "frequent" in starts_of(config):
        return
    backbone, embed = scorer.model.backbone, scorer.model.backbone.dims.embed
    blank = lambda shape: np.zeros(shape.shape, np.float32)
    table = lambda ids: np.zeros((len(ids), embed), np.float32)

    def keys(ids: Sequence[int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        run = functools.partial(text_keys, backbone)
        return jax.tree.map(blank, jax.eval_shape(run, shapes["backbone"], np.array(ids)))

    source = _make_source(
        config, scorer, counts, _Tables(table, table, keys), take_over=lambda _, drawn: drawn
    )
    scorer.model.prompt.begin(jax.tree.map(blank, shapes["prompt"]), source)


def check_all(
    config: RunConfig, scorer: Scorer, shapes: tree.Params, counts: np.ndarray | None,
    fingerprint: str, placement: Placement,
) -> tree.Flat:  # fmt: skip
    """Raises InputError for everything that `start` would reject with these weights.

    See `check_start`; exports to initialise from are read. Returns the shapes of trainable
    parameters.
    """
    check_init(config, scorer.model.backbone.dims)
    if init := config.prompt.get("init", ""):
        inherit(config, fingerprint, scorer.task.labels, init, shapes["prompt"])
    if config.train.init_head:
        inherit_head(config, fingerprint, scorer.task.labels, shapes["head"])
    check_start(config, scorer, shapes, counts)
    trainable, _ = divide(config, scorer, shapes)
    check_padding(placement, trainable, scorer.model.backbone.dims.vocab)
    return trainable


def _read_tables(scorer: Scorer, params: tree.Params, placement: Placement) -> _Tables:
    backbone = scorer.model.backbone

    def words(params: tree.Params, ids: np.ndarray) -> jax.Array:
        return backbone.bind({"params": params}).words()[ids]

    def answers(params: tree.Params, ids: np.ndarray) -> jax.Array:
        bound = backbone.bind({"params": params})
        # Classes that are listed are written into the input, others are scored as words are.
        return (bound.words() if scorer.head.LISTS_CLASSES else bound.lm_table()[0])[ids]

    def pick(rows: Callable[..., jax.Array], ids: Sequence[int]) -> np.ndarray:
        # The table may lie on several hosts: only what is needed of it is brought here.
        run = jax.jit(within(placement, rows), out_shardings=placement.replicated)
        return np.asarray(run(params["backbone"], np.array(ids)))

    def keys(ids: Sequence[int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        run = within(placement, functools.partial(text_keys, backbone))
        found = jax.jit(run, out_shardings=placement.replicated)(params["backbone"], np.array(ids))
        return jax.tree.map(lambda x: np.asarray(x, np.float32), found)

    return _Tables(functools.partial(pick, words), functools.partial(pick, answers), keys)


def _make_source(
    config: RunConfig, scorer: Scorer, counts: np.ndarray | None, tables: _Tables,
    take_over: Callable[[str, tree.Nested], tree.Nested], fingerprint: str = "",
) -> InitSource:  # fmt: skip
    """Returns the sources that a method may initialise from.

    Without `fingerprint`, exports of any backbone are read. `take_over` is
    `InitSource.init_from_exports`.
    """

    def read(method: Method, path: str) -> np.ndarray:
        return read_rows(path, method, config.backbone.rescale)

    def take(path: str) -> tuple[Method, tree.Nested]:
        tensors, metadata = read_export(path)
        backbone = metadata.backbone
        if fingerprint and backbone.fingerprint != fingerprint:
            raise InputError(
                f"prompt.pretrained={path} was trained on the weights {backbone.fingerprint[:12]} "
                f"({backbone.id}), but backbone.path has {fingerprint[:12]}; use that backbone, or "
                "another export"
            )
        return numbers_of(path, tensors, metadata)

    def known_ids(table: Callable[[Sequence[int]], T]) -> Callable[[Sequence[int]], T]:
        def checked(ids: Sequence[int]) -> T:
            check_id(max(ids, default=0), scorer.model.backbone.dims.vocab, scorer.tokenizer)
            return table(ids)

        return checked

    return InitSource(
        scorer.tokenizer,
        config.seed,
        functools.partial(_label_ids, scorer),
        counts,
        known_ids(tables.embed),
        known_ids(tables.rows),
        read,
        take_over,
        take,
        known_ids(tables.keys),
    )


def _label_ids(scorer: Scorer) -> list[list[int]]:
    """Lists the token ids of each class's words, as the head reads them where it does."""
    if scorer.verbalizer is not None:
        return [words[words >= 0].tolist() for words in scorer.verbalizer.ids]
    words = scorer.task.words or [(name,) for name in scorer.task.labels]
    encode = lambda own: encode_texts(scorer.tokenizer, [f" {word.strip()}" for word in own])
    return [sum(encode(own), []) for own in words]


def rows_of_file(path: str, width: int | None = None) -> tuple[np.ndarray, float]:
    """Reads saved soft tokens: float32 [S, E = `width` if given], and the divisor they have."""
    if path.endswith(".npy"):
        return artifact.import_npy(path, width), 1.0
    if os.path.exists(user_path(path) / "adapter_config.json"):
        rows = peft.read_peft(path).soft
        if rows is None:
            raise InputError(f"{path} contains a prefix; use an adapter with soft tokens")
        return rows, 1.0
    tensors, metadata = read_export(path)
    rows = soft_tokens(tensors)
    if rows is None:
        raise InputError(
            f"{path} contains a prompt of method {metadata.method}; use one of soft tokens"
        )
    return rows, metadata.backbone.rescale


def read_rows(path: str, prompt: Method, rescale: float = 1.0) -> np.ndarray:
    """Reads soft tokens from an .npy file, an export or a PEFT adapter. float32 [S, E]

    They are divided by `rescale`, like the embeddings; those of an export may already be divided.
    The decoder's are last.
    """
    shape = (prompt.length + prompt.decoder, prompt.dims.embed)
    rows, divided = rows_of_file(path, shape[1])
    if rows.shape != shape:
        raise InputError(f"{path} has shape {list(rows.shape)}, but the prompt needs {list(shape)}")
    return rescaled(rows, divided, rescale)


def count_tokens(
    config: RunConfig, train: Split | None, count_corpus: Callable[[], np.ndarray | None]
) -> np.ndarray | None:
    """Counts the tokens of the text that prompt.start samples from. int64 [ids]

    The text is the training examples (task) or a corpus (frequent), which is read only then.
    Returns None if the prompt is not initialised from text.
    """
    starts = starts_of(config)
    if "task" in starts:
        if train is None:
            raise ValueError("prompt.start=task counts training examples, but there are none")
        return np.bincount(text_ids(train.rows))
    return count_corpus() if "frequent" in starts else None


def count_corpus(config: RunConfig, scorer: Scorer, workdir: str | Path) -> np.ndarray:
    """Counts the tokens of the text at corpus.path, and indexes it if necessary. int64 [ids]

    Raises:
      InputError: if the text cannot be read.
    """
    vocab = scorer.model.backbone.cfg.vocab
    return read_corpus(config, scorer.tokenizer, vocab, workdir).token_counts()
