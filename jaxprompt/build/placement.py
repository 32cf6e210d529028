"""The mesh of a config, and checks that a backbone can be divided over it."""

import dataclasses
import math
from collections.abc import Sequence

import jax

from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError
from jaxprompt.layers import kernels
from jaxprompt.models.model import backbone_shapes
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel.sharding import Placement, check_divisible, make_placement


def build_placement(config: RunConfig, devices: Sequence[jax.Device] | None = None) -> Placement:
    """Builds the mesh of a config; its batches must be divisible by it."""
    mesh = config.mesh
    placement = make_placement(
        mesh.data, mesh.model, fsdp=mesh.fsdp, slices=mesh.slices, devices=devices
    )
    size = placement.mesh.shape["data"]
    share = config.data.batch // config.optim.accumulate
    if share % size:
        cut = f" / optim.accumulate={config.optim.accumulate}" * (config.optim.accumulate > 1)
        raise InputError(
            f"data.batch={config.data.batch}{cut} is not divisible by mesh.data={size}; use a "
            f"multiple of {size * config.optim.accumulate}, or mesh.data={math.gcd(share, size)}"
        )
    if config.data.eval_batch % size:
        raise InputError(
            f"data.eval_batch={config.data.eval_batch} is not divisible by mesh.data={size}; use "
            f"a multiple of {size}"
        )
    return placement


def check_mesh(placement: Placement, backbone: Backbone, part: str = "backbone") -> None:
    """Raises InputError if the parameters of a backbone cannot be divided over the mesh."""
    if placement.mesh.size > 1:
        module = backbone.module
        rows = dataclasses.replace(module.cfg, rows=placement.padded_vocab(module.cfg.vocab))
        shapes = backbone_shapes(module.clone(cfg=rows), backbone.config.quantize)
        check_divisible(placement, {f"{part}/{n.split('/', 1)[1]}": x for n, x in shapes.items()})


def tell_kernel(config: RunConfig, placement: Placement, backbone: Backbone) -> list[str]:
    """Returns a log line where dropout disables the device's attention kernel in training."""
    module = backbone.module
    rate = module.cfg.attention_dropout
    given = module.cfg, module.dims.head_dim, placement.target, config.data.max_len
    if not rate or not kernels.has_fused_kernel(*given, has_dropout=False):
        return []
    return [
        f"attention dropout {rate} disables the device's attention kernel in training; "
        "--config.backbone.dropout=0 enables it"
    ]
