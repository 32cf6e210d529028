"""Counts the work of a compiled program: matrix products, and communication between devices.

XLA's cost analysis counts the body of a loop once; here it counts once per iteration.
"""

import functools
import math
import re
from collections import Counter
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_BESIDE = ("chain_id=", "async_collective_name=")  # libtpu's marks of what other work hides
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# {{0,1},{2,3}}, [2,4]<=[8] (groups x devices), mesh['a'=2,'b'=4] {'b'}, or {'b':(1)2} of an axis
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
# Kind -> what a device sends in a ring of n devices, as a share of the largest array involved.
_SENT = {
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
    beside: Counter = Counter()  # of `counts`, those that run beside other work

    def plus(self, other: "DeviceWork", times: int = 1) -> "DeviceWork":
        """Adds other work, `times` times."""
        add = lambda own, more: own + Counter({kind: times * n for kind, n in more.items()})
        pairs = zip(self[1:], other[1:], strict=True)
        return DeviceWork(self.flops + times * other.flops, *(add(*pair) for pair in pairs))


class _Instruction(NamedTuple):
    name: str
    result: str  # its type
    kind: str
    rest: str  # operands and attributes


def read_work(text: str) -> DeviceWork:
    """Counts the work of a program in HLO text, as `compiled.as_text()` gives it."""
    computations, entry = _parse(text)
    parts = _parts(computations)

    # A computation that is called from several places is read once and counted each time.
    @functools.cache
    def total(name: str) -> DeviceWork:
        work, types = DeviceWork(0.0, Counter(), Counter()), {}
        for own in computations[name]:
            types[own.name] = own.result
            if own.name in parts:
                continue
            work = work.plus(_work(own, types))
            trips = _trips(own, computations) if own.kind == "while" else 1
            called = _CALLED.findall(own.rest)
            for branches in _BRANCHES.findall(own.rest):
                called += re.findall(r"[\w.\-]+", branches)
            for inner in called:
                work = work.plus(total(inner), trips)
        return work

    return total(entry)


def _parts(computations: dict[str, list[_Instruction]]) -> set[str]:
    """Returns the parts of collectives that are already counted: libtpu splits them."""
    seen, parts = set(), set()
    for own in (own for steps in computations.values() for own in steps):
        # All parts of one collective have its channel.
        channel = _CHANNEL.search(own.rest) if own.kind.removesuffix("-start") in _SENT else None
        if channel and (own.kind, channel[1]) in seen:
            parts.add(own.name)
        elif channel:
            seen.add((own.kind, channel[1]))
    return parts


def _trips(loop: _Instruction, computations: dict[str, list[_Instruction]]) -> int:
    """Returns the trip count of a loop: as annotated, else the limit in its condition."""
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    condition = _CONDITION.search(loop.rest)
    steps = computations.get(condition[1], []) if condition else []
    bounds = [step.rest for step in steps if step.kind == "constant"]
    counts_up = any("direction=LT" in step.rest for step in steps)
    # Of several constants it is not known which one the counter is compared with.
    bound = re.match(r"(\d+)\)", bounds[0]) if len(bounds) == 1 and counts_up else None
    return int(bound[1]) if bound else 1


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Parses a program. Returns its computations and the name of the entry computation."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            current.append(_Instruction(*found.groups()))
    return computations, entry


def _work(own: _Instruction, types: dict[str, str]) -> DeviceWork:
    if own.kind == "dot":
        # Some printers write the type of an operand in front of its name.
        lhs = re.match(r"[^%)]*%?([\w.\-]+)", own.rest)
        if lhs is None:
            raise ValueError(f"a dot without operands: {own.rest!r:.60}")
        sizes = _sizes(types[lhs[1]])[0][1]
        axes = _CONTRACTED.search(own.rest)
        shared = math.prod(sizes[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
        result = math.prod(_sizes(own.result)[0][1])
        return DeviceWork(2.0 * result * shared, Counter(), Counter())
    kind = own.kind.removesuffix("-start")
    if kind not in _SENT:
        return DeviceWork(0.0, Counter(), Counter())
    devices = _group(own.rest)
    arrays, starts = _sizes(own.result), own.kind.endswith("-start")
    if starts and own.result.startswith("("):  # operands, then results
        half = len(arrays) // 2
        # Its start may give two counters besides operand and result.
        arrays = arrays[:1] if kind == "collective-permute" else arrays[half:]
    size = sum(width * math.prod(sizes) for width, sizes in arrays)
    # Its result is one device's part of the array that it reads.
    if kind == "reduce-scatter":
        size *= devices
    sent = round(_SENT[kind](devices) * size)
    beside = Counter({kind: 1} if starts or any(mark in own.rest for mark in _BESIDE) else {})
    return DeviceWork(0.0, Counter({kind: 1}), Counter({kind: sent}), beside)


def _sizes(kind: str) -> list[tuple[int, list[int]]]:
    """Lists the arrays of a type, each as bytes per element and shape."""
    found = _ARRAY.findall(kind)
    return [(_width(dtype), [int(x) for x in sizes.split(",") if x]) for dtype, sizes in found]


def _width(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    # Types of less than 8 bits count a byte.
    return max(1, int(bits[0]) // 8) if bits else 1  # pred has no number


def _group(rest: str) -> int:
    """Returns the group size of a collective. Raises ValueError for an unknown notation."""
    if found := _LISTED.search(rest):
        return len(found[1].split(","))
    if found := _COUNTED.search(rest):
        return int(found[1])
    if found := _NAMED.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    if "source_target_pairs" in rest:
        # Any number will do, since a permutation sends all of its array.
        return 2
    raise ValueError(f"a collective without groups that are known: {rest[:200]}")
