"""The command `plan`: its numbers, its text, and what it refuses."""

import json
import os
from collections import Counter

import pytest
from tiny_pretrain import BATCH, CASES, fields_of
from tiny_run import ROOT, jaxprompt, succeed

from jaxprompt.cli.plan import in_child_process
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError
from jaxprompt.heads.verbalizer import AnswerHead
from jaxprompt.parallel.hlo import DeviceWork
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.planning.abstract_run import open_run
from jaxprompt.planning.compilers import Compiled
from jaxprompt.planning.cost import measure_sizes, step_shapes
from jaxprompt.runs import ppt

BASE = ROOT / "configs/base.py"
SMALL = (
    f"--config={BASE}", "--config.backbone.path=google/t5-v1_1-small", "--config.data.batch=8",
    "--config.data.max_len=64", "--config.backbone.dtype=bfloat16",
)  # fmt: skip
# One stack of layers compiles faster than two.
ELECTRA = (*SMALL, "--config.backbone.path=google/electra-small-discriminator")
PPT = sorted((ROOT / "configs/ppt").glob("*t5_*.py"))


@pytest.mark.long
def test_a_device_without_bfloat16_holds_float32_in_its_place(capsys):
    results = {}
    for device in ("v100-32", "v5e"):
        words = (*ELECTRA, f"--devices=1x {device}", "--limit=1", "--format=json")
        results[device] = json.loads(jaxprompt(capsys, "plan", *words)[1])
    old, new = (results[name]["plans"]["as configured"]["bytes"] for name in results)
    assert old["frozen"] == new["frozen"] and old["activations"] > 1.3 * new["activations"]
    assert "v100-32 has no bfloat16" in results["v100-32"]["notes"][-1]


@pytest.mark.default_cases("mt5_small", "t5_xxl")
@pytest.mark.parametrize("path", PPT, ids=lambda path: path.stem)
def test_every_published_size_has_a_plan(path):
    run = open_run(load_config(str(path)))
    model = max(run.config.mesh.model, 1)
    placement = make_placement(1, model)
    sizes = measure_sizes(step_shapes(run, placement), placement)
    assert sizes.trained == 100 * run.scorer.model.backbone.dims.width
    width = 2 if path.stem.endswith("xxl") else 4  # bytes; PPT's precision is mixed at 11B alone
    assert sizes.frozen_bytes == pytest.approx(width * sizes.total / model, rel=0.01)


