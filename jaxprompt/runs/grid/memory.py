"""How many runs fit in memory at once."""

import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.tree import Flat
from jaxprompt.types import Batch

SHARE = 0.9  # of the memory that is free: evaluation and the allocator need some besides


def available(mesh: Mesh) -> int:
    """Returns the free bytes on one device of a mesh; CPU devices share the RAM."""
    devices = mesh.local_mesh.devices.flatten()
    stats = devices[0].memory_stats() or {}  # None of a CPU
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return _free_ram() // len(devices)


def _free_ram() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = dict(line.split(":") for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def needed(
    programs: Programs, runs: int, batch: Batch, per_run: PerRun, *, shares: bool = False
) -> int | None:
    """Returns the bytes per device to train `runs` runs, without frozen parameters of all.

    `batch` and `per_run` are those of one run; with `shares` cached states count once for all runs.
    Returns None if the device cannot compile such a large program.
    """
    # A view: the batches of many runs take no memory on the host.
    spread = lambda x: np.broadcast_to(x, (runs, *np.shape(x)))
    state, best = programs.template(runs)
    wide = jax.tree.map(spread, batch)
    put = programs.put_batch(wide._replace(cached=batch.cached) if shares else wide, runs)
    try:
        program = programs.compile(state, put, programs.put_own([per_run] * runs))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    found = program.memory_analysis()
    # Arguments that are donated count among the results too, and are aliases there.
    used = (
        found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )  # fmt: skip
    # The best numbers of the runs are held besides, and no argument of the step.
    return used - local_bytes(programs.frozen) + local_bytes(best)


def local_bytes(tree: Flat) -> int:
    """Returns the bytes of a tree on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape))) for x in leaves)


def fitting(
    programs: Programs,
    wanted: int,
    batch: Batch,
    per_run: PerRun,
    free: int,
    *,
    shares: bool = False,
) -> int:
    """Returns how many of the `wanted` runs can train at once in `free` bytes; at least 1.

    The step of all runs is compiled first, because it is used if it fits. Otherwise the bytes per
    run are the difference between the steps of two runs and of one.
    """
    limit = SHARE * free
    whole = needed(programs, wanted, batch, per_run, shares=shares)
    # One run is tried in any case: if it does not fit, nothing smaller would.
    if wanted == 1 or (whole is not None and whole <= limit):
        return wanted
    one, two = (needed(programs, runs, batch, per_run, shares=shares) for runs in (1, 2))
    if one is None or two is None or two > limit:
        return 1
    each = max(two - one, 1)
    return min(wanted - 1, programs.round(2 + int((limit - two) / each)))
