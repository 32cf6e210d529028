"""Seconds and memory of loading a T5-large onto meshes, beside reading its files.

Its weights are random, 3 GB of float32 in files of some 250 MB.
"""

import argparse
import contextlib
import gc
import json
import os
import socket
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from launch.bench.process import call, side

SIZES = dict(V=32128, E=1024, H=1024, N=16, D=64, F=4096, R=32)  # letters of jaxprompt/types.py
TINY = dict(V=512, E=64, H=64, N=8, D=8, F=128, R=32)  # nothing is measured on it
FILE_BYTES = 250e6
READ_BYTES = 2**24
MESHES = (  # data x model, flags of a side, processes
    ("1 x 1", {}, 1),
    ("2 x 4", {"devices": 8, "model": 4}, 1),
    ("8 x 1 FSDP", {"devices": 8, "fsdp": True}, 1),
    ("8 x 1 FSDP, 2 hosts", {"devices": 4, "fsdp": True}, 2),
    ("1 x 8, 2 hosts", {"devices": 4, "model": 8}, 2),
)
SEED = 0


# -- the files ------------------------------------------------------------------------------------


def write(args: argparse.Namespace) -> None:
    """Writes config.json and the weights, one file at a time, and says how large they are."""
    folder, sizes = Path(args.folder), TINY if args.tiny else SIZES
    folder.mkdir(parents=True, exist_ok=True)
    where = {}
    for i, tensors in enumerate(draw(args.layers, sizes)):
        from safetensors.numpy import save_file

        name = f"model-{i:05d}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    config = dict(
        model_type="t5", vocab_size=sizes["V"], d_model=sizes["H"], num_heads=sizes["N"],
        d_kv=sizes["D"], d_ff=sizes["F"], num_layers=args.layers, num_decoder_layers=args.layers,
        relative_attention_num_buckets=sizes["R"], feed_forward_proj="relu",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    os.sync()  # only what is on the disk can be dropped from the cache
    sizes_written = [path.stat().st_size for path in files(folder)]
    print(json.dumps({"bytes": sum(sizes_written), "files": len(sizes_written)}))


def draw(layers: int, sizes: dict[str, int]):
    """Yields the tensors of file after file."""
    from jaxprompt.convert.names.tables import FAMILIES

    draws, tensors, size = np.random.default_rng(SEED), {}, 0
    for tensor in FAMILIES["t5"].trunk:
        if tensor.when == "gated":
            continue
        shape = [int(np.prod([sizes[axis] for axis in axes])) for axes in tensor.file_axes]
        for i in range(layers if tensor.stack else 1):
            values = draws.standard_normal(shape, dtype=np.float32)
            tensors[tensor.sources[-1].format(i=i)] = values
            size += values.nbytes
            if size >= FILE_BYTES:
                yield tensors
                tensors, size = {}, 0
    yield tensors


def files(folder: Path) -> list[Path]:
    """Lists the files of weights."""
    return sorted(folder.glob("*.safetensors"))


def drop(folder: Path) -> None:
    """Takes the files out of the system's cache."""
    for path in files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> None:
    """Reads every byte, and does nothing with it."""
    space = bytearray(READ_BYTES)
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(space):
                pass


def keep(folder: Path) -> list[np.ndarray]:
    """Reads every byte into memory of its own, the least that any loader does."""
    buffers = []
    for path in files(folder):
        buffers.append(np.empty(path.stat().st_size, np.uint8))
        left = memoryview(buffers[-1])
        with path.open("rb", buffering=0) as file:
            while left:
                left = left[file.readinto(left[:READ_BYTES]) :]
    return buffers


# -- loading --------------------------------------------------------------------------------------


