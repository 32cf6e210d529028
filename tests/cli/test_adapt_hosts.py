"""`adapt` on eight devices, and by two processes: the same run."""

import json

import numpy as np
import pytest
from processes import Processes
from tiny_adapt import (
    SCORED,
    adapted,
    losses,
    make_corpus,
    scores,
    words_of,
)

from jaxprompt.errors import InputError

# As many steps as the first look at dev needs.
SHORT = dict(train__total_steps=SCORED)


def assert_same(workdir, alone) -> None:
    """Compares the loss of each step and the first scores, up to the order of sums."""
    assert len(losses(workdir)) == SCORED
    np.testing.assert_allclose(losses(workdir), losses(alone)[:SCORED], rtol=1e-5)
    assert scores(workdir) == [pytest.approx(scores(alone)[0], rel=1e-5)]


@pytest.mark.long
def test_two_processes_adapt_as_one(tmp_path_factory, tmp_path):
    """Of dev's last batch, which is short, the second has filling alone."""
    alone = adapted(tmp_path_factory, "mlm-bert")
    workdir = tmp_path / "run"
    words = words_of(tmp_path_factory, "mlm-bert", workdir, mesh__data=2, **SHORT)
    with Processes(tmp_path / "logs", devices=1) as processes:
        processes.start_all(2, ["-m", "jaxprompt", *words])
        assert processes.wait() == [0, 0], processes.told()
        assert json.loads(processes.out(0)) == json.loads((workdir / "result.json").read_text())
        assert processes.out(1) == "" and f"step {SCORED}/{SCORED}" in processes.err(0)
    assert_same(workdir, alone)
    assert (workdir / "backbone/model.safetensors").exists()
    assert not list(workdir.glob(".*.partial"))


def test_processes_compare_their_texts(tmp_path_factory, tmp_path, refused, monkeypatch):
    """What each of three would compare with the others: the last has a text that ends early."""
    words = words_of(tmp_path_factory, "mlm-bert", tmp_path / "run", corpus__path="text")
    compared = []

    def agree(facts):
        compared[-1].append(facts)
        if "the corpus" in facts:
            raise InputError("all is compared")

    monkeypatch.setattr("jaxprompt.parallel.processes.check_agreement", agree)
    for process, documents in enumerate((60, 60, 40)):
        folder = tmp_path / str(process)
        make_corpus(folder / "text", documents)
        monkeypatch.chdir(folder)
        compared.append([])
        assert refused(*words, started=True) == "all is compared"
    (config, record), same, (third, other) = compared
    assert same == [config, record] and third == config
    differing = {name for name in record if other[name] != record[name]}
    assert differing == {"the corpus", "the store"} and other.keys() == record.keys()
    assert not (tmp_path / "run/metrics.jsonl").exists()
