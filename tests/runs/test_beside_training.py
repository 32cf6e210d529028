"""Commands that read a folder in which a run is at work."""

import pytest

from jaxprompt.errors import InputError
from jaxprompt.runs.record import beside_training
from jaxprompt.training.run_folder import lock


def test_numbers_that_a_run_replaced_meanwhile_are_no_lost_ones(tmp_path):
    """The cure is to read again: to delete the folder would end a run that is well."""
    lost = InputError("no checkpoint of step 4; delete it to train from the start")

    def read():
        with beside_training(str(tmp_path / "run")):
            raise lost

    with lock(tmp_path / "run"), pytest.raises(InputError, match="is being trained, .* again$"):
        read()
    with pytest.raises(InputError, match="no checkpoint of step 4"):
        read()
