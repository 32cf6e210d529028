"""Reads the best prompt of a workdir, for export."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxprompt.build.backbone import NO_INPUTS, InMemoryInputs
from jaxprompt.build.prompt_artifact import pack_prompt
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import InputError
from jaxprompt.models.scorer import Scorer
from jaxprompt.runs import ppt
from jaxprompt.runs.restore import restore_run
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.run_folder import read_result


class PackedPrompt(NamedTuple):
    """A prompt that is ready for export."""

    scorer: Scorer
    tensors: dict[str, np.ndarray]  # by flat name
    metadata: PromptMetadata


def pack_run(config: RunConfig, workdir: str, inputs: InMemoryInputs = NO_INPUTS) -> PackedPrompt:
    """Reads and folds the best prompt of a run, tuned or pre-trained, and makes its metadata."""
    if config.ppt.task:
        trained = ppt.restore_pretrained(config, workdir)
    else:
        trained = restore_run(config, workdir, inputs=inputs)
    result, best = read_result(workdir), trained.best
    splits = ("dev", "test", "held_out")
    metrics = {name: x for name in splits if (x := getattr(result, name, None)) is not None}
    weights = trained.weights
    tensors, metadata = pack_prompt(
        trained.scorer,
        weights.trainable,
        weights.frozen,
        backbone=dataclasses.replace(config.backbone, family=trained.family),
        fingerprint=weights.report.fingerprint,
        config=config,
        metrics=metrics or {"dev": best and best.dev},
    )
    metadata = dataclasses.replace(
        metadata,
        init=trained.record.init,
        pretrained=ppt.pretraining_summary(trained) if config.ppt.task else None,
        step=best.step if best is not None else None,
    )
    return PackedPrompt(trained.scorer, tensors, metadata)


def check_newest(workdir: str, step: int | None) -> None:
    """Raises InputError if the export of a run, made at `step`, is not from its best step."""
    result = read_result(workdir)
    best = Checkpoints(workdir).best() if result is None else result.best_step
    if best is not None and step not in (None, best):
        raise InputError(
            f"{workdir}/export is from step {step}, and the best step of the run is {best}; "
            "export it again, or give the folder with --prompt"
        )
