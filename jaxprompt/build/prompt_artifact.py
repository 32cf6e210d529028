"""Packs a trained prompt into tensors and metadata, and unpacks it."""

import dataclasses
import datetime
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt import tree
from jaxprompt.build.backbone import LoadedBackbone, load_weights, open_backbone
from jaxprompt.build.demonstrations import demos_from_metadata, demos_metadata, with_encoder
from jaxprompt.build.method import make_kind, make_method
from jaxprompt.build.scorer import build_scorer, layout_of
from jaxprompt.build.tuned_backbone import without_delta
from jaxprompt.config.block import OpenBlock
from jaxprompt.config.run import BackboneConfig, RunConfig
from jaxprompt.convert.artifact import check_fingerprint, package_versions, read_artifact
from jaxprompt.convert.hub import SCHEME, fetch_prompt
from jaxprompt.convert.prompt_metadata import (
    BackboneMetadata,
    Metrics,
    OriginMetadata,
    PromptMetadata,
)
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.data.text.identity import check_identity, identity_of
from jaxprompt.errors import InputError
from jaxprompt.heads import Kind
from jaxprompt.models.folding import fold, unfold
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.sharding import Placement, put
from jaxprompt.prompts import BASE, LoadExport, Method
from jaxprompt.registry import BACKBONES, HEADS, METHODS, is_installed

_ROWS = ("slots", "decoder_slots")  # arrays of soft tokens


class Exported(NamedTuple):
    """A prompt ready to score."""

    scorer: Scorer
    params: dict[str, Any]  # nested, on the device
    metadata: PromptMetadata


def pack(
    scorer: Scorer, trainable: tree.Flat, frozen: tree.Flat, *, backbone: BackboneConfig,
    fingerprint: str, config: RunConfig, metrics: Metrics,
) -> tuple[dict[str, np.ndarray], PromptMetadata]:  # fmt: skip
    """Folds the prompt and returns its tensors by flat name, and its metadata.

    Trained weights of the backbone are included. Arguments as in `make_metadata`.
    """
    params = tree.merge(trainable, frozen)
    # Any example will do: what is folded depends on no text.
    batch = scorer.one_batch(encode_text(scorer, ""))
    prompt, arrays = fold(scorer.model, params, batch)
    own = tree.flatten({"prompt": prompt.exported(arrays)})
    # What another export holds is not exported once more, unless it was trained on.
    tensors = {n: x for n, x in own.items() if n in trainable or not BASE.fullmatch(n)}
    tensors |= {
        name: np.asarray(leaf, np.float32)
        for name, leaf in tree.flatten(params).items()
        if name.startswith("head/") or (name in trainable and name.startswith("backbone/"))
    }
    metadata = make_metadata(
        scorer, prompt, backbone=backbone, fingerprint=fingerprint, config=config, metrics=metrics
    )
    return tensors, metadata


def make_metadata(
    scorer: Scorer, prompt: Method, *, backbone: BackboneConfig, fingerprint: str,
    config: RunConfig, metrics: Metrics,
) -> PromptMetadata:  # fmt: skip
    """Returns the metadata of a prompt that was not initialised from another export.

    Args:
      scorer: the scorer of the run.
      prompt: the method whose parameters are exported.
      backbone: the config block, with the family of its config.json.
      fingerprint: the fingerprint of the backbone's weights.
      config: the config of the run.
      metrics: the metrics by split.
    """
    plugins = plugins_of(prompt, scorer.head, backbone.family)
    return PromptMetadata(
        method=config.prompt.name,
        hyper=config.prompt,
        prompt=OpenBlock.from_dict(prompt.block()),
        head=OpenBlock.from_dict(scorer.head.block()),
        backbone=BackboneMetadata(
            id=backbone.path,
            revision=backbone.revision,
            family=backbone.family,
            sentinel=backbone.sentinel,
            rescale=backbone.rescale,
            quantize=backbone.quantize,
            fingerprint=fingerprint,
            dims=scorer.model.prompt.dims,
            **identity_of(scorer),
        ),
        task=scorer.task,
        template=scorer.template,
        label_words=scorer.verbalizer.words if scorer.verbalizer else None,
        layout=layout_of(config, scorer.layout.num_rows),
        generate=config.generate,
        metrics=metrics,
        seed=config.seed,
        versions=package_versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        demos=None if scorer.demos is None else demos_metadata(scorer.demos),
        plugins=plugins or None,
    )


