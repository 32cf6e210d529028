"""Rows of a split."""

from jaxprompt.data.rows import Rows


def test_a_slice_holds_rows_with_their_origins():
    rows = Rows([{"a": i} for i in range(5)], "x.jsonl", lines=[2, 3, 5, 8, 9])
    part = rows[1::2]
    assert list(part) == [{"a": 1}, {"a": 3}]
    assert [part.origin(i) for i in range(2)] == ["x.jsonl:3", "x.jsonl:8"]
    assert part.total == 5 and part.source_index(1) == 3
