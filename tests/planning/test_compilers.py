"""The makers' compilers: what is asked of them, where they are not. See tests/accelerators."""

import os
import re

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from jaxprompt.errors import InputError
from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.sharding import Target, make_placement, with_placement
from jaxprompt.planning import compilers

GPUS = [name for name, device in DEVICES.items() if device.platform == "gpu"]


def test_every_device_has_its_compiler(monkeypatch):
    monkeypatch.setattr(compilers, "_is_importable", lambda module: True)
    for name, device in DEVICES.items():
        compilers.check_compiler("cuda" if name in GPUS else "tpu", device)
        with pytest.raises(InputError, match=f"not for {name}; use --compiler="):
            compilers.check_compiler("tpu" if name in GPUS else "cuda", device)


@pytest.mark.parametrize("name", GPUS)
def test_a_card_is_described_as_its_data_sheet_has_it(name):
    device, text = DEVICES[name], compilers._gpu_description(DEVICES[name])
    read = lambda field: int(re.search(rf"{field}: (\d+)", text)[1])
    assert read("memory_bandwidth") == device.bandwidth
    assert read("major") == int(device.capability)
    # What a driver tells is a little less than what is printed on the card.
    assert 0.97 * device.memory < read("device_memory_size") <= device.memory
    assert text.count("{") == text.count("}") == 3


@pytest.mark.parametrize("count", [300, 512, 6])
def test_a_number_of_devices_that_no_slice_has(count):
    with pytest.raises(InputError, match=f"no slice has {count} x v5e; use 1, 2, .* up to 256"):
        compilers.find_devices(DEVICES["v5e"], count)


def test_a_module_in_a_package_that_is_absent_is_not_there():
    assert compilers._is_importable("jax") and compilers._is_importable("jax.numpy")
    assert not compilers._is_importable("no_such_package.module")


def test_what_stands_in_for_cudnn_is_taken_back():
    before = fused.check_cudnn_version, fused.check_compute_capability
    with compilers.trace_without_gpu(Target("gpu", 8.0)):
        assert fused.check_cudnn_version() >= 90000
        assert fused.check_compute_capability("8.0") and not fused.check_compute_capability("9.0")
        assert fused.is_cuda_compute_capability_equal("8.0")
    assert (fused.check_cudnn_version, fused.check_compute_capability) == before
    with compilers.trace_without_gpu(Target("tpu")):
        assert fused.check_cudnn_version is before[0]


def test_libraries_are_quiet_and_errors_are_not(capfd):
    with compilers.silence_stderr():
        os.write(2, b"TPU_WORKER_HOSTNAMES")
    os.write(2, b"an error")
    assert capfd.readouterr().err == "an error"


def test_a_program_is_measured():
    """On the CPU, whose compiler answers in the same way."""
    place = make_placement(2, 1, devices=jax.devices()[:2])
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=place.batch)
    actual = compilers.compile_for(place, with_placement(place, lambda x: (x @ x.T).sum()), x)
    assert actual.arguments == 4 * 16 * 4
    assert actual.arguments <= actual.bytes <= actual.arguments + actual.temporary + 4
    assert sum(actual.work.counts.values()) >= 1 and "HloModule" in actual.text


def test_what_a_compiler_refuses_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20 GiB of 16 GiB\nand more")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    place = make_placement(1, 1, devices=jax.devices()[:1])
    with pytest.raises(
        InputError, match="^the compiler failed: RESOURCE_EXHAUSTED: 20 GiB of 16 GiB$"
    ):
        compilers.compile_for(place, lambda x: x, jax.ShapeDtypeStruct((), "float32"))
