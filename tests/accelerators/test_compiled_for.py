"""What ships is compiled at its published size by the compilers of the devices that it is for."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from programs import (
    WRITES,
    compile_adapt,
    compile_grid,
    compile_scores,
    compile_train,
    compile_writing,
    copied_weights,
    make_place,
    put,
)

from jaxprompt.layers.product import einsum
from jaxprompt.layers.quantized import as_matrices, quantized_shapes
from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.roofline import read_kernels, step_time
from jaxprompt.parallel.sharding import with_placement
from jaxprompt.planning.abstract_run import open_run
from jaxprompt.planning.compilers import compile_for
from jaxprompt.planning.search import plan_as_configured
from jaxprompt.tree import is_layer_list

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
# Runs of several tasks are not planned.
SHIPPED = sorted(
    str(path.relative_to(CONFIGS))
    for path in CONFIGS.rglob("*.py")
    if path.stem not in ("__init__", "multi_task") and path.parent.name != "parts"
)  # fmt: skip
ON = os.environ.get("DEVICES", "v5e").split()  # libtpu takes one generation in a process
XXL = "google/t5-v1_1-xxl"
# What configs leave to the user, at the size that was published.
NAMED = {
    "base.py": "google-bert/bert-large-uncased", "ppt/cells.py": "google/t5-v1_1-large",
    "ppt/nsp.py": XXL, "ppt/nss.py": XXL, "ppt/unified.py": XXL, "ppt/cls.py": XXL,
    "adapt/mlm.py": "google-bert/bert-large-uncased", "adapt/clm.py": "openai-community/gpt2-large",
    "adapt/rtd.py": "google/electra-base-discriminator",
    "adapt/prefix_lm.py": "google/t5-v1_1-large",
    "adapt/span_corruption.py": "google/t5-v1_1-large",
}  # fmt: skip
# data x model; others are 4 x 1. The largest pre-training of prompts takes a pod, or 8 GPUs.
POD = {"v5e": (64, 4), "v5p": (16, 4), "v6e": (32, 4), "a100-80": (2, 4), "h100": (2, 4)}
PRETRAINING = ("ppt/nsp.py", "ppt/nss.py", "ppt/unified.py", "ppt/cls.py")
MESHES = {
    **dict.fromkeys(("ppt/t5_xxl.py", "ppt/mt5_xxl.py"), dict.fromkeys(POD, (2, 4))),
    **dict.fromkeys(("ppt/t5_xl.py", "ppt/mt5_xl.py"), dict.fromkeys(POD, (2, 2))),
    **dict.fromkeys(PRETRAINING, POD),
    "dart/lm_bff.py": dict.fromkeys(POD, (2, 1)),  # batches of 2
}  # fmt: skip
# PPT is in full precision below 11B; here all is in what these devices compute in.
HALF = dict(backbone__dtype="bfloat16")
FIELDS = {path: HALF for path in SHIPPED if path.startswith("ppt/")}
FIELDS |= {path: HALF | dict(backbone__remat="full") for path in PRETRAINING}
# libtpu 0.0.42.1 crashes on these for v6e, unless layers are recomputed in the backward pass.
CRASHING = (
    "ipt/few_shot.py", "ipt/knowledge.py", "ipt/prompt_length.py", "p_tuning/lama.py",
    "ppt/cells.py", "ptuning_v2/prompt_length.py", "ptuning_v2/superglue.py",
    "ptuning_v2/tagging.py", "ptuning_v2/verbalizer.py",
)  # fmt: skip
CRASHES = {(path, "v6e"): dict(backbone__remat="full") for path in CRASHING}
CRASHES["ppt/annotator.py", "v6e"] = dict(backbone__dtype="float32")  # in bfloat16 both crash
BERT, GPT2 = "google-bert/bert-large-uncased", "openai-community/gpt2-xl"
TINY_LLAMA = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
GEMMA, MODERN = "google/gemma-3-1b-pt", "answerdotai/ModernBERT-base"
NARROW = dict(backbone__dtype="bfloat16", backbone__dropout=0.0)


@pytest.fixture
def tell(record_property):
    """Checks a program and records its row of the table."""

    def tell(work, name, device, place, actual, trained, frozen, kernel):
        compiled, data, model = actual, place.mesh.shape["data"], place.mesh.shape["model"]
        sent, counts = compiled.work.sent, compiled.work.counts
        gib = [f"{size / 2**30:.2f} GiB" for size in (compiled.arguments, compiled.temporary)]
        said = ", ".join(
            f"{counts[kind]} {kind} {sent[kind] / 2**20:.0f} MiB"
            + f" ({compiled.work.overlapped[kind]} asynchronous)"
            * bool(compiled.work.overlapped[kind])
            for kind in sorted(counts)
        )
        there = "__cudnn$fmha" in compiled.text or "tpu_custom_call" in compiled.text
        mesh = f"{data} x {model}" + ", FSDP" * place.fsdp
        row = (work, name, f"{place.mesh.size}x {device}", mesh, *gib, said, "yes" if there else "")
        record_property("row", row)
        assert compiled.bytes <= DEVICES[device].memory
        assert there == kernel
        if place.mesh.size == 1:
            assert not counts
        elif model == 1 and not place.fsdp:  # the sums of gradients and of metrics, no weights
            assert sum(sent.values()) <= 4 * trained + 2**20
        elif place.fsdp:
            assert sent["all-gather"] >= 0.5 * frozen * (data - 1) / data / model
        else:
            assert counts["all-reduce"] and sent["all-gather"] <= 0.05 * frozen

    return tell


def weights(leaves) -> int:
    """Counts the bytes of a tree, whole."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())


