"""Reads the kernels of a compiled program: what each of them computes, and what it moves.

A kernel is an instruction that the device runs by itself: a fusion, a matrix product, a call of a
library or of a Pallas kernel, a copy. The larger of the time to compute and the time to move bounds
its time (Williams et al. 2009, "Roofline: an insightful visual performance model").

A fusion that slices a stack of layers reads the slice, not the stack, and one that updates a slice
writes the slice. Arrays in the on-chip memory of a TPU move nothing.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from jaxprompt.parallel.devices import Device
from jaxprompt.parallel.hlo import (
    SENT_SHARE,
    DeviceWork,
    Instruction,
    bytes_per_element,
    callees,
    dot_flops,
    parse_program,
    trip_count,
    type_arrays,
)

PRODUCT, ATTENTION, COLLECTIVE = "product", "attention", "collective"
LAYOUT = "layout"  # only converts, copies or transposes whole arrays
INTEGER = "integer"  # has no floating-point result: ids, masks, random bits
OTHER = "other"
# In the names of the operations of attention that a fused kernel computes, or would compute; the
# second if it skips the scores above the diagonal.
FUSED_SCOPE, CAUSAL_SCOPE = "fused_attention", "fused_causal_attention"
# What kernels reach of a device's peak speeds, and the time to launch one on a GPU. With these the
# kernels of the one step that was measured on a GPU take as long as the step did (docs/plan.md). No
# TPU was measured: its shares are assumed to be the same, and launches to be free.
PRODUCT_SHARE = 0.72  # of the FLOP/s, in matrix products
ATTENTION_SHARE = 0.45  # of the FLOP/s, in attention kernels
BANDWIDTH_SHARE = 0.9  # of the bandwidth
LAUNCH_SECONDS = 2.5e-6
_FROZEN_LEAF = "frozen["  # JAX's name of an argument: a leaf of the argument `frozen` of a step

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_ON_CHIP = re.compile(r"S\([1-4]\)")  # memory space of a layout; without one, the device's memory
_NAMES = re.compile(r"%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_CUDNN_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')
_PALLAS_FLOPS = re.compile(r'"cost_estimate":\s*\{[^}]*?"flops":\s*"?(\d+)')
_CONVOLUTION = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LAYOUT_KINDS = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "convert", "copy",
    "transpose",
}  # fmt: skip
_INTEGERS = {"pred", "s32", "u32", "s64", "u64"}  # weights are quantised to others
# Names of arrays that exist, and ends of kernels that are counted at their start.
_NO_KERNEL = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier",
    "partition-id", "replica-id", "async-update",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_ASYNC_RESULTS = {"copy-start": 0, "slice-start": 1, "dynamic-slice-start": 1}  # place in the type
# What a value depends on: constants and scalars, frozen weights, or more; of a tuple, one for each.
_CONSTANT, _FROZEN, _DATA = range(3)
_Origin: TypeAlias = "int | tuple[_Origin, ...]"


class Kernel(NamedTuple):
    """One kernel; FLOPs and bytes are those of one execution."""

    name: str
    category: str  # PRODUCT, ATTENTION, ...
    flops: float  # of matrix products
    read: int  # bytes
    written: int  # bytes
    copied: int  # bytes, of those, that copy, convert or reshape frozen weights
    times: int  # executions in one run of the program
    op: str  # JAX's name of the operation

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


@functools.lru_cache(maxsize=8)
def read_kernels(text: str, float_bytes: int = 8) -> tuple[Kernel, ...]:
    """Reads the kernels of a program from its HLO text, as `compiled.as_text()` returns it.

    Programs for CPUs, GPUs and TPUs are supported. Copies of weights are those of the leaves of
    the program's argument `frozen`. A call whose matrix products are unknown has no FLOPs.

    Args:
      text: the program.
      float_bytes: larger floating-point numbers count as this many bytes: XLA's CPU compiler
        computes in float32 where other devices stay in 16 bits.
    """
    computations, entry = parse_program(text)
    program = _Program(computations, float_bytes)
    arguments = [i for i in computations[entry] if i.kind == "parameter"]
    arguments.sort(key=_parameter_number)
    return tuple(program.kernels(entry, 1, tuple(map(_argument_origin, arguments))))


# -- time -----------------------------------------------------------------------------------------


class StepTime(NamedTuple):
    """Seconds of a step by what takes them. They add up: kernels run one after another."""

    products: float
    attention: float  # in kernels for attention
    other: float  # kernels that are limited by the memory's bandwidth
    launches: float
    network: float  # collectives, as far as they do not run in parallel with kernels

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self)


def step_time(kernels: Sequence[Kernel], work: DeviceWork, device: Device, dtype: str) -> StepTime:
    """Estimates the time of a program from its kernels and its collectives.

    Args:
      kernels: the kernels of the program.
      work: its collectives.
      device: the device that it runs on.
      dtype: of its matrix products.
    """
    seconds = {PRODUCT: 0.0, ATTENTION: 0.0, OTHER: 0.0}
    launches = sum(kernel.times for kernel in kernels) if device.platform == "gpu" else 0
    for kernel in kernels:
        moving = kernel.bytes / (BANDWIDTH_SHARE * device.bandwidth)
        if kernel.category in (PRODUCT, ATTENTION):
            share = PRODUCT_SHARE if kernel.category == PRODUCT else ATTENTION_SHARE
            computing = kernel.flops / (share * device.peak(dtype))
            seconds[kernel.category] += kernel.times * max(computing, moving)
        elif kernel.category != COLLECTIVE:
            seconds[OTHER] += kernel.times * moving
    parallel = work.overlapped_sent.total() / device.link
    network = work.sent.total() / device.link - parallel
    network += max(0.0, parallel - sum(seconds.values()))
    return StepTime(
        seconds[PRODUCT], seconds[ATTENTION], seconds[OTHER], LAUNCH_SECONDS * launches, network
    )


# -- programs -------------------------------------------------------------------------------------


class _Program:
    """The computations of a program, and what the kernels in them compute and move."""

    def __init__(self, computations: dict[str, list[Instruction]], float_bytes: int):
        self._computations = computations
        self._float_bytes = float_bytes
        # Cached: a computation may be called from several places.
        self.types = functools.cache(self._types)
        self.sizes = functools.cache(self._sizes)
        self.origins = functools.cache(self._origins)
        self.reads = functools.cache(self._reads)

    def kernels(self, name: str, times: int, arguments: tuple[_Origin, ...]) -> Iterator[Kernel]:
        """Yields the kernels of a computation that runs `times` times."""
        origins = self.origins(name, arguments)
        for i in self._computations[name]:
            inputs = tuple(origins.get(x, _DATA) for x in operand_names(i))
            if i.kind == "while":
                trips = trip_count(i, self._computations)
                yield from self.kernels(callees(i)[0], times * trips, (origins[i.name],))
            elif i.kind == "conditional":
                for k, branch in enumerate(callees(i)):
                    yield from self.kernels(branch, times, inputs[k + 1 : k + 2])
            elif _is_call(i):
                yield from self.kernels(callees(i)[0], times, inputs)
            elif not (i.kind in _NO_KERNEL or i.kind.endswith("-done") or _is_allocation(i)):
                yield self._kernel(i, name, inputs, origins[i.name], times)

    def _kernel(
        self, i: Instruction, computation: str, inputs: tuple, origin: _Origin, times: int
    ) -> Kernel:
        types = self.types(computation)
        sizes = [self._bytes(types.get(x, "")) for x in operand_names(i)]
        read, written, copied = sum(sizes), self._bytes(_without_workspace(i)), 0
        flops = self._flops(i, types)
        if i.kind == "fusion":
            (callee,) = callees(i)
            read = sum(self.reads(callee))
            written = sum(self._written(i))
            copied = self._copied(i, inputs)
        elif i.kind == "dynamic-update-slice":
            read = written = sizes[1]
        elif i.kind in _SLICES:
            read = min(sizes[0], self._bytes(_without_layouts(i.result)))
        elif i.kind in _ASYNC_RESULTS:  # its type also lists its operand
            result = _ASYNC_RESULTS[i.kind]
            read = min(sizes[0], self.sizes(_without_layouts(i.result))[result])
            written = self.sizes(i.result)[result]
        if i.kind != "fusion" and origin == _FROZEN and written:
            copied = read + written
        category = self._category(i, flops)
        copied = copied if category in (LAYOUT, OTHER) else 0
        op = _OP_NAME.search(i.rest)
        return Kernel(i.name, category, flops, read, written, copied, times, op[1] if op else "")

    def _category(self, i: Instruction, flops: float) -> str:
        if _is_attention(i):
            return ATTENTION
        if flops:
            return PRODUCT
        if self._communicates(i):
            return COLLECTIVE
        parts = self._computations[callees(i)[0]] if i.kind == "fusion" else [i]
        if all(part.kind in _LAYOUT_KINDS for part in parts):
            return LAYOUT
        dtypes = {match[0] for match in _ARRAY.findall(i.result)}
        return INTEGER if dtypes <= _INTEGERS else OTHER

    def _sizes(self, result: str) -> list[int]:
        """Returns the bytes of the arrays of a type, 0 for those that stay on the chip."""
        sizes = []
        for dtype, shape, layout in _ARRAY.findall(result):
            width = bytes_per_element(dtype)
            if dtype.startswith(("f", "bf")):
                width = min(width, self._float_bytes)
            count = math.prod(int(size) for size in shape.split(",") if size)
            sizes.append(0 if _ON_CHIP.search(layout) else width * count)
        return sizes

    def _bytes(self, result: str) -> int:
        return sum(self.sizes(result))

    def _types(self, name: str) -> dict[str, str]:
        return {i.name: i.result for i in self._computations[name]}

    def _root(self, name: str) -> Instruction:
        instructions = self._computations[name]
        return next((i for i in instructions if i.is_root), instructions[-1])

    # -- what values depend on ----------------------------------------------------------------

    def _origins(self, name: str, arguments: tuple[_Origin, ...]) -> dict[str, _Origin]:
        """Returns the origin of every value of a computation."""
        origins: dict[str, _Origin] = {}
        for i in self._computations[name]:
            inputs = tuple(origins.get(x, _DATA) for x in operand_names(i))
            origins[i.name] = self._origin(i, inputs, arguments)
        return origins

    def _origin(
        self, i: Instruction, inputs: tuple[_Origin, ...], arguments: tuple[_Origin, ...]
    ) -> _Origin:
        if i.kind == "parameter":
            number = _parameter_number(i)
            return arguments[number] if number < len(arguments) else _DATA
        if i.kind == "tuple":
            return inputs
        if i.kind == "get-tuple-element":
            index = _INDEX.search(i.rest)
            return inputs[0][int(index[1])] if index and isinstance(inputs[0], tuple) else inputs[0]
        if i.kind == "while":
            return self._loop_origin(callees(i)[0], inputs[0])
        if i.kind == "fusion" or _is_call(i):
            callee = callees(i)[0]
            return self.origins(callee, inputs)[self._root(callee).name]
        if i.kind == "conditional":
            return _DATA
        return _CONSTANT if _is_scalar(i.result) else _most(inputs)

    def _loop_origin(self, body: str, initial: _Origin) -> _Origin:
        """Returns the origins of what a loop carries: those that hold in every iteration."""
        root = self._root(body).name
        while True:
            result = _join(initial, self.origins(body, (initial,))[root])
            if result == initial:
                return result
            initial = result

    def _copied(self, fusion: Instruction, inputs: tuple[_Origin, ...]) -> int:
        """Counts the bytes that a fusion reads and writes to copy or convert frozen weights."""
        (callee,) = callees(fusion)
        origins, reads = self.origins(callee, inputs), self.reads(callee)
        outputs = self._outputs(callee)
        copies = [
            (name, size)
            for name, size in zip(outputs, self._written(fusion), strict=True)
            if origins[name] == _FROZEN and size
        ]
        sources = set().union(*(self._parameters(callee, name) for name, _ in copies))
        read = sum(reads[k] for k in sources if inputs[k] == _FROZEN)
        return read + sum(size for _, size in copies)

    def _parameters(self, name: str, value: str) -> set[int]:
        """Returns the numbers of the parameters of a computation that a value depends on."""
        by_name = {i.name: i for i in self._computations[name]}
        numbers, pending, seen = set(), [value], {value}
        while pending:
            i = by_name[pending.pop()]
            if i.kind == "parameter":
                numbers.add(_parameter_number(i))
            new = {x for x in operand_names(i) if x in by_name} - seen
            pending, seen = pending + sorted(new), seen | new
        return numbers

    # -- what a fusion moves and computes -----------------------------------------------------

    def _reads(self, name: str) -> list[int]:
        """Returns the bytes that a fused computation reads of each parameter."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for i in self._computations[name]:
            for position, operand in enumerate(operand_names(i)):
                users.setdefault(operand, []).append((i, position))

        def read(value: str, size: int) -> int:
            total = 0
            for user, position in users.get(value, ()):
                if user.kind in _SLICES and position == 0:
                    total += self._bytes(_without_layouts(user.result))
                elif user.kind == "bitcast":
                    total += read(user.name, size)
                elif user.kind == "fusion":
                    total += self.reads(callees(user)[0])[position]
                elif not (user.kind == "dynamic-update-slice" and position == 0):
                    return size
            return min(total, size)

        parameters = [i for i in self._computations[name] if i.kind == "parameter"]
        parameters.sort(key=_parameter_number)
        return [read(i.name, self._bytes(i.result)) for i in parameters]

    def _outputs(self, name: str) -> list[str]:
        """Lists the values that a computation returns."""
        root = self._root(name)
        return operand_names(root) if root.kind == "tuple" else [root.name]

    def _written(self, fusion: Instruction) -> list[int]:
        """Returns the bytes that a fusion writes of each of its results."""
        (callee,) = callees(fusion)
        by_name = {i.name: i for i in self._computations[callee]}

        def written(i: Instruction) -> int:
            if i.kind == "dynamic-update-slice":
                return self._bytes(by_name[operand_names(i)[1]].result)
            if i.kind == "bitcast":
                return written(by_name[operand_names(i)[0]])
            if i.kind == "fusion":
                return sum(self._written(i))
            return 0 if i.kind == "parameter" else self._bytes(i.result)

        outputs = [written(by_name[name]) for name in self._outputs(callee)]
        # The type of the fusion says which results stay on the chip.
        sizes = self.sizes(fusion.result)
        if len(sizes) != len(outputs):
            return outputs
        return [min(pair) for pair in zip(outputs, sizes, strict=True)]

    def _flops(self, i: Instruction, types: dict[str, str]) -> float:
        if i.kind == "dot":
            return dot_flops(i, types)
        if i.kind == "convolution":
            return _convolution_flops(i, types)
        if i.kind == "custom-call":
            return _call_flops(i, types)
        if i.kind == "fusion":
            callee = callees(i)[0]
            inner = self.types(callee)
            return sum(self._flops(x, inner) for x in self._computations[callee])
        return 0.0

    def _communicates(self, i: Instruction) -> bool:
        if i.kind == "fusion":
            return any(map(self._communicates, self._computations[callees(i)[0]]))
        return i.kind.removesuffix("-start") in SENT_SHARE


