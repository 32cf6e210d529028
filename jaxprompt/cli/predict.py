"""Labels texts, or writes on, with an exported prompt: texts, JSONL or stdin in, JSONL out.

Each line of the output is the row of the input with `prediction`, `score` and `scores` behind it,
or with `generated`; --prefix names these otherwise. A blank line stays blank. Where the input has
labels, the task's metric is told on stderr. With --format the output is what a benchmark's server
takes, and --output may be a folder: the file has the benchmark's name for it. With several --prompt
a row's --column says which it takes: they share one backbone, and batches.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli import bank, unreadable
from jaxprompt.cli.options import Parser
from jaxprompt.cli.results import check_single
from jaxprompt.errors import InputError, at_least, choose, escape

ON_ERROR = ("raise", "skip")


def main(argv: Sequence[str]) -> int:
    """Writes one JSON line for each line of the input: its row and what is predicted of it."""
    parser = Parser(__name__, __doc__, config=False)
    bank.add_serving(parser, "WORKDIR/export")
    parser.add_argument("--workdir", help="folder of the run that was exported")
    parser.add_argument("--text", action="append", help="a text; may be given several times")
    parser.add_argument("--output", help="JSONL file to write (default: stdout)")
    parser.add_argument(
        "--format", default="jsonl", help="jsonl (the default), or a submission to a benchmark: "
        "glue, superglue, squad",
    )  # fmt: skip
    parser.add_argument("--prefix", default="", help="put before the names of the new columns")
    parser.add_argument(
        "--on-error", default="raise",
        help="what cannot be read: raise = exit with 2 and write nothing (the default); "
        'skip = {"error": ...} in its place',
    )  # fmt: skip
    parser.add_argument(
        "--sentence-encoder", default="", help="what compares sentences to choose demonstrations, "
        "if not where the card says",
    )  # fmt: skip
    parser.add_argument(
        "--pretrained", default="", help="export that the prompt depends on, if not where the "
        "card says",
    )  # fmt: skip
    parser.add_argument("--generate", action="store_true", help="write a text instead of a label")
    parser.add_argument(
        "--max-new", type=int, help="tokens of a written text at most (default: the card's)"
    )
    args, overrides = parser.read(argv)
    if overrides:
        raise InputError("predict takes no --config: the exported card says all")
    if not (args.prompt or args.workdir):
        raise InputError("--prompt or --workdir is missing; see --help")
    if args.text and args.input:
        raise InputError("give --text or --input, not both")
    bank.check_serving(args)
    choose("--on-error", args.on_error, ON_ERROR)
    is_submission = args.format != "jsonl"
    if is_submission and (args.generate or args.prefix or args.on_error == "skip"):
        raise InputError(
            f"--format={args.format} is a submission to a benchmark, which has no --generate, "
            "--prefix or --on-error=skip; leave these out"
        )

    if args.column:
        return _predict_by_bank(args)

    from jaxprompt.build.prompt_artifact import read_export
    from jaxprompt.data.sources import records, submissions
    from jaxprompt.data.tasks.registry import task_from_json
    from jaxprompt.files import make_folder
    from jaxprompt.heads import make_head, writer
    from jaxprompt.serving.answers import make_answers, mark_errors
    from jaxprompt.serving.export import check_newest

    choose("--format", args.format, submissions.formats())
    if not args.prompt:
        check_single(args.workdir)
    where = args.prompt[0] if args.prompt else str(Path(args.workdir) / "export")
    _, card = read_export(where)
    if not args.prompt:
        check_newest(args.workdir, card)
    head = writer() if args.generate else make_head(**card["head"])
    if args.max_new is not None and not head.WRITES:
        raise InputError(f"--max-new={args.max_new} is of texts; {where} answers {head.OF}")
    how = card["generate"] | ({} if args.max_new is None else {"max_new": args.max_new})
    at_least("--max-new", how["max_new"], 1)
    errors = ("error",) if args.on_error == "skip" else ()
    name, task = "", task_from_json(card["task"])
    if is_submission:
        name = submissions.file_name(args.format, task, head.columns(task))
    # Before the weights: what is wrong with the output or the input is told at once.
    place = _check_output(args, name)
    given = _read_texts(args, card["task"]["fields"], card["task"]["columns"])
    if not is_submission:
        records.check_columns(given, head.columns(task) + errors, args.prefix)
    exported, placement = bank.open_export(
        args, where, sentence_encoder=args.sentence_encoder, pretrained=args.pretrained
    )
    scorer = exported.scorer
    if head.WRITES:
        scorer = scorer.writing(how["max_new"])
    # Rows of which some become several examples: each of these has a line of its own.
    given = records.with_examples(scorer.task, given)
    unreadable.raise_first(given, args.on_error)
    for line in records.tell_unknown(scorer.task, given):
        _say(line)
    asked = [record for record in given if record.example]
    if is_submission:
        submissions.check(args.format, scorer.task, asked)
    answers = []
    if asked:
        answer = make_answers(scorer, how=how, placement=placement)

        def answer_all(given: Sequence[Any]) -> Any:
            asked = [record.example for record in given if record.example]
            return answer(exported.params, asked) if asked else None

        def mark(given: Sequence[Any]) -> Sequence[Any]:
            given = mark_errors(scorer, given, how)
            unreadable.raise_first(given, args.on_error)
            return given

        given, found = unreadable.answer_encodable(answer_all, mark, given)
        if found:
            for line in _tell(found, scorer.layout.max_len, len(found.columns)):
                _say(line)
            answers = found.columns
    unreadable.report(given)
    if is_submission:
        lines = submissions.write(args.format, scorer.task, asked, answers)
    else:
        lines = "".join(records.to_lines(given, answers, args.prefix))
    if name and place:
        make_folder(place.parent)
    _write(place, lines)
    if place and place != Path(args.output):  # the file of a folder
        _say(f"wrote {place}")
    return 0


def _predict_by_bank(args: Any) -> int:
    """Does the same with several prompts, each for the rows that name it."""
    for flag in ("generate", "max_new", "text", "sentence_encoder", "pretrained", "workdir"):
        if getattr(args, flag):
            raise InputError(
                f"--{flag.replace('_', '-')} is of one prompt, and --column={args.column} picks "
                "among several; leave one of the two out"
            )
    if args.format != "jsonl":
        raise InputError(f"--format={args.format} is of one task; predict it by itself")

    from jaxprompt.data.sources import records
    from jaxprompt.serving.bank import in_order, mark_asked, read_asked

    place = _check_output(args)
    given = _read_texts(args, ())
    prompts = bank.open_bank(args)
    asked = read_asked(prompts, given, args.column)
    errors = ("error",) if args.on_error == "skip" else ()
    for number, record in asked:
        columns: tuple[str, ...] = ()
        if number >= 0:
            scorer = prompts.scorers[number]
            columns = scorer.head.columns(scorer.task)
        records.check_columns([record], columns + errors, args.prefix)
    unreadable.raise_first([record for _, record in asked], args.on_error)

    def mark(asked: Sequence[Any]) -> Sequence[Any]:
        asked = mark_asked(prompts, asked)
        unreadable.raise_first([record for _, record in asked], args.on_error)
        return asked

    answer = functools.partial(bank.answer_asked, prompts)
    asked, (answers, measured) = unreadable.answer_encodable(answer, mark, asked)
    unreadable.report([record for _, record in asked])
    for name, found in measured.items():
        if not found["examples"]:
            continue
        total = len(answers[prompts.names.index(name)].columns)
        shown = ", ".join(f"{key} {x:.4f}" for key, x in found.items() if key != "examples")
        _say(f"{name}: {shown} on {found['examples']} of {total} examples, those with a label")
    own = in_order(asked, answers)
    _write(place, "".join(records.to_lines([r for _, r in asked], own, args.prefix)))
    return 0


def _check_output(args: Any, name: str = "") -> Path | None:
    """Makes the path of the output, in a folder by `name`; None is stdout."""
    from jaxprompt.files import check_output, user_path

    if not args.output:
        return None
    sources: dict[str, Path] = {}
    if _reads_file(args):
        sources = {f"--input={args.input}": user_path(args.input)}
    elif not args.text:
        sources = {"stdin": Path("/dev/stdin")}
    return check_output(args.output, sources, name)


def _reads_file(args: Any) -> bool:
    return bool(args.input) and args.input != "-"


def _write(place: Path | None, lines: str) -> None:
    from jaxprompt.files import write_output

    if place is None:
        sys.stdout.write(lines)
    else:
        write_output(place, lines)


def _tell(found: Any, length: int, total: int) -> Iterator[str]:
    """Says how many texts were cut, and how good the answers are where that is known."""
    from jaxprompt.data.text.overview import tell_unmarked

    if found.cut:
        yield f"texts cut to {length} tokens: {found.cut} of {total}"
    yield from tell_unmarked({"the input": (found.unmarked, total)})
    if found.known:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.measured.items())
        yield f"{shown} on {found.known} of {total} examples, those with a label"


def _say(line: str) -> None:
    print(escape(line), file=sys.stderr)


def _read_texts(args: Any, fields: Sequence[str], columns: Sequence[str] = ()) -> list[Any]:
    from jaxprompt.data.sources import records

    if args.text:
        return records.from_texts(args.text, fields, "--text")
    is_file = _reads_file(args)
    given = records.from_file(args.input, columns) if is_file else records.from_stdin(fields)
    if all(record.row is None and not record.error for record in given):
        raise InputError(f"{args.input if is_file else 'stdin'} holds no text; give at least one")
    unreadable.raise_first(given, args.on_error)
    return given
