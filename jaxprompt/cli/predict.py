"""Labels texts, or writes on, with an exported prompt: texts, JSONL or stdin in, JSONL out.

Each line of the output is the row of the input with `prediction`, `score` and `scores` behind it,
or with `generated`; --prefix names these otherwise. A blank line stays blank. Where the input has
labels, the task's metric is told on stderr.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli.options import Parser
from jaxprompt.cli.results import check_single
from jaxprompt.errors import InputError, choose, escape

ON_ERROR = ("raise", "skip")


def main(argv: Sequence[str]) -> int:
    """Writes one JSON line for each line of the input: its row and what is predicted of it."""
    parser = Parser(__doc__, config=False)
    parser.add_argument("--prompt", help="folder of an export (default: WORKDIR/export)")
    parser.add_argument("--workdir", help="folder of the run that was exported")
    parser.add_argument("--text", action="append", help="a text; may be given several times")
    parser.add_argument(
        "--input", help="JSONL, CSV, TSV, JSON or Parquet file, - = stdin (default without --text)"
    )
    parser.add_argument("--output", help="JSONL file to write (default: stdout)")
    parser.add_argument("--prefix", default="", help="put before the names of the new columns")
    parser.add_argument(
        "--on-error", default="raise",
        help="what cannot be read: raise = exit with 2 and write nothing (the default); "
        'skip = {"error": ...} in its place',
    )  # fmt: skip
    parser.add_argument("--backbone", default="", help="backbone, if not where the card says")
    parser.add_argument(
        "--sentence-encoder", default="", help="what compares sentences to choose demonstrations, "
        "if not where the card says",
    )  # fmt: skip
    parser.add_argument(
        "--pretrained", default="", help="export that the prompt depends on, if not where the "
        "card says",
    )  # fmt: skip
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=64, help="examples a batch (default: 64)")
    parser.add_argument("--mesh", default="1x1", help="devices, data x model (default: 1x1)")
    parser.add_argument("--generate", action="store_true", help="write a text instead of a label")
    parser.add_argument("--force", action="store_true", help="accept other backbone weights")
    args, overrides = parser.read(argv)
    if overrides:
        raise InputError("predict takes no --config: the exported card says all")
    if not (args.prompt or args.workdir):
        raise InputError("--prompt or --workdir is missing; see --help")
    if args.text and args.input:
        raise InputError("give --text or --input, not both")
    if args.batch < 1:
        raise InputError(f"--batch={args.batch} must be at least 1")
    choose("--on-error", args.on_error, ON_ERROR)

    from jaxprompt.assembly.answers import make_answers
    from jaxprompt.assembly.prompt_artifact import read_export, unpack
    from jaxprompt.data import records
    from jaxprompt.data.tasks import task_from_json
    from jaxprompt.files import write_atomic
    from jaxprompt.heads import make_head, writer

    if not args.prompt:
        check_single(args.workdir)
    where = args.prompt or str(Path(args.workdir) / "export")
    _, card = read_export(where)
    given = _read(args, card["task"]["fields"])
    head = writer() if args.generate else make_head(**card["head"])
    errors = ("error",) if args.on_error == "skip" else ()
    columns = head.columns(task_from_json(card["task"]))
    records.check_columns(given, columns + errors, args.prefix)
    block = dict(
        path=args.backbone, revision="", init="", family="", dtype=args.dtype, stack="scan",
        remat="none", attention="auto", dropout=None, sentinel="", rescale=1.0,
    )  # fmt: skip
    placement = _placement(args.mesh, args.batch)
    exported = unpack(
        where, backbone=block, batch=args.batch, placement=placement, force=args.force,
        sentence_encoder=args.sentence_encoder, pretrained=args.pretrained,
    )  # fmt: skip
    scorer = exported.scorer
    if head.WRITES:
        scorer = scorer.writing(card["generate"]["max_new"])
    given = records.with_examples(scorer.task, given)
    _check(given, args.on_error)
    for line in records.tell_unknown(scorer.task, given):
        _say(line)
    examples = [record.example for record in given if record.example]
    answers = []
    if examples:
        answer = make_answers(scorer, how=card["generate"], placement=placement)
        found = answer(exported.params, examples)
        for line in _tell(found, scorer.layout.max_len, len(examples)):
            _say(line)
        answers = found.columns
    lines = "".join(records.to_lines(given, answers, args.prefix))
    if args.output:
        write_atomic(args.output, lines)
    else:
        sys.stdout.write(lines)
    return 0


def _tell(found: Any, length: int, total: int) -> Iterator[str]:
    """Says how many texts were cut, and how good the answers are where that is known."""
    from jaxprompt.data.overview import tell_unmarked

    if found.cut:
        yield f"texts cut to {length} tokens: {found.cut} of {total}"
    yield from tell_unmarked({"the input": (found.unmarked, total)})
    if found.known:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.measured.items())
        yield f"{shown} on {found.known} of {total} examples, those with a label"


def _say(line: str) -> None:
    print(escape(line), file=sys.stderr)


def _placement(mesh: str, batch: int) -> Any:
    from jaxprompt.parallel.sharding import make_placement

    sizes = mesh.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
        raise InputError(f"--mesh={mesh!r} must be DATAxMODEL, as in 2x4")
    placement = make_placement(*map(int, sizes))
    if batch % int(sizes[0]):
        raise InputError(f"--batch={batch} does not divide over the {sizes[0]} of --mesh={mesh}")
    return placement


def _read(args: Any, fields: Sequence[str]) -> list[Any]:
    from jaxprompt.data import records

    if args.text:
        return records.from_texts(args.text, fields)
    is_file = args.input and args.input != "-"
    given = records.from_file(args.input) if is_file else records.from_stdin(fields)
    if all(record.row is None and not record.error for record in given):
        raise InputError(f"{args.input if is_file else 'stdin'} holds no text; give at least one")
    if args.on_error == "raise":
        _check(given, "raise")
    return given


def _check(given: Sequence[Any], on_error: str) -> None:
    """Raises the first error of the input, or says how many there are."""
    broken = [record.error for record in given if record.error]
    if broken and on_error == "raise":
        raise InputError(f"{broken[0]}; --on-error=skip predicts the others")
    if broken:
        _say(f"{len(broken)} of {len(given)} lines cannot be read, the first is {broken[0]}")
