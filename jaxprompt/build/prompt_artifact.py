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
from jaxprompt.build.demonstrations import (
    demos_from_metadata,
    demos_metadata,
    replace_sentence_encoder,
)
from jaxprompt.build.layers import separates_layers
from jaxprompt.build.method import cached_head, cached_method
from jaxprompt.build.scorer import build_scorer, example_layout
from jaxprompt.build.tuned_backbone import from_delta
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
from jaxprompt.data.text.identity import check_fingerprints, scorer_fingerprints
from jaxprompt.errors import InputError
from jaxprompt.heads import Kind
from jaxprompt.models.folding import fold, unfold
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.sharding import Placement, put_global
from jaxprompt.prompts import BASE, LoadExport, Method
from jaxprompt.registry import BACKBONES, HEADS, METHODS, is_installed

_SOFT_TOKENS = ("slots", "decoder_slots")  # arrays of soft tokens


class Export(NamedTuple):
    """An export in memory."""

    path: str  # for messages
    tensors: Mapping[str, np.ndarray]
    metadata: PromptMetadata


class LoadedPrompt(NamedTuple):
    """A prompt ready to score."""

    scorer: Scorer
    params: dict[str, Any]  # nested, on the device
    metadata: PromptMetadata


def pack_prompt(
    scorer: Scorer,
    trainable: tree.Flat,
    frozen: tree.Flat,
    *,
    backbone: BackboneConfig,
    fingerprint: str,
    config: RunConfig,
    metrics: Metrics,
) -> tuple[dict[str, np.ndarray], PromptMetadata]:
    """Folds the prompt and returns its tensors by flat name, and its metadata.

    Trained weights of the backbone are included. Arguments as in `make_metadata`.
    """
    params = tree.merge(trainable, frozen)
    # Folding does not depend on the text of the example.
    prompt, arrays = fold(scorer.model, params, scorer.one_batch(encode_any(scorer)))
    folded = tree.flatten({"prompt": prompt.exported(arrays)})
    # The parameters of another export are only included if they were trained further.
    tensors = {n: x for n, x in folded.items() if n in trainable or not BASE.fullmatch(n)}
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
    scorer: Scorer,
    prompt: Method,
    *,
    backbone: BackboneConfig,
    fingerprint: str,
    config: RunConfig,
    metrics: Metrics,
) -> PromptMetadata:
    """Returns the metadata of a prompt that was not initialised from another export.

    Args:
      scorer: the scorer of the run.
      prompt: the method whose parameters are exported.
      backbone: the config block, with the family of its config.json.
      fingerprint: the fingerprint of the backbone's weights.
      config: the config of the run.
      metrics: the metrics by split.
    """
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
            **scorer_fingerprints(scorer),
        ),
        task=scorer.task,
        template=scorer.template,
        label_words=scorer.verbalizer.words if scorer.verbalizer else None,
        layout=example_layout(config, scorer.layout.num_rows),
        generate=config.generate,
        metrics=metrics,
        seed=config.seed,
        versions=package_versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        demos=None if scorer.demos is None else demos_metadata(scorer.demos),
        plugins=plugins_of(prompt, scorer.head, backbone.family) or None,
    )


def read_export(path: str) -> tuple[dict[str, np.ndarray], PromptMetadata]:
    """Reads the tensors and the metadata of an export, a folder or hub:owner/name.

    Raises:
      InputError: if the export is incomplete.
    """
    tensors, metadata = read_artifact(fetch_prompt(path) if path.startswith(SCHEME) else path)
    check_plugins(path, metadata.plugins or {})
    try:
        cached_head(metadata.head)
        _metadata_method(metadata)
    except (InputError, TypeError) as error:  # TypeError: a field has the name of an argument
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


def _metadata_method(metadata: PromptMetadata) -> Method:
    return cached_method(metadata.prompt, metadata.backbone.dims)


