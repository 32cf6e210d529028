"""Writing on a mesh: every device keeps to the examples that it has."""

import functools

import jax
import pytest
from tiny import make_batch, make_tiny

from jaxprompt.models.generation import generate
from jaxprompt.models.model import Model
from jaxprompt.parallel.hlo import count_work
from jaxprompt.parallel.sharding import make_placement, put_batch, with_placement
from jaxprompt.prompts import make_prompt

pytestmark = pytest.mark.long


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_beams_are_not_sent_around(family):
    """The cache stays where it is: in all, less is sent than the keys of one layer."""
    backbone, params = make_tiny(family)
    model = Model(backbone, make_prompt("none", backbone.dims), {})
    place = make_placement(4, 1, devices=jax.devices()[:4])
    write = functools.partial(generate, max_new_tokens=4, eos=1, pad=0, num_beams=2)
    step = with_placement(place, lambda params, batch: write(model, params, batch).ids)
    batch = put_batch(place, make_batch(rows=8, family=family))
    params_on_mesh = jax.device_put({"backbone": params}, place.replicated)
    work = count_work(jax.jit(step).lower(params_on_mesh, batch).compile().as_text())
    keys = 8 * 2 * 12 * 16 * 4  # bytes of one layer
    assert sum(work.sent.values()) < keys, work.sent
