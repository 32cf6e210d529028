"""The tables and figures of P-tuning v2 (Liu et al. 2022): which runs every number stands for."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from configs import ptuning_v2
from configs.ptuning_v2 import depth, prompt_length, qa, superglue, tagging, verbalizer
from jaxprompt.errors import InputError
from launch.papers.figures import draw_lines
from launch.papers.table import ROOT, Cell, Paper, Table

SYSTEMS = {
    "full": "Fine-tuning", "pt": "Prompt tuning", "p_tuning": "P-tuning", "prefix": "P-tuning v2",
    "multi_task": "Multi-task P-tuning v2",
}  # fmt: skip
BACKBONES = {
    "BERT-large": "bert-large", "RoBERTa-large": "roberta-large",
    "DeBERTa-xlarge": "deberta-xlarge", "GLM-xlarge": "glm-2b", "GLM-xxlarge": "glm-10b",
}  # fmt: skip
BROWN = "conll05_brown"  # the second test set of CoNLL-2005
# Of semantic roles the released code prints seqeval's F1 (tasks/srl/dataset.py), in which the
# predicate and each part of an argument count. That of srl-eval.pl, which the shared tasks have,
# stands beside it.
METRICS = {
    **dict.fromkeys(superglue.TASKS, ("accuracy",)), "multirc": ("f1a",),
    "record": ("answer_f1",), **dict.fromkeys(tagging.NER, ("entity_f1",)),
    **dict.fromkeys((*tagging.SRL, BROWN), ("entity_f1", "role_f1")),
    **dict.fromkeys(qa.TASKS, ("exact_match", "f1")), "sst2": ("accuracy",),
}  # fmt: skip


def _cells(row: str, task: str, method: str, backbone: str) -> Iterable[Cell]:
    return (Cell(row, task, method, backbone, metric=metric) for metric in METRICS[task])


def _every(tasks: Sequence[str], systems: Sequence[str], models: Sequence[str], file: str):
    for system in systems:
        for model in models:
            for task in tasks:
                config = "qa" if task in qa.TASKS else file
                method = f"{config},{system},{BACKBONES[model]}"
                yield from _cells(f"{SYSTEMS[system]}, {model}", task, method, model)


def table2(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields fine-tuning, prompt tuning, P-tuning and P-tuning v2 of every size."""
    models = [model for model in BACKBONES if model != "DeBERTa-xlarge"]
    return _every(tasks, ("full", "pt", "p_tuning", "prefix"), models, "superglue")