def has_kernel(config, device: str, length: int) -> bool:
    """Tells where attention's kernel is promised, of configs without dropout."""
    if config.backbone.dtype != "bfloat16" or config.backbone.dropout != 0.0:
        return False
    return DEVICES[device].platform == "gpu" or length >= 512


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("path", [path for path in SHIPPED if not path.startswith("adapt/")])
def test_every_config_trains(path, device, tell):
    data, model = MESHES.get(path, {}).get(device, (4, 1))
    place = make_place(device, data, model, False)
    fields = FIELDS.get(path, {}) | CRASHES.get((path, device), {})
    fields |= {"backbone__path": NAMED[path]} if path in NAMED else {}
    compiled, shapes, config = compile_train(str(CONFIGS / path), place, **fields)
    name, work = config.backbone.path.partition("/")[2], path.removesuffix(".py")
    kernel = has_kernel(config, device, shapes.batch.encoder.ids.shape[1])
    # XLA sums most gradients over the devices in each micro-batch, not once behind the last.
    trained = weights(shapes.state.trainable) * config.optim.accumulate
    parts = trained, weights(shapes.frozen)
    tell(work, name, device, place, compiled, *parts, kernel)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("storage", ["int8", "int8_blocks", "int4"])
def test_a_decoding_product_writes_no_matrix(storage, device):
    place, inputs, outputs = make_place(device, 1, 1, False), 4096, 11008
    name = "backbone/layers/mlp/up/kernel"
    kernel = jax.ShapeDtypeStruct((1, inputs, outputs), jnp.bfloat16)
    planes = quantized_shapes({name: kernel}, storage)
    planes = {
        path.rpartition("/")[2]: put(jax.ShapeDtypeStruct(x.shape[1:], x.dtype), place.replicated)
        for path, x in planes.items()
    }
    x = put(jax.ShapeDtypeStruct((8, inputs), jnp.bfloat16), place.replicated)
    step = lambda x, planes: einsum("rk,kn->rn", x, as_matrices(planes))
    compiled = compile_for(place, with_placement(place, step), x, planes)
    assert compiled.temporary < 0.15 * inputs * outputs  # bytes; the values would take 2 each


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("path", [path for path in SHIPPED if path.startswith("adapt/")])
def test_every_backbone_adapts(path, device, tell):
    place = make_place(device, 4, 1, False)
    compiled, state = compile_adapt(
        str(CONFIGS / path), place, NAMED[path], backbone__dtype="bfloat16"
    )
    name = NAMED[path].partition("/")[2]
    kernel = DEVICES[device].platform == "gpu" or "corruption" in path or "clm" in path
    kernel = kernel or "prefix_lm" in path
    tell(
        path.removesuffix(".py"), name, device, place, compiled, weights(state.trainable), 0, kernel
    )


