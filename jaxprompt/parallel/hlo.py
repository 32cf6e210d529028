"""Counts the work of a compiled program: matrix products, and communication between devices.

XLA's cost analysis counts the body of a loop once; here it counts once per iteration.
"""

import functools
import itertools
import math
import re
from collections import Counter
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ASYNC_MARKS = ("chain_id=", "async_collective_name=")  # libtpu's, of overlapped collectives
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# {{0,1},{2,3}}, [2,4]<=[8] (groups x devices), mesh['a'=2,'b'=4] {'b'}, or {'b':(1)2} of an axis
_GROUP_LIST = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_GROUP_SIZE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_GROUP_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
# Kind -> what a device sends in a ring of n devices, as a share of the largest array involved.
SENT_SHARE = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}


class DeviceWork(NamedTuple):
    """Work of one device in one run of a program."""

    flops: float  # of matrix products
    counts: Counter  # collectives by kind
    sent: Counter  # bytes that they send, by kind
    overlapped: Counter = Counter()  # those of `counts` that run in parallel with other work
    # Bytes of those that send while matrix products run: a GPU may wait at once for what it starts.
    overlapped_sent: Counter = Counter()

    def plus(self, other: "DeviceWork", times: int = 1) -> "DeviceWork":
        """Adds other work, `times` times."""
        counters = (
            mine + Counter({kind: times * n for kind, n in theirs.items()})
            for mine, theirs in zip(self[1:], other[1:], strict=True)
        )
        return DeviceWork(self.flops + times * other.flops, *counters)


class Instruction(NamedTuple):
    """One instruction of a program."""

    name: str
    result: str  # its type
    kind: str
    rest: str  # operands and attributes
    is_root: bool = False  # whether it is the result of its computation


def count_work(text: str) -> DeviceWork:
    """Counts the work of a program in HLO text, as `compiled.as_text()` gives it."""
    computations, entry = parse_program(text)
    duplicates = _duplicate_parts(computations)

    # Cached: a computation that is called from several places is parsed once.
    @functools.cache
    def total(name: str) -> DeviceWork:
        work, result_types = DeviceWork(0.0, Counter(), Counter()), {}
        for position, instruction in enumerate(computations[name]):
            result_types[instruction.name] = instruction.result
            if instruction.name in duplicates:
                continue
            part = _instruction_work(instruction, result_types)
            if part.overlapped and not _runs_beside_products(position, name, computations):
                part = part._replace(overlapped_sent=Counter())
            work = work.plus(part)
            trips = trip_count(instruction, computations) if instruction.kind == "while" else 1
            for callee in callees(instruction):
                work = work.plus(total(callee), trips)
        return work

    return total(entry)


def _runs_beside_products(
    position: int, name: str, computations: dict[str, list[Instruction]]
) -> bool:
    """Returns whether matrix products run between the start of a collective and its end."""
    start, *others = computations[name][position:]
    if not start.kind.endswith("-start"):
        return True  # libtpu's fusions, which have marks
    end = re.compile(rf"%?{re.escape(start.name)}\)")
    between = itertools.takewhile(
        lambda other: not (other.kind.endswith("-done") and end.match(other.rest)), others
    )
    products = {"dot", "convolution", "custom-call", "while"}
    return any(
        part.kind in products
        for other in between
        for part in (
            other,
            *(part for callee in callees(other) for part in computations.get(callee, ())),
        )
    )


def _duplicate_parts(computations: dict[str, list[Instruction]]) -> set[str]:
    """Returns the parts of collectives that are already counted: libtpu splits them."""
    seen, parts = set(), set()
    for instruction in itertools.chain.from_iterable(computations.values()):
        if instruction.kind.removesuffix("-start") not in SENT_SHARE:
            continue
        # All parts of one collective have its channel.
        channel = _CHANNEL.search(instruction.rest)
        if channel and (instruction.kind, channel[1]) in seen:
            parts.add(instruction.name)
        elif channel:
            seen.add((instruction.kind, channel[1]))
    return parts


def callees(instruction: Instruction) -> list[str]:
    """Lists the computations that an instruction calls, without the condition of a loop."""
    names = _CALLED.findall(instruction.rest)
    for branches in _BRANCHES.findall(instruction.rest):
        names += re.findall(r"[\w.\-]+", branches)
    return names


