"""Shardings: the mesh, and one table of rules for the parameters of every backbone.

Modules name the axes of activations (`constrain`), the table those of parameters; RULES maps each
logical axis to an axis of the mesh.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxprompt.errors import InputError
from jaxprompt.tree import PLANE, LayerList, is_layer_list
from jaxprompt.types import Array

DATA, MODEL = "data", "model"
# Logical axis -> mesh axis; other axes are not sharded.
RULES = {
    "vocab": MODEL, "heads": MODEL, "key_heads": MODEL, "mlp": MODEL, "experts": MODEL,
    "act_batch": DATA, "act_heads": MODEL, "act_vocab": MODEL,
}  # fmt: skip
FSDP = {"embed": DATA}  # in addition, if frozen weights are sharded over the data axis too
_QUERY_AXES, _KEY_AXES = ("heads", "kv"), ("key_heads", "kv")
# Logical axes of the backbone's parameters by name, without the leading axis of stacked layers.
PARAMETERS = (
    (r"(embed/(decoder_)?word|lm|mlm)/table", ("vocab", "embed")),
    (
        r"(embed/(decoder_)?position|embed/inner|embed/type|relative|mask_decoder)/table",
        (None, None),
    ),
    (r"(decoder_)?bias/table", ("relpos_buckets", "heads")),
    (r"mlm/bias", ("vocab",)),
    (r"lm_bias", (None, "vocab")),
    (r".*norm/(scale|bias)", (None,)),
    (r"(.*/)?(attention|cross)/(position_)?query/kernel", ("embed", *_QUERY_AXES)),
    (r"(.*/)?(attention|cross)/(position_)?query/bias", _QUERY_AXES),
    (r"(.*/)?(attention|cross)/(position_)?(key|value)/kernel", ("embed", *_KEY_AXES)),
    (r"(.*/)?(attention|cross)/(position_)?(key|value)/bias", _KEY_AXES),
    (r"(.*/)?attention/in_proj/kernel", ("embed", "heads", None, "kv")),
    (r"(.*/)?(attention|cross)/out/kernel", (*_QUERY_AXES, "embed")),
    (r"(.*/)?mlp/(up|gate)/kernel", ("embed", "mlp")),
    (r"(.*/)?mlp/(up|gate)/bias", ("mlp",)),
    (r"(.*/)?mlp/down/kernel", ("mlp", "embed")),
    (r"(.*/)?mlp/router/kernel", ("embed", None)),
    (r"(.*/)?mlp/experts/(up|gate)/kernel", ("experts", "embed", None)),
    (r"(.*/)?mlp/experts/down/kernel", ("experts", None, "embed")),
    # FSDP divides the columns, which are contiguous in the file.
    (r"(.*/)?mlp/experts/gate_up/kernel", ("experts", None, "embed")),
    (r"(.*/)?mlp/experts/(gate_up|down)/bias", ("experts", None)),
    (r"(.*/)?attention/sinks", ("heads",)),
    (r"(embed/project|pooler|mlm/dense|rtd/dense|rtd/out)/kernel", (None, None)),
    (r"conv/kernel", (None, None, None)),
    # The first matching rule counts, so this one is for all other biases.
    (r".*/bias", (None,)),
)
# Prompt parameters as large as a vocabulary; all others are replicated.
PROMPTS = (r"prompt/(.*/)?words/(table|base)", ("vocab", None))
STACKED = ("layers", "decoder_layers", "later_layers")
MODELS = ("backbone", "generator")  # first parts of the names in PARAMETERS


class Target(NamedTuple):
    """The device that a program is compiled for, as far as kernels depend on it."""

    platform: str  # cpu | gpu | tpu
    capability: float = 0.0  # NVIDIA's compute capability


def device_target(device: jax.Device) -> Target:
    """Returns the target of a device, attached or of a topology."""
    try:
        return Target(device.platform, float(getattr(device, "compute_capability", 0)))
    except ValueError:  # AMD's capabilities are names
        return Target(device.platform)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh with axes ("data", "model"), and whether frozen weights are sharded over both."""

    mesh: Mesh
    fsdp: bool = False
    compiled_for: Target | None = None  # another target than the mesh's devices, for lowering
    maps_runs: bool = False  # the program is mapped over a leading axis of runs

    @property
    def target(self) -> Target:
        """The target of programs on this mesh."""
        return self.compiled_for or device_target(self.mesh.devices.flat[0])

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

    def param_sharding(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of a parameter; most prompt and head parameters are replicated.

        A prompt table is sharded if the model axis divides its number of rows. Key heads are
        replicated if they are fewer than the model axis and divide it: query heads share them.
        """
        is_plane = PLANE.search(name) is not None
        name = PLANE.sub(r"\1", name)  # the arrays of a quantized parameter are sharded like it
        model, _, param_path = name.partition("/")
        ndim, model_size = len(shape), self.mesh.shape[MODEL]
        fits_prompts = ndim == len(PROMPTS[1]) and shape[0] % model_size == 0
        if fits_prompts and re.fullmatch(PROMPTS[0], name):
            return NamedSharding(self.mesh, PartitionSpec(*map(self.mesh_axis, PROMPTS[1])))
        if model not in MODELS:
            return self.replicated
        axes = next((axes for rule, axes in PARAMETERS if re.fullmatch(rule, param_path)), None)
        if axes is not None and param_path.split("/")[0] in STACKED:
            axes = (None, *axes)
        if axes is None or len(axes) != ndim:
            raise ValueError(f"no rule of sharding.PARAMETERS fits {name} with {ndim} axes")

        def is_shared(axis: str | None, size: int) -> bool:
            if is_plane and size == 1:  # a scale per output has no input axis
                return True
            return axis == "key_heads" and size < model_size and model_size % size == 0

        named = zip(axes, shape, strict=True)
        spec = (None if is_shared(axis, size) else self.mesh_axis(axis) for axis, size in named)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def param_shardings(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the sharding of each leaf of a flat tree; those of a `LayerList` as another."""
        shardings: dict[str, Any] = {}
        for name, leaf in leaves.items():
            sharding = self.param_sharding(name, leaf.shape)
            is_separate = is_layer_list(leaf)
            shardings[name] = (
                LayerList([layer_sharding(sharding)] * len(leaf)) if is_separate else sharding
            )
        return shardings

    def batch_part(self) -> tuple[int, int]:
        """Returns (part, parts): which part of a global batch this process loads.

        Raises InputError if the devices of this process do not form such a part.
        """
        rows = [_process_indices(row) for row in self.mesh.devices]  # of [data, model]
        rows_here = [number for number, row in enumerate(rows) if jax.process_index() in row]
        first, count = rows_here[0], len(rows_here)
        is_block = rows_here == list(range(first, first + count)) and first % count == 0
        if not is_block or len(rows) % count or len({rows[number] for number in rows_here}) > 1:
            data, model = self.mesh.devices.shape
            raise InputError(
                f"mesh.data={data} x mesh.model={model} gives a process no separate part of a "
                "batch; use a mesh.model that divides its number of devices, or is a multiple of it"
            )
        return first // count, len(rows) // count

    def padded_vocab(self, vocab: int) -> int:
        """Rounds a vocabulary size up to a multiple of the model axis."""
        return -(-vocab // self.mesh.shape[MODEL]) * self.mesh.shape[MODEL]


def layer_sharding(stacked: NamedSharding) -> NamedSharding:
    """Returns the sharding of one layer of a stacked parameter."""
    return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[1:]))


