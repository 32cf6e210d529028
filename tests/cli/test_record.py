"""What a run learned from is in its folder: nothing contradicts it silently."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from spoil import BASE, edit, files
from tiny_run import flags, jaxprompt, make_data, read_lines, succeed, tiny_fields, write_rows

from jaxprompt.__main__ import main
from jaxprompt.build.backbone import open_backbone
from jaxprompt.config.run import BackboneConfig
from jaxprompt.data.text import identity
from jaxprompt.data.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def finished(backbone, tmp_path_factory):
    """A finished run whose data is read from a folder `data`, beside it. -> folder"""
    folder = tmp_path_factory.mktemp("finished")
    fields = tiny_fields(backbone, make_data(folder / "data"))
    words = ["train", f"--config={BASE}", f"--workdir={folder / 'run'}", *flags(fields)]
    assert main(words) == 0
    return folder


@pytest.fixture
def place(finished, monkeypatch, tmp_path):
    """A copy of the finished run and its data. The config names the data by a relative path."""
    folder = shutil.copytree(finished, tmp_path / "place")
    edit(folder / "run/config.json", **{"data.source": "data"})
    monkeypatch.chdir(folder)
    return folder


def again(command="train"):
    return [command, "--config=run/config.json", "--workdir=run"]


def reverse_words(folder):
    """Numbers the words of a backbone's tokenizer anew, which leaves its weights as they are."""
    words = (folder / "vocab.txt").read_text().splitlines()
    (folder / "vocab.txt").write_text("\n".join([*words[:5], *words[5:][::-1]]) + "\n")


def other_eps(folder):
    edit(folder / "config.json", layer_norm_eps=0.5)


@pytest.mark.long_cases("reverse_words-tokenizer")
@pytest.mark.parametrize("spoil, name", [(reverse_words, "tokenizer"), (other_eps, "config.json")])
def test_a_backbone_is_more_than_its_weights(spoil, name, place, backbone, tmp_path, refused):
    """Another tokenizer or another function beside the same weights would answer otherwise."""
    argv = [*flags({"backbone.path": tmp_path / "other"})]
    assert main(["export", *again()[1:]]) == 0
    copy = shutil.copytree(backbone, tmp_path / "other")
    assert main(["evaluate", *again()[1:], *argv]) == 0  # the same, elsewhere
    spoil(copy)
    message = f"with another {name} for these weights"
    for command in ("train", "evaluate", "export"):
        assert message in refused(command, *again()[1:], *argv)
    predict_command = ("predict", "--workdir=run", "--text=the cat", f"--backbone={copy}")
    assert message in refused(*predict_command) and main([*predict_command, "--force"]) == 0


def test_an_export_of_an_earlier_step_is_told(place, refused):
    """As of a run that was cut, exported, and went on."""
    assert main(["export", *again()[1:]]) == 0
    command = ("predict", "--workdir=run", "--text=the cat")
    assert main([*command]) == 0
    edit(place / "run/result.json", best_step=1)
    line = refused(*command)
    assert "run/export is from step " in line and "the best step of the run is 1" in line
    (place / "run/result.json").unlink()  # as of one that is still at work
    assert main([*command]) == 0
    (place / "run/checkpoints/99/best").mkdir(parents=True)
    assert "the best step of the run is 99" in refused(*command)
    assert main(["predict", "--prompt=run/export", "--text=the cat"]) == 0


def test_what_the_weights_decide_is_not_compared(backbone):
    """Tables are padded, and an untied output table is found, once weights are read."""
    opened = open_backbone(BackboneConfig(path=str(backbone)))
    tokenizer, cfg = load_tokenizer(opened.folder), opened.module.cfg
    made = lambda cfg: SimpleNamespace(
        tokenizer=tokenizer,
        task=SimpleNamespace(messages=""),
        model=SimpleNamespace(backbone=SimpleNamespace(cfg=cfg)),
    )
    read = dataclasses.replace(cfg, tied=not cfg.tied, rows=cfg.vocab + 8)
    assert identity.scorer_fingerprints(made(cfg)) == identity.scorer_fingerprints(made(read))
    other = dataclasses.replace(cfg, activation="relu")
    assert identity.scorer_fingerprints(made(cfg)) != identity.scorer_fingerprints(made(other))


