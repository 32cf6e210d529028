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

from jaxprompt.convert.quantize import Planes, quantize
from jaxprompt.convert.tensors import Tensor
from jaxprompt.convert.weights import Weights, is_finite
from jaxprompt.errors import InputError
from jaxprompt.layers.quantized import BITS, DTYPES, PLANES, input_axis, plane_shape
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import Placement
from jaxprompt.tree import BLOCK, Flat

_THREADS = min(8, os.cpu_count() or 1)
_AHEAD = 2  # parameters begun beside the one that is finished
_TILE = 256  # rows and columns that are transposed at once
_GAP = 16  # numbers between a tile's rows: at a power of two a column would share one cache set


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an empty array at an address that JAX can use on the CPU without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    space = np.empty(size + 64, np.uint8)
    # numpy promises less; XLA's CPU client takes over buffers that are aligned to 64 bytes.
    start = -space.ctypes.data % 64
    return space[start : start + size].view(dtype).reshape(shape)


def digest(*parts: str, data: bytes = b"") -> str:
    """Hashes strings, and the hash of data, so that different lists have different hashes."""
    hashes = (hashlib.sha256(part.encode()).digest() for part in parts)
    return hashlib.sha256(b"".join(hashes) + data).hexdigest()


class _Part(NamedTuple):
    """An array that a parameter consists of: all of it, or a plane where it is quantized."""

    plane: str  # "" = not quantized
    dtype: np.dtype
    rows: int = 1  # of the file's matrix that share a number here
    columns: int = 1

    def scaled(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        """Returns where a range of the file's matrix is in this array's."""
        return _divided(rows, self.rows), _divided(columns, self.columns)


class _Shard(NamedTuple):
    """What some devices of this process hold of a parameter, and what that is in the file."""

    devices: tuple[Any, ...]
    arrays: tuple[np.ndarray, ...]  # of each part, of all layers
    rows: slice  # of the file's tensor as a matrix, as if it had the rows of padding
    columns: slice

    def matrices(self, tensor: Tensor, parts: Sequence[_Part], layer: int) -> list[np.ndarray]:
        """Views a layer of each part as the file has it. -> [rows, columns] each"""
        found = []
        for part, array in zip(parts, self.arrays, strict=True):
            own = array[layer] if tensor.stack else array
            rows, columns = map(_length, part.scaled(self.rows, self.columns))
            transposed = tensor.transposed  # [out, in] -> [in, out]
            found.append(own.reshape(columns, rows).T if transposed else own.reshape(rows, columns))
        return found

    def clear_padding(
        self, tensor: Tensor, parts: Sequence[_Part], layer: int, height: int, width: int
    ) -> None:
        """Sets to 0 what the file's matrix of `height` rows lacks: the padding of a vocabulary."""
        rows = slice(max(0, height - self.rows.start), _length(self.rows))
        columns = slice(max(0, width - self.columns.start), _length(self.columns))
        for part, target in zip(parts, self.matrices(tensor, parts, layer), strict=True):
            below, beside = part.scaled(rows, columns)
            target[below.start :] = 0
            target[:, beside.start :] = 0

    def copy(
        self, tensor: Tensor, parts: Sequence[_Part], layer: int, sources: Sequence[np.ndarray],
        rows: slice, columns: slice,
    ) -> None:  # fmt: skip
        """Copies what it holds of a block of the file, which has these rows and columns of it."""
        common = _overlap(self.rows, rows), _overlap(self.columns, columns)
        in_block = _shift(common[0], rows), _shift(common[1], columns)
        in_shard = _shift(common[0], self.rows), _shift(common[1], self.columns)
        copy = _transpose if tensor.transposed else np.copyto
        targets = self.matrices(tensor, parts, layer)
        for part, source, target in zip(parts, sources, targets, strict=True):
            copy(target[part.scaled(*in_shard)], source[part.scaled(*in_block)], casting="unsafe")


class Filler:
    """Fills parameters with tensors of the file; several threads hash and copy."""

    def __init__(
        self, weights: Weights, sizes: Mapping[str, int], dtype: np.dtype, rescale: float,
        placement: Placement | None, quantize: str = "none",
    ):  # fmt: skip
        self.weights, self.sizes, self.dtype = weights, sizes, dtype
        self.rescale, self.placement, self.quantize = rescale, placement, quantize
        self.bits = BITS.get(quantize, 0)
        self.requantized: set[str] = set()  # names in the file
        devices: Iterable[jax.Device] = () if placement is None else placement.mesh.devices.flat
        self.processes = sorted({device.process_index for device in devices})

    def fill(self, found: Mapping[Tensor, list[str]]) -> tuple[Flat, list[str]]:
        """Reads tensors.

        Args:
          found: the names in the file of each tensor, one per layer.

        Returns:
          (flat params, digests of all layers of all tensors, whichever process hashed them).
        """
        flat: Flat = {}
        digests: list[str] = []
        hashed = self._hashed(found)
        begun: deque[tuple[Tensor, list[_Shard], list[Future[str]]]] = deque()

        def finish() -> None:
            tensor, shards, jobs = begun.popleft()
            digests.extend(job.result() for job in jobs)
            flat.update(self._place(tensor, shards))

        error: InputError | None = None
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                for tensor, names in found.items():
                    # Allocated as its turn comes: few parameters wait beside those placed.
                    shards = self._shards(tensor)
                    copy = lambda i, name, t=tensor, s=shards: self._copy(
                        t, i, name, s, (t, i) in hashed
                    )
                    jobs = [pool.submit(copy, i, name) for i, name in enumerate(names)]
                    begun.append((tensor, shards, jobs))
                    if len(begun) > _AHEAD:
                        finish()
                while begun:
                    finish()
        except InputError as caught:
            error = caught
        digests = [found for found in digests if found]
        if len(self.processes) > 1:
            # A block may be read by one process alone; what is wrong with it ends them all.
            errors = [text for text in processes.gather_texts(str(error or "")) if text]
            error = error or (InputError(errors[0]) if errors else None)
        if error:
            raise error
        if len(self.processes) > 1:
            # Vectors are hashed by all: where they differ, there are too many digests.
            digests = list(set(" ".join(processes.gather_texts(" ".join(digests))).split()))
            if len(digests) != sum(map(len, found.values())):
                raise InputError(
                    f"the processes read different weights from {self.weights.folder}; use the "
                    "same checkpoint for all of them"
                )
        return flat, digests

    def _hashed(self, found: Mapping[Tensor, list[str]]) -> set[tuple[Tensor, int]]:
        """Chooses what this process hashes: the largest go first, each to who has least.

        Vectors are hashed by all, so that other weights on one host are noticed.
        """
        layers = [(tensor, i) for tensor, names in found.items() for i in range(len(names))]
        if len(self.processes) < 2:
            return set(layers)
        size = lambda tensor: math.prod(self.sizes[axis] for axis in tensor.axes)
        loads = dict.fromkeys(self.processes, 0)
        own = {(tensor, i) for tensor, i in layers if len(tensor.axes) == 1}
        # A total order, so that all processes divide alike without asking each other.
        for tensor, i in sorted(layers, key=lambda one: (-size(one[0]), one[0].path, one[1])):
            process = min(loads, key=loads.__getitem__)
            loads[process] += size(tensor)
            if process == jax.process_index():
                own.add((tensor, i))
        return own

    def _layout(self, tensor: Tensor) -> tuple[tuple[int, ...], NamedSharding | None]:
        """Returns the full shape of a parameter and its sharding."""
        letters = tensor.stack + tensor.axes
        if self.placement is None:
            return tuple(self.sizes[letter] for letter in letters), None
        rows = lambda letter, size: self.placement.padded_vocab(size) if letter == "V" else size
        shape = tuple(rows(letter, self.sizes[letter]) for letter in letters)
        return shape, self.placement.param_sharding(f"backbone/{tensor.path}", shape)

    def _has_planes(self, tensor: Tensor) -> bool:
        """Returns whether a parameter is quantised."""
        return self.bits > 0 and input_axis(tensor.path) is not None

    def _parts(self, tensor: Tensor) -> list[_Part]:
        """Lists what a parameter consists of."""
        if not self._has_planes(tensor):
            return [_Part("", self.dtype)]
        found = []
        for plane in PLANES:
            per = 8 // self.bits if plane == "codes" else BLOCK
            both = (1, per) if _lies_along_columns(tensor) else (per, 1)
            found.append(_Part(plane, np.dtype(DTYPES[plane]), *both))
        return found

    def _shards(self, tensor: Tensor) -> list[_Shard]:
        """Makes arrays for each of the different shards that this process holds."""
        shape, sharding = self._layout(tensor)
        parts = self._parts(tensor)
        holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        if sharding is None:
            holders[tuple((0, size) for size in shape)] = []
        else:
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                # JAX gives None for a device without a part, and here each has one.
                spans = (part.indices(size) for part, size in zip(index or (), shape, strict=True))
                holders.setdefault(tuple(span[:2] for span in spans), []).append(device)
        found = []
        for ranges, devices in holders.items():
            lengths = tuple(end - start for start, end in ranges)
            arrays = tuple(
                aligned(self._shape_of(part, tensor, lengths), part.dtype) for part in parts
            )
            places = self._place_in_file(tensor, ranges[len(tensor.stack) :])
            found.append(_Shard(tuple(devices), arrays, *places))
        return found

    def _shape_of(self, part: _Part, tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = input_axis(tensor.path)
        if not part.plane or axis is None:
            return shape
        return plane_shape(shape, axis, part.plane, self.bits)

    def _place_in_file(
        self, tensor: Tensor, index: tuple[tuple[int, int], ...]
    ) -> tuple[slice, slice]:
        """Finds the rows and columns of the file that a range of each of our axes comes from."""
        merged = tensor.file_axes[::-1] if tensor.transposed else tensor.file_axes
        ranges, spans = iter(index), []
        for axes in merged:
            (start, end), *inner = (next(ranges) for _ in axes)
            # A merged axis of the file is contiguous only where its inner axes are whole.
            if inner != [(0, self.sizes[axis]) for axis in axes[1:]]:
                raise ValueError(f"{tensor.path}: of the axes {axes} only the first can be divided")
            size = math.prod(self.sizes[axis] for axis in axes[1:])
            spans.append(slice(start * size, end * size))
        if len(spans) == 1:
            spans.insert(0, slice(0, 1))
        elif len(spans) > 2:  # all but the last are rows, none of which is divided
            spans = [slice(0, math.prod(span.stop for span in spans[:-1])), spans[-1]]
        rows, columns = spans[::-1] if tensor.transposed else spans
        return rows, columns

    def _copy(
        self, tensor: Tensor, layer: int, name: str, shards: list[_Shard], is_hashed: bool
    ) -> str:
        """Reads what shards need of a layer, all where it is hashed. -> its digest, "" where not"""
        parts = self._parts(tensor)
        file_rows, file_columns = self._span_in_file(tensor, name)
        # The ranges of shards, and those below, count from where the parameter begins in the file.
        height, width = _length(file_rows), _length(file_columns)
        for shard in shards:
            shard.clear_padding(tensor, parts, layer, height, width)
        data = hashlib.sha256()
        for block_rows in self.weights.blocks(name, parts[-1].rows):
            if not _meets(block_rows, file_rows):
                continue
            rows, columns = _shift(_overlap(block_rows, file_rows), file_rows), slice(0, width)
            users = [s for s in shards if _meets(s.rows, rows) and _meets(s.columns, columns)]
            if not users and not is_hashed:
                continue
            if not is_hashed:
                rows = _overlap(rows, _hull(shard.rows for shard in users))
                columns = _overlap(columns, _hull(shard.columns for shard in users))
            in_file = _unshift(rows, file_rows), _unshift(columns, file_columns)
            block = self.weights.read_block(name, *in_file)
            if is_hashed:
                # As it stands in the file, before any cast or division.
                data.update(block.view(np.uint8).data)
                # Each block is hashed by some process, so it is enough to look here.
                self._check_finite(name, block)
            sources = self._sources(tensor, name, block, *in_file) if users else ()
            for shard in users:
                shard.copy(tensor, parts, layer, sources, rows, columns)
        return self._digest(tensor, layer, name, data.digest()) if is_hashed else ""

    def _span_in_file(self, tensor: Tensor, name: str) -> tuple[slice, slice]:
        """Finds the rows and columns of the file's matrix that are the parameter's."""
        number, count = tensor.part
        height, width = self.weights.matrix(name)
        if tensor.transposed:
            height //= count
            return slice(number * height, (number + 1) * height), slice(0, width)
        width //= count
        return slice(0, height), slice(number * width, (number + 1) * width)

    def _check_finite(self, name: str, block: np.ndarray) -> None:
        if not is_finite(block):
            raise InputError(
                f"{name} in {self.weights.file(name)} contains NaN or infinity; the checkpoint is "
                "damaged: download it again, or use another"
            )

    def _digest(self, tensor: Tensor, layer: int, name: str, data: bytes) -> str:
        """Hashes a layer's path, its shape and dtype in the file, and the hash of its data."""
        path = f"{tensor.path}/{layer}" if tensor.stack else tensor.path
        shape, dtype = self.weights.shape(name), self.weights.dtype(name)
        # Codes of the file's own are others than those that would be made of its numbers.
        codes = " codes" if self._has_planes(tensor) and self._keeps_codes(tensor, name) else ""
        return digest(path, str(list(shape)), dtype + codes, data=data)

    def _sources(
        self, tensor: Tensor, name: str, block: np.ndarray, rows: slice, columns: slice
    ) -> Sequence[np.ndarray]:
        """Divides a block by the scale, and quantizes it. -> what is copied to each part"""
        if tensor.residual and self.rescale != 1.0:
            # In float32 or wider, and rounded to the parameter's dtype once, when it is copied.
            block = block / np.float32(self.rescale**tensor.residual)
        if self._has_planes(tensor):
            return self._quantized(tensor, name, block, rows, columns)
        return (block,)

    def _keeps_codes(self, tensor: Tensor, name: str) -> bool:
        """Returns whether codes of the file are used as they are."""
        unchanged = not tensor.residual or self.rescale == 1.0
        return unchanged and _lies_along_columns(tensor) and self.weights.has_codes(name, self.bits)

    def _quantized(
        self, tensor: Tensor, name: str, block: np.ndarray, rows: slice, columns: slice
    ) -> Planes:
        """Returns codes of the file if they fit, and quantises its values otherwise."""
        along_columns = _lies_along_columns(tensor)
        if self._keeps_codes(tensor, name):
            found = self.weights.read_planes(name, rows, columns, self.bits)
            if found is not None:
                return found
        if self.weights.is_quantized(name):
            self.requantized.add(name)
        try:
            if along_columns:
                return quantize(block, self.bits)
            return quantize(block.T, self.bits).T
        except ValueError as error:
            raise InputError(
                f"{name} in {self.weights.file(name)} has {error}, which "
                f"backbone.quantize={self.quantize} stores for each block; use "
                "backbone.quantize=none"
            ) from error

    def _place(self, tensor: Tensor, shards: list[_Shard]) -> dict[str, Any]:
        """Hands the arrays to their devices; on a CPU they stay where they are. -> by flat name"""
        shape, sharding = self._layout(tensor)
        found = {}
        for i, part in enumerate(self._parts(tensor)):
            path = f"{tensor.path}/{part.plane}" if part.plane else tensor.path
            if sharding is None:
                found[path] = shards[0].arrays[i]
                continue
            arrays = [
                jax.device_put(shard.arrays[i], device)
                for shard in shards
                for device in shard.devices
            ]
            own = self._shape_of(part, tensor, shape)
            whole = jax.make_array_from_single_device_arrays(own, sharding, arrays)
            # The host's memory is free before more of it is taken.
            found[path] = whole.block_until_ready()
        return found


def _lies_along_columns(tensor: Tensor) -> bool:
    """Returns whether the input axis of a quantised parameter is the columns in the file.

    It is in torch's linear layers and in tables, and not in GPT-2's.
    """
    return tensor.transposed or tensor.path.endswith("/table")


def _transpose(target: np.ndarray, source: np.ndarray, casting: Literal["unsafe"]) -> None:
    """Copies a matrix into one whose columns are contiguous."""
    bits = np.dtype(f"u{target.itemsize}")  # numpy moves them faster than bfloat16
    space = np.empty((_TILE, _TILE + _GAP), target.dtype)
    for i in range(0, source.shape[0], _TILE):
        for j in range(0, source.shape[1], _TILE):
            part = source[i : i + _TILE, j : j + _TILE]
            tile = space[: part.shape[0], : part.shape[1]]
            np.copyto(tile, part, casting=casting)
            target.view(bits)[i : i + _TILE, j : j + _TILE] = tile.view(bits)


def _divided(span: slice, per: int) -> slice:
    return slice(span.start // per, span.stop // per)


def _length(span: slice) -> int:
    return span.stop - span.start


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _meets(one: slice, other: slice) -> bool:
    return _length(_overlap(one, other)) > 0


def _hull(spans: Iterable[slice]) -> slice:
    spans = list(spans)
    return slice(min(span.start for span in spans), max(span.stop for span in spans))


def _shift(span: slice, origin: slice) -> slice:
    return slice(span.start - origin.start, span.stop - origin.start)


def _unshift(span: slice, origin: slice) -> slice:
    return slice(span.start + origin.start, span.stop + origin.start)
