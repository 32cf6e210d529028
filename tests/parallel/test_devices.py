"""The device table, and devices by the names that users and JAX write."""

import pytest

from jaxprompt.errors import InputError
from jaxprompt.parallel.devices import DEVICES, find_device, parse_devices


@pytest.mark.parametrize(
    "text, count, name",
    [
        ("8x v5e", 8, "v5e"),
        ("4 x V100-32G", 4, "v100-32"),
        ("1xNVIDIA A100 80GB", 1, "a100-80"),
        ("16 x TPU v4", 16, "v4"),
        ("2xTPUv6e", 2, "v6e"),
        (" 64 X h200 ", 64, "h200"),
    ],
)
def test_parse_devices(text, count, name):
    number, device = parse_devices(text)
    assert (number, device.name) == (count, name)


@pytest.mark.parametrize(
    "text", ["v5e", "0x v5e", "-1x v5e", "8x", "eight x v5e", "9" * 5000 + "x v4"]
)
def test_malformed_devices(text):
    with pytest.raises(InputError, match="COUNT x NAME"):
        parse_devices(text)


def test_unknown_names_give_the_nearest():
    with pytest.raises(InputError, match="unknown device 'a100'; nearest: .*a100-80"):
        parse_devices("1x a100")


def test_the_table_is_plausible():
    for name, device in DEVICES.items():
        assert device.name == name and device.source.startswith("https://")
        assert 16 * 2**30 <= device.memory <= 256 * 2**30
        assert 1e11 < device.link < device.bandwidth < device.peak("bfloat16")
        assert device.peak("float32") <= device.peak("bfloat16")


def test_peaks_of_dtypes():
    assert DEVICES["v100-32"].peak("bfloat16") == 15.7e12
    assert DEVICES["a100-40"].peak("bfloat16") == 312e12
    assert DEVICES["v5e"].platform == "tpu" and DEVICES["h100"].platform == "gpu"


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("Tesla V100-SXM2-16GB", "v100-16"), ("TPU v4", "v4"), ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"),
    ],
)  # fmt: skip
def test_names_of_jax(kind, name):
    assert find_device(kind).name == name


def test_unknown_kinds_have_no_peak():
    assert find_device("cpu") is None and find_device("NVIDIA GeForce RTX 4090") is None
