"""Tags and spans on every encoder, by every method."""

import json

import pytest
from test_token_heads import KINDS, STILL
from tiny_run import (
    jaxprompt,
    make_backbone,
    make_config,
    read_lines,
    train_and_export,
    with_part,
    write_rows,
)

from configs.parts.heads import HEADS
from jaxprompt import registry
from jaxprompt.config.load import with_overrides

METHODS = {
    "full": {},
    "prefix": {"prompt.length": 4},
    "soft": {"prompt.length": 4},
    "p_tuning": {"prompt.length": 4},
    "ipt": {"prompt.length": 4, "prompt.scale": 0.1},
    "compose": {"prompt.parts": "soft(length=2)+prefix(length=2)"},
    "dart": {"prompt.length": 2, "prompt.fluency": 0.0, "prompt.labels": False},
}
# A prefix on encoders of all layouts, and every method on a BERT once.
CASES = [(family, kind, "prefix") for family in ("albert", "deberta_v2", "modernbert")
         for kind in KINDS]  # fmt: skip
CASES += [("bert", "tags", method) for method in ("full", "ipt", "compose")]
CASES += [("bert", "spans", method) for method in ("soft", "p_tuning", "dart")]


def test_every_method_is_here():
    # One of exports, one of candidates alone, and `none`, which full is.
    assert set(registry.METHODS.names()) - {"constant", "dpt", "none"} == {x for *_, x in CASES} - {
        "full"
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """-> a folder of each backbone and of each kind of rows, made once"""
    folder = tmp_path_factory.mktemp("made")

    def make(family, kind):
        encoder, data = folder / family, folder / kind
        if not encoder.exists():
            make_backbone(encoder, family)
        if not data.exists():
            data.mkdir()
            for seed, name in enumerate(("train", "dev", "test")):
                write_rows(data / f"{name}.jsonl", KINDS[kind][0](seed, 16))
        return encoder, data

    return make


@pytest.mark.default_cases("albert-spans-prefix")
@pytest.mark.parametrize("family, kind, method", CASES)
def test_trains_exports_and_predicts(family, kind, method, made, tmp_path, capsys):
    encoder, data = made(family, kind)
    given = STILL | KINDS[kind][1] | {"train.total_steps": 4, "train.eval_steps": 2}
    fields = {name: x for name, x in given.items() if name not in ("head.name", "prompt.dropout")}
    c = make_config(encoder, data, method)
    # After the method, which may bring a head of its own.
    c = with_overrides(with_part(c, HEADS[kind]), [*(fields | METHODS[method]).items()])
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    words = ["predict", f"--workdir={workdir}", f"--input={data / 'test.jsonl'}"]
    code, _, err = jaxprompt(capsys, *words, f"--output={tmp_path / 'out.jsonl'}")
    assert code == 0, err
    lines = read_lines(tmp_path / "out.jsonl")
    assert len(lines) == 16
    if kind == "tags":
        assert all(len(line["prediction"]) == len(line["tokens"]) for line in lines)
    else:
        found = [line["context"][line["start"] : line["end"]] for line in lines]
        assert found == [line["prediction"] for line in lines]
    code, out, err = jaxprompt(capsys, "evaluate", f"--workdir={workdir}", "--split=test")
    metric = {"tags": "entity_f1", "spans": "exact_match"}[kind]
    assert code == 0 and json.loads(out)[metric] == pytest.approx(result["test"][metric]), err
