"""Predicts labels or generates text with an exported prompt: text, JSONL or stdin in, JSONL out.

Rows are read, answered and written 32 batches at a time, so memory does not depend on their number.
Each output line is the input row plus `prediction`, `score` and `scores`, or `generated`; --prefix
is put before these names. --config.generate.FIELD=VALUE changes how texts are generated, e.g. the
temperature. Blank lines stay blank. If the input has labels, the task's metric is printed to
stderr. With --format the output is a submission to a benchmark, and --output may be a
folder: the file then gets the name that the benchmark expects. With several --prompt, --column or
--route selects the prompt of each row; the prompts share one backbone and batches.
"""

import itertools
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxprompt.cli import bank, log
from jaxprompt.cli.options import Parser, path
from jaxprompt.cli.results import check_single
from jaxprompt.config.run import GenerateConfig
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.data.sources import records, submissions
from jaxprompt.data.sources.records import Record
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, check_known
from jaxprompt.files import check_output, make_folder, write_output

if TYPE_CHECKING:
    from jaxprompt.heads import Kind
    from jaxprompt.serving.stream import Predictor, Totals

# Flags that --column and --route do not take.
_ONE_PROMPT = ("sentence_encoder", "pretrained", "workdir", "format")


def main(argv: Sequence[str]) -> int:
    """Writes one JSON line for each input line: the row and its prediction."""
    parser = _make_parser()
    args, overrides = parser.read(argv)
    _check_flags(args)
    if not bank.selecting_flag(args):
        return _predict(args, overrides)
    return _predict_by_bank(parser, args, overrides)


def _make_parser() -> Parser:
    parser = Parser(__name__, __doc__, config=False)
    parser.takes_overrides = True  # of --config.generate
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
        help="for lines that cannot be read: raise = exit with code 2, without writing the file "
        'of --output (default); skip = write {"error": ...} instead',
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
    parser.add_argument(
        "--generate",
        action="store_true",
        help="generate text instead of a label; --config.generate.FIELD=VALUE changes how, e.g. "
        "--config.generate.max_new_tokens=20 (default: as in the export)",
    )
    return parser


def _check_flags(args: Namespace) -> None:
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


def _is_submission(args: Namespace) -> bool:
    return args.format != "jsonl"


