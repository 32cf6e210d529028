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
from jaxprompt.errors import InputError
from jaxprompt.files import user_path
from jaxprompt.models.folding import unfold
from jaxprompt.prompts import Method
from jaxprompt.types import Dims

# Fields of a method that may differ from those of the export that a prompt starts from.
_INIT_FIELDS = ("init", "start", "scale", "top", "text", "file", "dropout", "hidden", "encoder")
_SIZES = [name for name in Dims._fields if name not in ("vocab", "max_len")]


def check_init(config: RunConfig, dims: Dims) -> None:
    """Raises InputError if an export to initialise from has another method, form or size."""
    if config.train.init_head:
        _check_head(config)
    for path, method in inherited_exports(config, dims):
        held = _check_export(path, method, dims).backbone.rescale
        if held != config.backbone.rescale and method.must_match():
            raise InputError(
                f"prompt.{method.INIT}={path} was trained with backbone.rescale={held}, but this "
                f"run has {config.backbone.rescale}; set it to {held}, or use another export"
            )


def _check_head(config: RunConfig) -> None:
    """Raises InputError if a head cannot be initialised from the export of the prompt."""
    init = config.prompt.get("init", "")
    if not init and inherited_exports(config):
        raise InputError(
            "train.init_head=True initialises the head from the export in prompt.init, not from "
            "that of a component; set train.init_head=False"
        )
    paths = list_paths(init) if init else []
    if len(paths) != 1:
        raise InputError(
            "train.init_head=True initialises the head from the export in prompt.init, which names "
            f"{len(paths)}; name one, or set train.init_head=False"
        )
    tensors, metadata = read_export(paths[0])
    named = metadata.head.name
    has = named if any(name.startswith("head/") for name in tensors) else f"{named} without params"
    if has != config.head.name:
        raise InputError(
            f"train.init_head=True, but prompt.init={paths[0]} has head.name={has} and this run "
            f"{config.head.name}; use another export, or set train.init_head=False"
        )


def init_notes(config: RunConfig, dims: Dims) -> list[str]:
    """Describes the exports that a prompt is initialised from, and which are cut or repeated."""
    lines = []
    for path, method in inherited_exports(config, dims):
        metadata = read_export(path)[1]
        has, needs = metadata.hyper.get("length"), method.length
        change = ""
        if isinstance(has, int) and has != needs and method.must_match() is None:
            change = f", its {has} tokens {'cut' if needs < has else 'repeated'} to {needs}"
        lines.append(f"prompt initialised from {path}{change}")
        lines += _layout_notes(config, metadata, has_decoder=dims.decoder_layers > 0)
    return lines


