"""Scores a split with the best prompt of a workdir, zero-shot, or with the majority class.

With --prompt it scores the rows of --input with an export instead. With several prompts, --column
selects the prompt of each row, and the prompts share batches.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli import bank
from jaxprompt.cli.options import Parser, add_hosts, load_run, several_hosts
from jaxprompt.cli.unreadable import answer_encodable
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError, escape
from jaxprompt.files import dumps

_OF_RUNS = (
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
    bank.add_serving(parser)
    add_hosts(parser)
    args, overrides = parser.read(argv)
    if args.prompt or args.column:
        bank.refuse_flags(
            parser, args, _OF_RUNS, "is only valid for runs, and --prompt scores exports"
        )
        print(dumps(evaluate_exports(args, overrides)))
        return 0
    bank.refuse_flags(parser, args, bank.SERVING, "is only valid with --prompt")
    config = load_run(args, overrides)
    if args.majority:
        print(dumps(majority(config, args.split, args.output)))
        return 0
    with several_hosts(args) as is_first:
        measured = evaluate(config, args.workdir, args.split, args.output, args.prefix)
        if is_first:
            print(dumps(measured))
    return 0


def evaluate(
    config: RunConfig, workdir: str | None, split: str, output: str | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Returns the metrics of a split, and writes its rows to `output` in the format of `predict`.

    Raises:
      InputError: if the split is unknown or missing.
    """
    from jaxprompt.build.evaluation import build_judge
    from jaxprompt.build.examples import data_files
    from jaxprompt.build.task import share_front
    from jaxprompt.files import check_output
    from jaxprompt.parallel import processes
    from jaxprompt.parallel.compilation import keep_programs
    from jaxprompt.runs.restore import is_zero_shot, restore_run

    _check_split(split)
    if not is_zero_shot(config) and workdir is None:
        raise InputError("--workdir is missing; see --help")
    place = processes.on_first(lambda: check_output(output, data_files(config)) if output else None)
    keep_programs(config.train.compilation_cache)
    trained = restore_run(config, workdir or "", [split])  # zero-shot reads no workdir
    if split not in trained.splits:
        raise InputError(
            f"task {trained.scorer.task.name} has no {split} split here; give data.files.{split}"
        )
    # Scored all the same, with a message: the files may have been fixed since.
    for line in trained.changed_splits if processes.is_first() else ():
        print(escape(line), file=sys.stderr)
    scorer, part = share_front(config, trained.scorer), trained.splits[split]
    # Before anything is scored: rows with a column of that name are refused at once.
    records = _read(config, scorer, split, prefix) if output else []
    judge = build_judge(config, scorer, trained.placement)
    measured, found = judge(part, trained.weights.trainable, trained.weights.frozen)
    if place:
        _write(place, scorer, records, part, found, prefix)
    return {"split": split, "examples": part.size, **measured}


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
    bank.check_serving(args)
    read = lambda columns: from_stdin(()) if args.input == "-" else from_file(args.input, columns)
    measured = _measure_bank(args, read(())) if args.column else _measure_export(args, read)
    if not measured:
        raise InputError(
            f"{args.input}: no row has a known label of its prompt's task; add labelled rows"
        )
    return measured


def _measure_bank(args: Any, given: Sequence[Any]) -> dict[str, Any]:
    from jaxprompt.serving.bank import read_requests

    prompts = bank.open_bank(args)
    requests = read_requests(prompts, given, args.column)
    _refuse([record for _, record in requests])
    measured = bank.answer_asked(prompts, requests)[1]
    return measured if any(own["examples"] for own in measured.values()) else {}


def _measure_export(args: Any, read: Any) -> dict[str, Any]:
    from jaxprompt.build.prompt_artifact import read_export
    from jaxprompt.data.sources.records import tell_unknown, with_examples
    from jaxprompt.serving.answers import make_answers, mark_errors

    (where,) = args.prompt
    metadata = read_export(where)[1]
    generation = metadata.generate
    given = read(metadata.task.columns)
    exported, placement = bank.open_export(args, where)
    scorer = exported.scorer
    if scorer.head.WRITES:
        scorer = scorer.writing(generation.max_new_tokens)
    given = with_examples(scorer.task, given)
    _refuse(given)
    for line in tell_unknown(scorer.task, given):
        print(escape(line), file=sys.stderr)
    answer = make_answers(scorer, generation=generation, placement=placement)

    def mark(given: Sequence[Any]) -> Sequence[Any]:
        marked = mark_errors(scorer, given)
        _refuse(marked)
        return marked

    asked = lambda given: [record.example for record in given if record.example]
    if not asked(given):
        return {}
    _, found = answer_encodable(lambda given: answer(exported.params, asked(given)), mark, given)
    return {"examples": found.known, **found.measured} if found.known else {}


def _refuse(records: Sequence[Any]) -> None:
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


def _read(config: RunConfig, scorer: Any, split: str, prefix: str) -> list[Any]:
    """Reads the rows for --output; none may have a column with the name of a new column."""
    from jaxprompt.build.examples import read_rows
    from jaxprompt.data.sources.records import Record, check_columns

    found = read_rows(config, scorer.task, split)
    records = [Record(origin, row, example=own) for origin, row, own in found]
    check_columns(records, scorer.head.columns(scorer.task), prefix)
    return records


def _write(
    place: Path, scorer: Any, records: Sequence[Any], split: Any, found: Any, prefix: str
) -> None:
    from jaxprompt.data.sources.records import to_lines
    from jaxprompt.data.tasks.readers.dialogues import last_turns
    from jaxprompt.files import write_output

    examples = [record.example for record in records]
    if split.size > len(records):  # f1c is scored turn by turn; a row is answered by its last one
        ends = last_turns(scorer.task, ((r.origin, r.row, r.example) for r in records))
        split, found = split._replace(counts=split.counts[ends]), found[ends]
    answers = scorer.answers(examples, split, found)
    write_output(place, "".join(to_lines(records, answers, prefix)))
