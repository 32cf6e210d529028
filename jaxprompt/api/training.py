"""Trains prompts on rows in memory."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxprompt import signals
from jaxprompt.api.choices import AnyChoice, as_choice, make_config
from jaxprompt.api.prompts import Prompt
from jaxprompt.api.rows import AnyRows, infer_task, make_rows
from jaxprompt.build.backbone import InMemoryInputs, LoadedBackbone
from jaxprompt.build.examples import hold_out_dev, read_task
from jaxprompt.errors import InputError, check_type
from jaxprompt.files import user_path
from jaxprompt.runs import train as tune
from jaxprompt.runs.grid.expand import is_grid
from jaxprompt.serving.export import pack_run
from jaxprompt.training.log import read_metrics


@dataclass(frozen=True, eq=False)
class TrainedPrompt:
    """The result of `train`."""

    prompt: Prompt  # the best on dev
    result: Mapping[str, Any]  # best_step, dev, test, trained, ..., as in result.json
    # The records of metrics.jsonl: step, loss, lr or dev.
    history: list[dict[str, Any]] = field(repr=False)
    workdir: Path | None  # the run directory, None if it was not kept


def train(
    backbone: LoadedBackbone,
    train: AnyRows,
    dev: AnyRows | None = None,
    *,
    test: AnyRows | None = None,
    task: str | Mapping[str, Any] | None = None,
    method: AnyChoice | None = None,
    head: AnyChoice | None = None,
    workdir: str | Path | None = None,
    **overrides: Any,
) -> TrainedPrompt:
    """Trains a prompt for a frozen backbone, like the command `train`, on rows in memory.

    Args:
        backbone: result of `load_backbone`. It is not changed, not even by full fine-tuning.
        train, dev, test: dicts, a datasets.Dataset, a pandas DataFrame, or the path of a file.
            Without dev a fifth of train is held out; a protocol chooses another share:
            protocol="holdout", size=200.
        task: `jp.task("message", label="team")`, or the name of a known task; by default the
            columns with the usual names, or the only ones that can be the text and the label.
        method: jp.prefix(16), jp.soft(20), jp.full() and so on, or a name, "soft"; by default
            jp.prefix().
        head: jp.linear(), jp.verbalizer() and so on, or a name; by default the head of the
            method, else jp.linear().
        workdir: the run directory. The same call resumes an interrupted run, and returns the
            prompt of a finished run at once. With None nothing is kept.
        **overrides: config fields by their last name, e.g. lr=0.02, epochs=10, batch=16, seed=1,
            or with their block, e.g. optim__lr=0.02, see docs/config.md.

    Returns:
        The best prompt on dev, the result and the history of the run.

    Raises:
        InputError: for everything that the command refuses.
        KeyboardInterrupt: after Ctrl-C; what was saved stays in the workdir.
    """
    check_type("backbone", backbone, LoadedBackbone, "jp.load_backbone(path)")
    choices = as_choice("method", method), as_choice("head", head)
    keep_files = workdir is not None
    splits = {"train": train, "dev": dev, "test": test}
    if task is None:
        splits["train"], task = infer_task(train, overrides)
    config, set_fields = make_config(
        backbone, task=task, choices=choices, overrides=overrides, keep_files=keep_files
    )
    if is_grid(config):
        raise InputError("train supports one run; call it once per run, or use the command sweep")
    # From the config, because its label column must be known to read the class names of rows.
    requested_task = read_task(config.task)
    rows = {name: make_rows(x, name, requested_task) for name, x in splits.items() if x is not None}
    config = hold_out_dev(config, set_fields, rows)
    inputs = InMemoryInputs(rows, backbone)
    with _folder(workdir) as folder, signals.handled(), signals.keeping(keep_files):
        result = tune.train_prompt(config, str(folder), inputs)
        if result is None:
            if keep_files:
                raise KeyboardInterrupt(f"stopped; the same call resumes {folder}")
            raise KeyboardInterrupt("stopped; nothing is kept without a workdir")
        packed = pack_run(config, str(folder), inputs)
        prompt = Prompt(packed.tensors, packed.metadata.to_json(), str(folder))
        history = read_metrics(folder)
    return TrainedPrompt(prompt, result.to_json(), history, None if workdir is None else folder)


@contextlib.contextmanager
def _folder(workdir: str | Path | None) -> Iterator[Path]:
    if workdir is not None:
        if not str(workdir):
            raise InputError("workdir is empty; give a folder, or None to save nothing")
        yield user_path(workdir, "workdir")
        return
    # A run needs a folder while it trains, from which its best parameters are read.
    with tempfile.TemporaryDirectory(prefix="jaxprompt-") as folder:
        yield Path(folder)
