"""Chooses mesh.model=0: the smallest model axis with which a run fits the attached devices."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax

from jaxprompt.build.placement import build_placement
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError
from jaxprompt.parallel.compilation import enable_compilation_cache
from jaxprompt.parallel.devices import find_device
from jaxprompt.parallel.sharding import Placement
from jaxprompt.planning.abstract_run import AbstractRun, open_run
from jaxprompt.planning.cost import compile_evaluation, compile_run, measure_sizes, step_shapes
from jaxprompt.planning.search import RESERVE

_GIB = 2**30


def with_model_axis(config: RunConfig, log: Callable[[str], None]) -> RunConfig:
    """Returns a config with a model axis; mesh.model=0 becomes the smallest that fits.

    Args:
      config: the config.
      log: is called with a line that says what was chosen and why, once for equal runs.

    Raises:
      InputError: if no axis fits, or the choice is not possible.
    """
    if config.mesh.model:
        return config
    # Neither seeds nor rates change the choice, which the runs of a sweep share.
    alike = config.replace({"seed": 0, "data.seed": 0, "optim.lr": 0.0})
    return config.replace({"mesh.model": _choose(alike, log)})


@functools.lru_cache
def _choose(config: RunConfig, log: Callable[[str], None]) -> int:
    devices = jax.devices()
    if devices[0].platform == "cpu":
        log("mesh.model=1, because CPU devices share their memory")
        return 1
    limit = usable_bytes(jax.local_devices()[0])
    enable_compilation_cache(config.train.compilation_cache)
    try:
        run = open_run(config.replace({"mesh.model": 1}))
    except InputError as error:
        raise InputError(f"mesh.model=0 cannot be chosen: {error}; or set mesh.model") from error
    # A plan has one slice.
    run = dataclasses.replace(run, config=run.config.replace({"mesh.slices": config.mesh.slices}))
    model, message = smallest_model_axis(run, devices, limit)
    log(message)
    return model


def usable_bytes(device: jax.Device) -> int:
    """Returns the bytes of a device that a run can use.

    Raises:
      InputError: if neither the device nor the table of devices says how many it has.
    """
    total = (device.memory_stats() or {}).get("bytes_limit", 0)
    if not total:
        data_sheet = find_device(device.device_kind)
        if data_sheet is None:
            raise InputError(
                f"mesh.model=0 cannot be chosen, because the memory of {device.device_kind} is "
                "unknown; set mesh.model"
            )
        total = data_sheet.memory
    return int(total * (1 - RESERVE))


def smallest_model_axis(
    run: AbstractRun, devices: Sequence[jax.Device], limit: int
) -> tuple[int, str]:
    """Returns the smallest model axis with which a run fits, and why.

    Args:
      run: the run; mesh.model of its config is not used.
      devices: all of them.
      limit: bytes of one that a run can use.

    Raises:
      InputError: if the run fits on no mesh of the devices.
    """
    needs, refused = "", None
    for model in (n for n in range(1, len(devices) + 1) if len(devices) % n == 0):
        try:
            placement = build_placement(run.config.replace({"mesh.model": model}), devices)
            size = measure_sizes(step_shapes(run, placement), placement).bytes
        except InputError as error:  # the batch, the heads or the widths do not divide
            refused = error
            continue
        bound = "at least "
        if size <= limit:
            compiled = compiled_bytes(run, placement)
            size, bound = compiled or size, "" if compiled else bound
            if compiled and compiled <= limit:
                room = f"{size / _GIB:.2f} of {limit / _GIB:.2f} GiB per device"
                return model, f"mesh.model={model}: the run takes {room}{needs}"
        needs = f"; with mesh.model={model} {bound}{size / _GIB:.2f}"
    if refused is not None and not needs:
        raise refused
    raise InputError(
        f"mesh.model=0: the run fits on no mesh of {len(devices)} x {devices[0].device_kind} with "
        f"{limit / _GIB:.2f} GiB each{needs}; use more devices, mesh.fsdp=True, "
        "backbone.remat=full, or a smaller data.batch and data.eval_batch"
    )


def compiled_bytes(run: AbstractRun, placement: Placement) -> int:
    """Compiles a step and an evaluation. Returns the bytes on a device, 0 if the compiler fails."""
    try:
        step = compile_run(run, placement, run.config.backbone.remat, "")
        return max(step.bytes, compile_evaluation(run, placement, "").bytes)
    except InputError:  # larger than the memory
        return 0
