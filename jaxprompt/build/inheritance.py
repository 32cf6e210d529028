"""Initialises a prompt from exports: from one, or from the mean of several, cut to its length."""

import os
from collections.abc import Sequence

import numpy as np

from jaxprompt import tree
from jaxprompt.build.method import inherited_exports, list_paths
from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.prompt_metadata import OriginMetadata, PromptMetadata
from jaxprompt.corpus.ppt import TASKS
from jaxprompt.errors import InputError, check_rules
from jaxprompt.files import user_path
from jaxprompt.models.folding import unfold
from jaxprompt.prompts import Method
from jaxprompt.types import Dims

# Fields of a method that may differ from those of the export that initialises it.
_INIT_FIELDS = ("init", "start", "scale", "top", "text", "file", "dropout", "hidden", "encoder")
_SIZES = [name for name in Dims._fields if name not in ("vocab", "max_len")]


def check_init(config: RunConfig, dims: Dims) -> None:
    """Raises InputError if an export to initialise from has another method, form or size."""
    if config.train.init_head:
        _check_head(config)
    for path, method in inherited_exports(config, dims):
        trained_with = _check_export(path, method, dims).backbone.rescale
        if trained_with != config.backbone.rescale and method.must_match():
            raise InputError(
                f"prompt.{method.INIT}={path} was trained with backbone.rescale={trained_with}, "
                f"but this run has {config.backbone.rescale}; set it to {trained_with}, or use "
                "another export"
            )


def _check_head(config: RunConfig) -> None:
    """Raises InputError if a head cannot be initialised from the export of the prompt."""
    init = config.prompt.get("init", "")
    paths = list_paths(init) if init else []
    if len(paths) != 1:
        raise InputError(
            "train.init_head=True initialises the head from the export in prompt.init (not from "
            f"that of a component), which names {len(paths)}; name one, or set "
            "train.init_head=False"
        )
    tensors, metadata = read_export(paths[0])
    name = metadata.head.name
    exported = (
        name if any(name.startswith("head/") for name in tensors) else f"{name} without params"
    )
    if exported != config.head.name:
        raise InputError(
            f"train.init_head=True, but prompt.init={paths[0]} has head.name={exported} and this "
            f"run {config.head.name}; use another export, or set train.init_head=False"
        )


def init_notes(config: RunConfig, dims: Dims) -> list[str]:
    """Describes the exports that a prompt is initialised from, and which are cut or repeated."""
    lines = []
    for path, method in inherited_exports(config, dims):
        metadata = read_export(path)[1]
        old_length, new_length = metadata.hyper.get("length"), method.length
        resized = ""
        if isinstance(old_length, int) and old_length != new_length and method.must_match() is None:
            verb = "cut" if new_length < old_length else "repeated"
            resized = f", its {old_length} tokens {verb} to {new_length}"
        lines.append(f"prompt initialised from {path}{resized}")
        lines += _layout_notes(config, metadata, has_decoder=dims.decoder_layers > 0)
    return lines


def _layout_notes(config: RunConfig, metadata: PromptMetadata, *, has_decoder: bool) -> list[str]:
    """Describes where the format of a task differs from the pre-training of its prompt."""
    pretraining = metadata.pretrained or {}
    if pretraining.get("task") not in TASKS:
        return []
    pairs: dict[str, tuple[object, object]] = {}
    is_form = config.task.form in TASKS
    if config.task.form and config.task.form != pretraining["task"]:
        pairs["ppt.task"] = pretraining["task"], f"task.form={config.task.form}"
    elif is_form and "patterns" in pretraining:
        pairs["ppt.patterns"] = pretraining["patterns"], config.ppt.patterns
    if is_form or has_decoder:  # a BERT's input has the same end in any case
        pairs["task.eos"] = metadata.layout.eos, config.task.eos
    return [
        f"  it was pre-trained with {field}={old}, but this run has {new}"
        for field, (old, new) in pairs.items()
        if old != new
    ]