# -- instructions ---------------------------------------------------------------------------------


def operand_names(instruction: Instruction) -> list[str]:
    """Lists the operands of an instruction."""
    return _operand_names(instruction.rest)


@functools.lru_cache(maxsize=1 << 16)
def _operand_names(text: str) -> list[str]:
    depth = 1
    for parenthesis in re.finditer(r"[()]", text):
        depth += 1 if parenthesis[0] == "(" else -1
        if not depth:
            return _NAMES.findall(text[: parenthesis.start()])
    return _NAMES.findall(text)


def _without_layouts(result: str) -> str:
    """Returns a type with all of its arrays in the device's memory."""
    return re.sub(r"\{[^}]*\}", "", result)


def _without_workspace(i: Instruction) -> str:
    """Returns the type of an instruction without the working memory of a library's call."""
    if i.kind != "custom-call" or not i.result.startswith("("):
        return i.result
    return re.sub(r", [su]8\[\d+\](\{0\})?\)$", ")", i.result)


def _is_call(i: Instruction) -> bool:
    """Returns whether an instruction runs a computation, at once or asynchronously."""
    is_async = i.kind.endswith("-start") and i.kind.removesuffix("-start") not in SENT_SHARE
    return i.kind == "call" or (is_async and bool(callees(i)))


