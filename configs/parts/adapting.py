"""What runs that pre-train a backbone have in common."""

from ml_collections import ConfigDict

from configs import base


def adapting(objective, length, batch, lr, steps=10_000):
    """Returns a run of AdamW with warmup over all weights."""
    c = base.get_config()
    c.prompt = ConfigDict(dict(name="none"))
    c.objective.name = objective
    c.data.max_len, c.data.batch, c.data.eval_batch = length, batch, batch
    c.backbone.dropout = 0.0
    c.optim.lr, c.optim.weight_decay = lr, 0.01
    c.optim.schedule, c.optim.warmup_steps = "warmup_linear", steps // 20
    c.train.total_epochs, c.train.total_steps = 0.0, steps
    c.train.eval_steps = c.train.save_steps = steps // 20
    return c
