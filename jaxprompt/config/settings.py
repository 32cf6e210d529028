"""What the rooms above may know of a config: plain values, so that no field is read elsewhere."""

from dataclasses import dataclass
from typing import Any

from jaxprompt.config.schema import FIELDS

# What may change between two runs in one workdir: nothing here moves a number.
FREE = ("backbone.path", "train.tracker", "train.log_steps", "train.test", "data.cache_dir")
FREE += ("train.compilation_cache", "train.plot", "train.keep", "train.profile")
FREE += ("mesh", "cache.where", "cache.folder", "cache.limit")  # only the order of sums
# What may besides, once trained: how it was learned, how the backbone runs, what is scored. The
# seed of the data says which demonstrations are shown.
OF_DATA = tuple(f"data.{name}" for name in FIELDS["data"] if name != "seed")
FREE_TRAINED = ("optim", "train", *OF_DATA, "generate", "cache", "backbone.dtype", "backbone.stack")
FREE_TRAINED += ("backbone.remat", "backbone.attention", "backbone.reads", "backbone.once")


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
