"""What `predict` and `evaluate` share that take several prompts: the flags, and the bank."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxprompt.cli.options import Parser
from jaxprompt.errors import InputError, escape

SERVING = ("input", "backbone", "dtype", "batch", "mesh", "force")  # flags beside the prompts
_HOW = "--prompt=NAME=PATH"


def add_serving(parser: Parser, default: str = "") -> None:
    """Adds the flags that say where a prompt and its backbone are; the help names `default`."""
    own = f" (default: {default})" if default else ""
    parser.add_argument(
        "--prompt", action="append", help=f"folder of an export, or hub:owner/name{own}; several, "
        "also as NAME=PATH, make a bank, and --column says which of them a row takes",
    )  # fmt: skip
    parser.add_argument("--input", help="JSONL, CSV, TSV, JSON or Parquet file; - reads stdin")
    parser.add_argument("--column", default="", help="column that names the prompt of each row")
    parser.add_argument("--backbone", default="", help="backbone, if not where the export says")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=64, help="examples per batch (default: 64)")
    parser.add_argument("--mesh", default="1x1", help="devices, data x model (default: 1x1)")
    parser.add_argument("--force", action="store_true", help="accept other backbone weights")


def check_serving(args: Any) -> None:
    """Raises InputError for flags of a bank that do not go together."""
    several = len(args.prompt or ()) > 1
    if several and not args.column:
        raise InputError(
            f"{len(args.prompt)} prompts are given; --column names the column that says which of "
            "them a row takes"
        )
    if args.column and not args.prompt:
        raise InputError(f"--column={args.column} picks among prompts; give each by --prompt")
    if args.batch < 1:
        raise InputError(f"--batch={args.batch} must be at least 1")


def open_bank(args: Any) -> Any:
    """Loads the backbone and the prompts of a command line. -> a PromptBank"""
    from jaxprompt.build.backbone import LoadedBackbone, load_weights, open_backbone
    from jaxprompt.build.prompt_artifact import backbone_from_metadata, read_export
    from jaxprompt.parallel.compilation import keep_programs
    from jaxprompt.serving import bank

    paths, names = [], []
    for given in args.prompt:
        name, path = _split_name(given)
        paths.append(path)
        names.append(name or bank.name_of(path))
    bank.check_names(names, paths, _HOW)
    exports = {
        name: bank.Export(path, *read_export(path)) for name, path in zip(names, paths, strict=True)
    }
    config = backbone_config(args)
    keep_programs()
    placement = make_mesh(args.mesh, args.batch)
    # One prompt names the backbone, and make_bank refuses those of other weights.
    first = next(iter(exports.values()))
    opened = open_backbone(backbone_from_metadata(first.metadata.backbone, config))
    whole = LoadedBackbone(*load_weights(opened, placement), placement)
    return bank.make_bank(whole, exports, batch=args.batch, force=args.force)


def open_export(args: Any, where: str, **named: str) -> tuple[Any, Any]:
    """Puts one export on its backbone. -> see `unpack`, and the placement

    `named` says where else what it depends on is.
    """
    from jaxprompt.build.prompt_artifact import unpack
    from jaxprompt.parallel.compilation import keep_programs

    keep_programs()
    placement = make_mesh(args.mesh, args.batch)
    exported = unpack(
        where, backbone=backbone_config(args), batch=args.batch, placement=placement,
        force=args.force, **named,
    )  # fmt: skip
    return exported, placement


def _split_name(given: str) -> tuple[str, str]:
    """Splits NAME=PATH. A path may have a = too, as in runs/seed=0/export: its name is "" then."""
    name, equals, path = given.partition("=")
    # A name has no slash, so a path with a = behind one is told from NAME=PATH.
    is_path = not equals or "/" in name or os.path.exists(given)
    return ("", given) if is_path else (name, path)


def refuse_flags(parser: Parser, args: Any, names: Sequence[str], why: str) -> None:
    """Raises InputError, with `why`, for the first of some flags that is not at its default."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            raise InputError(f"--{name}={getattr(args, name)} {why}; leave it out")


def backbone_config(args: Any) -> Any:
    """Makes the config block of the backbone that the flags name."""
    from jaxprompt.config.run import BackboneConfig

    return BackboneConfig.from_dict({"path": args.backbone, "dtype": args.dtype}, "backbone.")


def make_mesh(mesh: str, batch: int) -> Any:
    """Makes the placement of --mesh. Raises InputError where it is none, or does not divide."""
    from jaxprompt.parallel.sharding import make_placement

    sizes = mesh.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
        raise InputError(f"--mesh={mesh!r} must be DATAxMODEL, as in 2x4")
    placement = make_placement(*map(int, sizes))
    if batch % int(sizes[0]):
        raise InputError(f"--batch={batch} does not divide over the {sizes[0]} of --mesh={mesh}")
    return placement


def answer_asked(
    bank: Any, requests: Sequence[tuple[int, Any]]
) -> tuple[Mapping[int, Any], dict[str, dict[str, float]]]:
    """Answers what was read by `read_requests`. -> answers by prompt, and metrics by its name

    How many examples were cut, and which labels are unknown, goes to stderr.
    """
    from jaxprompt.data.sources import records
    from jaxprompt.serving.bank import answer

    answers = answer(bank, requests)
    measured = {}
    for number, found in sorted(answers.items()):
        name, task = bank.names[number], bank.scorers[number].task
        mine = [own for at, own in requests if at == number]
        for line in records.tell_unknown(task, mine):
            _say(f"{name}: {line}")
        if found.cut:
            length = bank.scorers[number].layout.max_len
            _say(f"{name}: texts cut to {length} tokens: {found.cut} of {len(found.columns)}")
        measured[name] = {"examples": found.known, **found.measured}
    return answers, measured


def _say(line: str) -> None:
    print(escape(line), file=sys.stderr)
