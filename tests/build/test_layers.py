"""When the layers of a frozen backbone are separate arrays."""

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxprompt.build import layers
from jaxprompt.build.backbone import backbone_from_config
from jaxprompt.build.layers import (
    TrainingWork,
    compile_seconds,
    layer_notes,
    saved_seconds,
    separates_layers,
)
from jaxprompt.config.run import BackboneConfig
from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.sharding import Target
from jaxprompt.planning.published import published_checkpoints
from jaxprompt.tree import split_layers

BERT = "google-bert/bert-large-uncased"
STEP = 32 * 128  # tokens
PATHS = {
    **{f"attention/{name}/kernel": (1024, 16, 64) for name in ("query", "key", "value")},
    "attention/out/kernel": (16, 64, 1024), "attention/out/bias": (1024,),
    "mlp/up/kernel": (1024, 4096), "mlp/down/kernel": (4096, 1024),
}  # fmt: skip
LAYERS = {
    f"backbone/layers/{path}": jax.ShapeDtypeStruct((24, *shape), np.float32)
    for path, shape in PATHS.items()
}
SHAPES = LAYERS | {"backbone/embed/word/table": jax.ShapeDtypeStruct((30522, 1024), np.float32)}


@pytest.fixture(autouse=True)
def known_shapes(monkeypatch):
    monkeypatch.setattr(layers, "backbone_shapes", lambda module, quantize: SHAPES)


@functools.cache
def open_bert(**fields):
    config = BackboneConfig.from_dict(dict(path=BERT, dtype="bfloat16", **fields), "backbone.")
    checkpoint = published_checkpoints()[BERT]
    return backbone_from_config(config, Path(BERT), checkpoint.hf, checkpoint.heads)


def on(platform, kind="NVIDIA H100 80GB HBM3", data=1, model=1):
    devices = np.array([[SimpleNamespace(device_kind=kind)]])
    mesh = SimpleNamespace(shape={"data": data, "model": model}, devices=devices)
    return SimpleNamespace(mesh=mesh, target=Target(platform))


def separates(stack="auto", platform="gpu", work=None, **options):
    return separates_layers(open_bert(stack=stack), on(platform), work=work, **options)


def test_long_training_on_gpus_has_separate_layers():
    few, many = (TrainingWork(steps, STEP, shapes=2) for steps in (1000, 100_000))
    assert separates(work=many) and not separates(work=few)
    assert not separates(work=many, trainable=["backbone/layers/.*/bias"])
    assert separates(work=many, trainable=["backbone/embed/.*", "head/.*"])
    for platform in ("cpu", "tpu"):
        assert not separates(platform=platform, work=many)


def test_generation_copies_no_layers():
    few = TrainingWork(10, STEP, shapes=1)
    assert separates(writes=True) and separates(platform="cpu", writes=True)
    assert separates(writes=True, work=few) and not separates()
    assert not separates(platform="tpu", writes=True)
    assert not separates(platform="cpu", writes=True, work=few)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_explicit_values_hold_everywhere(platform):
    assert separates("unroll", platform) and not separates("scan", platform, writes=True)


def test_savings_and_costs():
    backbone = open_bert()
    work = TrainingWork(100, STEP, shapes=3)
    # 24 layers of 12 H^2 weights in 2 bytes, copied twice, and a value of each for H tokens.
    kernels = 24 * 12 * 1024**2 * 2
    moved = 4 * kernels + 3 * kernels * STEP / 1024
    saved = saved_seconds(LAYERS, backbone, on("gpu"), work)
    assert saved == pytest.approx(100 * moved / DEVICES["h100"].bandwidth, rel=2e-3)
    unknown = saved_seconds(LAYERS, backbone, on("gpu", "AMD Instinct"), work)
    assert unknown == pytest.approx(saved * 3350 / 4800)
    mesh = saved_seconds(LAYERS, backbone, on("gpu", data=2, model=4), work)
    moved = (4 * kernels + 3 * kernels * STEP / 1024 / 2) / 4
    assert mesh == pytest.approx(100 * moved / DEVICES["h100"].bandwidth, rel=2e-3)
    assert compile_seconds(LAYERS, work) == pytest.approx(3 * 2 * 24 * 0.4)


def test_the_log_says_how_layers_run():
    params = {"layers": {"bias": np.zeros((2, 3))}}
    (line,) = layer_notes(on("cpu"), split_layers(params))
    assert "unrolled" in line and "scanned" in layer_notes(on("gpu"), params)[0]
    assert layer_notes(on("tpu"), params) == layer_notes(on("cpu"), params) == []