@pytest.mark.parametrize("name", ["nsp-t5", "unified-t5", "nss-bert", "cls-t5", "cls-gpt2"])
def test_a_planned_batch_is_shaped_like_those_of_pretraining(name, tmp_path_factory):
    """Without text it must know how many tokens a decoder is fed, and how many are read."""
    case, fields = CASES[name], fields_of(tmp_path_factory, name)
    text = {"corpus.path": "", "ppt.annotations": ""}
    overrides = [(field, str(value)) for field, value in (fields | text).items()]
    config = load_config(f"{ROOT}/configs/ppt/{case.task}.py:{case.kind}", overrides)
    run, task = open_run(config), ppt.open_task(config, make_placement(1, 1))
    form = task.forms.forms[max(task.forms.forms)]
    assert run.batch.encoder.ids.shape == (BATCH, -(-fields["data.max_len"] // 8) * 8)
    assert run.batch.label_pos.shape == (BATCH, form.label_width)
    if form.decoder_length:
        assert run.batch.decoder.ids.shape == (BATCH, form.decoder_length)
    assert run.objectives[0].sums is not None
    assert isinstance(run.model.heads["main"], AnswerHead) == (config.head.get("span") == "target")


def test_pretraining_that_cannot_be_is_not_planned(refused):
    words = ("plan", f"--config={ROOT}/configs/ppt/nsp.py:causal", "--config.backbone.path=gpt2")
    behind = "text after [mask], which a gpt2 cannot read there"
    assert behind in refused(*words, "--config.ppt.patterns=en")
    assert "trains only the prompt" in refused(*words, "--config.trainable=backbone/.*")


@pytest.mark.long
def test_with_devices_it_says_what_fits_and_how_to_run_it(capsys):
    out, _ = succeed(capsys, "plan", *ELECTRA, "--devices=2x v5e", "--limit=2")
    for text in ("as configured", "fastest", "smallest", "2x v5e", "1x v5e", "fits"):
        assert text in out
    assert "smallest, 1x v5e: --config.mesh.data=1 --config.mesh.model=1" in out
    assert "fastest, 2x v5e: --config.mesh." in out
    assert "tokens per second" in out and "https://cloud.google.com/tpu/docs/v5e" in out


@pytest.mark.long
def test_what_the_devices_own_compiler_says_stands_beside_the_estimate(capsys, monkeypatch):
    """Its memory decides what fits, and its collectives are told; it may refuse."""
    work = DeviceWork(0.0, Counter({"all-reduce": 3}), Counter({"all-reduce": 2**20}),
                Counter({"all-reduce": 2}))  # fmt: skip
    text = "ENTRY %main () -> f32[] {\n  %a = f32[1024,1024]{1,0} rng-bit-generator()\n}\n"
    said = [Compiled(2**30, 20 * 2**30, 21 * 2**30, work, text), "the compiler failed: too large"]
    calls = []

    def compiled(run, plan):
        calls.append(plan.mesh)
        return plan._replace(compiled=said[len(calls) - 1], evaluated=said[0])

    monkeypatch.setattr("jaxprompt.planning.search.compile_plan", compiled)
    monkeypatch.setattr("jaxprompt.planning.compilers._is_importable", lambda module: True)
    # What stands in for the compiler is in this process.
    monkeypatch.setattr(
        "jaxprompt.cli.plan.in_child_process", lambda _, function, *arguments: function(*arguments)
    )
    words = (*ELECTRA, "--devices=2x v5e", "--limit=2", "--compiler=tpu")
    out, _ = succeed(capsys, "plan", *words, "--config.mesh.data=1")
    assert len(calls) == len(set(calls)) == 2
    lines = {line[:26].strip(): line[26:].split() for line in out.splitlines() if line}
    # The configured plan is the smallest one, too.
    assert lines["fits"] == ["NO", "NO"]
    assert lines["temporary"] == ["20", "GiB", "refused"]
    assert "3x 1 MiB, 2 asynchronous" in out.split("sent per device, compiled")[1]
    assert lines["kernels"][0] == "1" != lines["kernels"][1]
    assert "the compiler failed: too large" in out and "estimated: by that of the CPU" in out
    calls.clear()
    code, out, _ = jaxprompt(capsys, "plan", *words, "--config.mesh.data=1", "--format=json")
    configured = json.loads(out)["plans"]["as configured"]
    assert configured["compiled"]["bytes"]["total"] == 21 * 2**30 and not configured["fits"]
    assert configured["compiled"]["collectives"]["all-reduce"] == {
        "count": 3, "bytes": 2**20, "asynchronous": 2,
    }  # fmt: skip


def test_a_compiler_that_crashes_is_told_in_one_line():
    with pytest.raises(InputError, match="--compiler=tpu crashed on one of the plans, or ran"):
        in_child_process("tpu", os.abort)
    with pytest.raises(InputError, match="as its process says it"):
        in_child_process("tpu", _refuse, "as its process says it")
    assert in_child_process("tpu", os.getpid) != os.getpid()


def _refuse(said):
    raise InputError(said)


@pytest.mark.parametrize(
    "words, line",
    [
        (["--devices=1x v5e", "--limit=0"], "--limit=0 must be at least 1"),
        (["--devices=6x v5e", "--limit=1", "--config.mesh.data=4"],
         "mesh.data=4 x mesh.model=1 does not divide the 6 devices"),
        (["--devices=5000x v5e"], "supports at most 512 devices"),
        (["--devices=3x v5e", "--limit=1"], "data.batch=8 is not divisible by mesh.data=3"),
        (["--devices=8x v5e", "--limit=1", "--config.mesh.model=4"],
         "mesh.model=4 does not divide the 6 of backbone/"),
        (["--devices=16x v5e"], "cannot simulate 64 devices"),
        (["--compiler=tpu"], '--compiler=tpu needs --devices, e.g. --devices="8x v5e"'),
        (["--compiler=tpu", "--devices=1x v5e", "--limit=1"],
         '--compiler=tpu is not installed; run pip install "libtpu==0.0.42.*"'),
        (["--compiler=cuda", "--devices=1x h100", "--limit=1"],
         "--compiler=cuda is not installed; run pip install --no-deps jax-cuda12-plugin=="),
        (["--config.backbone.path="], "backbone.path is empty"),
        (["--config.prompt.length=80"], "80 slots, over max_len 64"),
        (["--config.shared.tasks=a.json,b.json"], "plan does not support shared.tasks; empty it"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(refused, monkeypatch, words, line):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("jaxprompt.planning.compilers._is_importable", lambda module: False)
    soft = SMALL[0]
    if "prompt.length" in words[0]:
        soft = f"--config={ROOT}/configs/ppt/prompt_tuning.py"
    assert line in refused("plan", soft, *SMALL[1:], *words)
