"""Which examples of a config are demonstrations, and what an export says of them."""

from types import SimpleNamespace

import pytest

from jaxprompt.build.demonstrations import (
    card_of,
    check_demos,
    check_demos_card,
    demos_of,
    demos_of_card,
    shows_demos,
    with_encoder,
)
from jaxprompt.config.load import load_config
from jaxprompt.data.tasks.task import Example
from jaxprompt.errors import InputError

TASK = SimpleNamespace(labels=("bad", "good"), fields=("s",))
TRAIN = [Example({"s": f"train {i}"}, label=i % 2) for i in range(8)]
DEV = [Example({"s": f"dev {i}"}, label=i % 2) for i in range(8)]


def config(**fields):
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    return load_config("base").replace(changes)


@pytest.mark.parametrize("field", ["per_class", "total", "exact"])
def test_each_count_shows_demonstrations(field):
    assert not shows_demos(config())
    assert demos_of(config(), TASK, {"train": TRAIN}) is None
    assert shows_demos(config(**{f"demos__{field}": 1}))


def test_demonstrations_are_training_examples_drawn_by_the_seed_of_the_data():
    """Not by that of the training, and none of dev."""
    given, shown = {"train": TRAIN, "dev": DEV}, {}
    for seed, data_seed in ((0, 0), (1, 0), (0, 1)):
        c = config(demos__per_class=1, demos__samples=4, data__seed=data_seed)
        c = c.replace({"seed": seed})
        demos = demos_of(c, TASK, given)
        assert demos.settings.seed == data_seed and demos.pool == TRAIN
        shown[seed, data_seed] = demos.sample(DEV)
    assert shown[0, 0] == shown[1, 0] != shown[0, 1]
    with pytest.raises(InputError, match="demos.per_class=1 shows training examples, and there"):
        demos_of(c, TASK, {"dev": DEV})


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
    check_all(config(**{"demos__per_class": 1} | fields))


@pytest.mark.parametrize("fields, given, told", [
    ({"demos__total": 2}, {}, "demos.per_class=1 and demos.total=2; set one"),
    ({"demos__similar": 0.99}, {}, "demos.encoder is empty"),
    ({}, {"reads": False}, "shows label words, which head.name=verbalizer does not read"),
    ({}, {"kind": "numbers"}, "shows examples of each class"),
    ({}, {"choices": ("a", "b")}, "shows examples of each class"),
    ({}, {"lists": True}, "shows examples of each class"),
    ({}, {"parts": (SOFT, CLASSES)}, r"lists all classes at \[classes\]"),
    ({}, {"parts": (SOFT, MARKED)}, r"without \|marked"),
    ({}, {"mask": False}, r"writes label words where the template has \[mask\]"),
])  # fmt: skip
def test_demonstrations_that_do_not_fit_are_refused(fields, given, told):
    with pytest.raises(InputError, match=told):
        check_all(config(**{"demos__per_class": 1} | fields), **given)
    if given:
        check_all(config(), **given)  # where none are shown nothing is asked


def make_card(**changes):
    c = config(demos__per_class=1, demos__samples=2, data__seed=5)
    block = card_of(demos_of(c, TASK, {"train": TRAIN})) | changes
    return {"task": {"fields": ["s"], "labels": ["bad", "good"]}, "demos": block}


def check(card):
    check_demos_card("export", card["demos"], card["task"])


def test_an_export_shows_what_its_run_showed():
    card = make_card()
    check(card)
    c = config(demos__per_class=1, demos__samples=2, data__seed=5)
    expected = demos_of(c, TASK, {"train": TRAIN}).sample(DEV)
    assert demos_of_card(card, TASK).sample(DEV) == expected
    assert demos_of_card({"demos": None}, TASK) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"per_class": 0}, {"total": 1}, {"exact": 1}, {"examples": []}, {"fingerprint": None},
        *[{"examples": [{"fields": {"s": "x"}, "label": label}]} for label in (-1, 2, True, "0")],
        *[{"examples": [{"fields": fields, "label": 0}]} for fields in ({}, {"s": 1}, ["s"])],
    ],
)  # fmt: skip
def test_a_card_that_was_edited_is_refused(changes):
    """One count is above 0, and the label of each example is one of the task's."""
    with pytest.raises(InputError, match="export"):
        check(make_card(**changes))


@pytest.mark.parametrize("label", [0, 1])
def test_the_first_and_the_last_class_are_labels(label):
    check(make_card(examples=[{"fields": {"s": "x"}, "label": label}]))


def test_a_sentence_encoder_is_for_prompts_that_compare():
    card = make_card(similar=0.99)
    assert with_encoder(card, "other")["demos"] == card["demos"] | {"encoder": "other"}
    assert with_encoder(card, "") is card
    for plain in (make_card(similar=1.0), {"demos": None}):
        with pytest.raises(InputError, match="encoder 'other' is not needed"):
            with_encoder(plain, "other")
