"""Hyperparameters that are out of range, or do not fit the backbone or each other."""

import pytest

from jaxprompt.errors import InputError
from jaxprompt.prompts import make_prompt
from jaxprompt.types import Dims

DIMS = Dims(vocab=53, width=16, embed=16, layers=2, heads=2, head_dim=8, max_len=40)


@pytest.mark.parametrize(
    "name, decoder_layers, fields, message",
    [
        ("constant", 0, dict(length=2, last=3), "in layers 1-3 of the encoder.* has 2;"),
        ("constant", 0, dict(decoder_slots=2), "prompt.decoder_slots=2 needs"),
        ("constant", 0, dict(cross_length=2, cross_last=1), "prompt.cross_length=2 needs"),
        *(
            ("constant", 0, {field: size}, f"prompt.{field}=")
            for field in ("slots", "length", "rows", "shift")
            for size in (2**31, -(10**400))
        ),
        ("ipt", 0, dict(encoder="rnn"), "prompt.encoder='rnn'"),
        ("ipt", 0, dict(fixed=True), "prompt.fixed=True needs an encoder"),
        ("ipt", 0, dict(init="runs/a"), "prompt.pretrained"),
        ("ipt", 0, dict(layers="2-3"), "prompt.layers='2-3'.* within 1-2"),
        ("ipt", 0, dict(length=0), "prompt.length=0"),
        ("ipt", 0, dict(rows="some"), "prompt.rows='some'"),
        ("ipt", 0, dict(utilization=0.0), "prompt.utilization=0.0"),
        ("ipt", 0, dict(utilization=1.5), "prompt.utilization=1.5"),
        ("p_tuning", 0, dict(encoder="gru"), "prompt.encoder='gru'"),
        ("p_tuning", 0, dict(hidden=-1), "prompt.hidden=-1"),
        ("p_tuning", 0, dict(length=0), "prompt.length=0"),
        ("p_tuning", 0, dict(linear=0), "prompt.linear=0"),
        ("p_tuning", 0, dict(lstm_layers=0), "prompt.lstm_layers=0"),
        ("prefix", 0, dict(cross=3), "prompt.cross=3 needs an encoder-decoder"),
        ("prefix", 0, dict(cross_layers="1"), "prompt.cross_layers='1' needs an encoder-decoder"),
        ("prefix", 0, dict(decoder=3), "prompt.decoder=3 needs an encoder-decoder"),
        ("prefix", 0, dict(length=0), "prompt.length=0 must be at least 1"),
        ("prefix", 0, dict(start="text"), "prompt.start=text needs prompt.text"),
        ("prefix", 0, dict(start="text", text=" "), "prompt.start=text needs prompt.text"),
        ("prefix", 0, dict(start="words"), "prompt.start='words'"),
        ("prefix", 0, dict(start="zero", hidden=4), "prompt.hidden=4 computes them"),
        ("prefix", 3, dict(cross=1, cross_layers="x"), "prompt.cross_layers='x' must be"),
        ("prefix", 3, dict(decoder=-1), "prompt.decoder=-1 must be at least 0"),
        ("prefix", 3, dict(decoder=1, decoder_layers="2-4"), "decoder_layers='2-4'.* within 1-3"),
        ("prefix", 3, dict(decoder_layers="1"), "decoder_layers='1' needs prompt.decoder above 0"),
        ("prefix", 3, dict(length=-1, cross=2), "prompt.length=-1 must be at least 0"),
        ("prefix", 3, dict(length=0), "prompt.length=0 must be at least 1"),
        ("prefix", 3, dict(length=0, decoder=1, layers="1"), "layers='1' needs prompt.length"),
        ("soft", 0, dict(decoder=2), "prompt.decoder=2 needs an encoder-decoder"),
        ("soft", 3, dict(decoder=-1), "prompt.decoder=-1 must be at least 0"),
        ("soft", 3, dict(length=0), "prompt.length=0 must be at least 1"),
    ],
)
def test_a_field_that_does_not_fit_is_named(name, decoder_layers, fields, message):
    with pytest.raises(InputError, match=message) as error:
        make_prompt(name, DIMS._replace(decoder_layers=decoder_layers), **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, fields, message",
    [("prefx", {}, "'prefx'.*nearest: prefix"), ("prefix", dict(lenght=3), "'lenght'.* length")],
)
def test_an_unknown_name_or_field_is_named_with_the_nearest(name, fields, message):
    with pytest.raises(InputError, match=message):
        make_prompt(name, DIMS, **fields)
