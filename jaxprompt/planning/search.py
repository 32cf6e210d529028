"""Searches for meshes that a run fits on, and estimates their speed."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax

from jaxprompt.build.placement import build_placement
from jaxprompt.errors import InputError
from jaxprompt.parallel.devices import Device
from jaxprompt.parallel.roofline import OTHER, Kernel, StepTime, read_kernels, step_time
from jaxprompt.parallel.sharding import DATA, MODEL, Placement, make_placement
from jaxprompt.planning.abstract_run import AbstractRun, can_request_fused
from jaxprompt.planning.compilers import Compiled, find_devices
from jaxprompt.planning.cost import (
    Cost,
    compile_evaluation,
    compile_run,
    eval_bytes,
    measure_sizes,
    step_cost,
    step_shapes,
)

# Of the bytes of kernels without a product, those that TPUs move: they compute the others together
# with a product, or keep them on the chip. In programs of libtpu for three steps it was 0.1 to 0.7.
TPU_SHARE = 0.5
RESERVE = 0.08  # of a device's memory that the framework and gaps between arrays take
_THREADS = 2  # compilation releases Python's global lock


class Mesh(NamedTuple):
    """One way to run on a number of devices."""

    data: int
    model: int
    fsdp: bool
    remat: str
    attention: str = ""  # of backbone.attention, where it differs from the config's

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.model


class Plan(NamedTuple):
    """A run on a mesh, with its cost."""

    mesh: Mesh
    cost: Cost
    device: Device | None
    evaluation: int = 0  # bytes on one device at the peak of an evaluation, 0 = not computed
    # By the device's compiler, or its error: the step, and an evaluation.
    compiled: Compiled | str | None = None
    evaluated: Compiled | str | None = None

    @property
    def hardware(self) -> Device:
        """The device. A plan without a device has no `room` and no times."""
        assert self.device is not None
        return self.device

    @property
    def room(self) -> int:
        """Bytes of a device that are available to a run."""
        return available_bytes(self.hardware)

    @property
    def fits(self) -> bool:
        """Whether the run fits, according to the device's compiler if it was used."""
        return self.trains and self.evaluates

    @property
    def trains(self) -> bool:
        """Whether a step fits."""
        if isinstance(self.compiled, str):
            return False
        return (self.compiled or self.cost).bytes <= self.room

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation fits."""
        if isinstance(self.evaluated, str):
            return False
        return (self.evaluated.bytes if self.evaluated else self.evaluation) <= self.room

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of a step: of the device's compiler if it was used, else estimates."""
        if isinstance(self.compiled, Compiled):
            return read_kernels(self.compiled.text)
        if self.hardware.platform == "tpu":
            return tuple(map(_on_tpu, self.cost.kernels))
        return self.cost.kernels

    def time(self, dtype: str) -> StepTime:
        """Estimates the seconds of a step."""
        work = self.compiled.work if isinstance(self.compiled, Compiled) else self.cost.work
        if work is self.cost.work and self.hardware.platform == "tpu":
            work = work._replace(overlapped_sent=work.sent)  # see parallel/libtpu.py
        return step_time(self.kernels, work, self.hardware, dtype)


def _on_tpu(kernel: Kernel) -> Kernel:
    """Returns a kernel with the bytes that it moves on a TPU, whose products slice the weights."""
    if kernel.category != OTHER:
        return kernel
    read, written = (round(TPU_SHARE * size) for size in (kernel.read, kernel.written))
    return kernel._replace(read=read, written=written, copied=0)


def available_bytes(device: Device) -> int:
    """Returns the bytes of a device that are available to a run."""
    return int(device.memory * (1 - RESERVE))


def plan_as_configured(run: AbstractRun, device: Device | None, count: int) -> Plan:
    """Returns the plan of the configured mesh on `count` devices; mesh.model=0 is chosen.

    Raises:
      InputError: if the batch or the model does not divide over it.
    """
    axes = [run.config.mesh.model]
    if axes == [0]:  # the smallest that fits, see `model_axis`; without a device, anything does
        axes = [n for n in range(1, count + 1) if count % n == 0]
    plan, refused = None, None
    for model in axes:
        config = run.config.replace({"mesh.model": model})
        try:
            placement = build_placement(config, jax.devices()[:count])
            plan = _make_plan(run, device, placement, config.backbone.remat)
        except InputError as error:
            refused = error
            continue
        plan = _with_eval_bytes(run, plan)
        if device is None or plan.fits:
            break
    if plan is None:
        assert refused is not None
        raise refused
    return plan


def needed_flops(run: AbstractRun, plan: Plan) -> float:
    """Returns the FLOPs of a plan's matrix products on one device without recomputation."""
    if plan.mesh.remat == "none":
        return plan.cost.flops
    placement = _mesh_placement(plan.mesh, jax.devices())
    return step_cost(run, placement, "none", plan.mesh.attention).flops  # cached by a search


