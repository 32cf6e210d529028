"""Fills arrays with tensors of a file, block by block: hashed, cast or quantised, transposed and
stacked.
"""

import hashlib
import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxprompt.convert.quantize import (
    OutputPlanes,
    Planes,
    quantize,
    quantize_float8,
    quantize_outputs,
)
from jaxprompt.convert.shapes import copy_index
from jaxprompt.convert.tensors import Tensor
from jaxprompt.convert.weights import CheckpointTensors, is_finite
from jaxprompt.errors import InputError
from jaxprompt.layers.quantized import BLOCK_BITS, input_axes, plane_dtypes, plane_shape
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import Placement, layer_sharding
from jaxprompt.tree import BLOCK, SEPARABLE, Flat, LayerList

_THREADS = min(8, os.cpu_count() or 1)
_MAX_PENDING = 2  # parameters that are read ahead
# Rows and columns that are transposed at once. A Llama of 634 MiB in float32 loads in 3.9 s, and in
# 4.5 s without tiles; in bfloat16 in 0.8 s and 1.3 s (2 cores). Whole tensors instead of the blocks
# of weights.py take the same time, and 160 MiB more.
_TILE = 256
_GAP = 16  # values between a tile's rows: at a power of two a column would share one cache set


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array of zeros at an address that JAX can use on the CPU without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    # The system gives pages of zeros when they are first written.
    buffer = np.zeros(size + 64, np.uint8)
    # XLA's CPU client uses buffers without a copy if they are aligned to 64 bytes.
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def hash_parts(*parts: str, data: bytes = b"") -> str:
    """Hashes strings and the hash of data; different lists have different hashes."""
    hashes = (hashlib.sha256(part.encode()).digest() for part in parts)
    return hashlib.sha256(b"".join(hashes) + data).hexdigest()


