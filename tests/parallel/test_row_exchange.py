"""Rows of processes become rows of a batch, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.parallel.row_exchange import RowExchange
from jaxprompt.parallel.sharding import make_placement


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 2), (8, 1), (1, 8)])
def test_rows_of_one_process_on_eight_devices(shape, dtype):
    """Those of several processes: tests/cli/test_feature_cache.py."""
    placement = make_placement(*shape)
    exchange = RowExchange(placement)
    rng = np.random.default_rng(0)
    for num_absent in (0, 3, 16):
        owners = np.where(rng.permutation(16) < num_absent, -1, 0)
        rows = rng.normal(size=(16, 3, 2)).astype(jnp.dtype(dtype))
        batch = exchange.join(owners, lambda indices, rows=rows: rows[indices])
        expected = np.where(owners[:, None, None] == 0, rows, 0).astype(rows.dtype)
        assert batch.sharding.is_equivalent_to(placement.batch, 3) and batch.dtype == rows.dtype
        assert np.asarray(batch).tobytes() == expected.tobytes()
    assert jax.device_count() == 8
