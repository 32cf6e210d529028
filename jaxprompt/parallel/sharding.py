"""Shardings: the mesh, and one table of rules for the parameters of every backbone.

Modules name the axes of activations (`constrain`), the table those of parameters; RULES maps each
logical axis to an axis of the mesh.
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
    """The device that a program is compiled for, as far as kernels depend on it."""

    platform: str  # cpu | gpu | tpu
    capability: float = 0.0  # NVIDIA's compute capability


def target_of(device: jax.Device) -> Target:
    """Returns the target of a device, attached or of a topology."""
    try:
        return Target(device.platform, float(getattr(device, "compute_capability", 0)))
    except ValueError:  # AMD's are names
        return Target(device.platform)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh with axes ("data", "model"), and whether frozen weights are sharded over both."""

    mesh: Mesh
    fsdp: bool = False
    compiled_for: Target | None = None  # in place of the mesh's devices, to lower for others
    runs: bool = False  # the program is mapped over a leading axis of runs

    @property
    def target(self) -> Target:
        """The target of programs on this mesh."""
        return self.compiled_for or target_of(self.mesh.devices.flat[0])

    @property
    def rules(self) -> dict[str, str]:
        """The mesh axis of each logical axis."""
        return RULES | FSDP if self.fsdp else RULES

    def mesh_axis(self, axis: str | None) -> str | None:
        """Returns the mesh axis of a logical axis; None if it is not sharded."""
        return None if axis is None else self.rules.get(axis)

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of an array that is replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Sharding of examples over the data axis."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    def parameter(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of a parameter; most prompt and head parameters are replicated.

        A prompt table is sharded if the model axis divides its number of rows. Key heads are
        replicated if they are fewer than the model axis and divide it: query heads share them.
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
        """Returns the sharding of each leaf of a flat tree."""
        return {name: self.parameter(name, leaf.shape) for name, leaf in leaves.items()}

    def share(self) -> tuple[int, int]:
        """Returns (part, parts): which part of a global batch this process loads.

        Raises InputError if the devices of this process do not form such a part.
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
        """Rounds a vocabulary size up to a multiple of the model axis."""
        return -(-vocab // self.mesh.shape[MODEL]) * self.mesh.shape[MODEL]


def _processes(devices: Iterable[jax.Device]) -> tuple[int, ...]:
    """Returns the processes that devices belong to."""
    return tuple(sorted({device.process_index for device in devices}))


def make_placement(
    data: int = -1, model: int = 1, *, fsdp: bool = False, slices: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Placement:  # fmt: skip
    """Arranges devices as a data x model mesh; -1 uses the remaining devices.

    `slices` must divide the data axis. Raises InputError if the sizes do not fit the devices.
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
    """Arranges devices so that neighbours in the mesh are physically close. Returns [data, model].

    Each process loads one part of a batch, so its rows are adjacent within a slice: the order of a
    torus, which would mix them, matters only on the model axis.
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
    """Raises InputError if the mesh does not divide an axis of a parameter.

    `shapes` are arrays or jax.ShapeDtypeStruct by flat name. The message suggests sizes.
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
    """Raises InputError if a trainable vocabulary table would need padding.

    Checkpoints and exports have no padding, so that they fit every mesh.
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
    """Returns a sharding for every leaf of a state, that of the parameter it belongs to.

    A leaf belongs to the parameter whose flat name is the last key of its path. Other leaves, and
    leaves with fewer or indivisible axes, are replicated.
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
    """Shards arrays that every process has completely."""

    def move(x, sharding):
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(move, tree, shardings)


def put_batch(placement: Placement, batch: Any) -> Any:
    """Makes a global batch from the parts of all processes, over the data axis.

    Arrays that are already global are returned unchanged.
    """
    if placement.batch.is_fully_addressable:
        return jax.device_put(batch, placement.batch)
    join = lambda x: jax.make_array_from_process_local_data(placement.batch, x)
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else join(x), batch)


def put_flag(placement: Placement, flag: int) -> jax.Array:
    """Makes an array with one number per device: the `flag` of the process of the device."""
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
    """Wraps a function so that `constrain` in it uses the mesh of this placement."""

    @functools.wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        with _active(placement):
            return function(*args, **kwargs)

    return placed


def target() -> Target:
    """Returns the target of the program being traced; outside of `within` the default device."""
    placement = _ACTIVE.get()
    return target_of(jax.local_devices()[0]) if placement is None else placement.target


def maps_runs() -> bool:
    """Returns whether the program being traced is mapped over a leading axis of runs."""
    placement = _ACTIVE.get()
    return placement is not None and placement.runs


def divide(function: Callable, specs: Sequence[Sequence[str | None]]) -> Callable:
    """Wraps a function with shard_map on meshes of several devices.

    `specs` are the logical axes of each argument; the result is sharded like the first one. The
    compiler partitions its own operations, but not Pallas kernels.
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
    """Returns whether weights are sharded over the data axis (FSDP) and must be gathered."""
    placement = _ACTIVE.get()
    return placement is not None and placement.fsdp and placement.mesh.shape[DATA] > 1


def parts(axis: str) -> int:
    """Returns the number of shards of a logical axis; 1 outside of `within`."""
    placement = _ACTIVE.get()
    if placement is None:
        return 1
    name = placement.mesh_axis(axis)
    return placement.mesh.shape[name] if name else 1


def gather(params: Any) -> Any:
    """Gathers the FSDP-sharded parameters of one layer, a nested dict, over the data axis."""
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
    """Constrains the sharding of an array by its logical axes; no effect outside of `within`.

    An axis that the mesh does not divide, e.g. the single row of a prompt, is not sharded.
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
