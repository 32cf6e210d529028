"""What a router reads of a row."""

import numpy as np

from jaxprompt.serving.router import join_columns, mask_prompts


def test_a_row_is_read_as_one_text():
    row = {"b": " two ", "a": "one", "n": 3, "none": None, "gap": float("nan"), "words": ["x", "y"]}
    assert join_columns(row, ("a", "b", "absent", "none", "gap", "n", "words")) == "one two 3 x y"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    assert join_columns({"messages": messages}, ("messages",)) == "hi"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert join_columns({"messages": parts}, ("messages",)) == "hi"
    assert join_columns(row, ("absent",)) == ""


def test_prompts_that_do_not_fit_a_row_are_masked():
    scores, inf = np.array([[1.0, 2.0]] * 3), np.inf
    rows = [{"a": 1, "b": None}, {"a": 1, "b": "x"}, {"c": 1}]
    masked = mask_prompts(scores, rows, [("a",), ("a", "b")])
    np.testing.assert_array_equal(masked, [[1, -inf], [1, 2], [1, 2]])
