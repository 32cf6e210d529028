"""Rows of tasks whose answer is a number."""

import pytest

from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head
from jaxprompt.scoring.metrics import check_metric

COUNTED = {"fields": ("text",), "number": "beasts", "limits": (0.0, 4.0)}


@pytest.mark.parametrize("value, number", [(0, 0.0), ("4", 4.0), (2.5, 2.5)])
def test_a_number_of_a_row(value, number):
    assert (
        read_example(custom_task(**COUNTED), {"text": "a", "beasts": value}, "x").number == number
    )


@pytest.mark.parametrize(
    "row, message",
    [
        ({"beasts": "many"}, "x:4: column 'beasts' is 'many', not a number"),
        ({"beasts": True}, "x:4: column 'beasts' is True, not a number"),
        ({"beasts": None}, "x:4: column 'beasts' is None, not a number"),
        ({"beasts": 5}, "x:4: beasts is 5; for task custom it must be between 0 and 4"),
        ({"other": 1}, "x:4: there is no column 'beasts'; columns: text, other"),
    ],
)
def test_rows_that_are_wrong(row, message):
    with pytest.raises(InputError, match=message):
        read_example(custom_task(**COUNTED), {"text": "a"} | row, "x:4")


def test_a_hidden_number_is_none():
    """Out of the limits, as -1, or absent: where none is needed."""
    for row in ({"beasts": -1}, {"beasts": None}, {}):
        example = read_example(custom_task(**COUNTED), {"text": "a"} | row, "x:1", need_label=False)
        assert example.number is None


def test_what_does_not_fit():
    with pytest.raises(InputError, match=r"task.limits=\(4.0, 0.0\) must be the minimum"):
        custom_task(**COUNTED | {"limits": (4.0, 0.0)})
    with pytest.raises(InputError, match="task.number='beasts' and task.labels are both set"):
        custom_task(**COUNTED, labels=("a", "b"))
    with pytest.raises(InputError, match="predicts numbers; use pearson, spearman"):
        check_metric("accuracy", 0, kind="numbers")
    with pytest.raises(InputError, match="optim.label_smoothing=0.1 is only valid with classes"):
        make_head("regression").objectives(0.1)