def _process_indices(devices: Iterable[jax.Device]) -> tuple[int, ...]:
    """Returns the processes that devices belong to."""
    return tuple(sorted({device.process_index for device in devices}))


def make_placement(
    data: int = -1,
    model: int = 1,
    *,
    fsdp: bool = False,
    slices: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Placement:
    """Arranges devices as a data x model mesh; -1 uses the remaining devices.

    `slices` must divide the data axis. Raises InputError if the sizes do not fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes_text = f"mesh.data={data} x mesh.model={model}"
    if model == 0:
        raise InputError(
            "mesh.model=0 is only chosen by train, pretrain, sweep, validate, evaluate, export and "
            "inspect; set mesh.model"
        )
    if data == model == -1:
        raise InputError("mesh.data=-1 and mesh.model=-1; only one of them can be -1")
    requested = max(data, 1) * max(model, 1)
    remaining = len(devices) // requested if -1 in (data, model) else 1
    data, model = remaining if data == -1 else data, remaining if model == -1 else model
    fits = data * model == len(devices) or (
        # One process may leave devices over; of several each must have its part of the mesh.
        len(devices) % requested == 0 and jax.process_count() == 1 and min(data, model) > 0
    )
    if not fits:
        raise InputError(
            f"{sizes_text} does not divide the {len(devices)} devices; use sizes whose product is "
            f"{len(devices)}, or -1 for one of them"
        )
    if data % slices:
        raise InputError(f"mesh.data={data} must be a multiple of mesh.slices={slices}")
    grid = arrange_devices(data, model, slices, devices[: data * model])
    # Auto: the compiler chooses shardings that `constrain` does not set.
    return Placement(Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto)), fsdp)


def arrange_devices(
    data: int, model: int, slices: int, devices: Sequence[jax.Device]
) -> np.ndarray:
    """Arranges devices so that neighbours in the mesh are physically close. Returns [data, model].

    Each process loads one part of a batch, so its rows are adjacent within a slice: the order of a
    torus, which would mix them, matters only on the model axis.
    """
    if slices == 1:
        make_grid = functools.partial(mesh_utils.create_device_mesh, (data, model), devices)
    else:
        # The network between slices is slow: only the data axis, which sums gradients, crosses it.
        # For devices without slices, such as CPUs, each process counts as a slice.
        by_process = not hasattr(devices[0], "slice_index")
        make_grid = functools.partial(
            mesh_utils.create_hybrid_device_mesh,
            (data // slices, model),
            (slices, 1),
            devices,
            process_is_granule=by_process,
        )
    try:
        grid = make_grid()
    except RuntimeError:  # for other shapes than the built-in ones, e.g. 64 x 4 on a 16 x 16 torus
        grid = make_grid(allow_split_physical_axes=True)
    rows_per_slice = data // slices
    return grid[
        sorted(range(data), key=lambda row: (row // rows_per_slice, _process_indices(grid[row])))
    ]


def check_divisible(placement: Placement, shapes: Mapping[str, Any]) -> None:
    """Raises InputError if the mesh does not divide an axis of a parameter.

    `shapes` are arrays or jax.ShapeDtypeStruct by flat name. The message suggests sizes.
    """
    sizes = placement.mesh.shape
    for name, leaf in shapes.items():
        spec = placement.param_sharding(name, leaf.shape).spec
        # A spec may omit the last axes; that of a replicated parameter omits all.
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis and size % sizes[axis]:
                fits = [n for n in range(1, size + 1) if size % n == 0 and n <= 2 * sizes[axis]]
                advice = f"use {' or '.join(map(str, fits))}"
                advice += ", or backbone.quantize=none" if PLANE.search(name) else ""
                advice += ", or mesh.fsdp=False" if axis == DATA else ""
                raise InputError(
                    f"mesh.{axis}={sizes[axis]} does not divide the {size} of "
                    f"{name} {list(leaf.shape)}; {advice}"
                )


def check_padding(placement: Placement, trainable: Mapping[str, Any], vocab: int) -> None:
    """Raises InputError if a trainable vocabulary table would need padding.

    Checkpoints and exports have no padding, so that they fit every mesh.
    """
    size = placement.mesh.shape[MODEL]
    for name, leaf in trainable.items():
        spec = placement.param_sharding(name, leaf.shape).spec
        if spec[:1] == (MODEL,) and vocab % size:  # only tables: stacked layers have None first
            fits = [n for n in range(1, size) if vocab % n == 0]
            raise InputError(
                f"{name} trains, and mesh.model={size} does not divide its {vocab} rows; use "
                f"{' or '.join(map(str, fits))}, or exclude it from config.trainable"
            )


def shardings_like(
    placement: Placement, tree: Any, param_shardings: Mapping[str, NamedSharding]
) -> Any:
    """Returns a sharding for every leaf of a state, that of the parameter it belongs to.

    A leaf belongs to the parameter whose flat name is the last key of its path. Other leaves, and
    leaves with fewer or indivisible axes, are replicated.
    """
    sizes = placement.mesh.shape

    def leaf_sharding(path, leaf):
        keys = [getattr(key, "key", None) for key in path]
        name = next((key for key in reversed(keys) if key in param_shardings), None)
        spec = () if name is None else param_shardings[name].spec
        # Factored moments have fewer axes than their parameter, or axes of 1.
        pairs = zip(spec, leaf.shape, strict=False)
        is_divisible = len(spec) <= leaf.ndim and all(
            x is None or n % sizes[x] == 0 for x, n in pairs
        )
        return param_shardings[name] if is_divisible and spec else placement.replicated

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def put_global(tree: Any, shardings: Any) -> Any:
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

    def to_global(x):
        if isinstance(x, jax.Array):
            return x
        return jax.make_array_from_process_local_data(placement.batch, x)

    return jax.tree.map(to_global, batch)


def put_flag(placement: Placement, flag: int) -> jax.Array:
    """Makes an array with one number per device: the `flag` of the process of the device."""
    sharding = NamedSharding(placement.mesh, PartitionSpec((DATA, MODEL)))
    # JAX only asks for the parts of this process's devices, so each process sets its flag.
    flags = np.full(placement.mesh.size, flag, np.int32)
    return jax.make_array_from_callback(flags.shape, sharding, lambda index: flags[index])


# -- what is computed -----------------------------------------------------------------------------

_ACTIVE: ContextVar[Placement | None] = ContextVar("placement", default=None)


def with_placement(placement: Placement, function: Callable) -> Callable:
    """Wraps a function so that `constrain` in it uses the mesh of this placement."""

    @functools.wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        token = _ACTIVE.set(placement)
        try:
            return function(*args, **kwargs)
        finally:
            _ACTIVE.reset(token)

    return placed


def current_target() -> Target:
    """Returns the target of the program being traced, by default that of the first device."""
    placement = _ACTIVE.get()
    return device_target(jax.local_devices()[0]) if placement is None else placement.target


def maps_runs() -> bool:
    """Returns whether the program being traced is mapped over a leading axis of runs."""
    placement = _ACTIVE.get()
    return placement is not None and placement.maps_runs


def is_partitioned() -> bool:
    """Returns whether the program being traced is for several devices."""
    placement = _ACTIVE.get()
    return placement is not None and placement.mesh.size > 1


def map_shards(function: Callable, specs: Sequence[Sequence[str | None]]) -> Callable:
    """Wraps a function with shard_map on meshes of several devices.

    `specs` are the logical axes of each argument; the result is sharded like the first one. The
    compiler partitions its own operations, but not Pallas kernels.
    """
    placement = _ACTIVE.get()
    if placement is None or placement.mesh.size == 1:
        return function
    partition_specs = tuple(PartitionSpec(*map(placement.mesh_axis, axes)) for axes in specs)
    # Unchecked: the results of a Pallas call do not declare over which axes they vary.
    return jax.shard_map(
        function,
        mesh=placement.mesh,
        in_specs=partition_specs,
        out_specs=partition_specs[0],
        check_vma=False,
    )


def gathers_params() -> bool:
    """Returns whether weights are sharded over the data axis (FSDP) and must be gathered."""
    placement = _ACTIVE.get()
    return placement is not None and placement.fsdp and placement.mesh.shape[DATA] > 1


def num_shards(axis: str) -> int:
    """Returns the number of shards of a logical axis; 1 outside of `with_placement`."""
    placement = _ACTIVE.get()
    if placement is None:
        return 1
    mesh_axis = placement.mesh_axis(axis)
    return placement.mesh.shape[mesh_axis] if mesh_axis else 1


def gather_params(params: Any) -> Any:
    """Gathers the FSDP-sharded parameters of one layer, a nested dict, over the data axis."""
    placement = _ACTIVE.get()
    if placement is None or not gathers_params():
        return params
    without_fsdp = dataclasses.replace(placement, fsdp=False)

    def gather(path, leaf):
        # The path of one layer lacks the name of the stack, so rules match without its axis.
        name = "/".join(["backbone", *(key.key for key in path)])
        sharding = without_fsdp.param_sharding(name, leaf.shape)
        return jax.lax.with_sharding_constraint(leaf, sharding)

    return jax.tree_util.tree_map_with_path(gather, params)


def constrain(x: Array, *axes: str | None) -> Array:
    """Constrains the sharding of an array by its logical axes.

    No effect outside of `with_placement`. An axis that the mesh does not divide, e.g. the single
    row of a prompt, is not sharded.
    """
    placement = _ACTIVE.get()
    if placement is None or math.prod(placement.mesh.shape.values()) == 1:
        return x
    sizes = placement.mesh.shape
    mesh_axes = map(placement.mesh_axis, axes)
    spec = [
        mesh_axis if mesh_axis and size % sizes[mesh_axis] == 0 else None
        for mesh_axis, size in zip(mesh_axes, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, PartitionSpec(*spec)))