OTHERS = (
    ("grid of 8", "base.py", 1, 1, False, dict(backbone__path=BERT, data__batch=16)),
    ("grid of 4", "ppt/t5_base.py", 1, 1, False, HALF),
    ("scores", "ppt/t5_xxl.py", 2, 4, False, {}),
    ("writing", "ppt/t5_large.py", 4, 1, False, HALF),
    ("writing", "base.py", 1, 1, False, dict(backbone__path=GPT2, data__batch=8)),
    ("train", "base.py", 2, 2, False, dict(backbone__path=BERT)),
    ("train", "base.py", 4, 1, True, dict(backbone__path=BERT)),
    ("train", "base.py", 2, 4, False, dict(backbone__path="openai-community/gpt2-large")),
    ("train", "base.py", 4, 1, True, dict(backbone__path=GPT2, data__max_len=512)),
    ("train", "base.py", 4, 1, False, dict(backbone__path=GPT2, data__max_len=512)),
    ("train", "ppt/t5_xxl.py", 8, 1, True, {}),
    # Four heads of keys on eight devices.
    ("train", "base.py", 1, 8, False, dict(backbone__path=TINY_LLAMA)),
)
# Windows, of heads of 256 numbers too, which a kernel of TPUs alone takes.
WINDOWS = (
    ("train", "base.py", 2, 2, False, dict(backbone__path=GEMMA, data__max_len=1024)),
    ("train", "base.py", 4, 1, False, dict(backbone__path=MODERN, data__max_len=1024)),
)
# All of them for one TPU and one GPU, the first for each.
CASES = [
    (on, *case) for on in ON
    for case in {"v5e": OTHERS + WINDOWS, "h100": OTHERS}.get(on, OTHERS[:1])
]  # fmt: skip
STEPS = {"train": compile_train, "grid": compile_grid, "scores": compile_scores,
         "writing": compile_writing}  # fmt: skip


@pytest.mark.parametrize("device, work, path, data, model, fsdp, fields", CASES)
def test_other_steps_and_meshes(device, work, path, data, model, fsdp, fields, tell):
    place = make_place(device, data, model, fsdp)
    fields = fields | (NARROW if path == "base.py" else {})
    kind, _, count = work.partition(" of ")
    runs = [int(count)] if count else []
    compiled, shapes, config = STEPS[kind](str(CONFIGS / path), place, *runs, **fields)
    kernel = has_kernel(config, device, shapes.batch.encoder.ids.shape[1])
    parts = weights(shapes.state.trainable), weights(shapes.frozen)
    name = config.backbone.path.partition("/")[2]
    tell(work, name, device, place, compiled, *parts, kernel)
    if work == "writing" and DEVICES[device].platform == "tpu" and "t5" in name:
        # The layers are read where they lie. (Beside a GPT-2's cache their copies would not show.)
        read = {path: x for path, x in shapes.frozen.items() if "decoder_layers/" in path}
        assert compiled.temporary < weights(read)
    if work == "writing" and path == "base.py":  # no beam has the cache of its text
        rows, length = shapes.batch.encoder.ids.shape
        caches = re.findall(r"\[(\d+),\d+,(\d+),\d+\]", compiled.text)
        large = {int(count) for count, columns in caches if int(columns) >= length}
        assert rows in large and rows * WRITES["num_beams"] not in large


