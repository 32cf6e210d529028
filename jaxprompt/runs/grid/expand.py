"""The runs of a grid config, and which of them can train as one program."""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt.build.check import check_config, check_packages
from jaxprompt.build.demonstrations import has_demos
from jaxprompt.build.method import drop_ignored_fields, get_head, prompt_starts
from jaxprompt.config.kinds import Value
from jaxprompt.config.run import GridConfig, RunConfig
from jaxprompt.errors import InputError
from jaxprompt.scoring.metrics import selection_score
from jaxprompt.training.progress import score_key
from jaxprompt.training.run_result import RunResult

# Field of the block `runs` -> the field of each run that it sets.
AXES = {
    "tasks": "ppt.task",
    "seeds": "seed", "data_seeds": "data.seed", "folds": "data.protocol.fold", "lr": "optim.lr",
    "weight_decay": "optim.weight_decay", "prompt_starts": "prompt.start", "texts": "prompt.text",
    "words": "task.words",
}  # fmt: skip
SEEDS, FOLD = ("seed", "data.seed"), "data.protocol.fold"
ONLY = "data.only"  # runs on different parts of the data are not compared
# Fields that usually do not change the shapes of a run. Runs whose shapes do differ, e.g. with
# label words of other lengths, are separated once they are prepared.
VARIES = (
    *AXES.values(),
    "optim.lr_head",
    "optim.lr_backbone",
    "prompt.file",
    "prompt.init",
    "prompt.scale",
    "data.protocol.rows",
)
_SHOWN = 40  # letters of a value in a name


class GridRun(NamedTuple):
    """One run of several."""

    name: str
    changes: dict[str, Any]  # field -> value
    config: RunConfig  # of this run, without a grid
    folder: Path


def is_grid(config: RunConfig) -> bool:
    """Returns whether a config defines several runs."""
    return any(getattr(config.runs, axis) for axis in AXES)


def grid_conflict(config: RunConfig) -> str:
    """Returns why a run cannot train in one program with others, and what to set; "" if it can."""
    if config.train.profile:
        return (
            f"train.profile={config.train.profile} traces one run, but config.runs defines "
            "several; set it to 0"
        )
    if config.rng == "rbg":
        return (
            "rng=rbg: runs of config.runs train as one program, and the dropout masks of each "
            "would depend on the others; set rng=threefry"
        )
    return ""


def list_runs(config: RunConfig, workdir: str) -> list[GridRun]:
    """Returns the runs of a grid. Raises InputError for a duplicate or invalid run."""
    if conflict := grid_conflict(config):
        raise InputError(f"{conflict}, or empty config.runs")
    axes = {axis: values for axis in AXES if (values := getattr(config.runs, axis))}
    _check_axes(config, axes)
    runs, names = [], {}
    for values in itertools.product(*axes.values()):
        changes = {AXES[axis]: value for axis, value in zip(axes, values, strict=True)}
        name = ",".join(
            f"{_short_name(axis)}={_format_value(value, axes[axis])}"
            for axis, value in zip(axes, values, strict=True)
        )
        run_config = without_grid(config).replace(
            {field: _field_value(field, value) for field, value in changes.items()}
        )
        if "prompt_starts" in axes:  # fields that only some of them read
            run_config = drop_ignored_fields(run_config)
        check_config(run_config)
        check_packages(run_config)
        # The whole config, because different values on the axes may still give the same run.
        config_json = json.dumps(run_config.to_dict(), sort_keys=True)
        if config_json in names:
            raise InputError(
                f"config.runs has the run {name} twice; remove one of the equal values"
            )
        names[config_json] = name
        runs.append(GridRun(name, changes, run_config, Path(workdir) / name))
    return runs


def without_grid(config: RunConfig) -> RunConfig:
    """Returns a config without its grid."""
    return dataclasses.replace(config, runs=GridConfig())


def program_key(config: RunConfig) -> str:
    """Returns a key of everything that must be equal between runs of one program."""
    fields = {name: value for name, value in config.leaves().items() if name not in VARIES}
    return json.dumps(fields, sort_keys=True)


def group_by_config(runs: Sequence[GridRun]) -> list[list[GridRun]]:
    """Groups runs that may train as one program, in their order."""
    groups: dict[str, list[GridRun]] = {}
    for run in runs:
        groups.setdefault(program_key(run.config), []).append(run)
    return list(groups.values())