def memory(field: str) -> int:
    """Returns the resident bytes of this process: now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def timed(work, folder: Path, state: str) -> float:
    """Returns the seconds of a function with its files in the page cache, or without ("cold")."""
    gc.collect()
    if state == "cold":
        drop(folder)
    started = time.perf_counter()
    loaded = work()
    seconds = time.perf_counter() - started
    del loaded
    return seconds


def load(args: argparse.Namespace) -> None:
    """Loads onto a mesh; answers with bytes and, in turns with plain reading, seconds."""
    flag = f"--xla_force_host_platform_device_count={args.devices}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    import jax

    from jaxprompt import tree
    from jaxprompt.convert.folder import read_config
    from jaxprompt.convert.load import load_backbone
    from jaxprompt.parallel import processes, sharding

    processes.connect(args.coordinator, args.processes, args.process)
    placement = sharding.make_placement(-1, args.model, fsdp=args.fsdp)
    jax.device_put(np.zeros(8), placement.replicated).block_until_ready()
    folder = Path(args.folder)
    config = read_config(folder)
    fill = lambda: load_backbone(folder, "t5", config, dtype=args.dtype, placement=placement)
    start = memory("VmRSS")
    loaded = fill()
    peak = memory("VmHWM")
    leaves = tree.flatten(loaded.params).values()
    largest = max(leaf.nbytes for leaf in leaves if leaf.ndim == 2)
    share = sum(
        shard.data.nbytes
        for leaf in leaves
        for shard in {str(shard.index): shard for shard in leaf.addressable_shards}.values()
    )  # what several devices hold alike is in memory once
    row = {"start": start, "peak": peak, "share": share, "largest": largest}
    row |= {"fingerprint": loaded.report.fingerprint}
    del loaded, leaves
    works = {"read": lambda: read(folder), "keep": lambda: keep(folder), "load": fill}
    for state in ("warm", "cold") if args.rounds else ():
        turns = []
        for _ in range(args.rounds):
            turns.append({name: timed(work, folder, state) for name, work in works.items()})
        row |= {f"{state} {x} s": statistics.median(turn[x] for turn in turns) for x in works}
        for base in ("read", "keep"):
            ratio = statistics.median(turn["load"] / turn[base] for turn in turns)
            row[f"{state} load / {base}"] = ratio
        row[f"{state} turns"] = [list(turn.values()) for turn in turns]
    print(json.dumps(row))


SIDES = {"write": write, "load": load}


# -- the table ------------------------------------------------------------------------------------


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--folder", help="of the written weights, which are kept")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to try it")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--model", type=int, default=1, help="devices of the model axis")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)


def measure(args: argparse.Namespace) -> list[dict]:
    """Loads onto every mesh, each in processes of its own. Of two the larger counts.

    The ratio is (peak - start - largest tensor) / share of the host, all resident bytes.
    """
    with contextlib.ExitStack() as stack:
        folder = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
        if not (Path(folder) / "config.json").exists():
            flags = {"folder": folder, "layers": args.layers, "tiny": args.tiny}
            call(side("load", "write", **flags), args.cores)
        rows = []
        for mesh, flags, processes in MESHES:
            for dtype in ("float32", "bfloat16"):
                rounds = args.rounds if processes == 1 else 0
                flags = flags | {"folder": folder, "dtype": dtype, "rounds": rounds}
                answer = max(call_all(args, flags, processes), key=lambda answer: answer["peak"])
                rows.append(make_row(mesh, dtype, answer))
        return rows


def call_all(args: argparse.Namespace, flags: dict, processes: int) -> list[dict]:
    """Runs a side as so many processes of one run. Returns the answer of each."""
    if processes == 1:
        return [call(side("load", "load", **flags), args.cores)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        flags = flags | {
            "coordinator": f"127.0.0.1:{server.getsockname()[1]}",
            "processes": processes,
        }
    run = lambda number: call(side("load", "load", **flags, process=number), args.cores)
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(run, range(processes)))


def make_row(mesh: str, dtype: str, answer: dict) -> dict:
    """Makes a row of the table."""
    sizes = {f"{x} GB": answer[x] / 1e9 for x in ("start", "share", "largest", "peak")}
    extra = answer["peak"] - answer["start"] - answer["largest"]
    row = {"mesh": mesh, "dtype": dtype, **sizes, "ratio": extra / answer["share"]}
    for state in ("warm", "cold"):
        for name in ("read s", "keep s", "load s", "load / read", "load / keep"):
            row[f"{state} {name}"] = answer.get(f"{state} {name}", "")
    return row | {"turns": [answer.get(f"{state} turns") for state in ("warm", "cold")]}
