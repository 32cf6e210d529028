"""Scores and throughput of pre-training steps."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxprompt.parallel.devices import find_device
from jaxprompt.parallel.sharding import Placement
from jaxprompt.types import Batch


class Meter:
    """Measures the scores and throughput of the steps of a run.

    `flops` are the model FLOPs of one step on all devices together, without recomputation in the
    backward pass.
    """

    def __init__(
        self, batches: Iterator[Batch], score: Callable[[dict], dict[str, float]], flops: float,
        dtype: str, placement: Placement,
    ):  # fmt: skip
        """Starts counting before the first batch."""
        self._batches, self._score, self._flops = batches, score, flops
        self._tokens, self._taken = 0, 0
        self._shares, self._devices = placement.batch_part()[1], placement.mesh.size
        known = find_device(placement.mesh.devices.flat[0].device_kind)
        self._peak = known.peak(dtype) if known else None

    def take(self) -> Batch:
        """Returns the next batch."""
        batch = next(self._batches)
        self._tokens += sum(int(x.mask.sum()) for x in (batch.encoder, batch.decoder) if x)
        self._taken += 1
        return batch

    def describe(self, measured: dict[str, Any], steps: int, seconds: float) -> dict[str, Any]:
        """Returns the log record of a step, the last of `steps` steps in `seconds`.

        "scores" are those of the batch. "time" has, per second: steps, non-padding tokens of all
        hosts, and TFLOPs per device; mfu is the share of its peak FLOP/s, if that is known.
        """
        said = {name: value for name, value in measured.items() if name != "sums"}
        said["scores"] = self._score(jax.tree.map(np.float64, measured["sums"]))
        # Right behind a pause there is no step to time.
        if steps and self._taken:
            # Every share of a batch has as many examples, and is taken to have as many tokens.
            rate = self._tokens / self._taken * steps / seconds * self._shares
            flops = self._flops * steps / seconds / self._devices
            said["time"] = {
                "steps_per_second": steps / seconds, "tokens_per_second": rate,
                "tflops": flops / 1e12,
            }  # fmt: skip
            if self._peak:
                said["time"]["mfu"] = flops / self._peak
        self._tokens, self._taken = 0, 0
        return said