def select_best_runs(runs: Sequence[tuple[Mapping[str, object], RunResult]]) -> list[int]:
    """Selects the run with the best dev score for each seed, the first of equal ones.

    A seed is a pair of train seed and data seed, and each value of `data.only` is selected for
    separately. Runs that differ only in data.protocol.fold are selected together by the mean over
    their folds, and all are returned. For a seed with unfinished runs only those with the most
    folds are compared.

    Args:
      runs: pairs of (changes, result).

    Returns:
      The positions of the selected runs.
    """
    by_seed: dict[tuple, dict[Any, list[int]]] = {}
    for index, (changes, _) in enumerate(runs):
        seed = tuple(changes.get(field) for field in (*SEEDS, ONLY))
        other_fields = {
            field: str(value)
            for field, value in changes.items()
            if field not in (*SEEDS, ONLY, FOLD)
        }
        setting = tuple(sorted(other_fields.items())) if FOLD in changes else index
        by_seed.setdefault(seed, {}).setdefault(setting, []).append(index)

    def fold_score(folds: list[int]) -> tuple[int, float]:
        return len(folds), sum(_selection_score(runs[index][1]) for index in folds) / len(folds)

    selected: list[int] = []
    for settings in by_seed.values():
        has_choice = len(settings) > 1  # a run that trains nothing has no dev scores to compare
        candidates = list(settings.values())
        best = max(candidates, key=fold_score) if has_choice else candidates[0]
        selected += best
    return selected


def _selection_score(result: RunResult) -> float:
    """Returns the selection score of a run; higher is better."""
    if result.held_out is not None:
        return score_key(-result.held_out["loss"])
    return score_key(selection_score(result.selection))


def _check_axes(config: RunConfig, axes: Mapping[str, Sequence[Value]]) -> None:
    if "texts" in axes and config.prompt.get("text") == "":
        config = config.replace({"prompt.text": axes["texts"][0]})  # the runs give it
    head, starts = get_head(config), axes.get("prompt_starts", prompt_starts(config))
    protocol, method = config.data.protocol.name, config.prompt
    samples = protocol or has_demos(config) or config.ppt.task
    if "words" in axes and (config.ppt.task or "tasks" in axes):
        raise InputError(
            "config.runs.words is for tuning, pre-training uses the words of ppt.patterns; empty it"
        )
    if "words" in axes and not head.READS_WORDS and "labels" not in starts:
        raise InputError(
            f"config.runs.words has no effect with head.name={head.name}; use "
            "head.name=verbalizer, or empty it"
        )
    if "data_seeds" in axes and not samples:
        raise InputError(
            "config.runs.data_seeds: no examples are sampled, so the runs would be equal; set "
            "data.protocol, e.g. kshot or holdout, or empty the list"
        )
    if "folds" in axes and protocol != "kfold":
        raise InputError(
            "config.runs.folds needs data.protocol=kfold, which divides the examples into folds; "
            f"set it in place of {protocol!r}, or empty the list"
        )
    for axis in ("prompt_starts", "texts"):
        if axis in axes and AXES[axis].partition(".")[2] not in method.fields:
            raise InputError(
                f"config.runs.{axis} needs a method with {AXES[axis]}, which {method.name} does "
                "not have; use prompt.name=soft"
            )
    if "texts" in axes and set(axes.get("prompt_starts", (method.get("start"),))) != {"text"}:
        raise InputError("config.runs.texts needs prompt.start=text; set it, and no other start")


def _field_value(field: str, value: Value) -> Value:
    """Returns the value of a run's field for an entry of its axis."""
    if field != "task.words":
        return value
    assert isinstance(value, str)
    return tuple(part.strip() for part in value.split(","))


def _short_name(axis: str) -> str:
    return {"data_seeds": "data_seed"}.get(axis, AXES[axis].rpartition(".")[2])


def _format_value(value: Value, axis_values: Sequence[Value]) -> str:
    """Formats a value for a folder name; a long string is replaced by its index.

    So is a string that could be mistaken for such an index.
    """
    values = list(dict.fromkeys(axis_values))
    names = [re.sub(r"[^\w.+-]+", "_", str(item).replace(",", "+")) for item in values]
    ambiguous = {name for name in names if len(name) > _SHOWN or names.count(name) > 1}
    index = values.index(value)
    is_clear = names[index] not in ambiguous and not (ambiguous and names[index].isdigit())
    return names[index] if is_clear else str(index + 1)
