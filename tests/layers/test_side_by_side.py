"""What several methods add, as one."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.layers.side_by_side import SlotCounts, join_injections
from jaxprompt.types import Injection, Prefix, Stream


def slots(*values, rows=1, mask=None):
    """Rows of three numbers, equal in each, and which of them are there."""
    array = np.broadcast_to(np.float32(values)[None, :, None], (rows, len(values), 3))
    return Stream(slots=jnp.asarray(array), slots_mask=None if mask is None else jnp.array(mask))


def test_rows_beyond_the_template_come_last_in_both_streams():
    """2 of 3 rows are placed, and 1 of 2; those of the decoder are counted apart."""
    parts = [
        Injection(slots(1, 2, 8), slots(3, 9)), Injection(), Injection(slots(4, 7), slots(5, 6))
    ]  # fmt: skip
    joined = join_injections(parts, [SlotCounts(2, 1, 3), SlotCounts(0, 0, 3), SlotCounts(1, 2, 3)])
    assert joined.encoder.slots[0, :, 0].tolist() == [1, 2, 4, 8, 7]
    assert joined.decoder.slots[0, :, 0].tolist() == [3, 5, 6, 9]
    assert joined.encoder.slots_mask is None and joined.cross == Stream() and joined.rows is None


def test_rows_that_a_text_lacks_are_masked_beside_those_that_all_have():
    """Of a method that reads the text, in a batch of 2, beside one that does not."""
    mask = [[True, False], [True, True]]
    parts = [Injection(slots(1, 2, 3)), Injection(slots(4, 5, rows=2, mask=mask))]
    joined = join_injections(parts, [SlotCounts(3, 0, 5), SlotCounts(2, 0, 5)]).encoder
    assert joined.slots[..., 0].tolist() == [[1, 2, 3, 4, 5]] * 2
    assert joined.slots_mask.tolist() == [[True] * 4 + [False], [True] * 5]


@pytest.mark.parametrize("inside", [True, False])
def test_prefixes_stand_one_behind_the_other(inside):
    """Each is masked in the layers that are not its own, and they are numbered through."""
    shape = lambda length: (2, 1, length, 1, 1)

    def prefix(value, length, layers):
        mask = np.broadcast_to(np.array(layers)[:, None, None], (2, 1, length))
        places = jnp.arange(length) if inside else None
        k = jnp.full(shape(length), value)
        return Injection(Stream(prefix=Prefix(k, -k, mask, places)))

    parts = [prefix(1.0, 2, [True, False]), prefix(2.0, 1, [True, True])]
    joined = join_injections(parts, [SlotCounts(0, 0, 0)] * 2).encoder.prefix
    assert joined.k[0, 0, :, 0, 0].tolist() == [1, 1, 2]
    assert joined.v[0, 0, :, 0, 0].tolist() == [-1, -1, -2]
    assert isinstance(joined.mask, np.ndarray)  # known when compiling, so that layers are spared
    assert joined.mask[:, 0].tolist() == [[True] * 3, [False, False, True]]
    assert (joined.positions.tolist() == [0, 1, 2]) if inside else (joined.positions is None)


def test_the_rows_for_the_head_are_those_of_the_part_that_has_some():
    rows = jnp.ones((2, 3))
    assert (
        join_injections([Injection(), Injection(rows=rows)], [SlotCounts(0, 0, 0)] * 2).rows is rows
    )
