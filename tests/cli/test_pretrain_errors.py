"""Bad input of `pretrain`, and of runs that start from an export: one line, exit code 2."""

import shutil

import pytest
from spoil import BASE, edit
from tiny_pretrain import (
    CASES,
    SLOTS,
    annotate,
    corpus_texts,
    fields_of,
    made,
    pretrained,
    words_of,
)
from tiny_run import flags, make_config, tiny_fields, write_rows

from jaxprompt.corpus import index_corpus, split_held_out
from jaxprompt.corpus.ppt.annotations import Annotations, AnnotationWriter
from jaxprompt.data.text.tokenizer import load_tokenizer


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
        ({"task__form": "nsp"}, "task.form='nsp' has no effect in pretrain, whose examples and"),
        ({"data__source": "rows"}, "words come from ppt.task=nsp; leave it out"),
        ({"data__files__dev": "d.csv"}, "data.files.dev='d.csv' has no effect in pretrain"),
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


@pytest.mark.long
def test_verbs_that_are_for_tuned_runs(refused, tmp_path_factory, data, backbone, tmp_path):
    """A config that pre-trains is no config of a task, and the other way round."""
    config = pretrained(tmp_path_factory, "cls-bert") / "config.json"
    where = (f"--config={config}", f"--workdir={tmp_path / 'new'}")
    for command, more in (("train", ()), ("train", ("--config.runs.seeds=1,2",))):
        line = refused(command, *where, *more, started=True)
        assert line.startswith("ppt.task=cls pre-trains a prompt, which is only valid with")
    line = refused("evaluate", f"--config={config}", f"--workdir={config.parent}")
    assert line.startswith("ppt.task=cls pre-trains a prompt")
    fields = tiny_fields(backbone, data)
    line = refused("pretrain", f"--config={BASE}", where[1], *flags(fields))
    assert line == "ppt.task is empty; give one of nsp, nss, unified, cls"


# -- backbone and text ----------------------------------------------------------------------------


def test_patterns_that_a_backbone_cannot_read(start, tmp_path_factory):
    line = start("cls-gpt2", ppt__task="nsp", ppt__patterns="en")
    assert "ppt.task=nsp with ppt.patterns=en has text after [mask], which a gpt2 cannot" in line
    assert "ppt.patterns=en_paper has text after" in start("cls-gpt2", ppt__patterns="en_paper")
    line = start("cls-bert", data__max_len=70)
    assert "data.max_len=70 + 0 positions of the prompt exceed the model's 66" in line
    line = start("nss-bert", data__max_len=36)
    assert "of max_len 36 for 7 texts; raise max_len to" in line
    assert "takes 37 tokens (10 for slots)" in start(
        "nss-bert", data__max_len=24, prompt__length=10
    )
    assert "label word 'terrible' of class 0" in start(
        "cls-bert", backbone__path=made(tmp_path_factory, "bert-bare")
    )


def test_an_answer_with_sentinels_that_a_glm_has_not(start, tmp_path_factory):
    told = "task.answer='[mask] {label} [mask]' has [mask], but a GLM has no sentinels"
    assert told in start("nsp-glm", task__answer="[mask] {label} [mask]")


def test_too_few_documents(start, tmp_path):
    def corpus(count, lines=8):
        rows = [{"text": "\n".join(text.splitlines()[:lines])} for text in corpus_texts()[:count]]
        write_rows(tmp_path / "texts.jsonl", rows)
        return tmp_path / "texts.jsonl"

    line = start(corpus__path=corpus(40, 4), started=True)
    assert line.startswith(
        "only 0 of 32 documents have 5 units of 5 tokens or more, but nsp needs 2 such"
    )
    line = start(corpus__path=corpus(6), started=True)
    assert line.startswith(
        "only 1 of 1 documents have 5 units of 5 tokens or more, but nsp needs 2 such"
    )
    line = start("nss-bert", corpus__path=corpus(20), started=True)
    assert line.startswith(
        "only 4 of 4 documents have 5 units of 5 tokens or more, but nss needs 5 such"
    )
    assert "raise corpus.held_out if these are held out" in line
    line = start(corpus__path=corpus(1), started=True)
    assert "holds out 1 of 1 documents, which leaves none to train on" in line


def test_labels_that_do_not_fit(start, tmp_path_factory, tmp_path):
    three = annotate(
        tmp_path_factory, tmp_path / "three", classes=("bad", "fair", "good", "best", "x", "y")
    )
    line = start("cls-bert", ppt__annotations=three)
    assert "the annotator has 6 classes (bad, fair, good, best, x, y), but ppt.task=cls ha" in line
    line = start("cls-bert", ppt__thresholds="0.5,0.5")
    assert line.startswith("thresholds 0.5, 0.5 must be 5 numbers from 0 to below 1")
    unsure = annotate(tmp_path_factory, tmp_path / "unsure", sure=0.4)
    line = start("cls-bert", ppt__annotations=unsure, started=True)
    assert line.startswith("none of 256 units has a label above its threshold (0.95")
    other = tmp_path / "other"
    other.mkdir()
    write_rows(other / "corpus.jsonl", [{"text": text} for text in corpus_texts()[:30]])
    line = start("cls-bert", corpus__path=other, started=True)
    assert "annotates different text (320 units) than" in line and "annotate this corpus" in line


# -- what changed under a run ---------------------------------------------------------------------