def load_prompt_export(
    path: str,
    *,
    backbone: BackboneConfig,
    batch: int,
    placement: Placement,
    force: bool = False,
    sentence_encoder: str = "",
    pretrained: str = "",
) -> LoadedPrompt:
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
    metadata = replace_sentence_encoder(metadata, sentence_encoder)
    backbone_module = open_backbone(backbone_from_metadata(metadata.backbone, backbone))
    scorer = scorer_from_metadata(backbone_module, metadata, batch, placement, force=force)
    separate_layers = separates_layers(backbone_module, placement, writes=scorer.head.WRITES)
    weights = load_weights(backbone_module, placement, separate_layers=separate_layers)
    loaded_backbone = LoadedBackbone(*weights, placement)
    check_fingerprint(metadata.backbone, loaded_backbone.loaded.report.fingerprint, force=force)
    tensors = with_base_params(path, tensors, metadata.init, scorer, pretrained)
    scorer = scorer.with_backbone(loaded_backbone.backbone)
    return LoadedPrompt(scorer, join_params(path, tensors, scorer, loaded_backbone), metadata)


def backbone_from_metadata(metadata: BackboneMetadata, config: BackboneConfig) -> BackboneConfig:
    """Fills a backbone block from the metadata of an export; a path in the block is kept."""
    config = dataclasses.replace(
        config, sentinel=metadata.sentinel, rescale=metadata.rescale, quantize=metadata.quantize
    )
    if config.path:
        return config
    return dataclasses.replace(config, path=metadata.id, revision=metadata.revision)


def scorer_from_metadata(
    backbone: Backbone,
    metadata: PromptMetadata,
    batch: int,
    placement: Placement | None = None,
    *,
    force: bool = False,
) -> Scorer:
    """Builds the scorer that the metadata of an export describe, for the devices of a mesh.

    Raises:
      InputError: if the backbone has another family, or, unless `force`, another tokenizer or
        other layers than in training.
    """
    trained_on = metadata.backbone
    if backbone.family != trained_on.family:
        raise InputError(
            f"the prompt was trained on {trained_on.family} ({trained_on.id}), but the backbone is "
            f"{backbone.family}; load a {trained_on.family} backbone"
        )
    task = metadata.task
    scorer = build_scorer(
        backbone,
        task,
        metadata.layout,
        prompt=metadata.prompt,
        head=metadata.head,
        template=metadata.template,
        batch=batch,
        placement=placement,
        demos=demos_from_metadata(metadata.demos, task),
    )
    if not force:
        check_fingerprints(
            trained_on.identity(),
            scorer_fingerprints(scorer),
            "the prompt was trained with",
            "load that backbone, or pass --force (force=True)",
        )
    return scorer


def method_and_params(
    path: str, tensors: Mapping[str, np.ndarray], metadata: PromptMetadata
) -> tuple[Method, tree.Nested]:
    """Returns the method of an export and its nested parameters, to initialise others from.

    Raises:
      InputError: if the export that it depends on has changed.
    """
    method = _metadata_method(metadata)
    return method, method.with_base(_prompt_params(tensors), _base_reader(path, metadata.init))


def _prompt_params(tensors: Mapping[str, np.ndarray]) -> tree.Nested:
    """Returns the nested parameters of the method of an export."""
    return tree.unflatten(tensors).get("prompt", {})


def _base_reader(path: str, init: OriginMetadata | None, new_path: str = "") -> LoadExport:
    """Returns a reader of the exports that a prompt depends on; `new_path` replaces their path."""
    digests = {origin.path: origin.sha256 for origin in (init, *(init.more or ()))} if init else {}

    def read_base(recorded_path: str) -> tuple[Method, tree.Nested]:
        path_now = new_path or recorded_path
        if recorded_path not in digests:
            raise InputError(
                f"{path} depends on {recorded_path}, but does not record which export that was; "
                "export the prompt again"
            )
        try:
            tensors, metadata = read_export(path_now)
        except InputError as error:
            raise InputError(
                f"{path} depends on {path_now}: {error}; give its path as pretrained"
            ) from error
        if digests[recorded_path] != metadata.sha256:
            raise InputError(
                f"{path} depends on {path_now}, which contains another export now; restore it, or "
                "give its new path as pretrained"
            )
        return method_and_params(path_now, tensors, metadata)

    return read_base