def trip_count(loop: Instruction, computations: dict[str, list[Instruction]]) -> int:
    """Returns the trip count of a loop: as annotated, else the limit in its condition."""
    if annotated := _TRIPS.search(loop.rest):
        return int(annotated[1])
    condition = _CONDITION.search(loop.rest)
    instructions = computations.get(condition[1], []) if condition else []
    bounds = [instruction.rest for instruction in instructions if instruction.kind == "constant"]
    counts_up = any("direction=LT" in instruction.rest for instruction in instructions)
    # Of several constants it is not known which one the counter is compared with.
    bound = re.match(r"(\d+)\)", bounds[0]) if len(bounds) == 1 and counts_up else None
    return int(bound[1]) if bound else 1


def parse_program(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Parses a program. Returns its computations and the name of the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, result, kind, rest = match.groups()
            current.append(Instruction(name, result, kind, rest, bool(root)))
    return computations, entry


def _instruction_work(instruction: Instruction, types: dict[str, str]) -> DeviceWork:
    if instruction.kind == "dot":
        return DeviceWork(dot_flops(instruction, types), Counter(), Counter())
    kind = instruction.kind.removesuffix("-start")
    if kind not in SENT_SHARE:
        return DeviceWork(0.0, Counter(), Counter())
    devices = _group_size(instruction.rest)
    arrays, is_async = type_arrays(instruction.result), instruction.kind.endswith("-start")
    if is_async and instruction.result.startswith("("):  # operands, then results
        half = len(arrays) // 2
        # Its start may also return two counters, after operand and result.
        arrays = arrays[:1] if kind == "collective-permute" else arrays[half:]
    size = sum(width * math.prod(sizes) for width, sizes in arrays)
    # Its result is one device's part of the array that it reads.
    if kind == "reduce-scatter":
        size *= devices
    sent = round(SENT_SHARE[kind](devices) * size)
    is_overlapped = is_async or any(mark in instruction.rest for mark in _ASYNC_MARKS)
    counts, bytes_sent = Counter({kind: 1}), Counter({kind: sent})
    return DeviceWork(
        0.0,
        counts,
        bytes_sent,
        *((counts, bytes_sent) if is_overlapped else (Counter(), Counter())),
    )


def dot_flops(dot: Instruction, types: dict[str, str]) -> float:
    """Returns the FLOPs of a matrix product; `types` has the type of its first operand."""
    # Some versions print the type of an operand before its name.
    lhs = re.match(r"[^%)]*%?([\w.\-]+)", dot.rest)
    if lhs is None:
        raise ValueError(f"a dot without operands: {dot.rest!r:.60}")
    sizes = type_arrays(types[lhs[1]])[0][1]
    axes = _CONTRACTED.search(dot.rest)
    contracted = axes[1].split(",") if axes else []
    contracted_size = math.prod(sizes[int(axis)] for axis in contracted if axis)
    return 2.0 * math.prod(type_arrays(dot.result)[0][1]) * contracted_size


def type_arrays(type_text: str) -> list[tuple[int, list[int]]]:
    """Lists the arrays of a type, each as bytes per element and shape."""
    matches = _ARRAY.findall(type_text)
    return [
        (bytes_per_element(dtype), [int(x) for x in sizes.split(",") if x])
        for dtype, sizes in matches
    ]


def bytes_per_element(dtype: str) -> int:
    """Returns the bytes of a number of a dtype of HLO, at least one."""
    bits = re.search(r"\d+", dtype)
    # Types of less than 8 bits count as one byte, and so does pred, which has no digits.
    return max(1, int(bits[0]) // 8) if bits else 1


def _group_size(rest: str) -> int:
    """Returns the group size of a collective. Raises ValueError for an unknown notation."""
    if match := _GROUP_LIST.search(rest):
        return len(match[1].split(","))
    if match := _GROUP_SIZE.search(rest):
        return int(match[1])
    if match := _GROUP_AXES.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    if "source_target_pairs" in rest:
        return 2  # any number: a permutation sends its whole array
    raise ValueError(f"a collective without groups that are known: {rest[:200]}")
