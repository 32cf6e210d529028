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
        self,
        batches: Iterator[Batch],
        score: Callable[[dict], dict[str, float]],
        flops: float,
        dtype: str,
        placement: Placement,
    ):
        """Starts counting before the first batch."""
        self._batches, self._score, self._flops = batches, score, flops
        self._tokens, self._num_batches = 0, 0
        self._num_shares, self._num_devices = placement.batch_part()[1], placement.mesh.size
        device = find_device(placement.mesh.devices.flat[0].device_kind)
        self._peak = device.peak(dtype) if device else None

    def next_batch(self) -> Batch:
        """Returns the next batch."""
        batch = next(self._batches)
        self._tokens += sum(int(x.mask.sum()) for x in (batch.encoder, batch.decoder) if x)
        self._num_batches += 1
        return batch

    def describe(self, metrics: dict[str, Any], steps: int, seconds: float) -> dict[str, Any]:
        """Returns the log record of a step, the last of `steps` steps in `seconds`.

        "scores" are those of the batch. "time" has, per second: steps, non-padding tokens of all
        hosts, and TFLOPs per device; mfu is the share of its peak FLOP/s, if that is known.
        """
        record = {name: value for name, value in metrics.items() if name != "sums"}
        record["scores"] = self._score(jax.tree.map(np.float64, metrics["sums"]))
        # Directly after a pause there is no step to measure.
        if steps and self._num_batches:
            # All shares of a batch have equally many examples; their tokens are assumed equal too.
            tokens_per_second = (
                self._tokens / self._num_batches * steps / seconds * self._num_shares
            )
            flops = self._flops * steps / seconds / self._num_devices
            record["time"] = {
                "steps_per_second": steps / seconds, "tokens_per_second": tokens_per_second,
                "tflops": flops / 1e12,
            }  # fmt: skip
            if self._peak:
                record["time"]["mfu"] = flops / self._peak
        self._tokens, self._num_batches = 0, 0
        return record
