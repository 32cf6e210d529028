"""Which mesh of a device holds a run, and how fast it would be."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax

from jaxprompt.build.placement import build_placement
from jaxprompt.errors import InputError
from jaxprompt.parallel.devices import Device
from jaxprompt.parallel.sharding import DATA, MODEL, Placement, make_placement
from jaxprompt.planning.abstract_run import AbstractRun, may_fuse
from jaxprompt.planning.compilers import Compiled, find_devices
from jaxprompt.planning.cost import (
    Cost,
    compile_evaluation,
    compile_run,
    cost_of,
    evaluation_of,
    make_shapes,
    weigh,
)

UTILISATION = 0.4  # of a device's peak that products reach
RESERVE = 0.08  # of a device's memory that the framework and gaps between arrays take
_THREADS = 2  # a compilation holds no lock of Python's


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


class Time(NamedTuple):
    """Seconds of a step, were each alone to bound it."""

    compute: float  # products at UTILISATION of the peak
    memory: float  # weights are read forward and backward; all else is written and read once
    network: float  # what is sent over the device's links

    @property
    def step(self) -> float:
        """Seconds of a step; sending is not hidden behind computing."""
        return max(self.compute, self.memory) + self.network


class Plan(NamedTuple):
    """A run on a mesh, measured."""

    mesh: Mesh
    cost: Cost
    device: Device | None
    evaluation: int = 0  # bytes on one device at the peak of an evaluation, once weighed
    # By the device's own compiler, or why it refuses: the step, and an evaluation.
    compiled: Compiled | str | None = None
    evaluated: Compiled | str | None = None

    @property
    def hardware(self) -> Device:
        """The device. Raises ValueError for a plan of none, which has neither room nor time."""
        if self.device is None:
            raise ValueError("this plan is of no device")
        return self.device

    @property
    def room(self) -> int:
        """Bytes of a device that a run may take."""
        return room(self.hardware)

    @property
    def fits(self) -> bool:
        """Whether the run stays within the room, as the device's own compiler says if asked."""
        return self.trains and self.evaluates

    @property
    def trains(self) -> bool:
        """Whether a step does."""
        if isinstance(self.compiled, str):
            return False
        return (self.compiled or self.cost).bytes <= self.room

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation does."""
        if isinstance(self.evaluated, str):
            return False
        return (self.evaluated.bytes if self.evaluated else self.evaluation) <= self.room

    def time(self, dtype: str) -> Time:
        """Estimates the seconds of a step."""
        device, cost = self.hardware, self.cost
        sizes = cost.sizes
        numbers = sizes.read_bytes + sizes.trained_bytes + sizes.optimizer_bytes
        moved = 2 * (numbers + cost.activations)
        return Time(
            cost.work.flops / (UTILISATION * device.peak(dtype)),
            moved / device.bandwidth,
            sum(cost.work.sent.values()) / device.link,
        )


def room(device: Device) -> int:
    """Tells the bytes of a device that a run may take."""
    return int(device.memory * (1 - RESERVE))


def plan_as_configured(run: AbstractRun, device: Device | None, count: int) -> Plan:
    """Measures the config's own mesh on `count` devices.

    Raises InputError where batch or model do not divide over it.
    """
    placement = build_placement(run.config, jax.devices()[:count])
    return _weigh_evaluation(run, _plan(run, device, placement, run.config.backbone.remat))


def _weigh_evaluation(run: AbstractRun, plan: Plan) -> Plan:
    place = _lay(plan.mesh, jax.devices())
    return plan._replace(evaluation=evaluation_of(run, place, plan.mesh.attention))


def _lay(mesh: Mesh, devices: Sequence[jax.Device]) -> Placement:
    devices = devices[: mesh.devices]
    return make_placement(mesh.data, mesh.model, fsdp=mesh.fsdp, devices=devices)


def compiled(run: AbstractRun, plan: Plan) -> Plan:
    """Asks the device's own compiler about a plan."""
    mesh = plan.mesh
    try:
        placement = _lay(mesh, find_devices(plan.hardware, mesh.devices))
        plan = plan._replace(compiled=compile_run(run, placement, mesh.remat, mesh.attention))
    except InputError as error:
        return plan._replace(compiled=str(error))
    try:
        return plan._replace(evaluated=compile_evaluation(run, placement, mesh.attention))
    except InputError as error:
        return plan._replace(evaluated=str(error))


def fastest(run: AbstractRun, device: Device, count: int) -> Plan | None:
    """Finds the mesh of `count` devices that holds the run and steps fastest, if one does.

    Recomputation costs a third of all products: meshes that do without it come first, and then, if
    the device has one for texts this short, its kernel for attention, which keeps no scores.
    """
    places = list(_places(run, device, count))
    kernel = "fused" if may_fuse(run, device) else ""
    with ThreadPoolExecutor(_THREADS) as pool:

        def fitting(
            remat: str, places: Iterable[Placement], attention: str = ""
        ) -> dict[Placement, Plan]:
            plans = pool.map(lambda place: _plan(run, device, place, remat, attention), places)
            return {place: plan for place, plan in zip(places, plans, strict=True) if plan.fits}

        found = fitting("none", places)
        if not found and kernel:
            found = fitting("none", places, kernel)
        if not found:
            # "dots" holds less than "none" and more than "full".
            full = fitting("full", places)
            # Tried only where the least memory is enough.
            found = fitting("dots", full) or full
    step = lambda plan: plan.time(run.config.backbone.dtype).step
    # An evaluation takes less than a step as a rule, and is weighed where it decides.
    plans = (_weigh_evaluation(run, plan) for plan in sorted(found.values(), key=step))
    return next((plan for plan in plans if plan.fits), None)


def smallest(
    run: AbstractRun, device: Device, limit: int, known: dict[int, Plan | None]
) -> Plan | None:
    """Finds the fewest devices, of 1, 2, 4, ... up to `limit`, that hold the run.

    `known` are numbers of devices whose answer is known already.
    """
    count = 1
    while count <= limit:
        plan = known[count] if count in known else fastest(run, device, count)
        if plan is not None:
            return plan
        count *= 2
    return None


def _ways(run: AbstractRun, count: int) -> Iterator[tuple[int, int]]:
    """Lists how `count` devices can be laid out, data x model, for this batch."""
    data_block, accumulate = run.config.data, run.config.optim.accumulate
    for model in (m for m in range(1, count + 1) if count % m == 0):
        data = count // model
        # Both batches have to divide over the data axis, that of a step after accumulation.
        if not (data_block.batch // accumulate % data or data_block.eval_batch % data):
            yield data, model


def _places(run: AbstractRun, device: Device, count: int) -> Iterator[Placement]:
    """Lays `count` devices out in every way whose weights alone are no more than the room."""
    for data, model in _ways(run, count):
        # On a data axis of one device there is nothing for FSDP to divide.
        for fsdp in (False, True)[: min(data, 2)]:
            place = make_placement(data, model, fsdp=fsdp, devices=jax.devices()[:count])
            try:
                sizes = weigh(make_shapes(run, place), place)
            except InputError:  # heads or widths that do not divide
                continue
            if sizes.bytes <= room(device):
                yield place


def _plan(
    run: AbstractRun, device: Device | None, placement: Placement, remat: str, attention: str = ""
) -> Plan:
    shape = placement.mesh.shape
    mesh = Mesh(shape[DATA], shape[MODEL], placement.fsdp, remat, attention)
    return Plan(mesh, cost_of(run, placement, remat, attention), device)
