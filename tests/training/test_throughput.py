from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.sharding import Placement, make_placement
from jaxprompt.training import throughput as module
from jaxprompt.training.throughput import Meter


def batches(tokens, decoder=None):
    """Yields batches with so many real tokens."""
    for num_tokens in tokens:
        mask = lambda count: SimpleNamespace(mask=np.arange(12).reshape(2, 6) < count)
        yield SimpleNamespace(
            encoder=mask(num_tokens), decoder=None if decoder is None else mask(decoder)
        )


MESH = make_placement(2, 1, devices=jax.devices()[:2])  # which need not be all there are
SUMS = {"main": {"loss": np.float32(6.0), "n": np.float32(3.0), "hits": np.float32(1.0)}}
MEASURED = {"loss": np.float32(2.0), "sums": SUMS}


def score(sums):
    return {"loss": float(sums["main"]["loss"] / sums["main"]["n"])}


def test_rates_are_of_the_tokens_taken():
    meter = Meter(batches([4, 6, 8]), score, 5e9, "float32", MESH)
    for _ in range(2):
        meter.next_batch()
    said = meter.describe(MEASURED, 2, 4.0)
    assert said["scores"] == {"loss": 2.0} and "sums" not in said and said["loss"] == 2.0
    assert said["time"] == {
        "steps_per_second": 0.5, "tokens_per_second": 2.5,
        "tflops": pytest.approx(5e9 * 0.5 / 2 / 1e12),
    }  # fmt: skip
    meter.next_batch()
    assert meter.describe(MEASURED, 1, 2.0)["time"]["tokens_per_second"] == 4.0


def test_a_decoder_counts_and_no_step_has_no_rate():
    meter = Meter(batches([5], decoder=3), score, 1.0, "float32", MESH)
    meter.next_batch()
    assert "time" not in meter.describe(MEASURED, 0, 0.0)
    meter = Meter(batches([5], decoder=3), score, 1.0, "float32", MESH)
    meter.next_batch()
    assert meter.describe(MEASURED, 1, 1.0)["time"]["tokens_per_second"] == 8.0


@pytest.mark.parametrize("dtype, peak", [("bfloat16", 989e12), ("float32", 494e12)])
def test_utilisation_is_of_the_dtypes_peak(monkeypatch, dtype, peak):
    monkeypatch.setattr(module, "find_device", lambda kind: DEVICES["h200"])
    meter = Meter(batches([1]), score, peak * 2 / 4, dtype, MESH)
    meter.next_batch()
    assert meter.describe(MEASURED, 1, 1.0)["time"]["mfu"] == pytest.approx(0.25)


def test_processes_that_hold_the_same_rows_count_once(monkeypatch):
    """With a model axis over two processes both read the same half of a batch."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(Placement, "batch_part", lambda self: (0, 2))
    meter = Meter(batches([5]), score, 1.0, "float32", MESH)
    meter.next_batch()
    assert meter.describe(MEASURED, 1, 1.0)["time"]["tokens_per_second"] == 10.0
