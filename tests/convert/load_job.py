"""Loads as one of several processes: `load_job.py FOLDER[,FOLDER] MODEL FSDP --coordinator=X ...`.

Prints one JSON object: the bytes read, and each parameter's shards of this process as hashes.
"""

import argparse
import hashlib
import json
import os
import sys

import numpy as np

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.tree import flatten


def hashes(array) -> dict[str, str]:
    """Hashes what this process holds. -> {range of every axis: hash}"""
    ranges = lambda shard: [
        part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)
    ]
    return {
        str(ranges(shard)): hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
        for shard in array.addressable_shards
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("model", type=int)
    parser.add_argument("fsdp", type=int)

    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    processes.connect(args.coordinator, args.processes, args.process)
    read, counts = os.preadv, []

    def count(*words):
        counts.append(read(*words))
        return counts[-1]

    os.preadv = count
    folders = args.folder.split(",")
    folder = folders[args.process % len(folders)]
    config = read_config(folder)
    placement = make_placement(-1, args.model, fsdp=bool(args.fsdp))
    loaded = load_backbone(folder, config["model_type"], config, placement=placement)
    shards = {name: hashes(leaf) for name, leaf in flatten(loaded.params).items()}
    answer = {"read": sum(counts), "shards": shards, "fingerprint": loaded.report.fingerprint}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
