"""Bad input of `pretrain`, and of runs that start from an export: one line, exit code 2."""

import shutil

import pytest
from tiny_pretrain import (
    fields_of,
    made,
    words_of,
)
from tiny_run import flags


@pytest.fixture
def start(refused, tmp_path_factory, tmp_path):
    """Starts a case that must be refused, some fields changed. -> its line"""

    def call(name="nsp-t5", started=False, **changes) -> str:
        workdir = tmp_path / "new"
        words = words_of(tmp_path_factory, name, workdir, **changes)
        line = refused(*words, started=started)
        assert not (workdir / "config.json").exists()
        return line

    return call


@pytest.fixture
def forbidden(monkeypatch):
    """Makes opening a backbone, text or weights an error."""

    def forbid(*_args, **_kwargs):
        raise AssertionError("read before the config was checked")

    for name in (
        "build.backbone.folder.resolve",
        "build.corpus.index_corpus",
        "runs.ppt.load_weights",
    ):
        monkeypatch.setattr(f"jaxprompt.{name}", forbid)


# -- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ppt__task": ""}, "ppt.task is empty; give one of nsp, nss, unified, cls"),
        ({"ppt__task": "nsq"}, "ppt.task='nsq' is unknown; nearest: n"),
        ({"ppt__patterns": "fr"}, "ppt.patterns='fr' is unknown; known: en, en_end, en_paper"),
        ({"corpus__path": ""}, "corpus.path is empty; give a folder, a file or a glob"),
        ({"corpus__held_out": 0}, "corpus.held_out=0 leaves no document to evaluate on"),
        ({"prompt__start": "task"}, "prompt.start=task uses words of training examples"),
        ({"trainable": "backbone/.*"}, "pretrain trains only the prompt; empty it"),
        ({"head__name": "linear"}, "head.name=linear does not use label words; set head.name=verb"),
        ({"head__name": "label_rows"}, "head.name=label_rows does not use label words; set"),
        ({"cache__location": "host"}, "cache.location=host caches states of sequences that"),
        ({"ppt__task": "unified", "ppt__max_options": 17}, "2 to 17 options are not valid"),
        ({"ppt__task": "unified", "ppt__min_options": 1}, "1 to 16 options are not valid"),
        ({"ppt__task": "unified", "ppt__min_options": 5, "ppt__max_options": 4}, "5 to 4 options"),
        ({"ppt__task": "cls"}, "ppt.annotations is empty; cls needs the folder that `annotate`"),
        ({"ppt__task": "cls", "ppt__annotations": "/no/where"}, "/no/where has no annotations"),
        ({"task__words": "a,b,c"}, "task.words='a,b,c' has no effect in pretrain, whose examples"),
        ({"data__source": "rows"}, "words come from ppt.task=nsp; leave it out"),
        ({"ppt__hard": True}, "ppt.hard=True has no effect in pretrain"),
        ({"ppt__thresholds": "0.5,1"}, "ppt.thresholds=1 must be in [0, 1)"),
        ({"train__eval_steps": 0, "train__eval_epochs": 0}, "train.eval_epochs=0; set one above 0"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_read(start, forbidden, changes, words):
    assert words in start(**changes)


def test_no_prompt_and_no_task(start, refused, tmp_path_factory, tmp_path):
    fields = fields_of(tmp_path_factory, "nsp-t5")
    for name in ("prompt.length", "prompt.decoder"):
        fields.pop(name)
    config = tmp_path / "none.py"
    config.write_text(
        "from configs.parts import methods\nfrom configs.ppt import pretrain\n"
        "def get_config():\n    c = pretrain('nsp')\n    methods.full(c)\n    return c\n"
    )
    line = refused(
        "pretrain", f"--config={config}", f"--workdir={tmp_path / 'new'}", *flags(fields)
    )
    assert line.startswith("prompt.name=none has nothing to train; use soft or prefix")


# -- backbone and text ----------------------------------------------------------------------------


def test_patterns_that_a_backbone_cannot_read(start):
    line = start("cls-gpt2", ppt__task="nsp", ppt__patterns="en")
    assert "ppt.task=nsp with ppt.patterns=en has text after [mask], which a gpt2 cannot" in line
    assert "ppt.patterns=en_paper has text after" in start("cls-gpt2", ppt__patterns="en_paper")


def test_an_answer_with_sentinels_that_a_glm_has_not(start):
    told = "task.answer='[mask] {label} [mask]' has [mask], but a GLM has no sentinels"
    assert told in start("nsp-glm", task__answer="[mask] {label} [mask]")


def test_the_folder_of_the_text_is_no_workdir(refused, tmp_path_factory, tmp_path):
    place = shutil.copytree(made(tmp_path_factory, "corpus"), tmp_path / "corpus")
    words = words_of(tmp_path_factory, "nsp-t5", place, corpus__path=str(place))
    line = refused(*words, started=True)
    assert f"--workdir={place} is the folder of corpus.path={place}" in line
    assert sorted(place.iterdir()) == sorted(
        place / path.name for path in made(tmp_path_factory, "corpus").iterdir()
    )
