"""Writes the best prompt of a workdir as safetensors and a JSON card."""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxprompt.cli.options import Parser, load_run, need
from jaxprompt.errors import InputError


def main(argv: Sequence[str]) -> int:
    """Folds the prompt, writes it and prints the paths and bytes as JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--output", help="folder to write (default: WORKDIR/export)")
    parser.add_argument("--npy", help="also write the soft tokens as a plain .npy array [P, E]")
    parser.add_argument("--peft", help="also write a folder that PEFT loads")
    args, overrides = parser.read(argv)
    need(args, "workdir")
    c = load_run(args, overrides)

    from jaxprompt.assembly.export import pack_run
    from jaxprompt.assembly.prompt_artifact import as_peft, plain_tokens
    from jaxprompt.convert.artifact import write_artifact, write_npy
    from jaxprompt.convert.peft import write_peft

    scorer, tensors, card = pack_run(c, args.workdir)
    rows = plain_tokens(tensors, card)
    if args.npy and rows is None:
        raise InputError(f"--npy: a {card['method']} prompt has no soft tokens")
    adapter = as_peft(scorer, tensors, card) if args.peft else {}
    paths = write_artifact(args.output or Path(args.workdir) / "export", tensors, card)
    if args.npy:
        write_npy(args.npy, rows)
        paths = (*paths, Path(args.npy))
    if args.peft:
        paths = (*paths, *write_peft(args.peft, **adapter))
    print(json.dumps({str(path): path.stat().st_size for path in paths}))
    return 0