def _is_allocation(i: Instruction) -> bool:
    return i.kind == "custom-call" and "AllocateBuffer" in i.rest


def _is_scalar(result: str) -> bool:
    arrays = type_arrays(result)
    return len(arrays) == 1 and math.prod(arrays[0][1]) <= 1


def _parameter_number(parameter: Instruction) -> int:
    return int(parameter.rest[: parameter.rest.index(")")])


def _argument_origin(argument: Instruction) -> _Origin:
    name = _OP_NAME.search(argument.rest)
    return _FROZEN if name and name[1].startswith(_FROZEN_LEAF) else _DATA


def _most(origins: tuple[_Origin, ...]) -> int:
    return max((_most(x) if isinstance(x, tuple) else x for x in origins), default=_CONSTANT)


def _join(left: _Origin, right: _Origin) -> _Origin:
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        return tuple(map(_join, left, right))
    return _most((left, right))


def _is_attention(i: Instruction) -> bool:
    """Returns whether an instruction calls an attention kernel of cuDNN or Pallas."""
    if i.kind != "custom-call" or not (target := _TARGET.search(i.rest)):
        return False
    op = _OP_NAME.search(i.rest)
    is_pallas = target[1] == "tpu_custom_call"
    return "fmha" in target[1] or bool(is_pallas and op and "attention" in op[1])


