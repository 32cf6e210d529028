"""Predicts labels or generates text with an exported prompt: text, JSONL or stdin in, JSONL out.

Each output line is the input row plus `prediction`, `score` and `scores`, or `generated`; --prefix
is put before these names. Blank lines stay blank. If the input has labels, the task's metric is
printed to stderr. With --format the output is a submission to a benchmark, and --output may be a
folder: the file then gets the name that the benchmark expects. With several --prompt, --column
selects the prompt of each row; the prompts share one backbone and batches.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxprompt.cli import bank, log
from jaxprompt.cli.options import Parser, path, whole
from jaxprompt.cli.results import check_single
from jaxprompt.config.run import GenerateConfig
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.data.sources import records, submissions
from jaxprompt.data.text.overview import unmarked_messages
from jaxprompt.errors import InputError, at_least, check_known
from jaxprompt.files import check_output, make_folder, write_output

if TYPE_CHECKING:
    from jaxprompt.heads import Kind

# Flags that --column does not take.
_ONE_PROMPT = (
    "generate", "max_new_tokens", "text", "sentence_encoder", "pretrained", "workdir", "format",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Writes one JSON line for each input line: the row and its prediction."""
    parser = _make_parser()
    args, _ = parser.read(argv)
    _check_flags(args)
    return _predict_by_bank(parser, args) if args.column else _predict(args)


def _make_parser() -> Parser:
    parser = Parser(__name__, __doc__, config=False)
    bank.add_serving_flags(parser, "WORKDIR/export")
    parser.add_argument("--workdir", type=path, help="folder of the run that was exported")
    parser.add_argument("--text", action="append", help="input text; may be repeated")
    parser.add_argument("--output", type=path, help="JSONL output file (default: stdout)")
    parser.add_argument(
        "--format",
        default="jsonl",
        help="jsonl (default), or a submission to a benchmark: glue, superglue, squad",
    )
    parser.add_argument("--prefix", default="", help="prefix of the names of the new columns")
    parser.add_argument(
        "--on-error",
        default="raise",
        choices=("raise", "skip"),
        help="for lines that cannot be read: raise = exit with code 2 and write nothing (default); "
        'skip = write {"error": ...} instead',
    )
    parser.add_argument(
        "--sentence-encoder",
        default="",
        help="path of the encoder that selects similar demonstrations (default: as in the export)",
    )
    parser.add_argument(
        "--pretrained",
        default="",
        help="path of the export that the prompt depends on (default: as in the export)",
    )
    parser.add_argument("--generate", action="store_true", help="generate text instead of a label")
    parser.add_argument(
        "--max-new-tokens",
        type=whole,
        help="maximum number of new tokens (default: as in the export)",
    )
    return parser


def _check_flags(args: Any) -> None:
    """Raises InputError for flags that are missing or cannot be combined."""
    if not (args.prompt or args.workdir):
        raise InputError("--prompt or --workdir is missing; see --help")
    if args.text and args.input:
        raise InputError("give --text or --input, not both")
    bank.check_serving_flags(args)
    if _is_submission(args) and (args.generate or args.prefix or args.on_error == "skip"):
        raise InputError(
            f"--format={args.format} writes a submission to a benchmark, which does not support "
            "--generate, --prefix and --on-error=skip; remove these"
        )


def _is_submission(args: Any) -> bool:
    return args.format != "jsonl"


def _predict(args: Any) -> int:
    """Answers the input with one prompt, and writes the answers."""
    check_known("--format", args.format, submissions.format_names())
    prompt, metadata = _read_metadata(args)
    head, generation = _make_head(args, prompt, metadata)
    name, task = "", metadata.task
    if _is_submission(args):
        name = submissions.submission_file_name(args.format, task, head.columns(task))
    # Before the weights are loaded, so that errors in the output or input are reported at once.
    output = _check_output(args, name)
    inputs = _read_texts(args, task.fields, task.columns)
    if not _is_submission(args):
        records.check_columns(inputs, head.columns(task) + _error_columns(args), args.prefix)
    exported, placement = bank.open_export(
        args, prompt, sentence_encoder=args.sentence_encoder, pretrained=args.pretrained
    )
    if head.WRITES:
        exported = exported._replace(scorer=exported.scorer.writing(generation.max_new_tokens))
    task = exported.scorer.task
    # Some rows become several examples, each with its own line.
    inputs = records.with_examples(task, inputs)
    bank.raise_first(inputs, args.on_error)
    for line in records.unknown_label_messages(task, inputs):
        log(line)
    if _is_submission(args):
        submissions.check_submission(args.format, task, _with_example(inputs))
    inputs, answers = bank.answer_records(exported, placement, generation, inputs, args.on_error)
    for line in _answer_messages(answers, exported.scorer.layout.max_len) if answers else ():
        log(line)
    columns = answers.columns if answers else []
    bank.report_errors(inputs)
    if _is_submission(args):
        lines = submissions.format_submission(args.format, task, _with_example(inputs), columns)
    else:
        lines = "".join(records.output_lines(inputs, columns, args.prefix))
    if name and output:
        make_folder(output.parent)
    _write(output, lines)
    if output and output != Path(args.output):  # the file of a folder
        log(f"wrote {output}")
    return 0


