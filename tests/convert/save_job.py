"""Saves as one of several processes: `save_job.py SOURCE FOLDER [--seed=0] --coordinator=X ...`.

With a seed the weights are drawn, else loaded. Prints what a second run is told.
"""

import argparse
import sys

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.random_weights import init_backbone
from jaxprompt.convert.save import save_backbone
from jaxprompt.errors import InputError
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import make_placement

CARD = dict.fromkeys(("corpus", "objective", "steps", "held_out"), "x")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    processes.connect(args.coordinator, args.processes, args.process)
    config = read_config(args.source)
    family = {"mt5": "t5"}.get(config["model_type"], config["model_type"])
    place = make_placement(1, -1, fsdp=True)
    if args.seed is None:
        loaded = load_backbone(args.source, family, config, placement=place)
    else:
        loaded = init_backbone(family, config, ["mlm"], seed=args.seed, placement=place)
    for run in ("first", "second"):
        try:
            save_backbone(
                args.folder, family, config, loaded.params, tokenizer=args.source, card=CARD,
                run=run,
            )  # fmt: skip
        except InputError as error:
            print(error, flush=True)


if __name__ == "__main__":
    sys.exit(main())
