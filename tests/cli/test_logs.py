"""What a run logs: the trackers that agree, and pictures."""

import json
import struct

import pytest
from tiny_run import make_config, read_lines

from jaxprompt.errors import InputError
from jaxprompt.runs.train import train_prompt

STILL = dict(
    backbone__dropout=0, head__dropout=0, prompt__dropout=0, train__eval_steps=3, optim__lr=1e-2,
    data__multiple=8,
)  # fmt: skip


def events(folder) -> dict[tuple[int, str], float]:
    """Reads the scalars of event files, TFRecords of protocol buffers. -> {(step, name): value}"""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            for value in event.summary.value:
                found[event.step, value.tag] = value.simple_value
    return found


def test_tensorboard_and_metrics_agree(backbone, data, tmp_path):
    fields = STILL | dict(train__total_steps=5, train__eval_steps=2, train__log_steps=2)
    c = make_config(backbone, data, "prefix", **fields, train__tracker="tensorboard")
    result = train_prompt(c, str(tmp_path)).to_json()
    lines, shown = read_lines(tmp_path / "metrics.jsonl"), events(tmp_path / "tensorboard")
    assert [r["step"] for r in lines if "loss" in r] == [2, 4, 5]
    assert [r["step"] for r in lines if "dev" in r] == [2, 4, 5]
    written = {}
    for record in lines:
        assert list(record["time"]) == ["seconds"]
        for name in ("loss", "grad_norm", "skipped", "streak", "lr"):
            if name in record:
                written[record["step"], name] = record[name]
        for name, value in record.get("dev", {}).items():
            written[record["step"], f"dev/{name}"] = value
    assert {(step, name) for step, name in shown if "time" not in name} == set(written)
    for key, value in written.items():
        assert shown[key] == pytest.approx(value, rel=1e-6, abs=1e-12), key
    best = max((r["dev"]["accuracy"], -r["step"]) for r in lines if "dev" in r)
    assert (result["dev"]["accuracy"], -result["best_step"]) == best
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_a_picture_that_cannot_be_drawn_fails_no_run(backbone, data, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def full(*_, **__):
        raise InputError("no space left")

    monkeypatch.setattr("jaxprompt.training.pictures.draw_curves", full)
    c = make_config(backbone, data, "prefix", train__plot=True, train__total_steps=1)
    assert train_prompt(c, str(tmp_path / "run"))
    assert "curves.png was not drawn: no space left" in capsys.readouterr().err
