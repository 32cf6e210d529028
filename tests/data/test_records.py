"""Records as lines of JSON."""

import json

import numpy as np
import pytest

from jaxprompt.data.records import Record, to_lines
from jaxprompt.errors import InputError


def test_what_is_not_finite_in_a_row_is_null_however_deep():
    nan, inf = float("nan"), float("inf")
    row = {"a": nan, "b": [1.0, [inf]], "c": {"d": -inf, "e": (nan, "x")}, "f": np.array([nan, 2])}
    (line,) = to_lines([Record("in:1", row)], [{"prediction": "cat"}], "")
    nulls = {"a": None, "b": [1.0, [None]], "c": {"d": None, "e": [None, "x"]}, "f": [None, 2.0]}
    assert json.loads(line) == nulls | {"prediction": "cat"}
    broken = Record("in:1", {"c": {"d": nan}}, error="why")
    assert list(map(json.loads, to_lines([broken], [], ""))) == [{"c": {"d": None}, "error": "why"}]


def test_scores_that_are_not_finite_are_none_of_a_row():
    with pytest.raises(InputError, match="in:1: the scores are not finite"):
        list(to_lines([Record("in:1", {"a": 1})], [{"score": float("nan")}], ""))


def test_no_answer_is_left_over():
    records = [Record("in:1", {"a": 1}), Record("in:2", error="why"), Record("in:3")]
    assert len(list(to_lines(records, [{"score": 1}], ""))) == 3
    with pytest.raises(RuntimeError, match="more answers than records with an example"):
        list(to_lines(records, [{"score": 1}, {"score": 2}], ""))
