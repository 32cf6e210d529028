"""How far the host runs ahead of the device, and what it knows of the steps there."""

from jaxprompt.training.loop import DispatchedSteps


class Number:
    """A number that a device computes; whoever waits for it gets it."""

    def __init__(self, value):
        self.value, self.computed = value, False

    def is_ready(self):
        return self.computed

    def block_until_ready(self):
        self.computed = True
        return self


def test_steps_that_are_only_begun_are_not_done():
    """Their number and the time taken to begin them would promise a speed that is not there."""
    ahead, streaks = DispatchedSteps(), []
    for step in range(1, 12):
        streaks.append(Number(0))
        ahead.add(step, {"streak": streaks[-1], "skipped": Number(0)})
        # Eight may be begun beside the one that was waited for.
        assert ahead.finished_step == (step - 8 if step > 8 else None)
    for streak in streaks[:7]:
        streak.computed = True
    streaks.append(Number(0))
    ahead.add(12, {"streak": streaks[-1], "skipped": Number(0)})
    assert ahead.finished_step == 7


def test_a_step_that_is_read_is_done():
    ahead = DispatchedSteps()
    ahead.add(4, {"streak": Number(0), "skipped": Number(0)})
    assert ahead.finished_step is None
    ahead.add(5, {"streak": Number(0), "skipped": Number(0)})
    read, actual = ahead.read({"loss": 0.5})
    assert (
        [step for step, *_ in read] == [4, 5]
        and actual == {"loss": 0.5}
        and ahead.finished_step == 5
    )
