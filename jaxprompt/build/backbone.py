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
from jaxprompt.data.rows import Rows
from jaxprompt.data.text.specials import Specials
from jaxprompt.errors import InputError, brief
from jaxprompt.heads import BackboneFacts
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel.sharding import Placement

# model_type -> family, where they differ
_KIN = {"xlm-roberta": "roberta", "mt5": "t5", "deberta-v2": "deberta_v2"}


_KIN |= dict.fromkeys(LLAMA_TYPES, "llama")


def get_family(model_type: str) -> str:
    """Returns the backbone family for a model_type of transformers."""
    return _KIN.get(model_type, model_type)


def open_backbone(config: BackboneConfig) -> Backbone:
    """Locates a backbone and reads its config and the names of its heads."""
    if not config.path:
        raise InputError(
            "backbone.path is empty; give a folder, a .gguf file, a Hub id or pkg:PACKAGE/FOLDER"
        )
    where = folder.resolve(config.path, config.revision or None)
    return shape_backbone(config, where, folder.read_config(where))


def shape_backbone(
    config: BackboneConfig, where: Path, hf: dict[str, object], heads: Collection[str] | None = None
) -> Backbone:
    """Creates the module for a transformers config.

    Args:
      config: the backbone block.
      where: the folder of the backbone, or the file of the config if there are no weights.
      hf: the transformers config.
      heads: the heads of the module; by default those in the checkpoint.
    """
    kind = hf.get("model_type", "")
    family = config.family or (get_family(kind) if isinstance(kind, str) else None)
    if family not in families():
        known = ", ".join(families())
        if not kind:
            raise InputError(f"{where}: the config has no model_type; add one of {known}")
        raise InputError(
            f"{where} contains a model of type {brief(kind)}, which is not supported; "
            f"backbone.family is one of {known}"
        )
    try:
        if heads is None:
            heads = load.present_heads(where, family, hf)
        module = make_backbone(
            family, hf, heads, dtype=config.dtype, stack=config.stack, remat=config.remat,
            attention=config.attention, dropout=config.dropout, rescale=config.rescale,
        )  # fmt: skip
    except InputError as error:
        shown = where if os.path.isfile(where) else where / "config.json"
        raise InputError(f"{shown}: {error}") from error
    return Backbone(config, where, family, hf, module)


def load_weights(backbone: Backbone, placement: Placement) -> tuple[Backbone, load.Loaded]:
    """Loads the weights onto their devices.

    Returns:
      (backbone, weights). The module may change: only the checkpoint shows whether the output
      table is untied, and embedding tables are padded to the mesh.
    """
    loaded = load.load_backbone(
        backbone.folder, backbone.family, backbone.hf, dtype=backbone.config.dtype,
        rescale=backbone.config.rescale, quantize=backbone.config.quantize,
        placement=placement,
    )  # fmt: skip
    cfg = backbone.module.cfg
    cfg = dataclasses.replace(
        cfg, rows=placement.padded(cfg.vocab), tied=cfg.tied and loaded.report.tied
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
        held = f"{report.bytes:,} bytes of {report.fingerprint[:12]}"
        where = f"{mesh['data']}x{mesh['model']} devices"
        return f"LoadedBackbone({self.backbone.family} {config.path}, {held} on {where})"


class Given(NamedTuple):
    """Inputs from Python that replace what the config names."""

    rows: Mapping[str, Rows] | None = None  # by split
    backbone: LoadedBackbone | None = None

    def load(self, backbone: Backbone, placement: Placement) -> tuple[Backbone, load.Loaded]:
        """Returns the given weights, or loads them; see `load_weights`."""
        if self.backbone is None:
            return load_weights(backbone, placement)
        return self.backbone.backbone, self.backbone.loaded


NOTHING = Given()


def facts_of(backbone: Backbone) -> BackboneFacts:
    """Returns what a head needs to know of a backbone."""
    module = backbone.module
    return BackboneFacts(
        backbone.family, str(backbone.folder), module.STYLE, module.cfg.model_heads,
        module.cfg.types, getattr(module.cfg, "start", 0), backbone.config.sentinel,
    )  # fmt: skip


def ends_of(backbone: Backbone, specials: Specials) -> tuple[int, ...]:
    """Lists the token ids that end generated text: of a target, and of the model (except GLM)."""
    own = [] if specials.style == "infilling" else folder.end_ids(backbone.folder, backbone.hf)
    known = range(backbone.module.dims.vocab)  # others are never written
    return tuple(dict.fromkeys([specials.stop, *filter(known.__contains__, own)]))
