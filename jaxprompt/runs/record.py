"""What a run learned from: made for its folder, and compared when the run is repeated or read."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxprompt.build.inheritance import read_origin
from jaxprompt.build.initial_params import rows_of_file
from jaxprompt.build.method import inherited, start_files, starts_of
from jaxprompt.config.run import RunConfig
from jaxprompt.data.text.identity import check_identity
from jaxprompt.errors import InputError
from jaxprompt.files import is_held
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.run_folder import check_record, check_workdir, read_record, read_result


def make_record(
    config: RunConfig, facts: Mapping[str, Any], template: str, family: str, fingerprint: str
) -> dict[str, Any]:
    """Says what a run learns from, for its folder: `facts` of its data, and its backbone."""
    record = dict(facts) | {"template": template}
    record["backbone"] = {"family": family, "fingerprint": fingerprint}
    return record | _origins(config)


def check_origins(config: RunConfig, record: Mapping[str, Any], workdir: str | os.PathLike) -> None:
    """Raises InputError where an export or a file that a run started from is another one now."""
    # Through JSON, as the saved record was.
    made = json.loads(json.dumps(_origins(config)))
    saved, now = record.get("init"), made.get("init")
    if _digests(saved) != _digests(now):
        raise InputError(
            f"{workdir} started from {now and now['path']}, which holds another export now; "
            "restore that, or train again in another workdir"
        )
    for path, digest in record.get("files", {}).items():
        if made.get("files", {}).get(path) != digest:
            raise InputError(
                f"{workdir} started from {path}, which holds other soft tokens now; restore that, "
                "or train again in another workdir"
            )


def _digests(init: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Lists the exports that numbers started from, and what they held."""
    own = [init, *init.get("more", ())] if init else []
    return [(each["path"], each["sha256"]) for each in own]


def _origins(config: RunConfig) -> dict[str, Any]:
    """Tells of the exports and the files that numbers start from."""
    found = [read_origin(path).to_json() for path, _ in inherited(config)]
    own = {"init": found[0] | ({"more": found[1:]} if found[1:] else {})} if found else {}
    files = {path: _sha256(rows_of_file(path)[0]) for path in start_files(config)}
    return own | ({"files": files} if files else {})


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def check_repeated(workdir: str | os.PathLike, record: Mapping[str, Any]) -> None:
    """Raises InputError where a folder's run learned from anything else than `record`."""
    saved = read_record(workdir)
    if saved is not None:
        now = record["backbone"]["fingerprint"]
        check_backbone(saved, now, workdir, record.get("identity", {}))
    check_record(workdir, record)


def check_backbone(
    record: Mapping[str, Any], fingerprint: str, workdir: str | os.PathLike,
    identity: Mapping[str, Any],
) -> None:  # fmt: skip
    """Raises InputError where a run goes on with another backbone than its record names.

    `identity` is what it is beside its weights, see `identity_of`; {} where that is not known.
    """
    learned = str(record["backbone"]["fingerprint"])
    if learned != fingerprint:
        raise InputError(
            f"{workdir} was trained on weights {learned[:12]}, backbone.path holds "
            f"{fingerprint[:12]}; give the same backbone or another workdir"
        )
    cure = "give the same backbone or another workdir"
    check_identity(record.get("identity", {}), identity, f"{workdir} was trained with", cure)


def other_splits(record: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Says which splits are not those that a run was trained and scored on."""
    lines = []
    for name, now in facts["splits"].items():
        saved = record["splits"].get(name)
        if saved is not None and saved["digest"] != now["digest"]:
            same_size = saved["examples"] == now["examples"]
            which = "those" if same_size else f"the {saved['examples']}"
            lines.append(f"{name}: {now['examples']} examples, not {which} of the run")
    return tuple(lines)


def check_start(
    config: RunConfig,
    record: Mapping[str, Any],
    facts: Mapping[str, Any],
    workdir: str | os.PathLike,
) -> None:
    """Raises InputError where a frozen prompt would start from another text than the run's did.

    Its numbers are in no checkpoint: they are made again from the training split.
    """
    saved, now = record["splits"].get("train"), facts["splits"]["train"]
    if "task" in starts_of(config) and saved is not None and saved["digest"] != now["digest"]:
        raise InputError(
            f"{workdir} has a frozen prompt that started from its training split "
            f"(prompt.start=task): {saved['examples']} examples, which are not the "
            f"{now['examples']} of now; restore them or train again in another workdir"
        )


def check_shown(
    record: Mapping[str, Any], facts: Mapping[str, Any], workdir: str | os.PathLike
) -> None:
    """Raises InputError where demonstrations would not be those that a run was trained with."""
    saved, now = record["splits"].get("train"), facts["splits"]["train"]
    if saved is not None and saved["digest"] != now["digest"]:
        raise InputError(
            f"{workdir} shows demonstrations from its training split: {saved['examples']} "
            f"examples, which are not the {now['examples']} of now; restore them or train again in "
            "another workdir"
        )
    marks = [str(part.get("sentence_encoder", ""))[:12] for part in (record, facts)]
    if marks[0] != marks[1]:
        raise InputError(
            f"{workdir} compared sentences with weights {marks[0]}, demos.encoder holds "
            f"{marks[1]}; give the same encoder or another workdir"
        )


@contextlib.contextmanager
def beside_training(workdir: str) -> Iterator[None]:
    """Reads checkpoints in a block, which a run that is at work there may replace meanwhile.

    Raises InputError where it did.
    """
    try:
        yield
    except InputError:
        if is_held(workdir):
            raise InputError(
                f"{workdir} is being trained, and replaced its best parameters while they were "
                "read; give the command again"
            ) from None
        raise


def read_trained(
    workdir: str, config: RunConfig, free: tuple[str, ...]
) -> tuple[dict[str, Any], int]:
    """Reads what a run of a config learned from and the step of its best numbers.

    Raises InputError for a folder that is of another config or untrained, and where the best
    numbers are not there any more.
    """
    check_workdir(workdir, config.to_dict(), free)
    checkpoints, record, result = Checkpoints(workdir), read_record(workdir), read_result(workdir)
    # A finished run says which step was best; of an unfinished one the checkpoints do.
    step = checkpoints.best() if result is None else result["best_step"]
    with beside_training(workdir):
        checkpoints.check_best(step)
    if result is None and (saved := checkpoints.latest()) is not None:
        known = checkpoints.position().get("best")
        if known is not None and known["step"] > step:
            raise InputError(
                f"{workdir} was best at step {known['step']} up to step {saved}, and those numbers "
                "are not there any more; train again in another workdir"
            )
    if record is None:
        raise InputError(f"{workdir} has no record.json; train again in another workdir")
    return record, step