def _call_flops(i: Instruction, types: dict[str, str]) -> float:
    """Returns the FLOPs of the matrix products of a library call or of a Pallas kernel."""
    target = _TARGET.search(i.rest)
    shapes = [type_arrays(types[x])[0][1] for x in operand_names(i) if types.get(x)]
    if target and "fmha" in target[1]:
        scores = _CUDNN_SCORES.search(i.rest)
        size = math.prod(map(int, re.findall(r"\d+", scores[1]))) if scores else 0
        # Two products forward, five backward; the kernel skips the scores above the diagonal.
        flops = (10.0 if "Backward" in target[1] else 4.0) * size * shapes[0][-1]
        return flops / 2 if "CAUSAL" in i.rest else flops
    if target and "gemm" in i.rest and (axes := _CONTRACTED.search(i.rest)):
        contracted = math.prod(shapes[0][int(axis)] for axis in re.findall(r"\d+", axes[1]))
        return 2.0 * math.prod(type_arrays(i.result)[0][1]) * contracted
    if _is_attention(i):
        # JAX's kernels: two products forward, three for gradients of queries, four of keys, values.
        products = 4 if "dkv" in i.name else 3 if "dq" in i.name else 2
        flops = 2.0 * products * math.prod(shapes[0]) * shapes[1][-2]
        return flops / 2 if CAUSAL_SCOPE in i.rest else flops
    estimate = _PALLAS_FLOPS.search(i.rest)
    return float(estimate[1]) if estimate else 0.0


