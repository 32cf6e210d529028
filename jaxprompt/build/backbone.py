"""Opens a backbone: its folder, its module, its weights."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxprompt.backbones import families, make_backbone
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert import folder, load
from jaxprompt.convert.llama_fields import MODEL_TYPES as LLAMA_TYPES
from jaxprompt.convert.shapes import check_num_parameters, get_family
from jaxprompt.data.rows import Rows
from jaxprompt.data.text.specials import Specials
from jaxprompt.errors import InputError, brief
from jaxprompt.heads import BackboneInfo
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel.sharding import Placement

# model_type -> family, where they differ
_FAMILIES = {
    "xlm-roberta": "roberta",
    "xlm-roberta-xl": "xlm_roberta_xl",
    "mt5": "t5",
    "deberta-v2": "deberta_v2",
}
_FAMILIES |= {name: model_type.family for name, model_type in LLAMA_TYPES.items()}
_MIXED_HEADS = (
    "its layers have heads of two sizes, or use the keys of other layers, but a prefix has one "
    "shape for all layers"
)
_RECURRENT = "most of its layers are not attention but recurrent (Gated DeltaNet)"
# model_type -> the reason why it is not supported
_REFUSED = dict.fromkeys(("gemma4", "gemma4_text"), _MIXED_HEADS)
_REFUSED |= dict.fromkeys(("qwen3_5", "qwen3_5_text"), _RECURRENT)
_REFUSED |= dict.fromkeys(("ministral3", "mistral3"), "its queries are scaled by their positions")


def model_family(model_type: str) -> str:
    """Returns the backbone family for a model_type of transformers."""
    return _FAMILIES.get(model_type, model_type)


def find_family(path: Path, hf: Mapping[str, object], family: str = "") -> str:
    """Returns the family of a transformers config; `family` replaces the config's.

    Raises:
      InputError: if it is not supported.
    """
    model_type = hf.get("model_type") or ""
    family = family or (model_family(model_type) if isinstance(model_type, str) else "")
    if family not in families():
        reason = f" ({_REFUSED[family]})" if family in _REFUSED else ""
        raise InputError(
            f"{path} contains a model of type {brief(family or model_type)}, which is not "
            f"supported; use one of {', '.join(families())}{reason}"
        )
    return family


def open_backbone(config: BackboneConfig) -> Backbone:
    """Locates a backbone and reads its config and the names of its heads."""
    if not config.path:
        raise InputError(
            "backbone.path is empty; give a folder, a .gguf file, a Hub id or pkg:PACKAGE/FOLDER"
        )
    path = folder.resolve(config.path, config.revision or None)
    return backbone_from_config(config, path, folder.read_config(path))


def backbone_from_config(
    config: BackboneConfig, path: Path, hf: dict[str, object], heads: Collection[str] | None = None
) -> Backbone:
    """Creates the module for a transformers config.

    Args:
      config: the backbone block.
      path: the folder of the backbone, or the file of the config if there are no weights.
      hf: the transformers config.
      heads: the heads of the module; by default those in the checkpoint.
    """
    family = find_family(path, hf, config.family)
    try:
        if heads is None:
            heads = load.present_heads(path, family, hf)
        check_num_parameters(get_family(family), hf, heads)
        module = make_backbone(
            family,
            hf,
            heads,
            dtype=config.dtype,
            stack=config.stack,
            remat=config.remat,
            attention=config.attention,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            rescale=config.rescale,
        )
        if config.quantize != "none" and getattr(module.cfg, "experts", None):
            raise InputError(
                f"backbone.quantize={config.quantize} is not supported for a model with experts; "
                "use backbone.quantize=none"
            )
    except InputError as error:
        shown = path if os.path.isfile(path) else path / "config.json"
        raise InputError(f"{shown}: {error}") from error
    return Backbone(config, path, family, hf, module)


def load_weights(
    backbone: Backbone, placement: Placement, *, separate_layers: bool = False
) -> tuple[Backbone, load.Loaded]:
    """Loads the weights onto their devices.

    `separate_layers` is the result of `build.layers.separates_layers`.

    Returns:
      (backbone, weights). The module may change: only the checkpoint shows whether the output
      table is untied, and embedding tables are padded to the mesh.
    """
    loaded = load.load_backbone(
        backbone.folder,
        backbone.family,
        backbone.hf,
        dtype=backbone.config.dtype,
        rescale=backbone.config.rescale,
        quantize=backbone.config.quantize,
        placement=placement,
        separate_layers=separate_layers,
    )
    cfg = backbone.module.cfg
    cfg = dataclasses.replace(
        cfg, rows=placement.padded_vocab(cfg.vocab), tied=cfg.tied and loaded.report.tied
    )
    return backbone._replace(module=backbone.module.clone(cfg=cfg)), loaded


class LoadedBackbone(NamedTuple):
    """A backbone and its weights on their devices."""

    backbone: Backbone
    loaded: load.Loaded
    placement: Placement

    def __repr__(self) -> str:
        """Returns a one-line summary."""
        config, report, mesh = self.backbone.config, self.loaded.report, self.placement.mesh.shape
        weights = f"{report.bytes:,} bytes of {report.fingerprint[:12]}"
        devices = f"{mesh['data']}x{mesh['model']} devices"
        return f"LoadedBackbone({self.backbone.family} {config.path}, {weights} on {devices})"


class InMemoryInputs(NamedTuple):
    """Inputs from Python that replace what the config names."""

    rows: Mapping[str, Rows] | None = None  # by split
    backbone: LoadedBackbone | None = None

    def load(
        self, backbone: Backbone, placement: Placement, *, separate_layers: bool = False
    ) -> tuple[Backbone, load.Loaded]:
        """Returns the given weights, or loads them; see `load_weights`."""
        if self.backbone is None:
            return load_weights(backbone, placement, separate_layers=separate_layers)
        return self.backbone.backbone, self.backbone.loaded


NO_INPUTS = InMemoryInputs()


def backbone_facts(backbone: Backbone) -> BackboneInfo:
    """Returns what a head needs to know of a backbone."""
    module = backbone.module
    return BackboneInfo(
        backbone.family,
        str(backbone.folder),
        module.STYLE,
        module.cfg.model_heads,
        module.cfg.types,
        getattr(module.cfg, "start", 0),
        backbone.config.sentinel,
        tuple(token for token in [getattr(module.cfg, "first", -1)] if token >= 0),
    )


def end_token_ids(backbone: Backbone, specials: Specials) -> tuple[int, ...]:
    """Lists the token ids that end generated text: of a target, and of the model (except GLM)."""
    ends = [] if specials.style == "infilling" else folder.end_ids(backbone.folder, backbone.hf)
    vocab = backbone.module.dims.vocab  # ids above are never generated
    return tuple(dict.fromkeys([specials.stop, *(token for token in ends if 0 <= token < vocab)]))
