"""Where arrays live: the mesh, and one table of rules for the parameters of every backbone.

Modules name the axes of what they compute (`constrain`), the table names those of parameters; RULES
says on which axis of the mesh each name lies.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxprompt.errors import InputError
from jaxprompt.tree import PLANE
from jaxprompt.types import Array

DATA, MODEL = "data", "model"
# Logical axis -> axis of the mesh; names that are not here are not divided.
RULES = {
    "vocab": MODEL, "heads": MODEL, "key_heads": MODEL, "mlp": MODEL,
    "act_batch": DATA, "act_heads": MODEL, "act_vocab": MODEL,
}  # fmt: skip
FSDP = {"embed": DATA}  # besides, where frozen weights are divided over the data axis too
_INNER, _KEYS = ("heads", "kv"), ("key_heads", "kv")
# Logical axes of the backbone's parameters by name. Stacked layers have one axis more, in front.
PARAMETERS = (
    (r"(embed/word|lm|mlm)/table", ("vocab", "embed")),
    (r"(embed/position|embed/inner|embed/type|relative|mask_decoder)/table", (None, None)),
    (r"(decoder_)?bias/table", ("relpos_buckets", "heads")),
    (r"mlm/bias", ("vocab",)),
    (r".*norm/(scale|bias)", (None,)),
    (r"(.*/)?(attention|cross)/(position_)?query/kernel", ("embed", *_INNER)),
    (r"(.*/)?(attention|cross)/(position_)?query/bias", _INNER),
    (r"(.*/)?(attention|cross)/(position_)?(key|value)/kernel", ("embed", *_KEYS)),
    (r"(.*/)?(attention|cross)/(position_)?(key|value)/bias", _KEYS),
    (r"(.*/)?attention/in_proj/kernel", ("embed", "heads", None, "kv")),
    (r"(.*/)?(attention|cross)/out/kernel", (*_INNER, "embed")),
    (r"(.*/)?mlp/(up|gate)/kernel", ("embed", "mlp")),
    (r"(.*/)?mlp/(up|gate)/bias", ("mlp",)),
    (r"(.*/)?mlp/down/kernel", ("mlp", "embed")),
    (r"(embed/project|pooler|mlm/dense|rtd/dense|rtd/out)/kernel", (None, None)),
    (r"conv/kernel", (None, None, None)),
    # The first rule that fits counts: this one takes the biases that no rule above names.
    (r".*/bias", (None,)),
)
# Those of a prompt that are as large as a vocabulary; all others are on every device.
PROMPTS = (r"prompt/(.*/)?words/(table|base)", ("vocab", None))
STACKED = ("layers", "decoder_layers", "later_layers")
MODELS = ("backbone", "generator")  # first parts of the names that PARAMETERS knows


class Target(NamedTuple):
    """What a program is compiled for, as far as kernels depend on it."""

    platform: str  # cpu | gpu | tpu
    capability: float = 0.0  # NVIDIA's compute capability


def target_of(device: jax.Device) -> Target:
    """Reads the target off a device, attached or of a topology."""
    try:
        return Target(device.platform, float(getattr(device, "compute_capability", 0)))
    except ValueError:  # AMD's are names
        return Target(device.platform)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh of axes ("data", "model"), and whether frozen weights are divided over both."""

    mesh: Mesh
    fsdp: bool = False
    compiled_for: Target | None = None  # in place of the mesh's devices, to lower for others
    runs: bool = False  # the program is mapped over a leading axis of runs

    @property
    def target(self) -> Target:
        """What programs on this mesh are compiled for."""
        return self.compiled_for or target_of(self.mesh.devices.flat[0])

    @property
    def rules(self) -> dict[str, str]:
        """Which axis of the mesh each logical axis lies on."""
        return RULES | FSDP if self.fsdp else RULES

    def mesh_axis(self, axis: str | None) -> str | None:
        """Looks up which axis of the mesh a logical axis lies on; None = it is not divided."""
        return None if axis is None else self.rules.get(axis)

    @property
    def replicated(self) -> NamedSharding:
        """The same on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Examples divided over the data axis."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def parameter(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """Looks up where a parameter lives; of a prompt's and a head's most are on every device.

        A prompt's table is divided where its rows divide over the mesh. Heads of keys that are
        fewer than the model axis, and divide it, are on every device: those of others share them.
        """
        name = PLANE.sub(r"\1", name)  # the arrays of a quantized parameter lie as it does
        part, _, path = name.partition("/")
        ndim, size = len(shape), self.mesh.shape[MODEL]
        divides = ndim == len(PROMPTS[1]) and shape[0] % size == 0
        if divides and re.fullmatch(PROMPTS[0], name):
            return NamedSharding(self.mesh, PartitionSpec(*map(self.mesh_axis, PROMPTS[1])))
        if part not in MODELS:
            return self.replicated
        axes = next((axes for rule, axes in PARAMETERS if re.fullmatch(rule, path)), None)
        # Stacked layers have an axis in front that no rule names.
        stacked = (None,) * (path.split("/")[0] in STACKED)
        if axes is None or len(stacked + axes) != ndim:
            raise ValueError(f"no rule of sharding.PARAMETERS fits {name} with {ndim} axes")
        shared = lambda axis, length: axis == "key_heads" and length < size and size % length == 0
        named = zip(stacked + axes, shape, strict=True)
        spec = (None if shared(axis, n) else self.mesh_axis(axis) for axis, n in named)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def parameters(self, leaves: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Looks up where each leaf of a flat tree lives."""
        return {name: self.parameter(name, leaf.shape) for name, leaf in leaves.items()}

    def share(self) -> tuple[int, int]:
        """Tells which part of a global batch this process holds, and of how many.

        Raises InputError where its devices lie in rows that are no such part.
        """
        rows = [_processes(row) for row in self.mesh.devices]  # of [data, model]
        own = [number for number, row in enumerate(rows) if jax.process_index() in row]
        first, count = own[0], len(own)
        adjacent = own == list(range(first, first + count)) and first % count == 0
        if not adjacent or len(rows) % count or len({rows[number] for number in own}) > 1:
            data, model = self.mesh.devices.shape
            raise InputError(
                f"mesh.data={data} x mesh.model={model} gives a process no separate part of a "
                "batch; use a mesh.model that divides its number of devices, or is a multiple of it"
            )
        return first // count, len(rows) // count

    def padded(self, vocab: int) -> int:
        """Rounds the rows of a vocabulary table up to what the model axis divides."""
        return -(-vocab // self.mesh.shape[MODEL]) * self.mesh.shape[MODEL]


def _processes(devices: Iterable[jax.Device]) -> tuple[int, ...]:
    """Lists the processes that devices belong to."""
    return tuple(sorted({device.process_index for device in devices}))


def make_placement(
    data: int = -1, model: int = 1, *, fsdp: bool = False, slices: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Placement:  # fmt: skip
    """Lays devices out as data x model; -1 takes the rest. Slices divide the data axis.

    Raises InputError where the sizes do not fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"mesh.data": data, "mesh.model": model}
    shown = f"mesh.data={data} x mesh.model={model}"
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise InputError(f"{name}={size} must be at least 1, or -1 for the rest")
    if data == model == -1:
        raise InputError("mesh.data=-1 and mesh.model=-1; only one of them can be -1")
    given = max(data, 1) * max(model, 1)
    rest = len(devices) // given if -1 in (data, model) else 1
    data, model = rest if data == -1 else data, rest if model == -1 else model
    fits = data * model == len(devices) or (
        # One process may leave devices over; of several each must have its part of the mesh.
        len(devices) % given == 0 and jax.process_count() == 1 and data * model
    )
    if not fits:
        raise InputError(
            f"{shown} does not divide the {len(devices)} devices; use sizes whose product is "
            f"{len(devices)}, or -1 for one of them"
        )
    if data % slices:
        raise InputError(f"mesh.data={data} must be a multiple of mesh.slices={slices}")
    grid = arrange(data, model, slices, devices[: data * model])
    # Auto: where `constrain` is silent the compiler chooses.
    return Placement(Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto)), fsdp)


def arrange(data: int, model: int, slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
    """Lays devices out so that neighbours are near. -> [data, model]

    A process reads one part of a batch, so that its rows stand side by side, within a slice: the
    order of a torus, which would mix them, matters on the model axis alone.
    """
    if slices == 1:
        lay = functools.partial(mesh_utils.create_device_mesh, (data, model), devices)
    else:
        # Between slices the network is slow: only the data axis, which sums gradients, crosses it.
        # Devices without slices, such as CPUs: there each process counts as one.
        by_process = not hasattr(devices[0], "slice_index")
        lay = functools.partial(
            mesh_utils.create_hybrid_device_mesh, (data // slices, model), (slices, 1), devices,
            process_is_granule=by_process,
        )  # fmt: skip
    try:
        grid = lay()
    except RuntimeError:  # of what is not built in: such as 64 x 4 on a torus of 16 x 16
        grid = lay(allow_split_physical_axes=True)
    of_slice = data // slices
    return grid[sorted(range(data), key=lambda row: (row // of_slice, _processes(grid[row])))]


def check_divides(placement: Placement, shapes: Mapping[str, Any]) -> None:
    """Raises InputError where an axis of a parameter does not divide over the mesh.

    `shapes` are arrays or jax.ShapeDtypeStruct by flat name. The message says what would divide.
    """
    sizes = placement.mesh.shape
    for name, leaf in shapes.items():
        spec = placement.parameter(name, leaf.shape).spec
        # A spec may leave the last axes out, as that of what is on every device does.
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis and size % sizes[axis]:
                fits = [n for n in range(1, size + 1) if size % n == 0 and n <= 2 * sizes[axis]]
                cure = f"use {' or '.join(map(str, fits))}"
                cure += ", or backbone.quantize=none" * (PLANE.search(name) is not None)
                cure += ", or mesh.fsdp=False" * (axis == DATA)
                raise InputError(
                    f"mesh.{axis}={sizes[axis]} does not divide the {size} of "
                    f"{name} {list(leaf.shape)}; {cure}"
                )


def check_padding(placement: Placement, trainable: Mapping[str, Any], vocab: int) -> None:
    """Raises InputError where a vocabulary table that trains would need padding.

    Checkpoints and exports hold no padding, so that they fit every mesh.
    """
    size = placement.mesh.shape[MODEL]
    for name, leaf in trainable.items():
        spec = placement.parameter(name, leaf.shape).spec
        if spec[:1] == (MODEL,) and vocab % size:  # of what is not stacked the tables alone
            fits = [n for n in range(1, size) if vocab % n == 0]
            raise InputError(
                f"{name} trains, and mesh.model={size} does not divide its {vocab} rows; use "
                f"{' or '.join(map(str, fits))}, or exclude it from config.trainable"
            )


def like(placement: Placement, tree: Any, own: Mapping[str, NamedSharding]) -> Any:
    """Gives every leaf of a state the sharding of the parameter that it belongs to.

    A leaf belongs to the parameter whose flat name is the last key of its path; others, and those
    of axes that are fewer or do not divide, are on every device.
    """
    sizes = placement.mesh.shape

    def place(path, leaf):
        keys = [getattr(key, "key", None) for key in path]
        name = next((key for key in reversed(keys) if key in own), None)
        spec = () if name is None else own[name].spec
        # Factored moments have fewer axes than their parameter, or axes of 1.
        pairs = zip(spec, leaf.shape, strict=False)
        fits = len(spec) <= leaf.ndim and all(x is None or n % sizes[x] == 0 for x, n in pairs)
        return own[name] if fits and spec else placement.replicated

    return jax.tree_util.tree_map_with_path(place, tree)


def put(tree: Any, shardings: Any) -> Any:
    """Puts arrays that every process holds whole where they belong."""

    def move(x, sharding):
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(move, tree, shardings)


def put_batch(placement: Placement, batch: Any) -> Any:
    """Joins the parts of a batch that the processes hold, over the data axis.

    What is an array of all of them already stays as it is.
    """
    if placement.batch.is_fully_addressable:
        return jax.device_put(batch, placement.batch)
    join = lambda x: jax.make_array_from_process_local_data(placement.batch, x)
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else join(x), batch)


def put_flag(placement: Placement, flag: int) -> jax.Array:
    """Makes an array with a number per device, each process's own `flag` on its devices."""
    sharding = NamedSharding(placement.mesh, PartitionSpec((DATA, MODEL)))
    # JAX asks for the parts of this process's devices alone, so each puts its own flag.
    mine = np.full(placement.mesh.size, flag, np.int32)
    return jax.make_array_from_callback(mine.shape, sharding, lambda index: mine[index])


# -- what is computed -----------------------------------------------------------------------------

_ACTIVE: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextlib.contextmanager
def _active(placement: Placement) -> Iterator[None]:
    token = _ACTIVE.set(placement)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def within(placement: Placement, function: Callable) -> Callable:
    """Traces a function so that `constrain` in it refers to this placement's mesh."""

    @functools.wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        with _active(placement):
            return function(*args, **kwargs)

    return placed


def target() -> Target:
    """Tells what the program in trace is compiled for; outside of `within` JAX's default device."""
    placement = _ACTIVE.get()
    return target_of(jax.local_devices()[0]) if placement is None else placement.target


def maps_runs() -> bool:
    """Tells whether the program in trace is mapped over a leading axis of runs."""
    placement = _ACTIVE.get()
    return placement is not None and placement.runs


def divide(function: Callable, specs: Sequence[Sequence[str | None]]) -> Callable:
    """Runs a function on each device's part of its arguments, on meshes of several devices.

    `specs` are the logical names of the axes of each argument; the result lies as the first one.
    The compiler divides its own operations by itself, kernels of Pallas it does not.
    """
    placement = _ACTIVE.get()
    if placement is None or placement.mesh.size == 1:
        return function
    named = tuple(PartitionSpec(*map(placement.mesh_axis, axes)) for axes in specs)
    # Unchecked: the results of a Pallas call do not say on which axes they vary.
    return jax.shard_map(
        function, mesh=placement.mesh, in_specs=named, out_specs=named[0], check_vma=False
    )


def gathers() -> bool:
    """Tells whether weights are divided over the data axis where they are used."""
    placement = _ACTIVE.get()
    return placement is not None and placement.fsdp and placement.mesh.shape[DATA] > 1


def parts(axis: str) -> int:
    """Tells into how many parts a logical axis is divided; outside of `within` it is whole."""
    placement = _ACTIVE.get()
    if placement is None:
        return 1
    name = placement.mesh_axis(axis)
    return placement.mesh.shape[name] if name else 1


def gather(params: Any) -> Any:
    """Joins over the data axis what FSDP divides of the parameters of one layer, a nested dict."""
    placement = _ACTIVE.get()
    if placement is None or not gathers():
        return params
    whole = dataclasses.replace(placement, fsdp=False)

    def join(path, leaf):
        # Names of one layer begin below the stack, so that rules fit them without its axis.
        name = "/".join(["backbone", *(key.key for key in path)])
        return jax.lax.with_sharding_constraint(leaf, whole.parameter(name, leaf.shape))

    return jax.tree_util.tree_map_with_path(join, params)


def constrain(x: Array, *axes: str | None) -> Array:
    """Lays an array by the logical names of its axes; outside of `within` it stays as it is.

    An axis that the mesh does not divide, such as the one row of a prompt, is not divided.
    """
    placement = _ACTIVE.get()
    if placement is None or math.prod(placement.mesh.shape.values()) == 1:
        return x
    sizes = placement.mesh.shape
    named = map(placement.mesh_axis, axes)
    spec = [
        name if name and size % sizes[name] == 0 else None
        for name, size in zip(named, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, PartitionSpec(*spec)))