def _with_eval_bytes(run: AbstractRun, plan: Plan) -> Plan:
    placement = _mesh_placement(plan.mesh, jax.devices())
    return plan._replace(evaluation=eval_bytes(run, placement, plan.mesh.attention))


def _mesh_placement(mesh: Mesh, devices: Sequence[jax.Device]) -> Placement:
    devices = devices[: mesh.devices]
    return make_placement(mesh.data, mesh.model, fsdp=mesh.fsdp, devices=devices)


def compile_plan(run: AbstractRun, plan: Plan) -> Plan:
    """Compiles a plan with the device's compiler."""
    mesh = plan.mesh
    try:
        placement = _mesh_placement(mesh, find_devices(plan.hardware, mesh.devices))
        plan = plan._replace(compiled=compile_run(run, placement, mesh.remat, mesh.attention))
    except InputError as error:
        return plan._replace(compiled=str(error))
    try:
        return plan._replace(evaluated=compile_evaluation(run, placement, mesh.attention))
    except InputError as error:
        return plan._replace(evaluated=str(error))


def fastest(run: AbstractRun, device: Device, count: int) -> Plan | None:
    """Returns the plan with the shortest step that fits on `count` devices, None if there is none.

    Meshes without recomputation are tried first, then the device's fused attention kernel, which
    stores no scores, if it supports texts this short, then the recomputation with the fewest matrix
    products: "dots" none, "mlp" about a sixth more, "full" 40%, as counted in the compiled steps.
    """
    placements = list(_candidate_placements(run, device, count))
    kernel = "fused" if can_request_fused(run, device) else ""
    with ThreadPoolExecutor(_THREADS) as pool:

        def fitting_plans(
            remat: str, placements: Iterable[Placement], attention: str = ""
        ) -> dict[Placement, Plan]:
            plans = pool.map(
                lambda placement: _make_plan(run, device, placement, remat, attention), placements
            )
            return {
                placement: plan
                for placement, plan in zip(placements, plans, strict=True)
                if plan.fits
            }

        plans_that_fit = fitting_plans("none", placements)
        if not plans_that_fit and kernel:
            plans_that_fit = fitting_plans("none", placements, kernel)
        if not plans_that_fit:
            # The others are tried only where "full" fits, which needs the least memory.
            full = fitting_plans("full", placements)
            plans_that_fit = fitting_plans("dots", full) or fitting_plans("mlp", full) or full

    def step_seconds(plan: Plan) -> float:
        return plan.time(run.config.backbone.dtype).step

    # An evaluation usually needs less memory than a step, so only candidates are checked.
    plans = (
        _with_eval_bytes(run, plan) for plan in sorted(plans_that_fit.values(), key=step_seconds)
    )
    return next((plan for plan in plans if plan.fits), None)


def smallest(
    run: AbstractRun, device: Device, limit: int, searched: dict[int, Plan | None]
) -> Plan | None:
    """Returns the plan with the fewest devices, of 1, 2, 4, ... up to `limit`, that fits.

    `searched` contains the plans of device counts that were searched already.
    """
    count = 1
    while count <= limit:
        plan = searched[count] if count in searched else fastest(run, device, count)
        if plan is not None:
            return plan
        count *= 2
    return None


def _mesh_shapes(run: AbstractRun, count: int) -> Iterator[tuple[int, int]]:
    """Yields the meshes of `count` devices, data x model, that divide the batch."""
    data_block, accumulate = run.config.data, run.config.optim.accumulate
    for model in (m for m in range(1, count + 1) if count % m == 0):
        data = count // model
        # Both batches must divide over the data axis, that of a step after accumulation.
        if not (data_block.batch // accumulate % data or data_block.eval_batch % data):
            yield data, model


def _candidate_placements(run: AbstractRun, device: Device, count: int) -> Iterator[Placement]:
    """Yields all placements on `count` devices whose weights alone fit."""
    for data, model in _mesh_shapes(run, count):
        # On a data axis of one device FSDP has nothing to shard.
        for fsdp in (False, True)[: min(data, 2)]:
            placement = make_placement(data, model, fsdp=fsdp, devices=jax.devices()[:count])
            try:
                sizes = measure_sizes(step_shapes(run, placement), placement)
            except InputError:  # heads or widths that do not divide
                continue
            if sizes.bytes <= available_bytes(device):
                yield placement


def _make_plan(
    run: AbstractRun, device: Device | None, placement: Placement, remat: str, attention: str = ""
) -> Plan:
    shape = placement.mesh.shape
    mesh = Mesh(shape[DATA], shape[MODEL], placement.fsdp, remat, attention)
    return Plan(mesh, step_cost(run, placement, remat, attention), device)