def test_what_differs_by_process_or_machine_is_summed_up_alike():
    """The biases of a Qwen, which are a set, and the last digit of the rates of turns."""
    actual = identity._digest({"biases": frozenset({"query", "key", "value"}), "at": ((1 / 3,),)})
    near = 1 / 3 + 2**-52
    assert actual == identity._digest({"biases": ["key", "query", "value"], "at": [[near]]})
    assert actual != identity._digest({"biases": ["key", "query", "value"], "at": [[0.334]]})


def test_a_token_without_an_embedding_is_refused(place, backbone, tmp_path, refused):
    copy = shutil.copytree(backbone, tmp_path / "other")
    with (copy / "vocab.txt").open("a") as file:
        file.write("zebra\n")
    main(["export", *again()[1:]])
    command = ("predict", "--workdir=run", f"--backbone={copy}", "--force")
    assert "gives 'zebra' the id" in refused(*command, "--text=the zebra")
    assert main([*command, "--text=the cat"]) == 0


def test_words_without_an_embedding_are_refused(backbone, data, tmp_path, refused):
    """As label words, and as what a prompt starts from: the last row would stand in for them."""
    copy = shutil.copytree(backbone, tmp_path / "other")
    with (copy / "vocab.txt").open("a") as file:
        file.write("zebra\n")
    fields = tiny_fields(copy, data)
    words = {"head.name": "verbalizer", "task.words": "cat,zebra,dog"}
    words |= {"task.template": "{text} [mask]"}
    starts = {"prompt.start": "text", "prompt.text": "the zebra"}
    for method, reason in (("prefix", words), ("soft", starts), ("prefix", starts)):
        command = ("validate", f"--config=configs/base.py:{method}", *flags(fields | reason))
        assert "gives 'zebra' the id" in refused(*command), (method, reason)


def test_the_record_tells_all(place):
    record = json.loads((place / "run/record.json").read_text())
    assert record["task"]["labels"] == sorted(record["task"]["labels"])
    train = record["splits"]["train"]
    assert train["examples"] == 48 == sum(train["labels"].values())
    assert set(train["labels"]) == set(record["task"]["labels"])
    assert len(train["digest"]) == len(record["backbone"]["fingerprint"]) == 64
    assert record["template"] and record["choices"] == 1
    assert not (place / "run/compiled").exists()


def test_export_and_evaluate_need_no_training_data(place, capsys):
    before, _ = succeed(capsys, *again("evaluate"), "--split=test")
    rows = read_lines(place / "data/dev.jsonl")
    for changed, message in ((rows[:-1], "29 examples, not those"), (rows[::-1], "not those")):
        write_rows(place / "data/dev.jsonl", changed)
        out, err = succeed(capsys, *again("evaluate"))
        assert json.loads(out)["examples"] == len(changed)
        assert err.startswith("dev: ") and f"{message} of the run\n" in err
    names = json.loads((place / "run/record.json").read_text())["task"]["labels"]
    (place / "data/train.jsonl").unlink()
    (place / "data/dev.jsonl").unlink()
    after, _ = succeed(capsys, *again("evaluate"), "--split=test")
    assert after == before
    (place / "data/test.jsonl").unlink()
    assert jaxprompt(capsys, *again("export"))[0] == 0
    card = json.loads((place / "run/export/prompt.json").read_text())
    assert card["task"]["labels"] == names


def test_a_finished_run_is_repeated_with_the_same_alone(place, other_backbone, refused, capsys):
    out, err = succeed(capsys, *again())
    assert "already trained" in err
    assert json.loads(out) == json.loads((place / "run/result.json").read_text())
    before = files(place / "run")
    line = refused(*again(), f"--config.backbone.path={place / 'nowhere'}")
    assert "nowhere" in line
    line = refused(*again(), f"--config.backbone.path={other_backbone}")
    assert "run was trained with weights" in line and "use the same backbone" in line
    rows = read_lines(place / "data/train.jsonl")
    write_rows(place / "data/train.jsonl", rows[:-1])
    line = refused(*again())
    assert "splits.train.examples (saved 48, now 47)" in line and "restore that" in line
    write_rows(place / "data/train.jsonl", rows[::-1])
    assert "splits.train.digest (saved" in refused(*again())
    write_rows(place / "data/train.jsonl", rows)
    after = files(place / "run")
    assert {n: x for n, x in after.items() if n != "lock"} == {
        n: x for n, x in before.items() if n != "lock"
    }


