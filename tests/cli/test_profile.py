"""--profile traces steps of a run and says what takes their time."""

import json
import re

import pytest
from tiny_run import flags, jaxprompt, tiny_fields

from jaxprompt.training.profiling import operation_kind


@pytest.mark.parametrize(
    "name, kind",
    [
        ("dot_add_fusion.12", "dot_add_fusion"),
        ("%fusion.3.clone.1 = f32[8]{0} fusion(%p)", "fusion"),
        ("copy", "copy"),
    ],
)
def test_operations_are_named_by_kind(name, kind):
    assert operation_kind(name) == kind


@pytest.mark.long
def test_a_run_writes_a_trace_and_tells_its_table(backbone, data, tmp_path, capsys):
    fields = tiny_fields(backbone, data) | {"train.total_epochs": 0, "train.total_steps": 6}
    place = ("--config=base:soft", f"--workdir={tmp_path / 'run'}", *flags(fields))
    code, _, err = jaxprompt(capsys, "train", *place, "--profile=2")
    assert code == 0, err
    assert "trace of 2 steps in" in err
    rows = re.findall(r"^  (\S+) +([\d.,]+) +([\d.,]+) +([\d.]+)%$", err, re.M)
    assert 1 < len(rows) <= 10 and not {"while", "call"} & {row[0] for row in rows}
    shares = [float(row[3]) for row in rows]
    assert shares == sorted(shares, reverse=True) and 20 < sum(shares) < 101
    assert list((tmp_path / "run/profile").glob("plugins/profile/*/*.xplane.pb"))
    assert json.loads((tmp_path / "run/config.json").read_text())["train"]["profile"] == 2
    code, _, err = jaxprompt(
        capsys, "train", *place, "--config.train.total_steps=2", f"--workdir={tmp_path / 'short'}",
        "--profile=2",
    )  # fmt: skip
    assert code == 0 and "no trace: tracing starts after 2 steps, and this run took 2" in err
    assert not (tmp_path / "short/profile").exists()
    # Of a grid there is no one run to trace.
    others = (place[0], f"--workdir={tmp_path / 'others'}", *place[2:])
    code, _, err = jaxprompt(capsys, "train", *others, "--profile=2", "--config.runs.lr=(0.1, 0.2)")
    assert code == 2 and "train.profile=2 traces one run" in err