def with_base_params(
    path: str,
    tensors: Mapping[str, np.ndarray],
    init: OriginMetadata | None,
    scorer: Scorer,
    new_path: str = "",
) -> dict[str, np.ndarray]:
    """Adds the parameters of the export that this one depends on.

    Args:
      path: the export, for messages.
      tensors: the tensors of the export.
      init: the export that it depends on.
      scorer: the scorer of the export.
      new_path: the new path of the export that it depends on, if it has moved.

    Raises:
      InputError: if that export is missing or differs from the one in training, or if there is
        none and `new_path` is given.
    """
    method = scorer.model.prompt
    if new_path and not method.inherits():
        raise InputError(f"{path} depends on no other export; leave out pretrained={new_path!r}")
    params = method.with_base(_prompt_params(tensors), _base_reader(path, init, new_path))
    return {**tensors, **tree.flatten({"prompt": params})}


def join_params(
    path: str, tensors: Mapping[str, np.ndarray], scorer: Scorer, loaded_backbone: LoadedBackbone
) -> tree.Nested:
    """Combines the tensors of a prompt with the backbone's parameters.

    `path` names the prompt in messages. Returns nested params on the device.

    Raises:
      InputError: if a tensor is missing, unknown or has another shape.
    """
    if any(name.startswith("router/") for name in tensors):
        raise InputError(
            f"{path} is a router, which chooses among prompts; give it with --route (router=)"
        )
    scorer = scorer.with_backbone(loaded_backbone.backbone)
    backbone_params = loaded_backbone.loaded.params
    flat = tree.flatten({"backbone": backbone_params})
    tensors = from_delta(path, tensors, flat, scorer.model.backbone.dims.vocab)
    init = functools.partial(scorer.model.init, choices=scorer.layout.num_rows)
    shapes = jax.eval_shape(init, jax.random.key(0), backbone_params)
    expected = tree.flatten({name: shapes[name] for name in ("prompt", "head")}) | {
        name: leaf for name, leaf in flat.items() if name in tensors
    }
    missing = expected.keys() - tensors.keys()
    lacks_head, has_head = (
        any(name.startswith("head/") for name in names) for names in (missing, tensors)
    )
    if lacks_head and not has_head:
        raise InputError(
            f"{path} has no parameters of a head, but head {scorer.head.name} must be trained; "
            "use head=jp.verbalizer(), which uses label words, or train a prompt"
        )
    for name in sorted(expected.keys() ^ tensors.keys()):
        state = "lacks" if name in expected else "has the unknown"
        raise InputError(f"{path} {state} tensor {name!r}; export the prompt again")
    for name, leaf in expected.items():
        if leaf.shape != tensors[name].shape:
            shape = list(tensors[name].shape)
            raise InputError(
                f"{path}: {name} is {shape}, but the backbone needs {list(leaf.shape)}; use the "
                "backbone that it was trained on, or another prompt"
            )
    shardings = loaded_backbone.placement.param_shardings(tensors)
    return tree.unflatten(flat | put_global(tensors, shardings))


def soft_tokens(tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns the soft tokens of an export, the decoder's last, None if it has none. [S, E]

    They are on the scale of embeddings divided by `backbone.rescale`.
    """
    arrays = {
        name: tensors[f"prompt/{name}"] for name in _SOFT_TOKENS if f"prompt/{name}" in tensors
    }
    return unfold(arrays)["table"] if arrays else None


def unscaled_soft_tokens(tensors: Mapping[str, np.ndarray], rescale: float) -> np.ndarray | None:
    """Returns soft tokens on the scale of the unmodified backbone: times `backbone.rescale`."""
    vectors = soft_tokens(tensors)
    return None if vectors is None else vectors * np.float32(rescale)


def encode_any(scorer: Scorer) -> list[list[Encoded]]:
    """Encodes an example, for what is the same for all examples."""
    choices = ("a",) * scorer.layout.num_rows
    return scorer.encoder.encode_all([scorer.task.example("a", choices)])
