"""The initial parameters of a run, divided into trainable and frozen ones."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import rng, tree
from jaxprompt.build.corpus import read_corpus
from jaxprompt.build.inheritance import check_init, inherit_head, inherit_prompt, rescale_vectors
from jaxprompt.build.method import prompt_starts
from jaxprompt.build.prompt_artifact import method_and_params, read_export, soft_tokens
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
from jaxprompt.parallel.sharding import Placement, check_padding, put_global, with_placement
from jaxprompt.prompts import BASE, InitSource, Method

T = TypeVar("T")


class InitialParams(NamedTuple):
    """The parameters of a run before its first step."""

    trainable: tree.Flat
    frozen: tree.Flat
    report: load.LoadReport


def init_params(
    config: RunConfig,
    scorer: Scorer,
    loaded: load.Loaded,
    counts: np.ndarray | None,
    placement: Placement,
    *,
    restored: bool = False,
) -> InitialParams:
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
        rng.key_for(config.seed, "init"),
        loaded.params,
        choices=scorer.layout.num_rows,
        placement=placement,
    )
    # A checkpoint has no frozen parameters: these are initialised even if others are restored.
    frozen = split_params(config, scorer, params)[1]

    def needs_init(prefix: str) -> bool:
        return not restored or any(name.startswith(prefix) for name in frozen)

    fingerprint, labels = loaded.report.fingerprint, scorer.task.labels
    if not needs_init("prompt/"):
        pass
    elif init := config.prompt.get("init", ""):
        params["prompt"] = inherit_prompt(config, fingerprint, labels, init, params["prompt"])
    else:
        source = _make_source(
            config,
            scorer,
            counts,
            _vector_tables(scorer, params, placement),
            functools.partial(inherit_prompt, config, fingerprint, labels),
            fingerprint,
        )
        params["prompt"] = scorer.model.prompt.begin(params["prompt"], source)
    if config.train.init_head and needs_init("head/"):
        params["head"] = inherit_head(config, fingerprint, labels, params["head"])
    for head in () if config.train.init_head else params["head"].values():
        # The pooler of a head is initialised from the checkpoint's.
        if "pooler" in head and "pooler" in loaded.params:
            head["pooler"] = loaded.params["pooler"]
    trainable, frozen = split_params(config, scorer, params)
    prompt = {name: leaf for name, leaf in frozen.items() if name.startswith("prompt/")}
    frozen |= put_global(prompt, placement.param_shardings(prompt))
    check_padding(placement, trainable, scorer.model.backbone.dims.vocab)
    return InitialParams(float32_copy(trainable, placement), frozen, loaded.report)


def float32_copy(trainable: tree.Flat, placement: Placement) -> tree.Flat:
    """Copies parameters that train to float32 arrays.

    Copied: a step donates the buffers of the state, and a pooler is also a frozen parameter.
    Separate layers are stacked.
    """

    def copy(flat):
        return jax.tree.map(jnp.copy, tree.cast(tree.stack_layers(flat), jnp.float32))

    shapes = jax.eval_shape(tree.stack_layers, trainable)
    return jax.jit(copy, out_shardings=placement.param_shardings(shapes))(trainable)


def split_params(
    config: RunConfig, scorer: Scorer, params: tree.Params
) -> tuple[tree.Flat, tree.Flat]:
    """Divides parameters into trainable and frozen ones."""
    patterns = tuple(config.trainable) or scorer.model.prompt.TRAINABLE
    if not any(params["head"].values()):  # a verbalizer has no parameters
        patterns = tuple(p for p in patterns if p != r"head/.*")
    trainable, frozen = tree.split_trainable(params, tree.trainable_mask(params, patterns))
    if codes := next(filter(tree.is_plane, trainable), None):
        raise InputError(
            f"backbone.quantize={config.backbone.quantize} quantises {codes.rpartition('/')[0]}, "
            "which then cannot be trained; use backbone.quantize=none, or exclude it from "
            "config.trainable"
        )
    # The parameters of another export stay frozen, even if a pattern matches them.
    base = {name: trainable.pop(name) for name in [*trainable] if BASE.fullmatch(name)}
    return trainable, frozen | base


# -- vectors of the vocabulary, or of a file ------------------------------------------------------


class _VectorTables(NamedTuple):
    """Functions from token ids to vectors of the backbone, see the fields of `InitSource`."""

    embed: Callable[[Sequence[int]], np.ndarray]
    rows: Callable[[Sequence[int]], np.ndarray]
    keys: Callable[[Sequence[int]], dict[str, tuple[np.ndarray, np.ndarray]]]


def check_prompt_init(
    config: RunConfig, scorer: Scorer, shapes: tree.Params, counts: np.ndarray | None
) -> None:
    """Raises InputError if a prompt cannot be initialised; needs no weights of the backbone.

    `shapes` are those of all parameters. prompt.init is checked by `check_init`, and a corpus
    (prompt.start=frequent) is not read.
    """
    if config.prompt.get("init") or "frequent" in prompt_starts(config):
        return
    backbone, embed = scorer.model.backbone, scorer.model.backbone.dims.embed

    def zeros(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.zeros(shape.shape, np.float32)

    def table(ids: Sequence[int]) -> np.ndarray:
        return np.zeros((len(ids), embed), np.float32)

    def keys(ids: Sequence[int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        compute_keys = functools.partial(text_keys, backbone)
        return jax.tree.map(zeros, jax.eval_shape(compute_keys, shapes["backbone"], np.array(ids)))

    source = _make_source(
        config, scorer, counts, _VectorTables(table, table, keys), inherit=lambda _, params: params
    )
    scorer.model.prompt.begin(jax.tree.map(zeros, shapes["prompt"]), source)


def check_init_params(
    config: RunConfig,
    scorer: Scorer,
    shapes: tree.Params,
    counts: np.ndarray | None,
    fingerprint: str,
    placement: Placement,
) -> tree.Flat:
    """Raises InputError for everything that `init_params` would reject with these weights.

    See `check_prompt_init`; exports to initialise from are read. Returns the shapes of trainable
    parameters.
    """
    check_init(config, scorer.model.backbone.dims)
    if init := config.prompt.get("init", ""):
        inherit_prompt(config, fingerprint, scorer.task.labels, init, shapes["prompt"])
    if config.train.init_head:
        inherit_head(config, fingerprint, scorer.task.labels, shapes["head"])
    check_prompt_init(config, scorer, shapes, counts)
    trainable, _ = split_params(config, scorer, shapes)
    check_padding(placement, trainable, scorer.model.backbone.dims.vocab)
    return trainable


def _vector_tables(scorer: Scorer, params: tree.Params, placement: Placement) -> _VectorTables:
    backbone = scorer.model.backbone

    def word_vectors(params: tree.Params, ids: np.ndarray) -> jax.Array:
        return backbone.bind({"params": params}).words()[ids]

    def answer_vectors(params: tree.Params, ids: np.ndarray) -> jax.Array:
        bound = backbone.bind({"params": params})
        # Listed classes are part of the input; others are scored by the output table.
        return (bound.words() if scorer.head.LISTS_CLASSES else bound.lm_table()[0])[ids]

    def compute(function: Callable[..., Any], ids: Sequence[int]) -> Any:
        # The table may be divided over several hosts: only the selected vectors are replicated.
        jitted = jax.jit(with_placement(placement, function), out_shardings=placement.replicated)
        return jax.tree.map(np.asarray, jitted(params["backbone"], np.array(ids)))

    def keys(ids: Sequence[int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return tree.cast(compute(functools.partial(text_keys, backbone), ids), np.float32)

    return _VectorTables(
        functools.partial(compute, word_vectors), functools.partial(compute, answer_vectors), keys
    )


def _make_source(
    config: RunConfig,
    scorer: Scorer,
    counts: np.ndarray | None,
    tables: _VectorTables,
    inherit: Callable[[str, tree.Nested], tree.Nested],
    fingerprint: str = "",
) -> InitSource:
    """Returns the sources that a method may initialise from.

    Without `fingerprint`, exports of any backbone are read. `inherit` is
    `InitSource.init_from_exports`.
    """

    def read_file(method: Method, path: str) -> np.ndarray:
        return read_soft_tokens(path, method, config.backbone.rescale)

    def read_pretrained(path: str) -> tuple[Method, tree.Nested]:
        tensors, metadata = read_export(path)
        backbone = metadata.backbone
        if fingerprint and backbone.fingerprint != fingerprint:
            raise InputError(
                f"prompt.pretrained={path} was trained on the weights {backbone.fingerprint[:12]} "
                f"({backbone.id}), but backbone.path has {fingerprint[:12]}; use that backbone, or "
                "another export"
            )
        return method_and_params(path, tensors, metadata)

    def with_checked_ids(table: Callable[[Sequence[int]], T]) -> Callable[[Sequence[int]], T]:
        def checked(ids: Sequence[int]) -> T:
            check_id(max(ids, default=0), scorer.model.backbone.dims.vocab, scorer.tokenizer)
            return table(ids)

        return checked

    return InitSource(
        scorer.tokenizer,
        config.seed,
        functools.partial(_label_ids, scorer),
        counts,
        with_checked_ids(tables.embed),
        with_checked_ids(tables.rows),
        read_file,
        inherit,
        read_pretrained,
        with_checked_ids(tables.keys),
    )


def _label_ids(scorer: Scorer) -> list[list[int]]:
    """Lists the token ids of each class's words, encoded as the head does if it uses them."""
    if scorer.verbalizer is not None:
        return [words[words >= 0].tolist() for words in scorer.verbalizer.ids]
    words = scorer.task.words or [(name,) for name in scorer.task.labels]
    texts = [[f" {word.strip()}" for word in class_words] for class_words in words]
    return [sum(encode_texts(scorer.tokenizer, class_texts), []) for class_texts in texts]


