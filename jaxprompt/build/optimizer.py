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
    eval_steps = train.eval_steps or max(1, round(train.eval_epochs * steps_per_epoch))
    return Milestones(total, eval_steps, train.save_steps)


def config_milestones(config: RunConfig, steps_per_epoch: int, examples: int = 0) -> Milestones:
    """Converts the total of a config to steps; `examples` per epoch, 0 = all batches are full."""
    return make_milestones(
        config.train, steps_per_epoch, examples / steps_per_epoch or config.data.batch
    )


def uses_epoch_length(config: RunConfig) -> bool:
    """Returns whether the optimizer depends on the length of an epoch."""
    return isinstance(config.optim.schedule, Exponential)


def build_schedule(
    config: RunConfig, milestones: Milestones, steps_per_epoch: int
) -> optim.Schedule:
    """Builds the learning-rate schedule of a config."""
    total = milestones.total
    return optim.make_schedule(config.optim.schedule, total=total, epoch=steps_per_epoch)


def build_optimizer(
    config: RunConfig, trainable: tree.Flat, milestones: Milestones, steps_per_epoch: int
) -> optax.GradientTransformation:
    """Builds the optax chain of a config."""
    block, schedule = config.optim, build_schedule(config, milestones, steps_per_epoch)
    parts = {name.split("/")[0] for name in trainable}
    learning_rates = optim.lr_by_part(
        parts, block.lr, {"head": block.lr_head, "backbone": block.lr_backbone}
    )
    if "head" in learning_rates and config.shared.tasks:  # each head counts its own steps
        head_names = {
            "/".join(name.split("/")[:2]) for name in trainable if name.startswith("head/")
        }
        learning_rates |= dict.fromkeys(sorted(head_names), learning_rates.pop("head"))
    optim.check_no_decay(block.no_decay, OptimConfig().no_decay, trainable)
    return optim.make_optimizer(
        block.name,
        schedule,
        learning_rates,
        weight_decay=block.weight_decay,
        no_decay=block.no_decay,
        clip=block.clip,
        b1=block.b1,
        b2=block.b2,
        eps=block.eps,
        decay_rate=block.decay_rate,
        scaled=block.scaled,
    )
