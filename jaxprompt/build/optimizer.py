"""The optimizer of a config, and the number of steps of its run."""

import math

import optax

from jaxprompt import tree
from jaxprompt.config.run import Exponential, OptimConfig, RunConfig, TrainConfig
from jaxprompt.training import optim
from jaxprompt.training.loop import Milestones


def make_milestones(train: TrainConfig, steps_per_epoch: int, batch: float) -> Milestones:
    """Converts the total of the config to steps; `batch` is the mean number of examples."""
    steps = train.total_epochs * steps_per_epoch or train.total_examples / batch
    # Rounded, since 0.07 of 100 steps is a little above 7 in floating point.
    total = train.total_steps or max(1, math.ceil(round(steps, 6)))
    evaluate = train.eval_steps or max(1, round(train.eval_epochs * steps_per_epoch))
    return Milestones(total, evaluate, train.save_steps)


def config_milestones(config: RunConfig, steps_per_epoch: int, examples: int = 0) -> Milestones:
    """Converts the total of a config to steps; `examples` per epoch, 0 = all batches are full."""
    return make_milestones(
        config.train, steps_per_epoch, examples / steps_per_epoch or config.data.batch
    )


def uses_epoch_length(config: RunConfig) -> bool:
    """Returns whether the optimizer depends on the length of an epoch."""
    return isinstance(config.optim.schedule, Exponential)


def build_optimizer(
    config: RunConfig, trainable: tree.Flat, plan: Milestones, steps_per_epoch: int
) -> optax.GradientTransformation:
    """Builds the optax chain of a config."""
    o = config.optim
    schedule = optim.make_schedule(o.schedule, total=plan.total, epoch=steps_per_epoch)
    parts = {name.split("/")[0] for name in trainable}
    rates = optim.rates_by_part(parts, o.lr, {"head": o.lr_head, "backbone": o.lr_backbone})
    if "head" in rates and config.shared.tasks:  # each counts its own steps
        heads = {"/".join(name.split("/")[:2]) for name in trainable if name.startswith("head/")}
        rates |= dict.fromkeys(sorted(heads), rates.pop("head"))
    optim.check_no_decay(o.no_decay, OptimConfig().no_decay, trainable)
    return optim.make_optimizer(
        o.name, schedule, rates, weight_decay=o.weight_decay, no_decay=o.no_decay,
        clip=o.clip, b1=o.b1, b2=o.b2, eps=o.eps, decay_rate=o.decay_rate, scaled=o.scaled,
    )  # fmt: skip
