"""Progress of counted work."""

import pytest

from jaxprompt.training.pace import ProgressReporter, format_seconds


def test_progress_is_reported_every_ten_seconds(clock):
    said = []
    pace = ProgressReporter(said.append, "labelled", 1_400, "units", done=400)
    for second, count in ((4, 100), (12, 140), (15, 60), (23, 160), (30, 540)):
        clock[0] = float(second)
        pace.add(count)
    assert said == [
        "labelled 640/1,400 units, 20 a second, 0:38 left",
        "labelled 860/1,400 units, 20 a second, 0:27 left",
    ]


def test_a_rate_below_one_and_nothing_done_yet(clock):
    said = []
    pace = ProgressReporter(said.append, "scored", 100, "examples")
    for second, count in ((11, 0), (40, 10)):
        clock[0] = float(second)
        pace.add(count)
    assert said == ["scored 10/100 examples, 0.25 a second, 6:00 left"]
    pace = ProgressReporter(said.append, "predicted", None, "rows")  # it is not known how many
    clock[0] = 60.0
    pace.add(2_000)
    assert said[1:] == ["predicted 2,000 rows, 100 a second"]


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0:00"), (125, "2:05"), (3599.6, "1:00:00"), (36_125, "10:02:05")]
)
def test_hours_appear_when_there_are_any(seconds, text):
    assert format_seconds(seconds) == text