def _check_export(path: str, method: Method, dims: Dims) -> PromptMetadata:
    """Checks the method, form and size of an export and returns its metadata."""
    block, init = method.block(), f"prompt.{method.INIT}={path}"
    if path.endswith(".npy") or os.path.exists(user_path(path) / "adapter_config.json"):
        raise InputError(
            f"{init} is not an export; for an .npy file or a PEFT adapter use "
            f"prompt.name=soft or prefix, prompt.start=file and prompt.file={path}"
        )
    try:
        _, metadata = read_export(path)
    except InputError as error:
        raise InputError(f"{init}: {error}") from error
    rules = {
        f"{init} contains a prompt of method {metadata.method}; set prompt.name={metadata.method}, "
        f"or use an export of {block['name']}": metadata.method != block["name"],
        f"{init} cannot be used: this prompt is computed from other parameters than those in an "
        f"export; set {method.PLAIN}": method.is_computed(),
    }
    check_rules(rules)
    fields = method.must_match()
    if fields is None:
        # One table contains the tokens of the input and of the decoder: neither can be resized.
        fixed = method.num_decoder_slots() or metadata.hyper.get("decoder") or not method.length
        free_fields = ("name", *_INIT_FIELDS) if fixed else ("name", *_INIT_FIELDS, "length")
        fields = [field for field in block if field not in free_fields]
    for field in fields:
        value = block[field]
        if (exported := metadata.hyper.get(field)) != value:
            raise InputError(
                f"{init} has prompt.{field}={exported!r}, but this run has {value!r}; set it "
                f"to {exported!r}, or use another export"
            )
    backbone = metadata.backbone
    if differing := [x for x in _SIZES if getattr(backbone.dims, x) != getattr(dims, x)]:
        raise InputError(
            f"{init} is for a backbone with {differing[0]}={getattr(backbone.dims, differing[0])} "
            f"({backbone.id}), but this one has {getattr(dims, differing[0])}; use that backbone, "
            "or another export"
        )
    return metadata


def origin_metadata(path: str) -> OriginMetadata:
    """Returns the metadata of the export that a prompt is initialised from."""
    _, metadata = read_export(path)
    return OriginMetadata(
        path=path,
        method=metadata.method,
        task=metadata.task.name,
        seed=metadata.seed,
        metrics=metadata.metrics,
        created=metadata.created,
        sha256=str(metadata.sha256),
        pretrained=metadata.pretrained,
        init=metadata.init,
    )


def inherit_prompt(
    config: RunConfig, fingerprint: str, labels: Sequence[str], init: str, initial: tree.Params
) -> tree.Nested:
    """Returns initial parameters from exported prompts.

    Several exports are averaged. Tables of another length are cut, or repeated from their start.

    Args:
      config: the config of the run.
      fingerprint: of the backbone's weights.
      labels: the classes of the task.
      init: the exports.
      initial: the randomly initialised parameters that are replaced.

    Raises:
      InputError: if an export was trained on other weights, has parameters of another form, or
        would assign its class vectors to other `labels`.
    """
    paths = list_paths(init)
    if "rows" in initial:
        for path in paths:
            _check_class_order(path, read_export(path)[1].task.labels, labels)
    prompts = [
        _fit_lengths(_read_prompt_params(config, fingerprint, path), initial) for path in paths
    ]
    for path, prompt in zip(paths, prompts, strict=True):
        _check_shapes(path, prompt, initial)
    if len(prompts) == 1:
        return prompts[0]
    flat = [tree.flatten(prompt) for prompt in prompts]
    mean = {
        name: np.mean([prompt[name] for prompt in flat], axis=0, dtype=np.float64)
        for name in flat[0]
    }
    return tree.unflatten({name: x.astype(np.float32) for name, x in mean.items()})


def _check_class_order(path: str, old_labels: Sequence[str], labels: Sequence[str]) -> None:
    """Raises InputError if a class has another position in the export: vectors are by position."""
    for position, label in enumerate(labels):
        if label in old_labels and list(old_labels).index(label) != position:
            raise InputError(
                f"prompt.init={path} was trained for the classes {', '.join(old_labels)}, but "
                f"this run has {label!r} at position {position + 1}; use the same order, or "
                "another export"
            )


