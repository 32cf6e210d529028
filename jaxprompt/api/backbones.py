"""Loads backbones."""

from pathlib import Path
from typing import Any

from jaxprompt.build.backbone import LoadedBackbone, load_weights, open_backbone
from jaxprompt.build.layers import separates_layers
from jaxprompt.build.placement import check_mesh
from jaxprompt.config.run import BackboneConfig
from jaxprompt.parallel.sharding import make_placement


def load_backbone(
    path: str | Path, *, mesh: tuple[int, int] = (1, 1), **fields: Any
) -> LoadedBackbone:
    """Loads the weights of a pre-trained model onto the devices.

    Args:
        path: a save_pretrained folder, a .gguf file, a hub id, or pkg:PACKAGE/FOLDER.
        mesh: the device mesh, data x model; -1 = all remaining devices.
        **fields: fields of the config block `backbone`: dtype="bfloat16", remat="full",
            dropout=0.0, revision="main" and so on, see docs/config.md.

    Returns:
        The loaded backbone.

    Raises:
        InputError: if the model does not exist or its family is unknown, or for unknown fields.
    """
    # Checked first, so that a wrong value is reported without the hub.
    config = BackboneConfig.from_dict({**fields, "path": str(path)}, "backbone.")
    backbone = open_backbone(config)
    placement = make_placement(*mesh)
    check_mesh(placement, backbone)
    separate_layers = separates_layers(backbone, placement)
    weights = load_weights(backbone, placement, separate_layers=separate_layers)
    return LoadedBackbone(*weights, placement)