def _predict(args: Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Answers the input with one prompt, and writes the answers."""
    from jaxprompt.serving.stream import one_prompt

    check_known("--format", args.format, submissions.format_names())
    prompt, metadata = _read_metadata(args)
    head = _make_head(args, metadata)
    answers = "" if head.WRITES else head.OF
    generation = bank.read_generation(metadata.generate, overrides, prompt, answers)
    name, task = "", metadata.task
    if _is_submission(args):
        name = submissions.submission_file_name(args.format, task, head.columns(task))
    # Before the weights are loaded, so that errors in the output or input are reported at once.
    output = _check_output(args, name)
    columns = _new_columns(args, head, task, generation)
    columns = () if _is_submission(args) else columns
    inputs = _read_inputs(args, output, task.input_columns, task.columns, columns)
    exported, placement = bank.open_export(
        args, prompt, sentence_encoder=args.sentence_encoder, pretrained=args.pretrained
    )
    scorer = exported.scorer
    if head.WRITES:
        scorer = scorer.writing(generation.max_new_tokens)
    predictor = one_prompt(scorer, exported.params, placement, generation)
    if not _is_submission(args):
        _write(output, _answer(args, predictor, predictor.read(inputs)))
        return 0
    texts = list(_answer_submission(args, predictor, inputs))
    if output:
        make_folder(output.parent)
    _write(output, texts)
    if output and output != Path(args.output):  # the file of a folder
        log(f"wrote {output}")
    return 0


def _answer_submission(
    args: Namespace, predictor: "Predictor", inputs: Iterable[Record]
) -> Iterator[str]:
    """Yields the file of a benchmark, which needs all answers at once."""
    from jaxprompt.serving.stream import Totals, answer_chunks, in_order, stop_at_errors

    rows = list(stop_at_errors(predictor.read(inputs), args.on_error))
    task = predictor.scorers[0].task
    submissions.check_submission(args.format, task, [row for row in rows if row.example])
    totals = Totals(predictor)
    for chunk, answers in answer_chunks(predictor, rows, len(rows), args.on_error):
        totals.add(chunk, answers)
        examples = [row for row in chunk if row.example]
        columns = list(in_order(chunk, answers))
        yield submissions.format_submission(args.format, task, examples, columns)
    _log_totals(totals)


def _answer(args: Namespace, predictor: "Predictor", rows: Iterable[Record]) -> Iterator[str]:
    """Yields the lines of a chunk at a time, and logs the progress and what was counted."""
    from jaxprompt.serving.stream import Totals, answer_chunks, in_order
    from jaxprompt.training.pace import ProgressReporter

    totals, progress = Totals(predictor), ProgressReporter(log, "predicted", None, "rows")
    for chunk, answers in answer_chunks(predictor, rows, bank.chunk_size(args), args.on_error):
        totals.add(chunk, answers)
        yield "".join(records.output_lines(chunk, in_order(chunk, answers), args.prefix))
        progress.add(len(chunk))
    _log_totals(totals)


def _log_totals(totals: "Totals") -> None:
    for line in totals.messages():
        log(line)
    try:
        metrics = totals.metrics()
    except InputError as error:  # an optional package is missing; the answers are complete
        log(str(error))
        return
    for name, (values, labelled, total) in metrics.items():
        if labelled:
            scores = ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())
            message = f"{scores} on {labelled} of {total} examples, those with a label"
            log(f"{name}: {message}" if name else message)


def _read_metadata(args: Namespace) -> tuple[str, PromptMetadata]:
    """Returns the path of the export, from --prompt or --workdir, and its metadata."""
    from jaxprompt.build.prompt_artifact import read_export
    from jaxprompt.serving.export import check_newest

    if args.prompt:
        return args.prompt[0], read_export(args.prompt[0])[1]
    check_single(args.workdir)
    prompt = str(Path(args.workdir) / "export")
    if not Path(prompt).exists():
        raise InputError(
            f"{prompt} does not exist; write it with: "
            f"python -m jaxprompt export --workdir={args.workdir}"
        )
    _, metadata = read_export(prompt)
    check_newest(args.workdir, metadata.step)
    return prompt, metadata


def _make_head(args: Namespace, metadata: PromptMetadata) -> "Kind":
    """Returns the head: that of the export, or with --generate one that generates text."""
    from jaxprompt.heads import make_head, make_text_head

    if args.generate:
        return make_text_head()
    return make_head(metadata.head.name, **metadata.head.fields)


def _predict_by_bank(parser: Parser, args: Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Answers the input with several prompts, each for the rows that name it."""
    from jaxprompt.serving.router import router_metadata
    from jaxprompt.serving.stream import several_prompts

    # A router reads texts; without one, a text has no column that names its prompt.
    bank.refuse_flags(
        parser,
        args,
        _ONE_PROMPT if args.route else ("text", *_ONE_PROMPT),
        f"is only valid for one prompt, and {bank.selecting_flag(args)} selects among several",
    )
    output, router = _check_output(args), bank.read_router(args)
    fields = router_metadata(router).columns if router else ()
    inputs = _read_inputs(args, output, fields)
    prompts = bank.open_bank(args, overrides, generate=args.generate, router=router)
    predictor = several_prompts(prompts, args.column)
    rows = _check_bank_columns(args, predictor, predictor.read(inputs))
    _write(output, _answer(args, predictor, rows))
    return 0


def _check_bank_columns(
    args: Namespace, predictor: "Predictor", rows: Iterable[Record]
) -> Iterator[Record]:
    """Yields rows; raises InputError if the columns of a row's prompt would overwrite its own."""
    from jaxprompt.serving.router import COLUMNS

    for row in rows:
        scorer = predictor.scorers[row.prompt]
        generation = predictor.generations[row.prompt]
        columns = _new_columns(args, scorer.head if row.example else None, scorer.task, generation)
        columns += () if row.confidence is None else (*COLUMNS, "error")
        yield from records.check_columns([row], columns, args.prefix)


def _new_columns(
    args: Namespace, head: "Kind | None", task: Task, generation: GenerateConfig
) -> tuple[str, ...]:
    """Returns the names of the output columns; without a head only that of errors."""
    columns = head.columns(task) if head else ()
    columns += ("tokens", "logprobs") if head and head.WRITES and generation.logprobs else ()
    return columns + (("error",) if args.on_error == "skip" else ())


def _check_output(args: Namespace, name: str = "") -> Path | None:
    """Returns the path of the output, None for stdout; in a folder the file is called `name`."""
    if not args.output:
        return None
    sources: dict[str, Path] = {}
    if _reads_file(args):
        sources = {f"--input={args.input}": Path(args.input)}
    elif not args.text:
        sources = {"stdin": Path("/dev/stdin")}
    return check_output(args.output, sources, name)


def _reads_file(args: Namespace) -> bool:
    return bool(args.input) and args.input != "-"


def _write(output: Path | None, texts: Iterable[str]) -> None:
    """Writes texts; a reader of stdout gets each at once."""
    if output is not None:
        write_output(output, texts)
        return
    for text in texts:
        sys.stdout.write(text)
        sys.stdout.flush()


def _read_inputs(
    args: Namespace,
    output: Path | None,
    fields: Sequence[str],
    names: Sequence[str] = (),
    new_columns: Sequence[str] = (),
) -> Iterator[Record]:
    """Reads the first chunk of the input, and the others when they are requested.

    Args:
      args: the flags.
      output: path of the output. If nothing is written after an error, as to a file, an error in
        the first chunk is raised at once.
      fields: fields of the task.
      names: names of the input's columns if it has none.
      new_columns: names of the columns that the input must not have.
    """
    from jaxprompt.serving.stream import in_chunks, stop_at_errors

    is_file, size = _reads_file(args), bank.chunk_size(args)
    inputs: Iterable[Record]
    if args.text:
        inputs = records.from_texts(args.text, fields, "--text")
    else:
        inputs = records.from_file(args.input, names) if is_file else records.from_stdin(fields)
    chunks = in_chunks(stop_at_errors(inputs, args.on_error), size)
    first = next(chunks, [])
    streams = output is None or (output.exists() and not output.is_file())
    if 0 < len(first) < size and (_is_submission(args) or not streams):
        next(chunks, None)  # raises the error that ended the first one, if any
    if len(first) < size and all(record.row is None and not record.error for record in first):
        raise InputError(
            f"{args.input if is_file else 'stdin'} contains no text; give at least one"
        )
    first = list(records.check_columns(first, new_columns, args.prefix))
    others = itertools.chain.from_iterable(chunks)
    return itertools.chain(first, records.check_columns(others, new_columns, args.prefix))
