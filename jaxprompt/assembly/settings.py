"""What the rooms above may know of a config: plain values, so that no field is read elsewhere."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Values of one run."""

    seed: int
    rng: str  # generator of dropout
    method: str
    batch: int
    eval_batch: int
    accumulate: int
    dtype: str
    remat: str
    attention: str
    log_steps: int
    max_streak: int
    patience: int
    test: bool
    keep: int  # newest saved steps that stay
    profile: int  # steps that are traced
    tracker: str
    compilation_cache: str
    at_once: int  # runs of a grid; 0 = all that memory holds
    pretrains: bool  # a prompt, on running text
    devices: int  # that the mesh names; what it leaves open counts as one


def programs_folder(c: Any) -> str:
    """Reads where compiled programs are kept off a config that is not checked yet."""
    return c.get("train", {}).get("compilation_cache", "")


def settings_of(c: Any) -> Settings:
    """Reads them off a config."""
    return Settings(
        seed=c.seed,
        rng=c.rng,
        method=c.prompt.name,
        batch=c.data.batch,
        eval_batch=c.data.eval_batch,
        accumulate=c.optim.accumulate,
        dtype=c.backbone.dtype,
        remat=c.backbone.remat,
        attention=c.backbone.attention,
        log_steps=c.train.log_steps,
        max_streak=c.train.max_streak,
        patience=c.train.patience,
        test=c.train.test,
        keep=c.train.keep,
        profile=c.train.profile,
        tracker=c.train.tracker,
        compilation_cache=c.train.compilation_cache,
        at_once=c.runs.size,
        pretrains=bool(c.ppt.task),
        devices=max(c.mesh.data, 1) * max(c.mesh.model, 1),
    )
