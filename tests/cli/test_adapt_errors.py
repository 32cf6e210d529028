"""Bad input of `adapt`, as a user meets it: one line, exit code 2."""

import pytest
from spoil import BASE
from tiny_adapt import made, tiny_fields
from tiny_run import ROOT, flags

REFUSED = [
    ("mlm", "bert", {"corpus.path": ""}, "corpus.path is empty"),
    ("mlm", "bert", {"backbone.path": ""}, "backbone.path is empty"),
    ("mlm", "bert", {"corpus.held_out": 0}, "corpus.held_out=0 "),
    ("mlm", "bert", {"objective.name": "mln"}, "objective.name='mln'; nearest: mlm"),
    ("mlm", "bert", {"optim.label_smoothing": 0.1}, "optim.label_smoothing=0.1 has no effect"),
    ("mlm", "bert", {"cache.location": "host"}, "cache.location=host has no effect"),
    ("mlm", "bert", {"corpus.on_error": "ignore"}, "corpus.on_error='ignore' is unknown"),
    # Heads that a backbone lacks.
    ("clm", "bert", {}, "objective.name=clm does not work with a bert; use mlm, rtd"),
    ("mlm", "gpt2", {}, "objective.name=mlm does not work with a gpt2; use clm"),
    ("mlm", "t5-v1.1", {}, "does not work with a t5; use prefix_lm, span_corruption"),
    ("span_corruption", "bert", {}, "objective.name=span_corruption does not work with a bert"),
    ("rtd", "roberta-trunk", {}, "contains a roberta"),
    ("rtd", "gpt2", {}, "objective.name=rtd does not work with a gpt2; use clm"),
    # Rows and meshes that do not fit; a RoBERTa's first position is the third.
    ("mlm", "bert", {"data.max_len": 80}, "data.max_len=80 exceeds the 66 positions"),
    ("mlm", "roberta-trunk", {"data.max_len": 66}, "data.max_len=66 exceeds the 64 positions"),
    ("mlm", "bert", {"data.max_len": 2}, "data.max_len=2 leaves no room"),
    ("mlm", "bert", {"mesh.data": 8, "data.batch": 12}, "data.batch=12 is not divisible by mesh."),
    ("mlm", "bert", {"mesh.model": 4}, "mesh.model=4 does not divide the 2 of backbone/layers/"),
    ("rtd", "electra", {"mesh.model": 2}, "does not divide the 1 of generator/layers/"),
    # Settings reach the tokenizer and the reader.
    ("span_corruption", "t5-v1.1", {"backbone.sentinel": "<X{}>"}, "like <X0> are needed"),
    ("mlm", "bert", {"corpus.field": "txt"}, ":1: there is no field 'txt'; nearest: text"),
    ("mlm", "bert", {"corpus.max_document": 40}, ":1: a document of over 40 bytes"),
]


@pytest.mark.parametrize("objective, backbone, changes, message", REFUSED)
def test_what_is_refused(
    objective, backbone, changes, message, tmp_path_factory, tmp_path, refused
):
    fields = tiny_fields(made(tmp_path_factory, backbone), made(tmp_path_factory, "corpus"))
    config = f"--config={ROOT / f'configs/adapt/{objective}.py'}"
    words = [config, f"--workdir={tmp_path / 'new'}", *flags(fields | changes)]
    assert message in refused("adapt", *words)
    assert not (tmp_path / "new/config.json").exists()


def test_an_objective_is_needed(tmp_path, refused):
    words = [f"--config={BASE}", f"--workdir={tmp_path}", "--config.corpus.path=here"]
    assert "objective.name is empty; give one of mlm, rtd, clm" in refused("adapt", *words)
