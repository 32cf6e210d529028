"""Trains a router, which chooses among several prompts for a row that names none.

It reads the training examples of the prompts: of an export in the folder of its run, those of the
run, else those that --examples names. Their texts go through the lower half of the frozen backbone
without a prompt, and a small layer on its states learns which prompt they belong to. Below a
probability, which is chosen by cross-validation, no prompt is chosen. `predict --route=auto` and
`evaluate --route=auto` use the router.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxprompt.cli import bank, log
from jaxprompt.cli.options import Parser, path, require_flags, whole
from jaxprompt.errors import InputError, at_least, check_known, nearest

if TYPE_CHECKING:
    from jaxprompt.build.prompt_artifact import Export
    from jaxprompt.data.rows import Rows


def main(argv: Sequence[str]) -> int:
    """Writes the router; prints its scores on held-out examples as JSON."""
    args, _ = _make_parser().read(argv)
    require_flags(args, "prompt")
    at_least("--batch", args.batch, 1)

    from jaxprompt.convert.artifact import write_artifact
    from jaxprompt.serving import router

    check_known("--kind", args.kind, router.KINDS)
    folder = args.output or bank.router_path(args)
    exports = bank.read_exports(args)
    _check_folder(folder)
    rows = _read_examples(args, exports)
    trained = router.train_router(
        bank.load_shared_backbone(args, exports),
        exports,
        rows,
        kind=args.kind,
        accuracy=args.accuracy,
        max_len=args.max_len,
        batch=args.batch,
        force=args.force,
    )
    metadata = trained.metadata
    assert metadata.router is not None
    for name, counts in metadata.router.held_out.items():
        log(f"{name}: held-out examples by chosen prompt: {_format_counts(counts)}")
    file, _ = write_artifact(folder, trained.tensors, metadata)
    result = {"router": str(file.parent), "threshold": metadata.router.threshold}
    print(json.dumps(result | dict(metadata.metrics["held_out"] or {})))
    return 0


def _make_parser() -> Parser:
    parser = Parser(__name__, __doc__, config=False)
    bank.add_prompt_flags(
        parser, "folder of an export, or hub:owner/name, also as NAME=PATH; give several"
    )
    parser.add_argument(
        "--examples",
        type=path,
        action="append",
        metavar="NAME=FILE",
        help="rows of a prompt (default: the training examples of its run)",
    )
    parser.add_argument(
        "--output", type=path, help="output folder (default: router, beside the first prompt)"
    )
    parser.add_argument(
        "--kind",
        default="centroid",
        help="centroid = the nearest mean state (default), linear = logistic regression on states",
    )
    parser.add_argument(
        "--accuracy",
        type=float,
        default=0.95,
        help="share of the routed held-out rows that must have the right prompt; it sets the "
        "threshold (default: 0.95)",
    )
    parser.add_argument(
        "--max-len", type=whole, default=128, help="tokens read of a text (default: 128)"
    )
    return parser


def _check_folder(folder: str) -> None:
    """Raises InputError if a router would replace an export."""
    from jaxprompt.convert.artifact import METADATA, read_metadata

    # Without its tensors: those of a router that was cut while it was written need not match.
    if (Path(folder) / METADATA).exists() and read_metadata(Path(folder)).router is None:
        raise InputError(f"{folder} contains an export that is no router; give another --output")


def _read_examples(args: Namespace, exports: "Mapping[str, Export]") -> "dict[str, Rows]":
    """Reads the examples of each prompt."""
    from jaxprompt.data.sources.files import read_file

    files = {}
    for value in args.examples or ():
        name, equals, file = value.partition("=")
        if not equals or name not in exports:
            advice = nearest(name, exports)
            raise InputError(
                f"--examples={value} must be NAME=FILE with a name of --prompt; {advice}"
            )
        files[name] = file
    return {
        name: read_file(files[name], export.metadata.task.columns)
        if name in files
        else _read_training_rows(name, export.path)
        for name, export in exports.items()
    }


def _read_training_rows(name: str, export: str) -> "Rows":
    """Reads the training examples of the run that an export is in the folder of.

    Raises InputError if there is no run, or the examples have changed since.
    """
    from jaxprompt.build.examples import read_split_rows
    from jaxprompt.config.load import load_config
    from jaxprompt.data.rows import Rows
    from jaxprompt.data.sources.digest import summarize
    from jaxprompt.files import is_run
    from jaxprompt.training.run_folder import read_record
    from jaxprompt.training.run_record import TaskRecord

    advice = f"give its rows with --examples={name}=FILE"
    workdir = Path(export).parent
    record = read_record(workdir, TaskRecord) if is_run(workdir) else None
    if record is None:
        raise InputError(
            f"prompt {name}: {export} is not in the folder of its run, whose training examples a "
            f"router needs; {advice}"
        )
    config = load_config(str(workdir / "config.json"))
    try:
        rows = read_split_rows(config, record.task, "train")
    except InputError as error:
        raise InputError(f"prompt {name}: {error}; or {advice}") from error
    digest = summarize([example for *_, example in rows], record.task.labels).digest
    if record.splits["train"].digest != digest:
        raise InputError(
            f"prompt {name}: the training examples of {workdir} have changed since; restore them, "
            f"or {advice}"
        )
    return Rows([row for _, row, _ in rows], str(workdir))


def _format_counts(counts: Mapping[str, int]) -> str:
    parts = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name or 'none'} {count}" for name, count in parts)
