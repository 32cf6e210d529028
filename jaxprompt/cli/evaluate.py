"""Scores a split with the best prompt of a workdir, zero-shot, or with the majority class.

With --prompt it scores the rows of --input with an export instead. With several prompts, --column
selects the prompt of each row, and the prompts share batches.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli import bank
from jaxprompt.cli.options import Parser, add_process_flags, join_processes, load_run
from jaxprompt.cli.unreadable import answer_encodable
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError, escape
from jaxprompt.files import dumps

_RUN_FLAGS = (
    "config", "workdir", "split", "majority", "output", "prefix",
    "coordinator", "processes", "process", "cluster", "timeout",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Prints the metrics of a split as JSON, and writes its predictions to --output."""
    parser = Parser(__name__, __doc__)
    parser.add_argument("--split", default="dev", help="train, dev or test (default: dev)")
    parser.add_argument("--output", help="JSONL output file: each row with its prediction")
    parser.add_argument("--prefix", default="", help="prefix of the names of the new columns")
    parser.add_argument(
        "--majority", action="store_true",
        help="score the most frequent class of the full training set; needs no backbone",
    )  # fmt: skip
    bank.add_serving_flags(parser)
    add_process_flags(parser)
    args, overrides = parser.read(argv)
    if args.prompt or args.column:
        bank.refuse_flags(
            parser, args, _RUN_FLAGS, "is only valid for runs, and --prompt scores exports"
        )
        print(dumps(evaluate_exports(args, overrides)))
        return 0
    bank.refuse_flags(parser, args, bank.SERVING, "is only valid with --prompt")
    config = load_run(args, overrides)
    if args.majority:
        print(dumps(majority(config, args.split, args.output)))
        return 0
    with join_processes(args) as is_first:
        metrics = evaluate(config, args.workdir, args.split, args.output, args.prefix)
        if is_first:
            print(dumps(metrics))
    return 0


