"""The mesh of a config, and checks that a backbone can be divided over it."""

import dataclasses
import math
from collections.abc import Sequence

import jax

from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError
from jaxprompt.layers import kernels
from jaxprompt.layers.quantized import float8
from jaxprompt.models.model import backbone_shapes
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel.sharding import Placement, check_divisible, make_placement


def build_placement(config: RunConfig, devices: Sequence[jax.Device] | None = None) -> Placement:
    """Builds the mesh of a config; its batches must be divisible by it."""
    mesh = config.mesh
    placement = make_placement(
        mesh.data, mesh.model, fsdp=mesh.fsdp, slices=mesh.slices, devices=devices
    )
    data_axis = placement.mesh.shape["data"]
    micro_batch = config.data.batch // config.optim.accumulate
    if micro_batch % data_axis:
        accumulate = config.optim.accumulate
        accumulation = f" / optim.accumulate={accumulate}" if accumulate > 1 else ""
        raise InputError(
            f"data.batch={config.data.batch}{accumulation} is not divisible by "
            f"mesh.data={data_axis}; use a multiple of {data_axis * accumulate}, or "
            f"mesh.data={math.gcd(micro_batch, data_axis)}"
        )
    if config.backbone.quantize == "fp8":
        float8.check_target(placement.target)
    if config.data.eval_batch % data_axis:
        raise InputError(
            f"data.eval_batch={config.data.eval_batch} is not divisible by mesh.data={data_axis}; "
            f"use a multiple of {data_axis}"
        )
    return placement


def check_mesh(placement: Placement, backbone: Backbone, part: str = "backbone") -> None:
    """Raises InputError if the parameters of a backbone cannot be divided over the mesh."""
    if placement.mesh.size > 1:
        module = backbone.module
        cfg = dataclasses.replace(module.cfg, rows=placement.padded_vocab(module.cfg.vocab))
        shapes = backbone_shapes(module.clone(cfg=cfg), backbone.storage)
        check_divisible(placement, {f"{part}/{n.split('/', 1)[1]}": x for n, x in shapes.items()})


def kernel_notes(config: RunConfig, placement: Placement, backbone: Backbone) -> list[str]:
    """Returns a log line where dropout disables the device's attention kernel in training."""
    module = backbone.module
    dropout = module.cfg.attention_dropout
    attention = module.cfg, module.dims.head_dim, placement.target, config.data.max_len
    if not dropout or not kernels.has_fused_kernel(*attention, has_dropout=False):
        return []
    return [
        f"attention dropout {dropout} disables the device's attention kernel in training; "
        "--config.backbone.attention_dropout=0 enables it"
    ]