def load_soft_tokens(path: str, width: int | None = None) -> tuple[np.ndarray, float]:
    """Reads saved soft tokens: float32 [S, E = `width` if given], and the divisor they have."""
    if path.endswith(".npy"):
        return artifact.import_npy(path, width), 1.0
    if os.path.exists(user_path(path) / "adapter_config.json"):
        adapter = peft.read_peft(path)
        parts = [x for x in (adapter.soft, adapter.decoder_soft) if x is not None]
        if not parts:
            raise InputError(f"{path} contains a prefix; use an adapter with soft tokens")
        return np.concatenate(parts), 1.0
    tensors, metadata = read_export(path)
    vectors = soft_tokens(tensors)
    if vectors is None:
        raise InputError(
            f"{path} contains a prompt of method {metadata.method}; use one of soft tokens"
        )
    return vectors, metadata.backbone.rescale


def read_soft_tokens(path: str, prompt: Method, rescale: float = 1.0) -> np.ndarray:
    """Reads soft tokens from an .npy file, an export or a PEFT adapter. float32 [S, E]

    They are divided by `rescale`, like the embeddings; those of an export may already be divided.
    The decoder's are last.
    """
    shape = (prompt.length + prompt.decoder, prompt.dims.embed)
    vectors, divisor = load_soft_tokens(path, shape[1])
    if vectors.shape != shape:
        raise InputError(
            f"{path} has shape {list(vectors.shape)}, but the prompt needs {list(shape)}"
        )
    return rescale_vectors(vectors, divisor, rescale)


def count_tokens(
    config: RunConfig, train: Split | None, count_corpus: Callable[[], np.ndarray | None]
) -> np.ndarray | None:
    """Counts the tokens of the text that prompt.start samples from. int64 [ids]

    The text is the training examples (task) or a corpus (frequent), which is read only then.
    Returns None if the prompt is not initialised from text.
    """
    starts = prompt_starts(config)
    if "task" in starts:
        assert train is not None  # by `check_trainable_prompt` in pre-training
        return np.bincount(text_ids(train.rows))
    return count_corpus() if "frequent" in starts else None


def count_corpus(config: RunConfig, scorer: Scorer, workdir: str | Path) -> np.ndarray:
    """Counts the tokens of the text at corpus.path, and indexes it if necessary. int64 [ids]

    Raises:
      InputError: if the text cannot be read.
    """
    vocab = scorer.model.backbone.cfg.vocab
    return read_corpus(config, scorer.tokenizer, vocab, workdir).token_counts()
