"""Records of what a run was trained on: written to its directory, and compared later."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import TypedDict

from jaxprompt.build.inheritance import origin_metadata
from jaxprompt.build.initial_params import load_soft_tokens
from jaxprompt.build.method import inherited_exports, prompt_files
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.prompt_metadata import OriginMetadata
from jaxprompt.data.text.identity import check_fingerprints
from jaxprompt.errors import InputError
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.run_folder import (
    Record,
    check_record,
    check_workdir,
    read_record,
    read_result,
)
from jaxprompt.training.run_record import (
    RunRecord,
    TaskData,
    TaskRecord,
)


class InitFields(TypedDict):
    """The fields of a record about what a run is initialised from."""

    init: OriginMetadata | None  # the exports
    files: dict[str, str]  # hashes of soft-token files, by path


def init_fields(config: RunConfig) -> InitFields:
    """Returns the fields of a record about what a run is initialised from."""
    origins = [origin_metadata(path) for path, _ in inherited_exports(config)]
    init = dataclasses.replace(origins[0], more=tuple(origins[1:])) if origins else None
    files = {
        path: hashlib.sha256(load_soft_tokens(path)[0].tobytes()).hexdigest()
        for path in prompt_files(config)
    }
    return {"init": init, "files": files}


def check_origins(config: RunConfig, record: TaskRecord, workdir: str | os.PathLike) -> None:
    """Raises InputError if an export or file that a run was initialised from has changed."""
    fields = init_fields(config)
    init = fields["init"]
    changes = [
        f"{path}, whose soft tokens have changed"
        for path, digest in record.files.items()
        if fields["files"].get(path) != digest
    ]
    if init is not None and _digests(record.init) != _digests(init):
        changes.append(f"{init.path}, which is another export now")
    if changes:
        raise InputError(
            f"{workdir} was initialised from {changes[0]}; restore it, or train again in another "
            "workdir"
        )


def _digests(init: OriginMetadata | None) -> list[tuple[str, str | None]]:
    """Returns the exports by path and digest."""
    return [(origin.path, origin.sha256) for origin in (init, *init.more)] if init else []


def check_same_data(workdir: str | os.PathLike, record: RunRecord) -> None:
    """Raises InputError if the run in a workdir was trained on anything else than `record`."""
    saved = read_record(workdir, type(record))
    if saved is not None:
        check_backbone(saved, record.backbone.fingerprint, workdir, record.identity)
    check_record(workdir, record)


def check_backbone(
    record: RunRecord, fingerprint: str, workdir: str | os.PathLike, identity: Mapping[str, str]
) -> None:
    """Raises InputError if a run would continue with a different backbone than in its record.

    `identity` describes the backbone without its weights, see `scorer_fingerprints`; {} if unknown.
    """
    trained_on = record.backbone.fingerprint
    if trained_on != fingerprint:
        raise InputError(
            f"{workdir} was trained with weights {trained_on[:12]}, but backbone.path has "
            f"{fingerprint[:12]}; use the same backbone or another workdir"
        )
    advice = "use the same backbone or another workdir"
    check_fingerprints(record.identity, identity, f"{workdir} was trained with", advice)


def changed_split_messages(record: TaskData, data: TaskData) -> tuple[str, ...]:
    """Returns a message for each split that differs from that of the run."""
    return tuple(
        f"{name}: {split.examples} examples, not those of the run"
        for name, split in data.splits.items()
        if name in record.splits and record.splits[name].digest != split.digest
    )


def check_train_split(
    record: TaskData, data: TaskData, workdir: str | os.PathLike, use: str
) -> None:
    """Raises InputError if training examples that restoring a run needs have changed.

    `use` says what the run does with its training split.
    """
    saved_split, split = record.splits.get("train"), data.splits["train"]
    if saved_split is not None and saved_split.digest != split.digest:
        raise InputError(
            f"{workdir} {use} of {saved_split.examples} examples, which differ from the "
            f"{split.examples} examples now; restore them or train again in another workdir"
        )


def check_demonstrations(record: TaskData, data: TaskData, workdir: str | os.PathLike) -> None:
    """Raises InputError if demonstrations would differ from those during training."""
    check_train_split(record, data, workdir, "shows demonstrations from its training split")
    fingerprints = [task_data.sentence_encoder[:12] for task_data in (record, data)]
    if fingerprints[0] != fingerprints[1]:
        raise InputError(
            f"{workdir} compared sentences with weights {fingerprints[0]}, but demos.encoder has "
            f"{fingerprints[1]}; use the same encoder or another workdir"
        )


def read_trained(
    workdir: str, config: RunConfig, free: tuple[str, ...], kind: type[Record]
) -> tuple[Record, int]:
    """Returns the record of a run and the step of its best parameters.

    Raises InputError for a workdir that is untrained or has a different config, and if the best
    parameters are missing.
    """
    check_workdir(workdir, config.to_dict(), free)
    checkpoints, result = Checkpoints(workdir), read_result(workdir)
    record = read_record(workdir, kind)
    # A finished run records its best step, an unfinished one has it in its checkpoints. Their
    # position is read first, because a run that is still training may improve.
    latest_step = checkpoints.latest() if result is None else None
    best = None if latest_step is None else checkpoints.position().get("best")
    best_step = checkpoints.find_best(None if result is None else result.best_step)
    if best is not None and best["step"] > best_step:
        raise InputError(
            f"{workdir} was best at step {best['step']} up to step {latest_step}, but the "
            "parameters of that step are missing; train again in another workdir"
        )
    if record is None:
        raise InputError(f"{workdir} has no record.json; train again in another workdir")
    return record, best_step