class _Plane(NamedTuple):
    """One array of a parameter: the whole parameter, or a plane of a quantized one."""

    name: str  # "" = not quantized
    dtype: np.dtype
    rows: int = 1  # of the file's matrix per value; 0 = all rows have the same values
    columns: int = 1

    def scaled(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        """Converts a range of the file's matrix to one of this array."""
        return _divide(rows, self.rows), _divide(columns, self.columns)


class _Shard(NamedTuple):
    """A shard of a parameter on devices of this process, and its place in the file."""

    devices: tuple[Any, ...]
    arrays: tuple[Any, ...]  # of each plane, of all layers: [L, ...], or a list of L arrays
    rows: slice  # of the file's matrix, as if it had the rows of the padding
    columns: slice
    stack: tuple[slice, ...]  # of the leading axes

    def contains(self, index: tuple[int, ...]) -> bool:
        """Returns whether it has a layer, or an expert of a layer."""
        spans = zip(index, self.stack, strict=True)
        return all(span.start <= place < span.stop for place, span in spans)

    def matrices(
        self, tensor: Tensor, planes: Sequence[_Plane], index: tuple[int, ...]
    ) -> list[np.ndarray]:
        """Returns views of a layer of each plane as in the file, [rows, columns] each."""
        views = []
        for plane, array in zip(planes, self.arrays, strict=True):
            layer_array = array
            for place, span in zip(index, self.stack, strict=True):
                layer_array = layer_array[place - span.start]
            rows, columns = map(_length, plane.scaled(self.rows, self.columns))
            if tensor.transposed:  # [out, in] -> [in, out]
                views.append(layer_array.reshape(columns, rows).T)
            else:
                views.append(layer_array.reshape(rows, columns))
        return views

    def copy(
        self,
        tensor: Tensor,
        planes: Sequence[_Plane],
        index: tuple[int, ...],
        sources: Sequence[np.ndarray],
        rows: slice,
        columns: slice,
    ) -> None:
        """Copies its part of a block with these rows and columns of the file."""
        common = _overlap(self.rows, rows), _overlap(self.columns, columns)
        in_block = _shift(common[0], -rows.start), _shift(common[1], -columns.start)
        in_shard = _shift(common[0], -self.rows.start), _shift(common[1], -self.columns.start)
        copy = _transpose if tensor.transposed else np.copyto
        targets = self.matrices(tensor, planes, index)
        for plane, source, target in zip(planes, sources, targets, strict=True):
            copy(target[plane.scaled(*in_shard)], source[plane.scaled(*in_block)], casting="unsafe")


class ParameterFiller:
    """Fills parameters with tensors of the file; several threads hash and copy."""

    def __init__(
        self,
        weights: CheckpointTensors,
        sizes: Mapping[str, int],
        dtype: np.dtype,
        rescale: float,
        placement: Placement | None,
        storage: str = "none",
        separate_layers: bool = False,
    ):
        self.weights, self.sizes, self.dtype = weights, sizes, dtype
        self.separate_layers = separate_layers
        self.rescale, self.placement, self.storage = rescale, placement, storage
        self.bits = BLOCK_BITS.get(storage, 0)  # 0 = without blocks
        self.requantized: set[str] = set()  # names in the file
        devices: Iterable[jax.Device] = () if placement is None else placement.mesh.devices.flat
        self.processes = sorted({device.process_index for device in devices})

    def fill(self, file_names: Mapping[Tensor, list[str]]) -> tuple[Flat, list[str]]:
        """Reads tensors.

        Args:
          file_names: the names in the file of each tensor, one per layer.

        Returns:
          (flat params, digests of all layers of all tensors, whichever process hashed them).
        """
        flat: Flat = {}
        digests: list[str] = []
        hashed = self._layers_to_hash(file_names)
        pending: deque[tuple[Tensor, list[_Shard], list[Future[str]]]] = deque()

        def finish() -> None:
            tensor, shards, jobs = pending.popleft()
            digests.extend(job.result() for job in jobs)
            flat.update(self._to_devices(tensor, shards))

        error: InputError | None = None
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                for tensor, names in file_names.items():
                    # Allocated one after the other, to limit the memory of the host.
                    shards = self._shards(tensor)
                    jobs = [
                        pool.submit(self._copy, tensor, i, name, shards, (tensor, i) in hashed)
                        for i, name in enumerate(names)
                    ]
                    pending.append((tensor, shards, jobs))
                    if len(pending) > _MAX_PENDING:
                        finish()
                while pending:
                    finish()
        except InputError as caught:
            error = caught
        digests = [digest for digest in digests if digest]
        if len(self.processes) > 1:
            # An error of any process, which may be the only one to read a block, ends them all.
            errors = [text for text in processes.gather_texts(str(error or "")) if text]
            error = error or (InputError(errors[0]) if errors else None)
        if error:
            raise error
        if len(self.processes) > 1:
            # Vectors are hashed by all: if they differ, there are too many digests.
            digests = list(set(" ".join(processes.gather_texts(" ".join(digests))).split()))
            if len(digests) != sum(map(len, file_names.values())):
                raise InputError(
                    f"the processes read different weights from {self.weights.folder}; use the "
                    "same checkpoint for all of them"
                )
        return flat, digests

    def _layers_to_hash(self, file_names: Mapping[Tensor, list[str]]) -> set[tuple[Tensor, int]]:
        """Chooses what this process hashes: processes take turns, the largest tensors first.

        Vectors are hashed by all, so that different weights on one host are detected.
        """
        layers = [(tensor, i) for tensor, names in file_names.items() for i in range(len(names))]
        if len(self.processes) < 2:
            return set(layers)
        sizes = {
            tensor: math.prod(self.sizes[axis] for axis in tensor.axes) for tensor in file_names
        }
        # A total order, so that all processes make the same division without communication.
        by_size = sorted(layers, key=lambda x: (-sizes[x[0]], x[0].path, x[1]))
        process = self.processes.index(jax.process_index())
        vectors = {(tensor, i) for tensor, i in layers if len(tensor.axes) == 1}
        return vectors.union(by_size[process :: len(self.processes)])

    def _layout(self, tensor: Tensor) -> tuple[tuple[int, ...], NamedSharding | None]:
        """Returns the full shape of a parameter and its sharding."""
        letters = tensor.stack + tensor.axes
        if self.placement is None:
            return tuple(self.sizes[letter] for letter in letters), None
        sizes = dict(self.sizes)
        if "V" in sizes:
            sizes["V"] = self.placement.padded_vocab(sizes["V"])
        shape = tuple(sizes[letter] for letter in letters)
        return shape, self.placement.param_sharding(f"backbone/{tensor.path}", shape)

    def _separates(self, tensor: Tensor) -> bool:
        """Returns whether the layers of a parameter are separate arrays."""
        return self.separate_layers and tensor.path.split("/")[0] in SEPARABLE

    def _has_planes(self, tensor: Tensor) -> bool:
        """Returns whether a parameter is quantised."""
        return self.storage != "none" and bool(input_axes(tensor.path, self.storage))

    def _has_output_scale(self, tensor: Tensor) -> bool:
        """Returns whether a parameter is quantised with one scale per output."""
        return self._has_planes(tensor) and not self.bits

    def _planes(self, tensor: Tensor) -> list[_Plane]:
        """Lists the arrays that a parameter consists of."""
        if not self._has_planes(tensor):
            return [_Plane("", self.dtype)]
        planes = []
        for name, dtype in plane_dtypes(self.storage).items():
            if self.bits:
                count = 8 // self.bits if name == "codes" else BLOCK
            else:
                count = 1 if name == "codes" else 0
            shape = (1, count) if _has_input_columns(tensor) else (count, 1)
            planes.append(_Plane(name, np.dtype(dtype), *shape))
        return planes

    def _shards(self, tensor: Tensor) -> list[_Shard]:
        """Allocates arrays for each of the different shards of this process.

        They are zero, as the padding of a vocabulary stays.
        """
        shape, sharding = self._layout(tensor)
        planes = self._planes(tensor)
        devices_by_index: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        if sharding is None:
            devices_by_index[tuple((0, size) for size in shape)] = []
        else:
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                # None is for a device without a shard, which does not occur here.
                spans = (span.indices(size) for span, size in zip(index or (), shape, strict=True))
                key = tuple(span[:2] for span in spans)
                devices_by_index.setdefault(key, []).append(device)
        shards = []
        for ranges, devices in devices_by_index.items():
            lengths = tuple(end - start for start, end in ranges)
            arrays = tuple(self._zeros(plane, tensor, lengths) for plane in planes)
            stack = tuple(slice(*span) for span in ranges[: len(tensor.stack)])
            rows, columns = self._file_range(tensor, ranges[len(tensor.stack) :])
            shards.append(_Shard(tuple(devices), arrays, rows, columns, stack))
        return shards

    def _zeros(self, plane: _Plane, tensor: Tensor, shape: tuple[int, ...]) -> Any:
        """Allocates a plane, as a list of layers if these are separate."""
        plane_shape = self._plane_shape(plane, tensor, shape)
        if not self._separates(tensor):
            return aligned_zeros(plane_shape, plane.dtype)
        count, *layer_shape = plane_shape
        return [aligned_zeros(tuple(layer_shape), plane.dtype) for _ in range(count)]

    def _plane_shape(
        self, plane: _Plane, tensor: Tensor, shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        if not plane.name:
            return shape
        return plane_shape(shape, input_axes(tensor.path, self.storage), plane.name, self.storage)

    def _file_range(
        self, tensor: Tensor, index: tuple[tuple[int, int], ...]
    ) -> tuple[slice, slice]:
        """Returns the rows and columns of the file for a range of each of our axes."""
        merged = tensor.file_axes[::-1] if tensor.transposed else tensor.file_axes
        ranges, spans = iter(index), []
        for axes in merged:
            # A range of a merged axis is contiguous, because only its first axis is divided.
            (start, end), *_ = [next(ranges) for _ in axes]
            size = math.prod(self.sizes[axis] for axis in axes[1:])
            spans.append(slice(start * size, end * size))
        if len(spans) == 1:
            spans.insert(0, slice(0, 1))
        elif len(spans) > 2:  # all but the last are rows, of which only the first are divided
            first, *rest, last = spans
            size = math.prod(span.stop for span in rest)
            spans = [slice(first.start * size, first.stop * size), last]
        rows, columns = spans[::-1] if tensor.transposed else spans
        return rows, columns

    def _copy(
        self, tensor: Tensor, layer: int, name: str, shards: list[_Shard], is_hashed: bool
    ) -> str:
        """Reads what shards need of a layer, all of it if it is hashed.

        Returns the digest of the layer, "" if it is not hashed. One pass hashes and copies, as a
        second one would read each byte twice.
        """
        planes, index = self._planes(tensor), copy_index(tensor, layer, self.sizes)
        shards = [shard for shard in shards if shard.contains(index)]
        file_rows, file_columns = self._part_range(tensor, name)
        # Ranges of shards, and those below, are relative to the parameter's first row and column.
        width = _length(file_columns)
        data = hashlib.sha256()
        # A scale per output needs all inputs at once.
        needs_rows = self._has_output_scale(tensor) and not _has_input_columns(tensor)
        needs_columns = self._has_output_scale(tensor) and _has_input_columns(tensor)
        multiple = self.weights.matrix(name)[0] if needs_rows else planes[-1].rows
        # Blocks of whole heads, if the parts of a head follow each other.
        times = tensor.part[1] if tensor.per_head and tensor.transposed else 1
        if times > 1:
            multiple *= times * self.sizes["D"]
        for block_rows in self.weights.blocks(name, multiple):
            block_rows = _divide(block_rows, times)
            if not _overlaps(block_rows, file_rows):
                continue
            rows = _shift(_overlap(block_rows, file_rows), -file_rows.start)
            columns = slice(0, width)
            users = [s for s in shards if _overlaps(s.rows, rows) and _overlaps(s.columns, columns)]
            if not users and not is_hashed:
                continue
            if not is_hashed:
                if not needs_rows:
                    rows = _overlap(rows, _union(shard.rows for shard in users))
                if not needs_columns:
                    columns = _overlap(columns, _union(shard.columns for shard in users))
            in_file = _shift(rows, file_rows.start), _shift(columns, file_columns.start)
            block = self._read(tensor, name, *in_file)
            if is_hashed:
                # As in the file, before any cast or division.
                data.update(block.view(np.uint8).data)
                # Each block is hashed, and so checked, by some process.
                self._check_finite(name, block)
            sources = self._sources(tensor, name, block, *in_file) if users else ()
            for shard in users:
                shard.copy(tensor, planes, index, sources, rows, columns)
        return self._digest(tensor, layer, name, data.digest()) if is_hashed else ""

    def _part_range(self, tensor: Tensor, name: str) -> tuple[slice, slice]:
        """Returns the rows and columns of the parameter in the file's matrix.

        If the parts of a head follow each other, they are those of a matrix of one part.
        """
        height, width = self.weights.matrix(name)
        part, part_sizes = tensor.part[0], tensor.part_sizes(self.sizes)
        start = 0 if tensor.per_head else sum(part_sizes[:part])
        span = slice(start, start + part_sizes[part])
        return (span, slice(0, width)) if tensor.transposed else (slice(0, height), span)

    def _read(self, tensor: Tensor, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Reads a block, whose rows and columns are those of `_part_range`."""
        if not tensor.per_head:
            return self.weights.read_block(name, rows, columns)
        (part, count), size = tensor.part, self.sizes["D"]

        def all_parts(span: slice) -> slice:
            return slice(span.start * count, span.stop * count)

        if tensor.transposed:
            block = self.weights.read_block(name, all_parts(rows), columns)
            heads = block.reshape(-1, count, size, _length(columns))[:, part]
        else:  # a bias is one row
            block = self.weights.read_block(name, rows, all_parts(columns))
            heads = block.reshape(-1, count, size)[:, part]
        return heads.reshape(_length(rows), _length(columns))

    def _check_finite(self, name: str, block: np.ndarray) -> None:
        if not is_finite(block):
            raise InputError(
                f"{name} in {self.weights.entries[name].path} contains NaN or infinity; the "
                "checkpoint is damaged: download it again, or use another"
            )

    def _digest(self, tensor: Tensor, layer: int, name: str, data: bytes) -> str:
        """Hashes a layer's path, its shape and dtype in the file, and the hash of its data."""
        path = f"{tensor.path}/{layer}" if tensor.stack else tensor.path
        shape, dtype = self.weights.entries[name].shape, self.weights.entries[name].dtype
        # The codes of the file differ from those computed from its values.
        codes = " codes" if self._has_planes(tensor) and self._uses_codes(tensor, name) else ""
        return hash_parts(path, str(list(shape)), dtype + codes, data=data)

    def _sources(
        self, tensor: Tensor, name: str, block: np.ndarray, rows: slice, columns: slice
    ) -> Sequence[np.ndarray]:
        """Divides a block by the scale and quantizes it; returns the values of each plane."""
        if tensor.residual and self.rescale != 1.0:
            # In float32 or wider; rounded to the parameter's dtype once, when it is copied.
            block = block / np.float32(self.rescale**tensor.residual)
        if self._has_planes(tensor):
            return self._quantized(tensor, name, block, rows, columns)
        return (block,)

    def _uses_codes(self, tensor: Tensor, name: str) -> bool:
        """Returns whether codes of the file are used as they are."""
        is_unscaled = not tensor.residual or self.rescale == 1.0
        if tensor.per_head:
            return False
        has_blocks = self.bits > 0 and self.weights.has_codes(name, self.bits)
        return is_unscaled and _has_input_columns(tensor) and has_blocks

    def _quantized(
        self, tensor: Tensor, name: str, block: np.ndarray, rows: slice, columns: slice
    ) -> Planes | OutputPlanes:
        """Returns codes of the file if they fit, and quantises its values otherwise."""
        if not self.bits:
            quantize_rows = quantize_float8 if self.storage == "fp8" else quantize_outputs
            return quantize_rows(block) if _has_input_columns(tensor) else quantize_rows(block.T).T
        if self._uses_codes(tensor, name):
            planes = self.weights.read_planes(name, rows, columns, self.bits)
            if planes is not None:
                return planes
        if self.weights.entries[name].is_quantized:
            self.requantized.add(name)
        try:
            if _has_input_columns(tensor):
                return quantize(block, self.bits)
            return quantize(block.T, self.bits).T
        except ValueError as error:
            raise InputError(
                f"{name} in {self.weights.entries[name].path} has {error}, which "
                f"backbone.quantize=int{self.bits} stores for each block; use "
                "backbone.quantize=none"
            ) from error

    def _to_devices(self, tensor: Tensor, shards: list[_Shard]) -> dict[str, Any]:
        """Copies the arrays to their devices, without a copy on a CPU; returns them by name."""
        shape, _ = self._layout(tensor)
        params = {}
        for i, plane in enumerate(self._planes(tensor)):
            path = f"{tensor.path}/{plane.name}" if plane.name else tensor.path
            arrays = [shard.arrays[i] for shard in shards]
            full_shape = self._plane_shape(plane, tensor, shape)
            sharding = None
            if self.placement is not None:
                sharding = self.placement.param_sharding(f"backbone/{path}", full_shape)
            if self._separates(tensor):
                layers = zip(*arrays, strict=True)
                where = sharding and layer_sharding(sharding)
                params[path] = LayerList(
                    [_to_device(shards, layer, full_shape[1:], where) for layer in layers]
                )
            else:
                params[path] = _to_device(shards, arrays, full_shape, sharding)
        # Waits, so that the host's memory is freed before more is allocated.
        return jax.block_until_ready(params)


def _to_device(
    shards: Sequence[_Shard],
    arrays: Sequence[np.ndarray],
    shape: tuple[int, ...],
    sharding: NamedSharding | None,
) -> Any:
    """Makes an array of the arrays of shards; without a sharding it stays on the host."""
    if sharding is None:
        return arrays[0]
    local_arrays = [
        jax.device_put(array, device)
        for shard, array in zip(shards, arrays, strict=True)
        for device in shard.devices
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, local_arrays)


def _has_input_columns(tensor: Tensor) -> bool:
    """Returns whether the columns in the file are the input axis of a quantised parameter.

    They are in torch's linear layers and in tables, but not in GPT-2's.
    """
    return tensor.transposed or tensor.path.endswith("/table")


def _transpose(target: np.ndarray, source: np.ndarray, casting: Literal["unsafe"]) -> None:
    """Copies a matrix into one whose columns are contiguous."""
    bits = np.dtype(f"u{target.itemsize}")  # numpy copies integers faster than bfloat16
    buffer = np.empty((_TILE, _TILE + _GAP), target.dtype)
    for i in range(0, source.shape[0], _TILE):
        for j in range(0, source.shape[1], _TILE):
            block = source[i : i + _TILE, j : j + _TILE]
            tile = buffer[: block.shape[0], : block.shape[1]]
            np.copyto(tile, block, casting=casting)
            target.view(bits)[i : i + _TILE, j : j + _TILE] = tile.view(bits)


def _divide(span: slice, divisor: int) -> slice:
    return slice(span.start // divisor, span.stop // divisor) if divisor else slice(0, 1)


def _length(span: slice) -> int:
    return span.stop - span.start


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _overlaps(one: slice, other: slice) -> bool:
    return _length(_overlap(one, other)) > 0


def _union(spans: Iterable[slice]) -> slice:
    spans = list(spans)
    return slice(min(span.start for span in spans), max(span.stop for span in spans))


def _shift(span: slice, offset: int) -> slice:
    return slice(span.start + offset, span.stop + offset)
