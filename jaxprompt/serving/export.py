"""The best prompt of a workdir as what an export holds."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxprompt.build.backbone import NOTHING, Given
from jaxprompt.build.prompt_artifact import pack
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import InputError
from jaxprompt.models.scorer import Scorer
from jaxprompt.runs import ppt
from jaxprompt.runs.restore import restore
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.run_folder import read_result


class Packed(NamedTuple):
    """A prompt on its way out."""

    scorer: Scorer
    tensors: dict[str, np.ndarray]  # by flat name
    metadata: PromptMetadata


def pack_run(config: RunConfig, workdir: str, given: Given = NOTHING) -> Packed:
    """Reads the best prompt of a run, tuned or pre-trained, folds it and describes it."""
    if config.ppt.task:
        trained = ppt.restore(config, workdir)
    else:
        trained = restore(config, workdir, given=given)
    result, best = read_result(workdir), trained.best
    splits = ("dev", "test", "held_out")
    metrics = {name: x for name in splits if (x := getattr(result, name, None)) is not None}
    weights = trained.weights
    tensors, metadata = pack(
        trained.scorer, weights.trainable, weights.frozen,
        backbone=dataclasses.replace(config.backbone, family=trained.family),
        fingerprint=weights.report.fingerprint, config=config,
        metrics=metrics or {"dev": best and best.dev},
    )  # fmt: skip
    metadata = dataclasses.replace(
        metadata,
        init=trained.record.init,
        pretrained=ppt.read_about(trained) if config.ppt.task else None,
        step=best.step if best is not None else None,
    )
    return Packed(trained.scorer, tensors, metadata)


def check_newest(workdir: str, step: int | None) -> None:
    """Raises InputError where the best step of a run is another than its export's `step`."""
    result = read_result(workdir)
    best = Checkpoints(workdir).best() if result is None else result.best_step
    if best is not None and step not in (None, best):
        raise InputError(
            f"{workdir}/export is of step {step}, and the run was best at step {best}: "
            "export it again, or name the folder by --prompt"
        )