def table3(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields the same and what starts from a prompt of several tasks, on hard tasks."""
    return _every(tasks, tuple(SYSTEMS), tuple(BACKBONES)[:3], "tagging")


def table4(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields both heads."""
    rows = ("prefix, [CLS] and linear head", "prefix, verbalizer and LM head")
    for row, head in zip(rows, verbalizer.HEADS, strict=True):
        for task in tasks:
            yield from _cells(row, task, f"verbalizer,{head}", "RoBERTa-large")


def figure3(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields prompts in some of the layers."""
    for order in depth.ORDERS:
        for count in depth.COUNTS:
            for task in tasks:
                row = f"layers {depth.interval(order, count)}"
                if count == depth.LAYERS:
                    row = f"all layers, {order}"
                yield from _cells(row, task, f"depth,{order},{count}", "BERT-large")


def figure4(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields prompts of several lengths, with and without an MLP."""
    for form in prompt_length.FORMS:
        for length in ptuning_v2.LENGTHS:
            for task in tasks:
                row = f"{form}, length {length}"
                method = f"prompt_length,{form},{length}"
                yield from _cells(row, task, method, "RoBERTa-large")


_HARD = (*tagging.TASKS, BROWN, *qa.TASKS)
_DEPTH, _LENGTH = (partial(draw_lines, axis=axis) for axis in ("depth", "length"))
TABLES = {
    "table2": Table("SuperGLUE, models of all sizes", table2, superglue.TASKS, superglue.TASKS),
    "table3": Table("named entities, questions and semantic roles", table3, _HARD, _HARD),
    "table4": Table("a linear head against label words", table4, verbalizer.TASKS,
                    verbalizer.TASKS, named_by=("head.name",)),
    "figure3": Table("layers with a prompt, from the first up and the last down", figure3,
                     depth.TASKS, depth.TASKS, draw=_DEPTH, axis="depth"),
    "figure4": Table("lengths of the prompt, with and without an MLP", figure4,
                     prompt_length.TASKS, prompt_length.TASKS, draw=_LENGTH, axis="length",
                     named_by=("prompt.length", "prompt.hidden")),
}  # fmt: skip


def _task_of(cell: Cell) -> str:
    return cell.task.removesuffix("_brown")


def _kind_of(cell: Cell) -> ModuleType:
    """Returns the module of configs/ptuning_v2 with the recipe of a cell's task."""
    kinds = (qa, tagging)
    return next((kind for kind in kinds if _task_of(cell) in kind.TASKS), superglue)


class PTuningV2(Paper):
    """P-tuning v2: the paper's backbones, or any other by --backbone."""

    NAME = "ptuning_v2"
    TITLE = "P-tuning v2 (Liu et al. 2022)"
    TABLES = TABLES
    HUB: Mapping[str, str] = {name: ptuning_v2.MODELS[model] for name, model in BACKBONES.items()}
    SEEDS = ptuning_v2.SEEDS
    FLAGS: Mapping[str, str] = {"prompt.init": "--shared", "prompt.layers": "--layers"}

    def add_flags(self, parser: Any) -> None:
        """Adds --shared and --layers."""
        parser.add_argument(
            "--shared", default="shared",
            help="folder with the exports of configs/ptuning_v2/multi_task.py: MODEL/TASK, or TASK "
            "with --backbone",
        )  # fmt: skip
        parser.add_argument(
            "--layers", type=int, default=depth.LAYERS,
            help="number of layers of the backbone; figure3 uses the same fractions of it as of 24",
        )  # fmt: skip

    def check(self, args: Any, saved: Mapping[str, Any]) -> None:
        """Raises InputError for layers that the figure's shares do not divide."""
        if saved and saved.get("layers", args.layers) != args.layers:
            raise InputError(
                f"{args.workdir} contains runs with --layers={saved['layers']}, not "
                f"{args.layers}; use that value, or another --workdir"
            )
        if args.layers < 6 or args.layers % 6:
            raise InputError(
                f"--layers={args.layers} must be a multiple of 6, because figure3 uses sixths of it"
            )

    def about(self, args: Any) -> dict[str, Any]:
        """Binds a workdir of figure3 to the number of layers."""
        return {"layers": args.layers} if args.table == "figure3" else {}

    def why_not(self, cell: Cell, args: Any) -> str:
        """Returns why a cell is not run: its row is for another model, or its export is missing.

        With --backbone, the rows of all models would have the same runs.
        """
        one = args.backbone and not args.rows and args.table in ("table2", "table3")
        if one and cell.backbone != next(iter(BACKBONES)):
            return "it is for another backbone; select it by --rows to run it on --backbone"
        if cell.method.split(",")[1] != "multi_task":
            return ""
        export = self._export(cell, args)
        if export.is_dir():
            return ""
        return (
            f"{export} does not exist; train configs/ptuning_v2/multi_task.py, which exports the "
            "prompt once per task, or name the folder of its exports by --shared"
        )

    def config_of(self, cell: Cell, args: Any) -> str:
        """Names the run of a config in configs/ptuning_v2."""
        name, argument = cell.method.split(",", 1)
        return f"{ROOT}/configs/ptuning_v2/{name}.py:{_task_of(cell)},{argument}"

    def changes_of(
        self, cell: Cell, args: Any, overrides: Mapping[str, Any], backbone: str
    ) -> dict[str, Any]:
        """Lists the changes; fields of prompts do not apply to fine-tuning."""
        name, system, *rest = cell.method.split(",")
        if system == "full":
            overrides = {x: overrides[x] for x in overrides if not x.startswith("prompt.")}
        if not args.backbone and backbone == ptuning_v2.MODELS["bert-large"]:
            backbone = _kind_of(cell).tune(_task_of(cell), model="bert-large").backbone.path
        changes = super().changes_of(cell, args, overrides, backbone)
        if name == "depth":
            count = int(rest[0]) * args.layers // depth.LAYERS
            changes["prompt.layers"] = depth.interval(system, count, args.layers)
        if system == "multi_task":
            changes["prompt.init"] = str(self._export(cell, args))
        return changes

    def rates(self, cell: Cell, backbone: str) -> Sequence[float]:
        """Lists the learning rates that are searched; () = the released one."""
        name, system, *_ = cell.method.split(",")
        if name == "prompt_length":
            return prompt_length.rates_of(cell.task, system)
        if system != "full" and self._released(cell):
            return ()
        return ptuning_v2.rates_of(system)

    def searched(self, cell: Cell) -> Mapping[str, Sequence[Any]]:
        """Lists the lengths that are searched where none is released."""
        name, system, *_ = cell.method.split(",")
        fixed = name in ("prompt_length", "depth") or system in ("full", "multi_task")
        return {} if fixed or self._released(cell) else {"prompt.length": ptuning_v2.LENGTHS}

    def follows(self, cell: Cell, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Gives the text as much room beside a prompt of any length."""
        length = str(changes.get("prompt.length", ""))
        if not length.isdecimal():  # of a length that is none the config says what is wrong
            return {}
        sizes = cell.method.split(",")[1], BACKBONES[cell.backbone], int(length)
        return {"data.max_len": _kind_of(cell).max_len_of(*sizes)}

    def point_of(self, cell: Cell) -> tuple[str, str]:
        """Names a figure's number by its curve, and by its length or number of layers."""
        _, method, *at = cell.method.split(",")
        return method, at[0] if at else ""

    def remarks(self, args: Any) -> list[str]:
        """Returns what was inferred about figures whose labels are not in the text of the paper."""
        if args.table.startswith("figure"):
            lines = [
                "the numbers of figures are not in the paper's text: lengths and counts are ours"
            ]
            if args.table == "figure3" and args.layers != depth.LAYERS:
                last = 8 * args.layers // depth.LAYERS
                lines.append(
                    f"--layers={args.layers}: layers in proportion, 1-{last} for 1-8 of 24"
                )
            return lines
        lines = ["the paper reports the development set, at the epoch that is best on it"]
        if args.table in ("table2", "table3"):
            lines.append(
                "the paper has one column for prompt tuning and P-tuning; it is shown with prompt "
                "tuning"
            )
        return lines

    def seeds_of(self, cell: Cell) -> Sequence[int]:
        """Lists the seed of the released script where there is one."""
        if not self._released(cell):
            return self.SEEDS
        return (_kind_of(cell).tune(_task_of(cell), model=BACKBONES[cell.backbone]).seed,)

    def _export(self, cell: Cell, args: Any) -> Path:
        model = "" if args.backbone else BACKBONES[cell.backbone]
        return Path(args.shared) / model / _task_of(cell)

    def _released(self, cell: Cell) -> bool:
        if cell.method.split(",")[1] in ptuning_v2.SOFT:  # the settings are those of prefixes
            return False
        return (_task_of(cell), BACKBONES[cell.backbone]) in _kind_of(cell).RELEASED


PAPER = PTuningV2()