@pytest.mark.parametrize("device", [device for device in ON if device == "h100"])
def test_remat_runs_no_attention_again(device):
    place, programs = make_place(device, 1, 1, False), {}
    for remat in ("none", "mlp", "dots"):
        fields = NARROW | dict(backbone__path=BERT, backbone__remat=remat)
        programs[remat] = compile_train(str(CONFIGS / "base.py"), place, **fields)[0]
        text = programs[remat].text
        calls = re.findall(r'custom_call_target="__cudnn\$fmha(\w*)"', text)
        backward = sum("Backward" in call for call in calls)
        assert backward and len(calls) == 2 * backward, remat
    assert programs["mlp"].temporary < 0.8 * programs["none"].temporary


@pytest.mark.parametrize("device", [device for device in ON if device == "h100"])
def test_float8_products_read_the_stored_matrices(device):
    place = make_place(device, 1, 1, False)
    fields = NARROW | dict(backbone__path=BERT, backbone__quantize="fp8")
    text = compile_train(str(CONFIGS / "base.py"), place, **fields)[0].text
    # Those of a matrix: few rows, in the last layer, are summed in parts, which have three axes.
    kernels = re.findall(r"gemm_fusion\S* \((.*)\) -> (\w+)\[\d+,\d+\]", text)
    forward = [types for types in kernels if types[0].count("f8e4m3fn[") == 2]
    backward = [types for types in kernels if "f8e5m2[" in types[0] and "f8e4m3fn[" in types[0]]
    # Each writes 16 bits: the scales are part of the kernel.
    assert len(forward) >= 3 and len(backward) >= 6
    assert {result for _, result in forward + backward} == {"bf16"}


TPUS = [device for device in ON if DEVICES[device].platform == "tpu"]


@pytest.mark.parametrize("device", TPUS)
@pytest.mark.parametrize("data, model, fsdp", [(4, 1, True), (4, 1, False), (2, 2, False)])
def test_collectives_are_asynchronous_on_tpus(data, model, fsdp, device):
    place = make_place(device, data, model, fsdp)
    fields = NARROW | dict(backbone__path="google-bert/bert-base-uncased")
    work = compile_train(str(CONFIGS / "base.py"), place, **fields)[0].work
    assert work.overlapped.total() >= 0.95 * work.counts.total() > 0, work


GPUS = [device for device in ON if DEVICES[device].platform == "gpu"]


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("work, name", [("train", BERT), ("writing", TINY_LLAMA)])
def test_unrolled_layers_are_not_copied(work, name, device, tell):
    """Every product reads the weights where they are; generation needs no second copy of them."""
    place = make_place(device, 1, 1, False)
    fields = NARROW | dict(backbone__path=name, data__batch=8, backbone__stack="unroll")
    compiled, shapes, config = STEPS[work](str(CONFIGS / "base.py"), place, **fields)
    kernel = has_kernel(config, device, shapes.batch.encoder.ids.shape[1])
    parts = weights(shapes.state.trainable), weights(shapes.frozen)
    tell(f"{work}, unrolled", name.partition("/")[2], device, place, compiled, *parts, kernel)
    layers = {path: leaf for path, leaf in shapes.frozen.items() if is_layer_list(leaf)}
    assert copied_weights(compiled.text, layers) == []
    assert compiled.temporary < weights(layers) / (2 if work == "writing" else 1)


@pytest.mark.parametrize("name", [name for name in ON if name == "h100"])  # it was measured there
def test_the_time_of_a_step_by_its_kernels_is_the_measured_one(name):
    """18.9 ms (docs/results/speed.md); without the device's compiler within 15% of it, too."""
    device, place = DEVICES[name], make_place(name, 1, 1, False)
    fields = NARROW | dict(backbone__path=BERT, backbone__stack="scan", data__max_len=128)
    compiled, _, config = compile_train(str(CONFIGS / "base.py"), place, **fields)
    kernels = read_kernels(compiled.text)
    assert step_time(kernels, compiled.work, device, "bfloat16").step == pytest.approx(
        18.9e-3, 0.05
    )
    estimate = plan_as_configured(open_run(config, device), device, 1).time("bfloat16")
    assert estimate.step == pytest.approx(18.9e-3, 0.15)