def inherit_head(
    config: RunConfig, fingerprint: str, labels: Sequence[str], initial: tree.Params
) -> tree.Nested:
    """Returns the parameters of the exported head, which replace those in `initial`.

    Raises:
      InputError: if the export was trained on other weights, or has other classes or another form.
    """
    (path,) = list_paths(config.prompt.get("init", ""))
    tensors, metadata = _read_matching(fingerprint, path)
    if metadata.task.labels != tuple(labels):
        exported, expected = (", ".join(names)[:60] for names in (metadata.task.labels, labels))
        raise InputError(
            f"train.init_head=True, but prompt.init={path} has a head for the classes {exported} "
            f"and this run has {expected}; use another export, or set train.init_head=False"
        )
    params = tree.unflatten({n: x for n, x in tensors.items() if n.startswith("head/")})
    _check_shapes(path, params, {"head": initial})
    return params["head"]


def _read_matching(fingerprint: str, path: str) -> tuple[dict[str, np.ndarray], PromptMetadata]:
    """Reads an export that was trained on these weights; returns its tensors and metadata."""
    tensors, metadata = read_export(path)
    backbone = metadata.backbone
    if backbone.fingerprint != fingerprint:
        raise InputError(
            f"prompt.init={path} was trained on the weights {backbone.fingerprint[:12]} "
            f"({backbone.id}), but backbone.path has {fingerprint[:12]}; use that backbone, or "
            "another export"
        )
    return tensors, metadata


def _read_prompt_params(config: RunConfig, fingerprint: str, path: str) -> tree.Nested:
    tensors, metadata = _read_matching(fingerprint, path)
    prefix = "prompt/"
    arrays = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
    for name in arrays.keys() & {"slots", "decoder_slots"}:
        arrays[name] = rescale_vectors(
            arrays[name], metadata.backbone.rescale, config.backbone.rescale
        )
    is_folded = metadata.prompt.name != metadata.method
    return unfold(arrays) if is_folded else tree.unflatten(arrays)


def rescale_vectors(vectors: np.ndarray, old: float, new: float) -> np.ndarray:
    """Rescales soft tokens: divides them by `new` instead of `old`, like the embeddings."""
    # float64: undoes the multiplication of --npy except for the last bit.
    return (vectors * (np.float64(old) / new)).astype(np.float32) if old != new else vectors


def _fit_lengths(saved: tree.Params, initial: tree.Params) -> tree.Nested:
    """Cuts or repeats tables that differ from those of `initial` only in the number of tokens."""
    saved_flat, initial_flat = tree.flatten(saved), tree.flatten(initial)
    for name in [
        name for name in saved_flat.keys() & initial_flat.keys() if name.endswith("table")
    ]:
        table, shape = np.asarray(saved_flat[name]), initial_flat[name].shape
        axes = [i for i, (x, y) in enumerate(zip(table.shape, shape, strict=False)) if x != y]
        if table.ndim == len(shape) and len(axes) == 1:
            # The first vectors, or all of them repeated.
            indices = np.arange(shape[axes[0]]) % table.shape[axes[0]]
            saved_flat[name] = np.take(table, indices, axis=axes[0])
    return tree.unflatten(saved_flat)


def _check_shapes(path: str, saved: tree.Params, initial: tree.Params) -> None:
    """Raises InputError if the parameters of an export are not those that this run trains."""
    saved_shapes, initial_shapes = (
        {n: list(x.shape) for n, x in tree.flatten(t).items()} for t in (saved, initial)
    )
    for name in sorted(saved_shapes.keys() | initial_shapes.keys()):
        if saved_shapes.get(name) != initial_shapes.get(name):
            raise InputError(
                f"prompt.init={path}: {name} is {saved_shapes.get(name, 'absent')}, but this run "
                f"needs {initial_shapes.get(name, 'none')}; use an export of a run like this one"
            )