def test_a_run_is_resumed_with_the_same_alone(place, refused):
    (place / "run/result.json").unlink()
    for name in ("train", "dev"):
        path = place / f"data/{name}.jsonl"
        rows = read_lines(path)
        write_rows(path, [{**rows[0], "text": "a fox"}, *rows[1:]])
        line = refused(*again())
        assert f"splits.{name}.digest" in line and "another workdir" in line
        write_rows(path, rows)
    assert not (place / "run/result.json").exists()


def test_data_may_be_moved(place, refused, capsys):
    """The record knows the examples; another place with others is refused."""
    (place / "data").rename(place / "moved")
    assert "data folder data does not exist" in refused(*again())
    (place / "run/result.json").unlink()
    _, err = succeed(capsys, *again(), "--config.data.source=moved")
    assert "resumed at step" in err
    assert json.loads((place / "run/config.json").read_text())["data"]["source"] == "moved"
    rows = read_lines(place / "moved/train.jsonl")
    write_rows(place / "moved/train.jsonl", rows[::-1])
    assert "splits.train.digest (saved" in refused(*again())


def test_without_its_record_a_run_is_not_resumed(place, refused):
    """What it learned from could not be compared."""
    (place / "run/result.json").unlink()
    path = place / "run/record.json"
    path.write_text(path.read_text()[:100])
    for _ in range(2):
        line = refused(*again())
        assert "record.json" in line
        assert "restore it, or train again in another workdir" in line and "delete" not in line
        path.unlink(missing_ok=True)


@pytest.mark.long
def test_a_frozen_prompt_is_made_again_from_the_same_text_alone(place, refused, capsys):
    """Its numbers are in no checkpoint: another text would give another prompt."""
    blocks = ["--config.prompt.name=soft", "--config.prompt.start=task", "--config.prompt.length=4"]
    words = ["--config=run/config.json", "--workdir=frozen", *blocks]
    words += ["--config.task.template=[soft] {text}", "--config.trainable=head/.*"]
    succeed(capsys, "train", *words)
    argv = ["evaluate", "--config=frozen/config.json", "--workdir=frozen"]
    before, _ = succeed(capsys, *argv)
    rows = read_lines(place / "data/train.jsonl")
    write_rows(place / "data/train.jsonl", rows[:-1])
    line = refused(*argv)
    assert "frozen prompt that was initialised from its training split" in line
    assert "48 examples, which differ from the 47" in line
    assert "data.max_len" in refused(*argv, "--config.data.max_len=12")  # would cut that text
    write_rows(place / "data/train.jsonl", rows)
    assert jaxprompt(capsys, *argv)[:2] == (0, before)


def test_a_frozen_prompt_is_made_again_from_the_same_file_alone(
    backbone, data, tmp_path, refused, capsys
):
    """Its numbers are in no checkpoint."""
    rows = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    np.save(tmp_path / "soft.npy", rows)
    fields = tiny_fields(backbone, data) | {
        "prompt.name": "soft", "prompt.length": 4, "prompt.start": "file",
        "prompt.file": tmp_path / "soft.npy", "trainable": "head/.*",
    }  # fmt: skip
    argv = [f"--config={BASE}", f"--workdir={tmp_path / 'run'}", *flags(fields)]
    assert jaxprompt(capsys, "train", *argv)[0] == 0
    assert jaxprompt(capsys, "evaluate", *argv)[0] == 0
    np.save(tmp_path / "soft.npy", rows + 1)
    message = f"initialised from {tmp_path / 'soft.npy'}, whose soft tokens have changed; restore"
    assert message in refused("evaluate", *argv) and message in refused("export", *argv)
    assert f"files.{tmp_path / 'soft.npy'}" in refused("train", *argv)


def test_the_best_checkpoint_is_the_one_of_the_result(place, refused):
    best = json.loads((place / "run/result.json").read_text())["best_step"]
    folder = place / "run/checkpoints"
    shutil.copytree(folder / f"{best}/best", folder / f"{best + 7}/best")
    shutil.rmtree(folder / str(best))
    for command in ("evaluate", "export"):
        assert f"no best parameters of step {best} in" in refused(*again(command))
    (place / "run/result.json").unlink()
    shutil.rmtree(folder)
    assert "checkpoint" in refused(*again("export"))
