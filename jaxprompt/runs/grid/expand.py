"""The runs of a grid config, and which of them can train as one program."""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt.build.check import check_config
from jaxprompt.build.demonstrations import has_demos
from jaxprompt.build.method import drop_ignored_fields, get_head, prompt_starts
from jaxprompt.config.block import Values
from jaxprompt.config.kinds import Value
from jaxprompt.config.run import GridConfig, RunConfig
from jaxprompt.errors import InputError
from jaxprompt.training.progress import score_key
from jaxprompt.training.run_result import RunResult

# Field of the block `runs` -> the field of each run that it gives.
AXES = {
    "tasks": "ppt.task",
    "seeds": "seed", "data_seeds": "data.seed", "folds": "data.protocol.fold", "lr": "optim.lr",
    "weight_decay": "optim.weight_decay", "prompt_starts": "prompt.start", "texts": "prompt.text",
    "words": "task.words",
}  # fmt: skip
SEEDS, FOLD = ("seed", "data.seed"), "data.protocol.fold"
ONLY = "data.only"  # runs on parts of the data, as the relations of one file, are no rivals
# What leaves the shapes of a run as they are. Where it does not, as label words of other lengths,
# the runs are told apart once they are prepared.
VARIES = (
    *AXES.values(), "optim.lr_head", "optim.lr_backbone", "prompt.file", "prompt.init",
    "prompt.scale", "data.protocol.rows",
)  # fmt: skip
_SHOWN = 40  # letters of a value in a name


class GridRun(NamedTuple):
    """One run of several."""

    name: str
    changes: dict[str, Any]  # field -> value
    config: RunConfig  # its own, without a grid
    folder: Path


def is_grid(config: RunConfig) -> bool:
    """Returns whether a config defines several runs."""
    return any(getattr(config.runs, axis) for axis in AXES)


def why_alone(config: RunConfig) -> str:
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
    if why := why_alone(config):
        raise InputError(f"{why}, or empty config.runs")
    axes = {axis: x for axis in AXES if (x := getattr(config.runs, axis))}
    _check_axes(config, axes)
    runs, names = [], {}
    for values in itertools.product(*axes.values()):
        changes = {AXES[axis]: value for axis, value in zip(axes, values, strict=True)}
        name = ",".join(
            f"{_short(axis)}={_show(value, axes[axis])}"
            for axis, value in zip(axes, values, strict=True)
        )
        own = alone(config).replace({field: _value(field, x) for field, x in changes.items()})
        if "prompt_starts" in axes:  # what is given for one of them is not for the others
            own = drop_ignored_fields(own)
        check_config(own)
        # By the whole config: different values on the axes may still make the same run.
        text = json.dumps(own.to_dict(), sort_keys=True)
        if text in names:
            raise InputError(
                f"config.runs has the run {name} twice; remove one of the equal values"
            )
        names[text] = name
        runs.append(GridRun(name, changes, own, Path(workdir) / name))
    return runs


def alone(config: RunConfig) -> RunConfig:
    """Returns a config without its grid."""
    return dataclasses.replace(config, runs=GridConfig())


def alike(config: RunConfig) -> str:
    """Returns a key of everything that must be equal between runs of one program."""
    given = config.to_dict()
    for field in VARIES:
        *blocks, last = field.split(".")
        block: Values = given
        for name in blocks:
            inner = block[name]
            assert isinstance(inner, dict)
            block = inner
        # A method may not have the field at all.
        block.pop(last, None)
    return json.dumps(given, sort_keys=True)


def by_config(runs: Sequence[GridRun]) -> list[list[GridRun]]:
    """Groups runs that may train as one program, in their order."""
    groups: dict[str, list[GridRun]] = {}
    for run in runs:
        groups.setdefault(alike(run.config), []).append(run)
    return list(groups.values())


def select(runs: Sequence[tuple[Mapping[str, object], RunResult]]) -> list[int]:
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
    tried: dict[tuple, dict[Any, list[int]]] = {}
    for number, (changes, _) in enumerate(runs):
        seed = tuple(changes.get(field) for field in (*SEEDS, ONLY))
        rest = {name: str(x) for name, x in changes.items() if name not in (*SEEDS, ONLY, FOLD)}
        setting = tuple(sorted(rest.items())) if FOLD in changes else number
        tried.setdefault(seed, {}).setdefault(setting, []).append(number)
    merit = lambda folds: (len(folds), sum(_merit(runs[i][1]) for i in folds) / len(folds))
    chosen: list[int] = []
    for settings in tried.values():
        several = len(settings) > 1  # what trains nothing has no dev, and nothing to choose
        chosen += max(settings.values(), key=merit) if several else next(iter(settings.values()))
    return chosen


def _merit(result: RunResult) -> float:
    """Returns the selection score of a run; higher is better."""
    if result.held_out is not None:
        return score_key(-result.held_out["loss"])
    return score_key(next(iter(result.selection.values())))


def _check_axes(config: RunConfig, axes: Mapping[str, Sequence[Value]]) -> None:
    if "words" in axes and (config.ppt.task or "tasks" in axes):
        raise InputError(
            "config.runs.words is for tuning, pre-training uses the words of ppt.patterns; empty it"
        )
    head = get_head(config)
    if "texts" in axes and config.prompt.get("text") == "":
        config = config.replace({"prompt.text": axes["texts"][0]})  # the runs give it
    starts = axes.get("prompt_starts", prompt_starts(config))
    if "words" in axes and not head.READS_WORDS and "labels" not in starts:
        raise InputError(
            f"config.runs.words has no effect with head.name={head.name}; use "
            "head.name=verbalizer, or empty it"
        )
    if "data_seeds" in axes and not (
        config.data.protocol.name or has_demos(config) or config.ppt.task
    ):
        raise InputError(
            "config.runs.data_seeds: no examples are sampled, so the runs would be equal; set "
            "data.protocol, e.g. kshot or holdout, or empty the list"
        )
    if "folds" in axes and config.data.protocol.name != "kfold":
        raise InputError(
            "config.runs.folds needs data.protocol=kfold, which divides the examples into folds; "
            f"set it in place of {config.data.protocol.name!r}, or empty the list"
        )
    for axis in ("prompt_starts", "texts"):
        field = AXES[axis].partition(".")[2]
        if axis in axes and field not in config.prompt.fields:
            raise InputError(
                f"config.runs.{axis} needs a method with prompt.{field}, which "
                f"{config.prompt.name} does not have; use prompt.name=soft"
            )
    if "texts" in axes and set(axes.get("prompt_starts", (config.prompt.get("start"),))) != {
        "text"
    }:
        raise InputError("config.runs.texts needs prompt.start=text; set it, and no other start")


def _value(field: str, value: Value) -> Value:
    """Returns the value of a run's field for an entry of its axis."""
    if field != "task.words":
        return value
    assert isinstance(value, str)
    return tuple(part.strip() for part in value.split(","))


def _short(axis: str) -> str:
    return {"data_seeds": "data_seed"}.get(axis, AXES[axis].rpartition(".")[2])


def _show(value: Value, among: Sequence[Value]) -> str:
    """Formats a value for a folder name; a long string is replaced by its index.

    So is a string that could be mistaken for such an index.
    """
    values = list(dict.fromkeys(among))
    shown = [re.sub(r"[^\w.+-]+", "_", str(own).replace(",", "+")) for own in values]
    unclear = {text for text in shown if len(text) > _SHOWN or shown.count(text) > 1}
    at = values.index(value)
    is_clear = shown[at] not in unclear and not (unclear and shown[at].isdigit())
    return shown[at] if is_clear else str(at + 1)
