"""A paper's table, run: which runs it starts, and what of their results it shows."""

import json
import shutil

import pytest
from tiny_run import ROOT, flags, jaxprompt, sentences, write_rows

from configs.parts import ppt
from jaxprompt.config.load import load_config
from jaxprompt.corpus.ppt import get_pattern
from jaxprompt.errors import InputError
from launch.papers import core as paper


@pytest.fixture
def data(tmp_path):
    """A folder of data sets, of which there is one."""
    folder = tmp_path / "data"
    (folder / "sst2").mkdir(parents=True)
    for part, size in (("train", 40), ("test", 60)):
        rows = [
            {"sentence": row["text"], "label": int(row["label"] == "beast")}
            for row in sentences(len(part), size)
        ]
        write_rows(folder / "sst2" / f"{part}.jsonl", rows)
    return folder


@pytest.mark.long
def test_rows_that_train_nothing_are_evaluated(data, backbone, capsys, tmp_path):
    """Beside a row that trains with each of the batches that are searched."""
    work = tmp_path / "work"
    words = [f"--workdir={work}", f"--backbone={backbone}", f"--data={data}"]
    words += ["--tasks=sst2", "--seeds=10", "--learning-rates=0.001"]
    own = {
        "data.protocol.on_shortage": "use_fewer", "demos.total": 2, "data.max_len": 60,
        "mesh.data": 1,
        "train.total_steps": 2, "train.eval_steps": 1, "train.tracker": "none",
        "task.words": "bad,good",
    }  # fmt: skip
    rows = "--rows=majority;zero_shot;in_context;lm_bff"
    assert paper.main(["dart", "table1", rows, *words, *flags(own)]) == 0
    told = capsys.readouterr()
    assert "table1: 6 runs, 0 of them have a result" in told.err
    results = {
        path.parent.name: json.loads(path.read_text())["test"]
        for path in work.glob("*/result.json")
    }
    assert sorted(results) == sorted(
        [f"{name}-sst2,seed=10" for name in ("majority", "zero_shot", "in_context")]
        + [f"lm_bff-sst2,lr=0.001,batch={n},seed=10" for n in (2, 4, 8)]
    )
    assert results["majority-sst2,seed=10"]["accuracy"] == pytest.approx(2 / 3)  # no beast
    shot = f"--config={ROOT}/configs/dart/lm_bff.py:sst2,zero_shot"
    changed = own | {"backbone.path": backbone, "data.source": data / "sst2"}
    changed |= {"data.seed": 10}  # of what demos.total shows here in every row
    code, out, err = jaxprompt(capsys, "evaluate", shot, *flags(changed), "--split=test")
    assert code == 0, err
    assert json.loads(out)["accuracy"] == results["zero_shot-sst2,seed=10"]["accuracy"]
    head, *lines = told.out.split("\n\n")[1].splitlines()[2:]
    assert head == "| majority | 66.7 ± 0.0 [50.9] |" and len(lines) == 3
    assert (
        "data.batch" not in told.out and "data.protocol.on_shortage=use_fewer (raise)" in told.out
    )
    before = (work / "zero_shot-sst2,seed=10/result.json").stat().st_mtime_ns
    assert paper.main(["dart", "table1", rows, *words, *flags(own)]) == 0
    assert "6 runs, 6 of them have a result" in capsys.readouterr().err
    assert (work / "zero_shot-sst2,seed=10/result.json").stat().st_mtime_ns == before
    other = shutil.copytree(backbone, tmp_path / "other")
    words[1] = f"--backbone={other}"
    with pytest.raises(InputError, match="2 runs failed"):
        paper.main(["dart", "table1", "--rows=zero_shot;in_context", *words, *flags(own)])
    assert "contains a run with a different config: backbone.path" in capsys.readouterr().err


@pytest.mark.parametrize("task", [task for task, own in ppt.TASKS.items() if own.words])
def test_answers_in_the_words_of_pre_training(task):
    """Topics alone are no words of a pre-training task; two classes take the outer ones."""
    own = ppt.TASKS[task]
    words = get_pattern(own.group, own.patterns).words
    if own.topics:
        assert not set(own.words) & set(words)
    elif own.group == "nsp" and len(own.words) == 2:
        assert set(own.words) == {words[0], words[-1]}
    else:
        assert set(own.words) <= set(words)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("nsp.py:maskd", "the kind of backbone 'maskd' is unknown; nearest: masked"),
        ("cells.py:rte,ppt,masked-dep", " 'masked-dep' is unknown; nearest: masked-deep"),
        ("cells.py:rte,pptt", "the method 'pptt' is unknown; nearest: ppt"),
        ("t5_base.py:rtee", "the task 'rtee' is unknown; nearest: rte"),
        ("t5_base.py:rte,ppt,t5", "'rte,ppt,t5' has 3 parts; give TASK,METHOD$"),
        ("annotator.py:sst", "the data set 'sst' is unknown; nearest: sst5"),
    ],
)
def test_an_argument_that_a_config_does_not_know(config, message):
    with pytest.raises(InputError, match=message):
        load_config(f"{ROOT}/configs/ppt/{config}")