def _convolution_flops(i: Instruction, types: dict[str, str]) -> float:
    """Returns the FLOPs of a TPU's matrix product, which is written as a convolution.

    Axes of a batch are spatial axes whose window reaches one input for each output, because the
    others are padding or holes.
    """
    labels = _CONVOLUTION.search(i.rest)
    if labels is None:
        return 0.0
    inputs, kernel = (type_arrays(types[x])[0][1] for x in operand_names(i)[:2])
    outputs = type_arrays(i.result)[0][1]
    window = _WINDOW.search(i.rest)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    flops = 2.0 * kernel[labels[2].index("i")]
    flops *= math.prod(outputs[labels[3].index(label)] for label in "bf")
    for axis in range(len(outputs) - 2):
        flops *= _window_pairs(
            inputs[labels[1].index(str(axis))],
            kernel[labels[2].index(str(axis))],
            outputs[labels[3].index(str(axis))],
            axis,
            fields,
        )
    return flops


def _window_pairs(inputs: int, window: int, outputs: int, axis: int, fields: dict[str, str]) -> int:
    """Counts the pairs of an input and an output of one axis that a window connects."""

    def field(name: str, default: str) -> str:
        return fields[name].split("x")[axis] if name in fields else default

    stride, before = int(field("stride", "1")), int(field("pad", "0_0").split("_")[0])
    spread, hole = int(field("lhs_dilate", "1")), int(field("rhs_dilate", "1"))
    positions = (o * stride + k * hole - before for o in range(outputs) for k in range(window))
    return sum(x % spread == 0 and 0 <= x // spread < inputs for x in positions)