def _read_metadata(args: Any) -> tuple[str, PromptMetadata]:
    """Returns the path of the export, from --prompt or --workdir, and its metadata."""
    from jaxprompt.build.prompt_artifact import read_export
    from jaxprompt.serving.export import check_newest

    if args.prompt:
        return args.prompt[0], read_export(args.prompt[0])[1]
    check_single(args.workdir)
    prompt = str(Path(args.workdir) / "export")
    _, metadata = read_export(prompt)
    check_newest(args.workdir, metadata.step)
    return prompt, metadata


def _make_head(args: Any, prompt: str, metadata: PromptMetadata) -> "tuple[Kind, GenerateConfig]":
    """Returns the head, and the generation config with --max-new-tokens applied."""
    from jaxprompt.heads import make_head, make_text_head

    head = (
        make_text_head() if args.generate else make_head(metadata.head.name, **metadata.head.fields)
    )
    if args.max_new_tokens is not None and not head.WRITES:
        raise InputError(
            f"--max-new-tokens={args.max_new_tokens} is only valid for generated texts, "
            f"and {prompt} predicts {head.OF}; remove it"
        )
    generation = metadata.generate
    if args.max_new_tokens is not None:
        generation = dataclasses.replace(generation, max_new_tokens=args.max_new_tokens)
    at_least("--max-new-tokens", generation.max_new_tokens, 1)
    return head, generation


def _with_example(inputs: Sequence[Any]) -> list[Any]:
    return [record for record in inputs if record.example]


def _predict_by_bank(parser: Parser, args: Any) -> int:
    """Answers the input with several prompts, each for the rows that name it."""
    bank.refuse_flags(
        parser,
        args,
        _ONE_PROMPT,
        f"is only valid for one prompt, and --column={args.column} selects among several",
    )

    from jaxprompt.serving.bank import in_order, mark_requests, read_requests

    output = _check_output(args)
    inputs = _read_texts(args, ())
    prompts = bank.open_bank(args)
    requests = read_requests(prompts, inputs, args.column)
    for number, record in requests:
        columns: tuple[str, ...] = ()
        if number >= 0:
            scorer = prompts.scorers[number]
            columns = scorer.head.columns(scorer.task)
        records.check_columns([record], columns + _error_columns(args), args.prefix)
    bank.raise_first([record for _, record in requests], args.on_error)

    def mark(requests: Sequence[Any]) -> Sequence[Any]:
        requests = mark_requests(prompts, requests)
        bank.raise_first([record for _, record in requests], args.on_error)
        return requests

    answer = functools.partial(bank.answer_requests, prompts)
    requests, (answers, metrics) = bank.answer_encodable(answer, mark, requests)
    bank.report_errors([record for _, record in requests])
    for name, values in metrics.items():
        examples = values.pop("examples")
        total = len(answers[prompts.names.index(name)].columns)
        if examples:
            log(f"{name}: {_format_scores(values, examples, total)}")
    rows = [record for _, record in requests]
    lines = records.output_lines(rows, in_order(requests, answers), args.prefix)
    _write(output, "".join(lines))
    return 0


def _error_columns(args: Any) -> tuple[str, ...]:
    return ("error",) if args.on_error == "skip" else ()


def _check_output(args: Any, name: str = "") -> Path | None:
    """Returns the path of the output, None for stdout; in a folder the file is called `name`."""
    if not args.output:
        return None
    sources: dict[str, Path] = {}
    if _reads_file(args):
        sources = {f"--input={args.input}": Path(args.input)}
    elif not args.text:
        sources = {"stdin": Path("/dev/stdin")}
    return check_output(args.output, sources, name)


def _reads_file(args: Any) -> bool:
    return bool(args.input) and args.input != "-"


def _write(output: Path | None, lines: str) -> None:

    if output is None:
        sys.stdout.write(lines)
    else:
        write_output(output, lines)


def _answer_messages(answers: Any, max_len: int) -> Iterator[str]:
    """Yields messages: how many texts were truncated, and the metrics if there are labels."""
    total = len(answers.columns)
    if answers.cut:
        yield f"texts cut to {max_len} tokens: {answers.cut} of {total}"
    yield from unmarked_messages({"the input": (answers.unmarked, total)})
    if answers.num_labelled:
        yield _format_scores(answers.measured, answers.num_labelled, total)


def _format_scores(values: Mapping[str, float], examples: int, total: int) -> str:
    scores = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    return f"{scores} on {examples} of {total} examples, those with a label"


def _read_texts(args: Any, fields: Sequence[str], columns: Sequence[str] = ()) -> list[Any]:

    if args.text:
        return records.from_texts(args.text, fields, "--text")
    is_file = _reads_file(args)
    inputs = records.from_file(args.input, columns) if is_file else records.from_stdin(fields)
    if all(record.row is None and not record.error for record in inputs):
        raise InputError(
            f"{args.input if is_file else 'stdin'} contains no text; give at least one"
        )
    bank.raise_first(inputs, args.on_error)
    return inputs
