"""The best prompt of a workdir as what an export holds."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.build.backbone import NOTHING, Given
from jaxprompt.build.prompt_artifact import pack
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError
from jaxprompt.runs import ppt
from jaxprompt.runs.restore import restore
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.run_folder import read_result


class Packed(NamedTuple):
    """A prompt on its way out."""

    scorer: Any
    tensors: dict[str, np.ndarray]  # by flat name
    card: dict[str, Any]


def pack_run(config: RunConfig, workdir: str, given: Given = NOTHING) -> Packed:
    """Reads the best prompt of a run, tuned or pre-trained, folds it and describes it."""
    if config.ppt.task:
        trained = ppt.restore(config, workdir)
    else:
        trained = restore(config, workdir, given=given)
    result, best = read_result(workdir), trained.best
    splits = ("dev", "test", "held_out")
    metrics = {name: x for name in splits if (x := getattr(result, name, None)) is not None}
    init = trained.record.init
    origin = {} if init is None else {"init": init.to_json()}
    if config.ppt.task:
        origin["pretrained"] = ppt.read_about(trained)
    weights = trained.weights
    tensors, card = pack(
        trained.scorer, weights.trainable, weights.frozen,
        backbone=dataclasses.replace(config.backbone, family=trained.family),
        fingerprint=weights.report.fingerprint, config=config,
        metrics=metrics or {"dev": best and best.dev}, origin=origin,
    )  # fmt: skip
    if best is not None:
        card["step"] = best.step
    return Packed(trained.scorer, tensors, card)


def check_newest(workdir: str, card: Mapping[str, Any]) -> None:
    """Raises InputError where the best step of a run is another than that of its export."""
    result = read_result(workdir)
    best = Checkpoints(workdir).best() if result is None else result.best_step
    if best is not None and card.get("step", best) != best:
        raise InputError(
            f"{workdir}/export is of step {card['step']}, and the run was best at step {best}: "
            "export it again, or name the folder by --prompt"
        )
