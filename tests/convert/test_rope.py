"""Blocks of rotary positions that ask for nothing that can be computed: one line each."""

import pytest

from jaxprompt.convert.rope import read_turning
from jaxprompt.errors import InputError

YARN = dict(rope_type="yarn", factor=4.0, rope_theta=100.0)


def read(**fields):
    return read_turning({"rope_parameters": YARN | fields}, 8, 40)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(rope_theta=1.0), "rope_theta=1, .* must be above 1: give the config.json"),
        (dict(rope_theta=0.5), "rope_theta=0.5, .* must be above 1"),
        (dict(mscale="a", mscale_all_dim=1.0), "has mscale='a', which must be above 0"),
        (dict(mscale=1.0, mscale_all_dim="b"), "has mscale_all_dim='b', which must be above 0"),
        (dict(mscale=-100.0, mscale_all_dim=1.0), "has mscale=-100.0, which must be above 0"),
        (dict(mscale=[1.0]), r"has mscale=\[1.0\], which must be above 0"),
        (dict(attention_factor=-1.0), "has attention_factor=-1.0, which must be above 0"),
        (dict(beta_fast=0), "has beta_fast=0, which must be above 0"),
    ],
)
def test_a_yarn_that_cannot_be_computed_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        read(**fields)


def test_a_scale_of_0_is_none():
    assert read(mscale=0, mscale_all_dim=0.0) == read() == read(mscale=0.7)
    assert read(mscale=0.7, mscale_all_dim=1.0) != read()
