"""What a router reads of a row."""

from jaxprompt.serving.router import join_columns


def test_a_row_is_read_as_one_text():
    row = {"b": " two ", "a": "one", "n": 3, "none": None, "gap": float("nan"), "words": ["x", "y"]}
    assert join_columns(row, ("a", "b", "absent", "none", "gap", "n", "words")) == "one two 3 x y"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    assert join_columns({"messages": messages}, ("messages",)) == "hi"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert join_columns({"messages": parts}, ("messages",)) == "hi"
    assert join_columns(row, ("absent",)) == ""
