"""Prompts of a bank side by side, and each row with its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.heads import linear
from jaxprompt.models.bank import (
    group_heads,
    prefix_positions,
    select_injections,
    stack_injections,
    without_positions,
)
from jaxprompt.types import Injection, Prefix, Stream


def soft(count, value):
    return Injection(Stream(slots=jnp.full((1, count, 4), value)))


def prefix(length, value, layers=(True, True), inside=True):
    shape = (2, 1, length, 3, 5)
    mask = np.broadcast_to(np.array(layers)[:, None, None], shape[:3])
    positions = jnp.arange(length) if inside else None
    return Injection(
        Stream(prefix=Prefix(jnp.full(shape, value), jnp.full(shape, -value), mask, positions))
    )


def test_soft_tokens_are_filled_up_to_the_longest():
    slots = stack_injections([soft(2, 1.0), Injection(), soft(3, 5.0)]).encoder.slots
    assert slots[..., 0].tolist() == [[1, 1, 0], [0, 0, 0], [5, 5, 5]]
    assert stack_injections([Injection()] * 2) == Injection()


def test_a_shorter_prefix_is_masked_behind_its_end_and_a_missing_one_throughout():
    """A key of zeros that is seen would take its share of the attention."""
    actual = stack_injections([prefix(1, 2.0), Injection(), prefix(3, 7.0, layers=(False, True))])
    stacked_prefix = actual.encoder.prefix
    assert stacked_prefix.k.shape == stacked_prefix.v.shape == (2, 3, 3, 3, 5)
    assert stacked_prefix.mask.astype(int).tolist() == [
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 0], [1, 1, 1]]
    ]  # fmt: skip
    assert stacked_prefix.k[0, :, :, 0, 0].tolist() == [[2, 0, 0], [0, 0, 0], [7, 7, 7]]
    assert stacked_prefix.v[1, :, :, 2, 4].tolist() == [[-2, 0, 0], [0, 0, 0], [-7, -7, -7]]
    assert stacked_prefix.positions.tolist() == [0, 1, 2]


def test_each_row_has_what_its_prompt_adds():
    added = stack_injections([prefix(1, 2.0), prefix(2, 7.0)])
    actual = select_injections(added, jnp.array([1, 0, 1])).encoder.prefix
    assert actual.k[0, :, :, 0, 0].tolist() == [[7, 7], [2, 0], [7, 7]]
    assert actual.mask[1].tolist() == [[True, True], [True, False], [True, True]]
    slots = select_injections(
        stack_injections([soft(1, 3.0), soft(1, 4.0)]), jnp.array([1, 1, 0])
    ).encoder.slots
    assert slots[:, 0, 0].tolist() == [4, 4, 3]


@pytest.mark.parametrize("inside", [True, False])
def test_whether_prefixes_stand_at_distances_is_told_and_forgotten(inside):
    near = prefix(2, 1.0, inside=inside)
    assert (
        prefix_positions(near) == (inside, False, False)
        and prefix_positions(soft(2, 1.0)) == (False,) * 3
    )
    assert without_positions(near).encoder.prefix.positions is None
    assert without_positions(near).encoder.prefix.k is near.encoder.prefix.k


def test_heads_of_one_kind_are_stacked_and_numbered_within_it():
    """Three kinds: two classes, three, and two beside label rows."""
    two, three = linear.Classifier(2), linear.Classifier(3)
    heads, rows = [two, three, two, two, three], [None, None, None, np.ones((2, 4)), None]
    params = [{"bias": jnp.full(head.classes, i)} for i, head in enumerate(heads)]
    kinds, stacked, of = group_heads(heads, params, rows)
    assert kinds == (two, three, two) and of == [0, 1, 0, 2, 1]
    assert [stack.params["bias"][:, 0].tolist() for stack in stacked] == [[0, 2], [1, 4], [3]]
    positions = [int(stacked[kind].index[prompt]) for prompt, kind in enumerate(of)]
    assert positions == [0, 0, 1, 0, 1]
    assert stacked[0].rows is None and jax.tree.map(np.shape, stacked[2].rows) == (1, 2, 4)
