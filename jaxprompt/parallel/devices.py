"""Accelerators and their performance, from the vendors' data sheets."""

import re
from typing import NamedTuple

from jaxprompt.errors import InputError, nearest

_NVIDIA, _GOOGLE = "https://www.nvidia.com/en-us/data-center", "https://cloud.google.com/tpu/docs"
TERA, GIGA = 1e12, 1e9


class Device(NamedTuple):
    """One accelerator; rates are per second, without sparsity."""

    name: str
    memory: int  # bytes
    bfloat16: float  # FLOP of matrix products; 0 = it has no units for them
    float32: float  # FLOP of products of float32 arrays at JAX's default precision
    bandwidth: float  # bytes of its memory
    link: float  # bytes to others, one way: half of what data sheets give for both ways
    source: str
    capability: float = 0.0  # NVIDIA's compute capability

    @property
    def platform(self) -> str:
        """Name of its platform in JAX."""
        return "gpu" if self.capability else "tpu"

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s of a dtype; dtypes without native support run as float32."""
        return (self.bfloat16 if dtype == "bfloat16" else 0) or self.float32


def _gpu(name, gib, bfloat16, float32, bandwidth, link, capability):
    rates = (bfloat16 * TERA, float32 * TERA, bandwidth * GIGA, link * GIGA / 2)
    page = name.partition("-")[0]
    return Device(name, gib * 2**30, *rates, f"{_NVIDIA}/{page}/", capability)


def _tpu(name, gib, bfloat16, bandwidth, link):
    # Products of float32 arrays run in one pass of bfloat16 unless a precision is asked for.
    rates = (bfloat16 * TERA, bfloat16 * TERA, bandwidth * GIGA, link * GIGA / 2)
    return Device(name, gib * 2**30, *rates, f"{_GOOGLE}/{name}")


# SXM forms. float32 is TF32 where there is one: JAX's default on these GPUs. V100's 125 TFLOP/s are
# of float16, which no backbone runs in here.
_TABLE = (
    _gpu("v100-16", 16, 0, 15.7, 900, 300, 7.0),
    _gpu("v100-32", 32, 0, 15.7, 900, 300, 7.0),
    _gpu("a100-40", 40, 312, 156, 1555, 600, 8.0),
    _gpu("a100-80", 80, 312, 156, 2039, 600, 8.0),
    _gpu("h100", 80, 989, 494, 3350, 900, 9.0),
    _gpu("h200", 141, 989, 494, 4800, 900, 9.0),
    _tpu("v4", 32, 275, 1228, 600),
    _tpu("v5e", 16, 197, 819, 400),
    _tpu("v5p", 95, 459, 2765, 1200),
    _tpu("v6e", 32, 918, 1638, 800),
)
DEVICES = {device.name: device for device in _TABLE}
# What JAX calls otherwise than the data sheets do.
_TPU_KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}


def find_device(kind: str) -> Device | None:
    """Finds a device by its name in JAX ("NVIDIA H200", "TPU v5 lite"); None if it is unknown."""
    kind = _TPU_KINDS.get(kind, kind).lower()
    # By the first part of the name: sizes are written otherwise in JAX ("80GB").
    matches = [
        device for name, device in DEVICES.items() if re.search(rf"\b{name.split('-')[0]}\b", kind)
    ]
    same_size = [device for device in matches if f"{device.name.partition('-')[2]}gb" in kind]
    # A name without a size is taken for the largest form, which is listed last.
    return (same_size or matches or [None])[-1]


def parse_devices(text: str) -> tuple[int, Device]:
    """Parses e.g. "8x v5e" or "4 x V100-32GB". Raises InputError."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*[xX*]\s*(\S.*?)\s*", text)
    if not match or int(match[1]) < 1:
        raise InputError(f'--devices={text!r} must be COUNT x NAME, e.g. "8x v5e" or "4x V100-32"')
    name = re.sub(r"^(nvidia|google|tpu)[\s-]+|^tpu(?=v)", "", match[2].lower())
    # "32GB", "32GiB" and "32G" are all 32.
    name = re.sub(r"(?<=\d)\s*gi?b?$", "", re.sub(r"\s+", "-", name))
    if name not in DEVICES:
        raise InputError(
            f"--devices={text!r}: unknown device {match[2]!r}; {nearest(name, DEVICES)}"
        )
    return int(match[1]), DEVICES[name]
