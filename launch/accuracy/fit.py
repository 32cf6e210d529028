"""The training loop of the sides in torch: the epoch that is best on dev counts."""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from jaxprompt.config.run import RunConfig
from jaxprompt.training.run_result import RunResult


class Training(NamedTuple):
    """What is trained, on what loss, and how it is scored."""

    method: str  # as the result names it
    model: torch.nn.Module
    examples: int  # of the training set
    loss: Callable[[np.ndarray], torch.Tensor]  # of the training examples with these indices
    measure: Callable[[str], dict[str, float]]  # metrics of a split
    metric: str = "accuracy"  # chooses the epoch on dev


def fit(
    c: RunConfig, seed: int, training: Training, epochs: int, optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> RunResult:  # fmt: skip
    """Trains on batches in random order, restores the best epoch and scores test.

    Returns:
      The result of the run, as launch/accuracy writes it.
    """
    model = training.model
    parameters = [p for p in model.parameters() if p.requires_grad]

    def measure(split: str) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            return training.measure(split)

    rng, best, started = np.random.RandomState(seed), None, time.monotonic()
    for epoch in range(epochs):
        model.train()
        order = rng.permutation(training.examples)
        for i in range(0, training.examples, c.data.batch):
            training.loss(order[i : i + c.data.batch]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, c.optim.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        dev = measure("dev")
        shown = ", ".join(f"{name} {value:.4f}" for name, value in dev.items())
        print(f"epoch {epoch + 1}: dev {shown}", file=sys.stderr, flush=True)
        if best is None or dev[training.metric] > best[0][training.metric]:
            best = dev, [p.detach().clone() for p in parameters], epoch + 1
    with torch.no_grad():
        for p, value in zip(parameters, best[1], strict=True):
            p.copy_(value)
    steps = -(-training.examples // c.data.batch)  # of an epoch
    return RunResult(
        method=training.method, seed=seed, trained=sum(p.numel() for p in parameters),
        total=sum(p.numel() for p in model.parameters()), steps=epochs * steps,
        best_step=best[2] * steps, dev=best[0], test=measure("test"),
        time={"seconds": time.monotonic() - started},
    )  # fmt: skip