def _layout_notes(config: RunConfig, metadata: PromptMetadata, *, has_decoder: bool) -> list[str]:
    """Describes where the format of a task differs from the pre-training of its prompt."""
    before = metadata.pretrained or {}
    if before.get("task") not in TASKS:
        return []
    lines: list[str] = []
    pairs: dict[str, tuple[object, object]] = {}
    is_form = config.task.form in TASKS
    if config.task.form and config.task.form != before["task"]:
        lines = [
            f"  it was pre-trained with ppt.task={before['task']}, but this run has "
            f"task.form={config.task.form}"
        ]
    elif is_form and "patterns" in before:
        pairs["ppt.patterns"] = before["patterns"], config.ppt.patterns
    if is_form or has_decoder:  # a BERT's input has the same end in any case
        pairs["task.eos"] = metadata.layout.eos, config.task.eos
    return lines + [
        f"  it was pre-trained with {field}={held}, but this run has {now}"
        for field, (held, now) in pairs.items()
        if held != now
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
    if metadata.method != block["name"]:
        raise InputError(
            f"{init} contains a prompt of method {metadata.method}; set prompt.name="
            f"{metadata.method}, or use an export of {block['name']}"
        )
    if method.is_computed():
        raise InputError(
            f"{init} cannot be used: this prompt is computed from other parameters than those in "
            f"an export; set {method.PLAIN}"
        )
    shared = method.must_match()
    if shared is None:
        # Tokens of an input and of a decoder that stand in one table cannot be told apart.
        fixed = method.num_decoder_slots() or metadata.hyper.get("decoder") or not method.length
        free = ("name", *_INIT_FIELDS) if fixed else ("name", *_INIT_FIELDS, "length")
        shared = [field for field in block if field not in free]
    for field in shared:
        value = block[field]
        if (held := metadata.hyper.get(field)) != value:
            raise InputError(
                f"{init} has prompt.{field}={held!r}, but this run has {value!r}; set it "
                f"to {held!r}, or use another export"
            )
    backbone = metadata.backbone
    if other := [x for x in _SIZES if getattr(backbone.dims, x) != getattr(dims, x)]:
        raise InputError(
            f"{init} is for a backbone with {other[0]}={getattr(backbone.dims, other[0])} "
            f"({backbone.id}), but this one has {getattr(dims, other[0])}; use that backbone, or "
            "another export"
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
    config: RunConfig, fingerprint: str, labels: Sequence[str], init: str, drawn: tree.Params
) -> tree.Nested:
    """Returns initial parameters from exported prompts.

    Several exports are averaged. Tables of another length are cut, or repeated from their start.

    Args:
      config: the config of the run.
      fingerprint: of the backbone's weights.
      labels: the classes of the task.
      init: the exports.
      drawn: the randomly initialised parameters that are replaced.

    Raises:
      InputError: if an export was trained on other weights, has parameters of another form, or
        would assign its class vectors to other `labels`.
    """
    paths = list_paths(init)
    if "rows" in drawn:
        for path in paths:
            _check_class_order(path, read_export(path)[1].task.labels, labels)
    found = [_fit_lengths(_read_prompt_params(config, fingerprint, path), drawn) for path in paths]
    for path, own in zip(paths, found, strict=True):
        _check_shapes(path, own, drawn)
    if len(found) == 1:
        return found[0]
    flat = [tree.flatten(own) for own in found]
    mean = {
        name: np.mean([own[name] for own in flat], axis=0, dtype=np.float64) for name in flat[0]
    }
    return tree.unflatten({name: x.astype(np.float32) for name, x in mean.items()})


def _check_class_order(path: str, held: Sequence[str], labels: Sequence[str]) -> None:
    """Raises InputError if a class has another position in the export: vectors are by position."""
    for place, label in enumerate(labels):
        if label in held and list(held).index(label) != place:
            raise InputError(
                f"prompt.init={path} was trained for the classes {', '.join(held)}, but this run "
                f"has {label!r} at position {place + 1}; use the same order, or another export"
            )


def inherit_head(
    config: RunConfig, fingerprint: str, labels: Sequence[str], drawn: tree.Params
) -> tree.Nested:
    """Returns the parameters of the exported head, which replace those in `drawn`.

    Raises:
      InputError: if the export was trained on other weights, or has other classes or another form.
    """
    (path,) = list_paths(config.prompt.get("init", ""))
    tensors, metadata = _read_matching(fingerprint, path)
    if metadata.task.labels != tuple(labels):
        own, other = (", ".join(names)[:60] for names in (metadata.task.labels, labels))
        raise InputError(
            f"train.init_head=True, but prompt.init={path} has a head for the classes {own} and "
            f"this run has {other}; use another export, or set train.init_head=False"
        )
    found = tree.unflatten({n: x for n, x in tensors.items() if n.startswith("head/")})
    _check_shapes(path, found, {"head": drawn})
    return found["head"]


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
    part = "prompt/"
    arrays = {n.removeprefix(part): x for n, x in tensors.items() if n.startswith(part)}
    for name in arrays.keys() & {"slots", "decoder_slots"}:
        arrays[name] = rescale_vectors(
            arrays[name], metadata.backbone.rescale, config.backbone.rescale
        )
    is_folded = metadata.prompt.name != metadata.method
    return unfold(arrays) if is_folded else tree.unflatten(arrays)


def rescale_vectors(rows: np.ndarray, old: float, new: float) -> np.ndarray:
    """Rescales soft tokens: divides them by `new` instead of `old`, like the embeddings."""
    # In float64, so that what --npy multiplied comes back to the last bit but one.
    return (rows * (np.float64(old) / new)).astype(np.float32) if old != new else rows


def _fit_lengths(saved: tree.Params, initial: tree.Params) -> tree.Nested:
    """Cuts or repeats tables that differ from those of `initial` only in the number of tokens."""
    has, needs = tree.flatten(saved), tree.flatten(initial)
    for name in [name for name in has.keys() & needs.keys() if name.endswith("table")]:
        own, shape = np.asarray(has[name]), needs[name].shape
        pairs = list(enumerate(zip(own.shape, shape, strict=False)))
        other = [axis for axis, (x, y) in pairs if x != y]
        if own.ndim == len(shape) and len(other) == 1:
            # The first rows, or all of them over and over.
            count = np.arange(shape[other[0]]) % own.shape[other[0]]
            has[name] = np.take(own, count, axis=other[0])
    return tree.unflatten(has)


def _check_shapes(path: str, saved: tree.Params, initial: tree.Params) -> None:
    """Raises InputError if the parameters of an export are not those that this run trains."""
    has, needs = ({n: list(x.shape) for n, x in tree.flatten(t).items()} for t in (saved, initial))
    for name in sorted(has.keys() | needs.keys()):
        if has.get(name) != needs.get(name):
            raise InputError(
                f"prompt.init={path}: {name} is {has.get(name, 'absent')}, but this run needs "
                f"{needs.get(name, 'none')}; use an export of a run like this one"
            )