def read_export(path: str) -> tuple[dict[str, np.ndarray], PromptMetadata]:
    """Reads the tensors and the metadata of an export, a folder or hub:owner/name.

    Raises:
      InputError: if the export is incomplete.
    """
    tensors, metadata = read_artifact(fetch_prompt(path) if path.startswith(SCHEME) else path)
    check_plugins(path, metadata.plugins or {})
    try:
        make_kind(metadata.head)
        _method_of(metadata)
    except (InputError, TypeError) as error:  # the second for a field that is an argument too
        raise InputError(f"{path}: {error}; export the prompt again") from error
    return tensors, metadata


def plugins_of(prompt: Method, head: Kind, family: str) -> dict[str, str]:
    """Returns the installed packages that a method, a head and a backbone are from.

    Returns:
      Versions by name of the package, without jaxprompt itself.
    """
    methods = [prompt, *(part.method for part in prompt.components())]
    plugins = [
        *(METHODS.plugin(METHODS.name_of(type(method))) for method in methods),
        HEADS.plugin(head.name),
        BACKBONES.plugin(family),
    ]
    return dict(sorted({plugin for plugin in plugins if plugin is not None}))


def check_plugins(path: str, plugins: Mapping[str, str]) -> None:
    """Raises InputError if a package that an export needs is not installed, see `plugins_of`."""
    for package, version in plugins.items():
        if not is_installed(package):
            raise InputError(
                f"{path} needs the package {package} {version}, which is not installed; "
                f"run: pip install {package}"
            )


def _method_of(metadata: PromptMetadata) -> Method:
    return make_method(metadata.prompt, metadata.backbone.dims)


def unpack(
    path: str, *, backbone: BackboneConfig, batch: int, placement: Placement,
    force: bool = False, sentence_encoder: str = "", pretrained: str = "",
) -> Exported:  # fmt: skip
    """Loads an exported prompt and its backbone.

    Args:
      path: the export.
      backbone: the config block; if its path is empty, the one in the metadata is used.
      batch: the batch size.
      placement: where parameters go.
      force: accepts other weights than those that the prompt was trained on.
      sentence_encoder: replaces the path in the metadata.
      pretrained: replaces the path of the export that this one depends on.

    Raises:
      InputError: if the prompt was trained on other weights, unless `force`.
    """
    tensors, metadata = read_export(path)
    metadata = with_encoder(metadata, sentence_encoder)
    opened = open_backbone(backbone_from_metadata(metadata.backbone, backbone))
    scorer = scorer_from_metadata(opened, metadata, batch, force=force)
    whole = LoadedBackbone(*load_weights(opened, placement), placement)
    check_fingerprint(metadata.backbone, whole.loaded.report.fingerprint, force=force)
    tensors = with_base(path, tensors, metadata.init, scorer, pretrained)
    scorer = scorer.with_backbone(whole.backbone)
    return Exported(scorer, join(path, tensors, scorer, whole), metadata)


def backbone_from_metadata(metadata: BackboneMetadata, config: BackboneConfig) -> BackboneConfig:
    """Fills a backbone block from the metadata of an export; a path in the block is kept."""
    config = dataclasses.replace(
        config, sentinel=metadata.sentinel, rescale=metadata.rescale, quantize=metadata.quantize
    )
    if config.path:
        return config
    return dataclasses.replace(config, path=metadata.id, revision=metadata.revision)


def scorer_from_metadata(
    opened: Backbone, metadata: PromptMetadata, batch: int, *, force: bool = False
) -> Scorer:
    """Builds the scorer that the metadata of an export describe.

    Raises:
      InputError: if the backbone has another family, or, unless `force`, another tokenizer or
        other layers than in training.
    """
    backbone = metadata.backbone
    if opened.family != backbone.family:  # no prompt means anything there
        raise InputError(
            f"the prompt was trained on {backbone.family} ({backbone.id}), but the backbone is "
            f"{opened.family}; load a {backbone.family} backbone"
        )
    task = metadata.task
    scorer = build_scorer(
        opened, task, metadata.layout, prompt=metadata.prompt, head=metadata.head,
        template=metadata.template, batch=batch, demos=demos_from_metadata(metadata.demos, task),
    )  # fmt: skip
    if not force:
        cure = "load that backbone, or pass --force (force=True)"
        check_identity(
            backbone.identity(), identity_of(scorer), "the prompt was trained with", cure
        )
    return scorer


def numbers_of(
    path: str, tensors: Mapping[str, np.ndarray], metadata: PromptMetadata
) -> tuple[Method, tree.Nested]:
    """Returns the method of an export and its nested parameters, to initialise others from.

    Raises:
      InputError: if the export that it depends on has changed.
    """
    method = _method_of(metadata)
    own = {name: x for name, x in tensors.items() if name.startswith("prompt/")}
    numbers = tree.unflatten(own).get("prompt", {})
    return method, method.with_base(numbers, _base_reader(path, metadata.init))