def evaluate(
    config: RunConfig, workdir: str | None, split: str, output: str | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Returns the metrics of a split, and writes its rows to `output` in the format of `predict`.

    Raises:
      InputError: if the split is unknown or missing.
    """
    from jaxprompt.build.evaluation import make_evaluate_fn
    from jaxprompt.build.examples import data_files
    from jaxprompt.build.task import cache_shared_prefix
    from jaxprompt.files import check_output
    from jaxprompt.parallel import processes
    from jaxprompt.parallel.compilation import enable_compilation_cache
    from jaxprompt.runs.restore import is_zero_shot, restore_run

    _check_split(split)
    if not is_zero_shot(config) and workdir is None:
        raise InputError("--workdir is missing; see --help")
    path = processes.run_on_first(
        lambda: check_output(output, data_files(config)) if output else None
    )
    enable_compilation_cache(config.train.compilation_cache)
    trained = restore_run(config, workdir or "", [split])  # zero-shot reads no workdir
    if split not in trained.splits:
        raise InputError(
            f"task {trained.scorer.task.name} has no {split} split here; give data.files.{split}"
        )
    # Only a message, and the split is scored: the files may have been fixed since.
    for line in trained.changed_splits if processes.is_first() else ():
        print(escape(line), file=sys.stderr)
    scorer, examples = cache_shared_prefix(config, trained.scorer), trained.splits[split]
    # Before anything is scored: rows with a column of that name are refused at once.
    records = _read_records(config, scorer, split, prefix) if output else []
    judge = make_evaluate_fn(config, scorer, trained.placement)
    metrics, scores = judge(examples, trained.weights.trainable, trained.weights.frozen)
    if path:
        _write_records(path, scorer, records, examples, scores, prefix)
    return {"split": split, "examples": examples.size, **metrics}


def evaluate_exports(args: Any, overrides: Sequence[Any]) -> dict[str, Any]:
    """Scores rows with one export or several.

    Returns:
      The metrics; for several exports by the name of each prompt.

    Raises:
      InputError: for config fields, for a row that cannot be read, and if no row has a label.
    """
    from jaxprompt.data.sources.records import from_file, from_stdin

    if overrides:
        raise InputError("--prompt scores exports, which contain their config; remove --config.*")
    if not (args.prompt and args.input):
        raise InputError("--prompt and --input must be given together; give both")
    bank.check_serving_flags(args)

    def read(columns: Sequence[str]) -> Sequence[Any]:
        return from_stdin(()) if args.input == "-" else from_file(args.input, columns)

    metrics = _measure_bank(args, read(())) if args.column else _measure_export(args, read)
    if not metrics:
        raise InputError(
            f"{args.input}: no row has a known label of its prompt's task; add labelled rows"
        )
    return metrics


def _measure_bank(args: Any, records: Sequence[Any]) -> dict[str, Any]:
    from jaxprompt.serving.bank import read_requests

    prompts = bank.open_bank(args)
    requests = read_requests(prompts, records, args.column)
    _raise_error([record for _, record in requests])
    metrics = bank.answer_requests(prompts, requests)[1]
    return metrics if any(values["examples"] for values in metrics.values()) else {}


def _measure_export(args: Any, read: Any) -> dict[str, Any]:
    from jaxprompt.build.prompt_artifact import read_export
    from jaxprompt.data.sources.records import unknown_label_messages, with_examples
    from jaxprompt.serving.answers import make_answers, mark_errors

    (path,) = args.prompt
    metadata = read_export(path)[1]
    generation = metadata.generate
    records = read(metadata.task.columns)
    exported, placement = bank.open_export(args, path)
    scorer = exported.scorer
    if scorer.head.WRITES:
        scorer = scorer.writing(generation.max_new_tokens)
    records = with_examples(scorer.task, records)
    _raise_error(records)
    for line in unknown_label_messages(scorer.task, records):
        print(escape(line), file=sys.stderr)
    answer = make_answers(scorer, generation=generation, placement=placement)

    def mark(records: Sequence[Any]) -> Sequence[Any]:
        marked = mark_errors(scorer, records)
        _raise_error(marked)
        return marked

    def answer_records(records: Sequence[Any]) -> Any:
        return answer(exported.params, _examples(records))

    if not _examples(records):
        return {}
    _, answers = answer_encodable(answer_records, mark, records)
    return {"examples": answers.num_labelled, **answers.measured} if answers.num_labelled else {}


def _examples(records: Sequence[Any]) -> list[Any]:
    return [record.example for record in records if record.example]


def _raise_error(records: Sequence[Any]) -> None:
    for record in records:
        if record.error:
            raise InputError(record.error)


def majority(config: RunConfig, split: str, output: str | None) -> dict[str, Any]:
    """Scores the majority baseline. Raises InputError if predictions are requested, too."""
    from jaxprompt.runs.majority import measure_majority

    _check_split(split)
    if output:
        raise InputError(
            f"--majority predicts one class for all examples; remove --output={output}"
        )
    return measure_majority(config, split)


def _check_split(split: str) -> None:
    from jaxprompt.build.examples import SPLITS

    if split not in SPLITS:
        raise InputError(f"--split={split!r} is unknown; known: {', '.join(SPLITS)}")


def _read_records(config: RunConfig, scorer: Any, split: str, prefix: str) -> list[Any]:
    """Reads the rows for --output; none may have a column with the name of a new column."""
    from jaxprompt.build.examples import read_split_rows
    from jaxprompt.data.sources.records import Record, check_columns

    rows = read_split_rows(config, scorer.task, split)
    records = [Record(origin, row, example=example) for origin, row, example in rows]
    check_columns(records, scorer.head.columns(scorer.task), prefix)
    return records


def _write_records(
    path: Path, scorer: Any, records: Sequence[Any], split: Any, scores: Any, prefix: str
) -> None:
    from jaxprompt.data.sources.records import output_lines
    from jaxprompt.data.tasks.readers.dialogues import indices_of_last_turns
    from jaxprompt.files import write_output

    examples = [record.example for record in records]
    if split.size > len(records):  # f1c is scored turn by turn; a row is answered by its last one
        ends = indices_of_last_turns(scorer.task, ((r.origin, r.row, r.example) for r in records))
        split, scores = split._replace(counts=split.counts[ends]), scores[ends]
    answers = scorer.answers(examples, split, scores)
    write_output(path, "".join(output_lines(records, answers, prefix)))
