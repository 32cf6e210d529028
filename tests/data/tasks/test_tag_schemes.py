"""Tags of words: every scheme becomes IOB2 or is refused by name."""

import random

import pytest

from jaxprompt.data.tasks import tags
from jaxprompt.data.tasks.tags import Entity, find_entities, find_scheme, to_iob2, write_iob2
from jaxprompt.errors import InputError

PLACE = "rows.jsonl:{}".format


def write(entities, words, scheme):
    """Writes entities in a scheme, by its definition."""
    actual = ["O"] * words
    for kind, start, end in entities:
        for word in range(start, end):
            letter = "I"
            follows = any(other.end == start and other.type == kind for other in entities)
            if scheme == "iob2" and word == start or scheme == "iob1" and word == start and follows:
                letter = "B"
            if scheme == "bioes":
                letter = "S" if end - start == 1 else {start: "B", end - 1: "E"}.get(word, "I")
            actual[word] = f"{letter}-{kind}"
    return actual


@pytest.mark.parametrize("scheme", [s for s in tags.SCHEMES if s != tags.NO_SCHEME])
def test_every_scheme_gives_the_entities_that_were_written(scheme):
    rng = random.Random(0)
    for _ in range(300):
        words, at, entities = rng.randint(1, 12), 0, []
        while at < words:
            size = rng.randint(1, 3)
            if rng.random() < 0.6 and at + size <= words:
                entities.append(Entity(rng.choice("AB"), at, at + size))
                at += size
            else:
                at += 1
        row = write(entities, words, scheme)
        assert find_entities(row, scheme) == entities
        assert to_iob2(row, scheme, "") == write(entities, words, "iob2")
        assert write_iob2(entities, words) == write(entities, words, "iob2")


@pytest.mark.parametrize(
    "rows, scheme",
    [
        (["B-A I-A O B-A"], "iob2"),
        (["I-A I-A O", "I-B B-B O"], "iob1"),
        (["B-A I-A E-A O"], "bioes"),
        (["O U-A", "B-A L-A"], "bioes"),
        (["O O"], "iob2"),
    ],
)
def test_the_scheme_is_found(rows, scheme):
    assert find_scheme([row.split() for row in rows], PLACE) == scheme


@pytest.mark.parametrize(
    "rows, message",
    [
        (["O B-A", "O I-A"], "jsonl:1: word 2 begins .*jsonl:0: word 2 with B-.*=iob1"),
        (["O B_A"], "rows.jsonl:0: word 2 has the invalid tag 'B_A'.* task.scheme=none"),
        (["O", "X-A"], "rows.jsonl:1: word 1 has the invalid tag 'X-A'"),
        (["B-"], "has the invalid tag 'B-'"),
    ],
)
def test_what_is_no_scheme_is_refused(rows, message):
    with pytest.raises(InputError, match=message):
        find_scheme([row.split() for row in rows], PLACE)


@pytest.mark.parametrize(
    "row, scheme, word",
    [
        ("O I-A", "iob2", 2), ("B-A I-B", "iob2", 2), ("B-A O", "bioes", 2), ("B-A", "bioes", 2),
        ("I-A E-A", "bioes", 1), ("O E-A", "bioes", 2), ("S-A I-A", "bioes", 2),
        ("B-A B-A E-A", "bioes", 2), ("B-A E-A", "iob2", 2), ("O S-A", "iob2", 2),
    ],
)  # fmt: skip
def test_a_transition_that_a_scheme_lacks_names_the_word(row, scheme, word):
    with pytest.raises(InputError, match=f"here:3: word {word} .*task.scheme={scheme}"):
        to_iob2(row.split(), scheme, "here:3")
    assert to_iob2(row.replace("S-", "B-").split(), "iob1", "")  # in IOB1 every tag is right


def test_what_is_no_tag_names_the_word():
    with pytest.raises(InputError, match="here:3: word 2 has the invalid tag 'X-A'"):
        to_iob2(["O", "X-A", "O"], "bioes", "here:3")