def _base_reader(path: str, init: OriginMetadata | None, moved: str = "") -> LoadExport:
    """Returns a reader of the exports that a prompt depends on; `moved` is a new path of one."""
    digests = {origin.path: origin.sha256 for origin in (init, *(init.more or ()))} if init else {}

    def take(named: str) -> tuple[Method, tree.Nested]:
        # Its digest is compared below, wherever it was moved to.
        where = moved or named
        if named not in digests:
            raise InputError(
                f"{path} depends on {named}, but does not record which export that was; "
                "export the prompt again"
            )
        try:
            tensors, metadata = read_export(where)
        except InputError as error:
            raise InputError(
                f"{path} depends on {where}: {error}; give its path as pretrained"
            ) from error
        if digests[named] != metadata.sha256:
            raise InputError(
                f"{path} depends on {where}, which contains another export now; restore it, or "
                "give its new path as pretrained"
            )
        return numbers_of(where, tensors, metadata)

    return take


def with_base(
    path: str, tensors: Mapping[str, np.ndarray], init: OriginMetadata | None, scorer: Scorer,
    moved: str = "",
) -> dict[str, np.ndarray]:  # fmt: skip
    """Adds the parameters of the export that this one depends on.

    Args:
      path: the export, for messages.
      tensors: the tensors of the export.
      init: the export that it depends on.
      scorer: the scorer of the export.
      moved: the new path of the export that it depends on, if it has moved.

    Raises:
      InputError: if that export is missing or differs from the one in training, or if there is
        none and `moved` is given.
    """
    method = scorer.model.prompt
    if moved and not method.inherits():
        raise InputError(f"{path} depends on no other export; leave out pretrained={moved!r}")
    own = {name: x for name, x in tensors.items() if name.startswith("prompt/")}
    prompt = tree.unflatten(own).get("prompt", {})
    whole = method.with_base(prompt, _base_reader(path, init, moved))
    return {**tensors, **tree.flatten({"prompt": whole})}


def join(
    path: str, tensors: Mapping[str, np.ndarray], scorer: Scorer, whole: LoadedBackbone
) -> tree.Nested:
    """Combines the tensors of a prompt with the backbone's parameters.

    `path` names the prompt in messages. Returns nested params on the device.

    Raises:
      InputError: if a tensor is missing, unknown or has another shape.
    """
    scorer, loaded, placement = scorer.with_backbone(whole.backbone), whole.loaded, whole.placement
    flat = tree.flatten({"backbone": loaded.params})
    tensors = without_delta(path, tensors, flat, scorer.model.backbone.dims.vocab)
    init = functools.partial(scorer.model.init, choices=scorer.layout.num_rows)
    # Shapes alone: nothing is drawn that the tensors would replace.
    shapes = jax.eval_shape(init, jax.random.key(0), loaded.params)
    wanted = tree.flatten({name: shapes[name] for name in ("prompt", "head")}) | {
        name: leaf for name, leaf in flat.items() if name in tensors
    }
    lost = wanted.keys() - tensors.keys()
    if any(x.startswith("head/") for x in lost) and not any(x.startswith("head/") for x in tensors):
        raise InputError(
            f"{path} has no parameters of a head, but head {scorer.head.name} must be trained; "
            "use head=jp.verbalizer(), which uses label words, or train a prompt"
        )
    for name in sorted(wanted.keys() ^ tensors.keys()):
        state = "lacks" if name in wanted else "has the unknown"
        raise InputError(f"{path} {state} tensor {name!r}; export the prompt again")
    for name, leaf in wanted.items():
        if leaf.shape != tensors[name].shape:
            shape = list(tensors[name].shape)
            raise InputError(
                f"{path}: {name} is {shape}, but the backbone needs {list(leaf.shape)}; use the "
                "backbone that it was trained on, or another prompt"
            )
    own = put(tensors, placement.parameters(tensors))
    return tree.unflatten(flat | own)


def soft_tokens(tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns the soft tokens of an export, the decoder's last, None if it has none. [S, E]

    They are on the scale of embeddings divided by `backbone.rescale`.
    """
    rows = {name: tensors[f"prompt/{name}"] for name in _ROWS if f"prompt/{name}" in tensors}
    return unfold(rows)["table"] if rows else None


def plain_tokens(tensors: Mapping[str, np.ndarray], rescale: float) -> np.ndarray | None:
    """Returns soft tokens on the scale of the unmodified backbone: times `backbone.rescale`."""
    rows = soft_tokens(tensors)
    return None if rows is None else rows * np.float32(rescale)


def encode_text(scorer: Scorer, text: str) -> list[list[Encoded]]:
    """Encodes one example whose fields and choices are all `text`."""
    return scorer.encoder.encode_all([scorer.task.example(text, (text,) * scorer.layout.num_rows)])
