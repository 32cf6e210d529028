"""Which backbones read where a prefix stands: a bank keeps its positions for these alone."""

import numpy as np
import pytest
from tiny import jit, make_batch, make_tiny

from jaxprompt.backbones import families
from jaxprompt.types import Injection, Prefix, Stream

# family, changes, whether it reads them
CASES = {family: (family, {}, family in ("t5", "t5gemma")) for family in families()}
CASES["mistral"] = "llama", dict(model_type="mistral", sliding_window=4), True
CASES["gemma3"] = (
    "llama", dict(model_type="gemma3_text", sliding_window=4, sliding_window_pattern=2), True,
)  # fmt: skip


@pytest.mark.default_cases("bert", "t5")
@pytest.mark.parametrize("case", CASES)
def test_a_backbone_says_whether_it_reads_where_a_prefix_stands(case):
    family, changes, reads = CASES[case]
    module, params = make_tiny(family, **changes)
    dims, rng = module.dims, np.random.default_rng(0)
    length = 3
    shape = dims.layers, 1, length, dims.heads, dims.head_dim
    k, v = rng.normal(size=(2, *shape)).astype(np.float32)
    batch = make_batch(family=family, shift=length)

    @jit
    def states(places):
        prefix = Prefix(k, v, np.ones(shape[:3], bool), places)
        injection = Injection(Stream(prefix=prefix))
        return module.apply({"params": params}, batch, injection, deterministic=True)

    gap = float(np.abs(states(np.arange(length)) - states(None)).max())
    assert module.reads_prefix_positions == reads
    assert gap > 1e-3 if reads else gap == 0.0
