"""Without an optional package: the line that installs it, before anything is read or trained."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from exports import make_metadata

from jaxprompt.__main__ import main
from jaxprompt.api import lm_eval
from jaxprompt.api.banks import BankedModel
from jaxprompt.api.models import PromptedModel, evaluate
from jaxprompt.api.prompts import Prompt
from jaxprompt.api.saving import save_prompt
from jaxprompt.api.stablehlo import check_folder
from jaxprompt.cli.predict import _log_totals
from jaxprompt.convert.gguf.tensors import _item_layout
from jaxprompt.corpus.split import sentencex_version
from jaxprompt.data.sources.splits import _tfds_builder
from jaxprompt.errors import InputError, check_extra
from jaxprompt.scoring.metrics import score_predictions, score_tags, score_texts
from jaxprompt.training.trackers import TRACKERS
from launch.papers import figures

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: {re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in lines}
    for name, lines in PROJECT["optional-dependencies"].items()
}
NAMES = {"sklearn": "scikit_learn"}  # of the index
SHARED = ",".join(
    f"{ROOT}/configs/ptuning_v2/tasks/{name}.json" for name in ("conll2003", "conll04")
)
CUSTOM = {"task.name": "custom", "task.fields": "text"}
CLASSES = {"task.label": "team", "task.labels": "a,b"}
TEXTS = {"task.target": "answer", "head.name": "text"}
TAGS = {"task.tags": "tags", "task.labels": "PER", "head.name": "tags"}
F1 = SimpleNamespace(task=SimpleNamespace(metric="macro_f1", kind="classes"))
METADATA = make_metadata().to_json()  # of a backbone that is absent
# What uses a package: fields of a run, the words of another command, or a function.
USES = [
    ("metrics", "sklearn", CLASSES | {"task.metric": "f1"}),
    ("metrics", "sklearn", CLASSES | {"task.metric": "matthews"}),
    ("metrics", "sklearn", lambda: score_predictions("macro_f1", [0, 1], [0, 0])),
    ("metrics", "sklearn", lambda: evaluate(PromptedModel(F1, {}, None, None), [])),
    (
        "metrics",
        "sklearn",
        lambda: evaluate(BankedModel(SimpleNamespace(scorers=[F1]), "task"), []),
    ),
    ("metrics", "rouge_score", TEXTS | {"task.metric": "rouge_l"}),
    ("metrics", "rouge_score", lambda: score_texts("rouge_l", [["a"]], ["a"])),
    ("metrics", "sacrebleu", TEXTS | {"task.metric": "bleu"}),
    ("metrics", "seqeval", TAGS | {"task.metric": "entity_f1"}),
    ("metrics", "seqeval", lambda: score_tags("entity_f1", [["B-x"]], [["B-x"]])),
    ("metrics", "sklearn", ["validate", "--config=base", "--config.task.name=mrpc"]),
    ("metrics", "sklearn", ["evaluate", "--config=base:zero_shot", "--config.task.name=mrpc"]),
    (
        "metrics",
        "seqeval",
        [
            "train",
            "--workdir=run",
            "--config=base",
            "--config.head.name=tags",
            f"--config.shared.tasks={SHARED}",
        ],
    ),
    ("tracking", "wandb", {"train.tracker": "wandb"}),
    ("tracking", "wandb", {"train.tracker": "wandb", "runs.seeds": "0,1"}),
    ("tracking", "trackio", {"train.tracker": "trackio"}),
    ("plots", "matplotlib", ["inspect", "--workdir=absent"]),
    ("plots", "sklearn", ["inspect", "--workdir=absent"]),
    ("plots", "matplotlib", ["inspect", "--exports=absent"]),
    ("plots", "matplotlib", ["sweep", "--table=absent", "--plot=chart.png"]),
    ("plots", "matplotlib", lambda: figures.check_output(Path("figure.svg"))),
    ("stablehlo", "flatbuffers", lambda: check_folder("absent")),
    ("stablehlo", "flatbuffers", lambda: save_prompt(Prompt({}, METADATA), "x", "stablehlo")),
    ("corpus", "sentencex", sentencex_version),
    ("tfds", "tensorflow_datasets", lambda: _tfds_builder("mnist", None)),
    ("gguf", "gguf", lambda: _item_layout(Path("x.gguf"), "output.weight", 2)),
    ("lm_eval", "lm_eval", ["lm_eval", "--tasks=sst2"]),
    ("lm_eval", "lm_eval", lambda: lm_eval.__getattr__("JaxpromptLM")),
]


@pytest.mark.parametrize("extra, package, use", USES)
def test_a_missing_package_is_named_at_once(extra, package, use, tmp_path, monkeypatch, capsys):
    assert NAMES.get(package, package) in EXTRAS[extra]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    if isinstance(use, dict):  # the backbone is absent, too: it would be the next message
        (tmp_path / "train.jsonl").write_text('{"text": "a", "team": "a"}\n')
        fields = {"backbone.path": "absent", "data.files.train": "train.jsonl"} | CUSTOM | use
        command = ["train", "--config=base", "--workdir=run"]
        use = [*command, *(f"--config.{name}={value}" for name, value in fields.items())]
    if isinstance(use, Callable):
        with pytest.raises(InputError) as error:
            use()
        (line,) = str(error.value).splitlines()
    else:
        assert main(use) == 2
        line = capsys.readouterr().err.splitlines()[-1]
    assert package in line and f"pip install 'jaxprompt[{extra}]'" in line
    assert not list(tmp_path.rglob("*.json"))


def test_predictions_need_no_metric(monkeypatch, capsys):
    """They are complete when the metric of their labels is computed."""
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    totals = SimpleNamespace(messages=list, metrics=lambda: score_texts("bleu", [["a"]], ["a"]))
    _log_totals(totals)
    assert "pip install 'jaxprompt[metrics]'" in capsys.readouterr().err


def test_a_folder_is_no_package(tmp_path, monkeypatch):
    """wandb leaves a folder of its name beside the runs, which Python can import."""
    (tmp_path / "folder_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="only a folder"):
        check_extra("tracking", "folder_of_runs", "train.tracker=wandb")


def test_every_package_is_tried():
    """Those of the extras that the code imports, and the trackers."""
    imported = set(EXTRAS["metrics"] | EXTRAS["plots"] | EXTRAS["tracking"] | EXTRAS["corpus"])
    imported |= EXTRAS["gguf"] | EXTRAS["stablehlo"] | EXTRAS["lm_eval"] | {"tensorflow_datasets"}
    assert {NAMES.get(package, package) for _, package, _ in USES} == imported
    assert {tracker.PACKAGE for tracker in TRACKERS.values()} == {"", *EXTRAS["tracking"]}
