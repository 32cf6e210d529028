"""Which examples of a config are demonstrations, and what an export says of them."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from exports import make_metadata
from sentence_pieces import KINDS, write_pieces

from jaxprompt.build.demonstrations import (
    check_demos,
    demos_from_metadata,
    demos_metadata,
    has_demos,
    make_demos,
    replace_sentence_encoder,
)
from jaxprompt.build.scorer import demo_format
from jaxprompt.config.load import load_config
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.specials import read_specials
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError

TASK = SimpleNamespace(labels=("bad", "good"), fields=("s",))
TRAIN = [Example({"s": f"train {i}"}, label=i % 2) for i in range(8)]
DEV = [Example({"s": f"dev {i}"}, label=i % 2) for i in range(8)]


def make_config(**fields):
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    return load_config("base").replace(changes)


@pytest.mark.parametrize("field", ["per_class", "total", "exact"])
def test_each_count_shows_demonstrations(field):
    assert not has_demos(make_config())
    assert make_demos(make_config(), TASK, {"train": TRAIN}) is None
    assert has_demos(make_config(**{f"demos__{field}": 1}))


def test_demonstrations_are_training_examples_drawn_by_the_seed_of_the_data():
    """Not by that of the training, and none of dev."""
    splits, shown = {"train": TRAIN, "dev": DEV}, {}
    for seed, data_seed in ((0, 0), (1, 0), (0, 1)):
        config = make_config(demos__per_class=1, demos__samples=4, data__seed=data_seed)
        config = config.replace({"seed": seed})
        demos = make_demos(config, TASK, splits)
        assert demos.settings.seed == data_seed and demos.pool == TRAIN
        shown[seed, data_seed] = demos.sample(DEV)
    assert shown[0, 0] == shown[1, 0] != shown[0, 1]
    with pytest.raises(InputError, match="demos.per_class=1 shows training examples, but there"):
        make_demos(config, TASK, {"dev": DEV})


SOFT, CLASSES, MARKED = (SimpleNamespace(kind=k, mark=m) for k, m in (
    ("soft", ""), ("classes", ""), ("field", "marked")
))  # fmt: skip


def check_all(
    config, *, reads=True, kind="classes", choices=(), lists=False, parts=(SOFT,), mask=True
):
    head = SimpleNamespace(READS_WORDS=reads, name="verbalizer")
    task = SimpleNamespace(kind=kind, choices=choices, name="custom")
    template = SimpleNamespace(lists_choices=lists, parts=parts, has_mask=mask, source="{s}")
    check_demos(config, head, task, template)


@pytest.mark.parametrize("fields", [
    {}, {"demos__per_class": 0, "demos__total": 1}, {"demos__similar": 1.0},
    {"demos__similar": 0.99, "demos__encoder": "a/bert"},
])  # fmt: skip
def test_demonstrations_that_fit_are_let_through(fields):
    check_all(make_config(**{"demos__per_class": 1} | fields))


@pytest.mark.parametrize("fields, splits, message", [
    ({"demos__total": 2}, {}, "demos.per_class=1 and demos.total=2; set one"),
    ({"demos__similar": 0.99}, {}, "demos.encoder is empty"),
    ({}, {"reads": False}, "shows label words, which head.name=verbalizer does not use"),
    ({}, {"kind": "numbers"}, "shows examples of each class"),
    ({}, {"choices": ("a", "b")}, "shows examples of each class"),
    ({}, {"lists": True}, "shows examples of each class"),
    ({}, {"parts": (SOFT, CLASSES)}, r"lists all classes at \[classes\]"),
    ({}, {"parts": (SOFT, MARKED)}, r"without \|marked"),
    ({}, {"mask": False}, r"writes label words at \[mask\]"),
])  # fmt: skip
def test_demonstrations_that_do_not_fit_are_refused(fields, splits, message):
    with pytest.raises(InputError, match=message):
        check_all(make_config(**{"demos__per_class": 1} | fields), **splits)
    if splits:
        check_all(make_config(), **splits)  # where none are shown nothing is asked


def metadata_with_demos(**changes):
    config = make_config(demos__per_class=1, demos__samples=2, data__seed=5)
    metadata = demos_metadata(make_demos(config, TASK, {"train": TRAIN}))
    demos = json.loads(json.dumps(dataclasses.asdict(metadata))) | changes
    task = {"fields": list(TASK.fields), "labels": list(TASK.labels), "derive": {}}
    return make_metadata(task=task, demos=demos)


def test_an_export_shows_what_its_run_showed():
    metadata = metadata_with_demos()
    config = make_config(demos__per_class=1, demos__samples=2, data__seed=5)
    expected = make_demos(config, TASK, {"train": TRAIN}).sample(DEV)
    assert demos_from_metadata(metadata.demos, TASK).sample(DEV) == expected
    assert demos_from_metadata(None, TASK) is None


def test_a_sentence_encoder_is_for_prompts_that_compare():
    metadata = metadata_with_demos(similar=0.99)
    expected = dataclasses.replace(metadata.demos, encoder="other")
    assert replace_sentence_encoder(metadata, "other") == dataclasses.replace(
        metadata, demos=expected
    )
    assert replace_sentence_encoder(metadata, "") is metadata
    for plain in (metadata_with_demos(similar=1.0), make_metadata()):
        with pytest.raises(InputError, match="encoder 'other' is not needed"):
            replace_sentence_encoder(plain, "other")


# -- format ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_break_ends_each_on_a_left_to_right_model(kind, tmp_path):
    tokenizer = load_tokenizer(write_pieces(tmp_path, kind))
    specials = read_specials(tokenizer, "causal", eos=True, sentinel="", num_masks=1)
    laid = SimpleNamespace(
        specials=specials, verbalizer=SimpleNamespace(ids=np.array([[[7, -1]], [[8, 9]]]))
    )
    settings = SimpleNamespace(
        per_class=0, total=0, exact=2, max_demo_tokens=0, max_example_tokens=0
    )
    beside = demo_format(SimpleNamespace(settings=settings), laid, tokenizer)
    assert [tokenizer.decode(run.ids) for run in beside.separator] == ["\n"]
    assert beside.words == [[7], [8, 9]] and beside.demos_first and beside.never_cut
