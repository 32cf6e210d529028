"""Compiles programs for devices that are not attached, with the compilers of their vendors.

libtpu compiles for TPUs, jax's CUDA plugin for NVIDIA GPUs, on any x86-64 Linux machine. Nothing
is run.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxprompt.errors import InputError
from jaxprompt.parallel import libtpu
from jaxprompt.parallel.devices import Device
from jaxprompt.parallel.hlo import DeviceWork, count_work
from jaxprompt.parallel.sharding import Placement, Target

INSTALL = {
    "tpu": 'pip install "libtpu==0.0.42.*"',
    # The plugin of another version is not used.
    "cuda": f"pip install --no-deps jax-cuda12-plugin=={jax.__version__} "
    f"jax-cuda12-pjrt=={jax.__version__} nvidia-cuda-nvcc-cu12",
}
# Read by the compilers at start: they do not look for devices.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}  # fmt: skip
_MODULES = {"tpu": ("libtpu",), "cuda": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")}
# Layouts of the smallest slices that hold 4, 8, ... devices.
_SLICES_2D = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SLICES_3D = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8"}
_SLICES = {
    "v5e": _SLICES_2D,
    "v6e": _SLICES_2D,
    "v4": _SLICES_3D,
    "v5p": _SLICES_3D | {256: "4x8x8"},
}
_LIMITS = """threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
threads_per_core_limit: 2048 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536"""
# Cores, units per core, shared memory per core, shared memory per block, L2, GHz, capability; the
# total memory that the driver reports. From XLA's descriptions of these cards.
_A100 = (108, 64, 167936, 166912, 41943040, 1.41, 8)
_H100 = (132, 128, 233472, 232448, 52428800, 1.98, 9)
_V100 = (80, 64, 98304, 98304, 6291456, 1.53, 7)
_GPUS = {
    "v100-16": (*_V100, 16935682048), "v100-32": (*_V100, 34072559616),
    "a100-40": (*_A100, 42331013120), "a100-80": (*_A100, 85100068864),
    "h100": (*_H100, 84942979072), "h200": (*_H100, 151397597184),
}  # fmt: skip


def check_compiler(compiler: str, device: Device) -> None:
    """Raises InputError if a compiler is not installed, or does not support a device."""
    supported = _GPUS if compiler == "cuda" else _SLICES
    if device.name not in supported:
        raise InputError(
            f"--compiler={compiler} compiles for {', '.join(supported)}, not for {device.name}; "
            f"use --compiler={'tpu' if compiler == 'cuda' else 'cuda'}"
        )
    if not any(map(_is_importable, _MODULES[compiler])):
        raise InputError(f"--compiler={compiler} is not installed; run {INSTALL[compiler]}")


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # for its parent package
        return False


def find_devices(device: Device, count: int) -> list[jax.Device]:
    """Returns `count` devices that programs can be compiled for, but not run on.

    Raises:
      InputError: for a number of TPUs that is not a power of two, or larger than any slice.
    """
    from jax.experimental.topologies import get_topology_desc

    os.environ.update(ENVIRONMENT)
    libtpu.set_flags()
    if device.name in _GPUS:
        with silence_stderr():
            topology = get_topology_desc(
                topology_name="",
                platform="cuda",
                target_config=_gpu_description(device),
                topology=f"1x1x{count}",
            )
        return list(topology.devices)
    slices = _SLICES[device.name]
    size = next((size for size in slices if size >= count), None)
    # Slices come in powers of two.
    if size is None or count & (count - 1):
        raise InputError(
            f"no slice has {count} x {device.name}; use 1, 2, 4, ... up to {max(slices)}"
        )
    name = f"{device.name}:{slices[size]}"
    # A chip of the v4 has two cores; programs see one.
    options = {"chip_config_name": "megacore"} if device.name == "v4" else {}
    with silence_stderr():
        topology = get_topology_desc(platform="tpu", topology_name=name, **options)
    return list(topology.devices)[:count]  # the smallest slice may have more


def _gpu_description(device: Device) -> str:
    """Returns the description of a GPU for the CUDA compiler, a GpuTargetConfigProto as text."""
    cores, units, shared_per_core, shared_optin, cache, clock, major, memory = _GPUS[device.name]
    return (
        f"gpu_device_info {{ {_LIMITS} core_count: {cores} fpus_per_core: {units} "
        f"shared_memory_per_core: {shared_per_core} shared_memory_per_block_optin: {shared_optin} "
        f"l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory} "
        f"memory_bandwidth: {int(device.bandwidth)} cuda_compute_capability {{ major: {major} }} "
        f'}} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 2 }} '
        f'device_description_str: "{device.name}"'
    )


@contextlib.contextmanager
def trace_without_gpu(target: Target) -> Iterator[None]:
    """Allows to trace cuDNN attention for a target without a GPU or cuDNN.

    jax queries the attached GPU and the installed cuDNN, and has no public way to set the answers.
    """
    if target.platform != "gpu":
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as fused

    replacements = {
        # cuDNN 9.10.2, as `_gpu_description` says.
        "check_cudnn_version": lambda: 91002,
        "check_compute_capability": lambda text: target.capability >= float(text),
        "is_cuda_compute_capability_equal": lambda text: target.capability == float(text),
    }
    if missing := [name for name in replacements if not hasattr(fused, name)]:
        raise InputError(
            f"--compiler does not support jax {jax.__version__} ({missing[0]} is missing); plan "
            "without --compiler, or with jax 0.10"
        )
    originals = {name: getattr(fused, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(fused, name, replacement)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(fused, name, function)


class Compiled(NamedTuple):
    """Memory and work of a program on one device, according to that device's compiler."""

    arguments: int  # bytes
    temporary: int  # bytes
    bytes: int  # at the peak: results and temporary arrays reuse the buffers of donated arguments
    work: DeviceWork  # its collectives; matrix products are kernels of many names, not counted
    text: str  # HLO


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "tile sizes" not in str(error):
            raise
        # Without a GPU on which XLA can try them, no tiles of its Triton kernels fit some products,
        # such as 3,904 rows in float32; cuBLAS computes these.
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def compile_for(placement: Placement, step: Callable, *args: Any, **settings: Any) -> Compiled:
    """Compiles a step that runs `within` a placement for its devices, from shapes alone.

    Raises:
      InputError: if the compiler fails, e.g. because the program exceeds the device's memory.
    """
    with silence_stderr(), trace_without_gpu(placement.target):
        lowered = jax.jit(step, **settings).lower(*args)
        try:
            program = _compile(lowered)
        except jax.errors.JaxRuntimeError as error:
            raise InputError(f"the compiler failed: {str(error).splitlines()[0]}") from error
    memory: Any = program.memory_analysis()
    text = program.as_text() or ""
    return Compiled(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.peak_memory_in_bytes,
        count_work(text),
        text,
    )


@contextlib.contextmanager
def silence_stderr() -> Iterator[None]:
    """Drops what the compilers' libraries write to stderr: that they find no device."""
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    # The libraries write to the descriptor itself, past Python's sys.stderr.
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)
