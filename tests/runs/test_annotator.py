"""What `annotate` refuses by the config alone."""

import pytest

from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError
from jaxprompt.runs.annotate import check_annotator


@pytest.mark.parametrize("field", ["demos.per_class", "demos.total", "demos.exact"])
def test_a_classifier_that_shows_demonstrations_is_refused(field):
    changes = {"corpus.path": "texts", "task.name": "sst2", field: 1}
    config = load_config("base", [("head.name", "verbalizer")]).replace(changes)
    with pytest.raises(InputError, match=f"demonstrations; set {field}=0"):
        check_annotator(config)