@pytest.fixture
def unfinished(tmp_path_factory, tmp_path):
    """Copies a run as if it had not ended, with text and labels of its own. -> (workdir, words)"""

    def copy(name: str):
        workdir = shutil.copytree(pretrained(tmp_path_factory, name), tmp_path / "run")
        (workdir / "result.json").unlink()
        changes = {
            "corpus.path": shutil.copytree(made(tmp_path_factory, "corpus"), tmp_path / "corpus")
        }
        if CASES[name].task == "cls":
            changes["ppt.annotations"] = shutil.copytree(
                made(tmp_path_factory, "labels"), tmp_path / "labels"
            )
        edit(workdir / "config.json", **{field: str(path) for field, path in changes.items()})
        fields = {field.replace(".", "__"): path for field, path in changes.items()}
        return workdir, words_of(tmp_path_factory, name, workdir, **fields)

    return copy


@pytest.mark.long
def test_a_corpus_that_changed_under_a_run(refused, unfinished, tmp_path):
    workdir, words = unfinished("nsp-t5")
    before = (workdir / "metrics.jsonl").read_bytes()
    (tmp_path / "corpus/more.txt").write_text("the cat\n" * 8)
    line = refused(*words, started=True)
    assert "the corpus is not the one of the saved run: more.txt is new; restore it, or use" in line
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert "data.max_len (saved 48, given 50)" in refused(*words, "--config.data.max_len=50")


@pytest.mark.long
def test_labels_that_changed_under_a_run(refused, unfinished, tmp_path_factory, tmp_path):
    workdir, words = unfinished("cls-bert")
    shutil.rmtree(tmp_path / "labels")
    annotate(tmp_path_factory, tmp_path / "labels", annotator="another")
    line = refused(*words, started=True)
    assert f"ppt.annotations={tmp_path / 'labels'} has different labels than the saved run" in line


@pytest.mark.long
def test_labels_that_changed_places_under_a_run(refused, unfinished, tmp_path_factory, tmp_path):
    workdir, words = unfinished("cls-bert")
    tokenizer = load_tokenizer(made(tmp_path_factory, "bert"))
    corpus = index_corpus(str(tmp_path / "corpus"), tokenizer, workdir / "corpus", processes=1)
    found = Annotations(tmp_path / "labels")
    table = found.probabilities.copy()
    train, _ = split_held_out(len(corpus), 0.2, 0)
    first, *others = [number for document in train for number in corpus.units(document)]
    second = next(n for n in others if table[n].argmax() != table[first].argmax())
    table[[first, second]] = table[[second, first]]  # as many of each class as before
    shutil.rmtree(found.folder)
    writer = AnnotationWriter(found.folder, corpus, found.classes, found.annotator)
    writer.append(table)
    writer.seal()
    line = refused(*words, started=True)
    assert f"ppt.annotations={tmp_path / 'labels'} has different labels than the saved run" in line


def test_the_folder_of_the_text_is_no_workdir(refused, tmp_path_factory, tmp_path):
    place = shutil.copytree(made(tmp_path_factory, "corpus"), tmp_path / "corpus")
    words = words_of(tmp_path_factory, "nsp-t5", place, corpus__path=str(place))
    line = refused(*words, started=True)
    assert f"--workdir={place} is the folder of corpus.path={place}" in line
    assert sorted(place.iterdir()) == sorted(
        place / path.name for path in made(tmp_path_factory, "corpus").iterdir()
    )


@pytest.mark.long
def test_an_export_of_nothing(refused, tmp_path_factory, tmp_path):
    config = pretrained(tmp_path_factory, "nsp-t5") / "config.json"
    line = refused("export", f"--config={config}", f"--workdir={tmp_path / 'empty'}")
    assert "no checkpoint in" in line and "train first" in line


# -- prompt.init ----------------------------------------------------------------------------------


@pytest.fixture
def tune(refused, tmp_path_factory, data, tmp_path):
    """Starts a tuned run from the export of a case that must be refused. -> its line"""

    def call(
        name="nsp-t5", method="soft", family="t5", init=None, arguments=None, **changes
    ) -> str:
        init = pretrained(tmp_path_factory, name) / "export" if init is None else init
        folder = made(tmp_path_factory, family)
        fields = dict(
            prompt__init=init, head__name="verbalizer", task__template="{text} [mask]",
            task__words="terrible,maybe,great",
        )  # fmt: skip
        c = make_config(
            folder, data, method, arguments=arguments or dict(length=SLOTS), **(fields | changes)
        )
        path = tmp_path / "tune.json"
        path.write_text(c.to_json())
        return refused("train", f"--config={path}", f"--workdir={tmp_path / 'new'}", started=True)

    return call


@pytest.mark.long
def test_prompts_that_do_not_fit(tune, tmp_path_factory, monkeypatch):
    def forbid(*_args, **_kwargs):
        raise AssertionError("weights were read")

    with monkeypatch.context() as patch:
        patch.setattr("jaxprompt.build.backbone.load_weights", forbid)
        line = tune(prompt__decoder=1, prompt__length=6)
        assert "has prompt.length=4, but this run has 6; set it to 4, or use another export" in line
        assert "has prompt.decoder=1, but this run has 0; set it to 1" in tune()
        line = tune(method="prefix")
        assert (
            "contains a prompt of method soft; set prompt.name=soft, or use an export of prefix"
            in line
        )
        line = tune("cls-bert")
        assert "is for a backbone with head_dim=16 (" in line and "this one has 12; use" in line
        line = tune("cls-t5", "prefix", prompt__cross=2, prompt__hidden=8)
        assert (
            "is computed from other parameters than those in an export; set prompt.hidden=0" in line
        )
        line = tune(init="/no/where")
        assert "cannot read /no/where/prompt.json: No such file or directory; give the" in line


@pytest.mark.long
def test_prompts_of_other_weights(tune, tmp_path_factory):
    line = tune(prompt__decoder=1, family="t5-other")
    assert "was trained on the weights " in line and ", but backbone.path has " in line
    assert line.endswith("; use that backbone, or another export")
