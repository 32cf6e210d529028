"""Chooses whether the layers of a frozen backbone are separate arrays, which unrolls them."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxprompt.config.run import RunConfig
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.text.encoded import Split
from jaxprompt.models.model import backbone_shapes
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel.devices import DEVICES, find_device
from jaxprompt.parallel.sharding import DATA, MODEL, Placement
from jaxprompt.tree import SEPARABLE, Flat, has_layer_lists

# CPU seconds to trace and compile one more layer of a train step for an H100, from programs of
# tests/accelerators: 24 layers of BERT-large take 30.1 s instead of 21.4 s in a scan, 48 of T5-XL
# 24.1 s instead of 7.0 s, 32 of Llama-2-7B 23.5 s instead of 12.6 s. 0.38, 0.37 and 0.35 a layer.
_SECONDS_PER_LAYER = 0.4
_PROGRAMS_PER_SHAPE = 2  # a train step and an evaluation


class TrainingWork(NamedTuple):
    """The size of a training."""

    steps: int
    tokens: float  # of the inputs of a step, of all devices and runs, without padding
    shapes: int  # of batches, each of which is compiled


def measure_work(
    config: RunConfig, steps: int, layout: Layout, splits: Sequence[Split], runs: int = 1
) -> TrainingWork:
    """Measures the training of `runs` runs at once on the training splits of one or more tasks."""
    lengths = [[len(row.ids) for row in example] for split in splits for example in split.rows]
    tokens = sum(map(sum, lengths)) / max(1, len(lengths)) * config.data.batch * runs
    shapes = {layout.length(max(rows)) for rows in lengths}
    return TrainingWork(steps, tokens, len(shapes))


def measure_corpus_work(config: RunConfig, steps: int, runs: int = 1) -> TrainingWork:
    """Measures the training of `runs` runs at once on sequences of a corpus, which are full."""
    return TrainingWork(steps, config.data.batch * config.data.max_len * runs, shapes=1)


def separates_layers(
    backbone: Backbone,
    placement: Placement,
    *,
    writes: bool = False,
    work: TrainingWork | None = None,
    trainable: Sequence[str] = (),
) -> bool:
    """Returns whether the layers of a backbone are loaded as separate arrays.

    With backbone.stack=auto they are where text is generated on GPUs and CPUs, which would copy
    stacked layers, and where training on GPUs saves more time than compilation takes.

    Args:
      backbone: the backbone.
      placement: where it is loaded.
      writes: whether text is generated.
      work: the training; None = there is none.
      trainable: patterns of the names of parameters that train.
    """
    config = backbone.config
    if config.stack != "auto":
        return config.stack == "unroll"
    platform = placement.target.platform
    if platform == "tpu" or (platform == "cpu" and work is not None):
        return False
    if work is None and not writes:
        return False
    layers = {
        name: leaf
        for name, leaf in backbone_shapes(backbone.module, config.quantize).items()
        if name.split("/")[1] in SEPARABLE
    }
    if any(re.fullmatch(pattern, name) for pattern in trainable for name in layers):
        return False
    if writes or work is None:
        return True
    return saved_seconds(layers, backbone, placement, work) > compile_seconds(layers, work)


def saved_seconds(
    layers: Flat, backbone: Backbone, placement: Placement, work: TrainingWork
) -> float:
    """Estimates the seconds that separate layers save in a training on GPUs.

    A scan copies a layer's weights for its forward and for its backward pass. What the backward
    pass needs of the forward pass is in stacked arrays, which are zeroed, written and read once
    more than in separate arrays; for each token it is about as large as the results of all matrix
    products. That of a decoder after an encoder is left out, because its texts are short. This
    gives 9.7 GB for a step of BERT-large (32 x 128), 49 GB for T5-XL (16 x 512) and 207 GB for
    Llama-2-7B (8 x 2,048); the programs of an H100's compiler differ by 9.8, 75 and 257 GB.
    """
    mesh, module = placement.mesh.shape, backbone.module
    itemsize = jnp.dtype(module.cfg.dtype).itemsize
    weights = residuals = 0.0
    for name, leaf in layers.items():
        values = math.prod(leaf.shape)
        weights += values * (leaf.dtype.itemsize if leaf.dtype.itemsize < itemsize else itemsize)
        if name.startswith("backbone/layers/") and name.endswith(("/kernel", "/kernel/codes")):
            residuals += values / module.cfg.width * work.tokens * itemsize
    moved = (4 * weights + 3 * residuals / mesh[DATA]) / mesh[MODEL]
    # An unknown GPU is taken for the fastest: it saves least.
    device = find_device(placement.mesh.devices.flat[0].device_kind) or DEVICES["h200"]
    return work.steps * moved / device.bandwidth


def compile_seconds(layers: Flat, work: TrainingWork) -> float:
    """Estimates the additional seconds that compilation takes if layers are unrolled."""
    lengths = {name.split("/")[1]: leaf.shape[0] for name, leaf in layers.items()}
    return sum(lengths.values()) * work.shapes * _PROGRAMS_PER_SHAPE * _SECONDS_PER_LAYER


def layer_notes(placement: Placement, frozen: Flat) -> list[str]:
    """Returns a log line on how the layers run, where it is not always the same."""
    if has_layer_lists(frozen):
        return ["layers are separate arrays and unrolled (backbone.stack)"]
    if placement.target.platform == "gpu":
        return ["layers are one stacked array and scanned (backbone.stack)"]
    return []
