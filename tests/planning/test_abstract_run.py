"""A run without files: its batch, its head and what it says was assumed."""

import pytest

from jaxprompt.errors import InputError
from jaxprompt.parallel.devices import DEVICES
from jaxprompt.planning.abstract_run import WordTokenizer, open_run

ELECTRA, T5 = "google/electra-small-discriminator", "google/t5-v1_1-small"


def test_every_row_is_as_long_as_it_may_be(make_run):
    run = make_run(ELECTRA, data__batch=6, data__max_len=48)
    tokens = run.batch.encoder
    assert tokens.ids.shape == (6, 48) and tokens.mask.all()
    assert sorted(set(tokens.slot[0])) == list(range(-1, 20))
    (note,) = run.notes
    assert note == f"backbone {ELECTRA}, not on this machine: planned with its published shape"


def test_the_decoder_is_fed_what_the_head_reads(make_run):
    words = dict(task__name="sst2", head__name="verbalizer", data__batch=4)
    cloze = make_run(T5, **words).batch
    assert cloze.decoder.ids.shape == (4, 2)  # the start and the sentinel; the word is read
    whole = make_run(T5, head__span="target", **words).batch
    assert whole.label_pos.shape == (4, 2)
    run = make_run(T5, task__form="text", head__scores="full", **words)
    assert run.batch.decoder.ids.shape == (4, 1)
    assert "one subword" in run.notes[1]


def test_choices_and_free_texts(make_run):
    fields = dict(task__name="custom", task__fields=("question",), data__batch=2)
    run = make_run(ELECTRA, task__choices=("a", "b", "c"), **fields)
    assert run.batch.encoder.ids.shape[0] == 2 * 3 and len(run.batch.labels) == 2
    run = make_run(ELECTRA, task__choices=("options",), **fields)
    assert run.batch.encoder.ids.shape[0] == 2 * 4 and "4 choices" in run.notes[-1]
    text = dict(task__target="answer", head__name="text", data__max_target=9)
    run = make_run(T5, **fields, **text)
    assert run.batch.targets.shape == (2, 9) and run.batch.decoder.ids.shape == (2, 9)
    run = make_run(ELECTRA, **fields)
    assert "2 classes" in run.notes[-1] and run.scorer.classes == 2
    # The classes that are assumed lack the one of the data that f1 is of.
    run = make_run(ELECTRA, task__metric="f1", task__positive="spam", **fields)
    assert "2 classes" in run.notes[-1] and run.scorer.classes == 2


def test_reading_and_the_unified_form(make_run):
    """A row is full though its question is never cut."""
    fields = dict(head__name="verbalizer", task__form="unified", data__batch=2, data__max_len=64)
    run = make_run(T5, task__name="race", **fields)
    assert run.batch.encoder.mask.all() and run.batch.counts.tolist() == [4, 4]
    run = make_run(T5, task__name="custom", task__fields=("text",), **fields)
    assert run.scorer.task.options == ("0", "1") and "2 classes" in run.notes[-1]


def test_a_backbone_here_is_read_with_its_tokenizer(make_run, shared):
    folder = shared / "weights"
    here = sorted(p.parent for p in folder.rglob("config.json") if "bert" in p.read_text())
    if not here:
        pytest.skip("no BERT among the shared weights")
    run = make_run(str(here[0]), data__max_len=32)
    assert not isinstance(run.scorer.tokenizer, WordTokenizer)
    assert run.batch.encoder.mask.all() and "from the files on this machine" in run.notes[0]


def test_an_unknown_backbone_names_published_ones(make_run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="nearest: .*google/t5-v1_1-xxl"):
        make_run("google/t5-v1_1-xx")
    with pytest.raises(InputError, match="neither a folder nor a Hub id"):
        make_run("./somewhere/else")


def test_gpus_have_a_kernel_for_attention(make_run):
    config = make_run(T5, backbone__dtype="bfloat16").config
    kernel = lambda device: open_run(config, DEVICES[device]).backbone.module.cfg.attention
    assert [kernel(name) for name in ("h100", "v100-32", "v5e")] == ["fused", "auto", "auto"]
    config = config.replace(
        {"backbone.dropout": 0.1}
    )  # of the probabilities too: the kernel has none
    assert kernel("h100") == "auto"
    assert (
        open_run(
            config.replace({"backbone.attention_dropout": 0.0}), DEVICES["h100"]
        ).backbone.module.cfg.attention
        == "fused"
    )
    config = config.replace({"backbone.dtype": "float32", "backbone.dropout": 0.0})
    assert kernel("h100") == "auto"


def test_the_kernel_of_a_tpu_is_promised_from_512_tokens_on_behind_a_window_too(make_run):
    """Mistral's is 4096 tokens, those of a prefix included."""
    fields = dict(prompt__length=8, backbone__dtype="bfloat16")
    config = make_run("mistralai/Mistral-7B-v0.1", "prefix", **fields).config
    kernel = lambda device: open_run(config, DEVICES[device]).backbone.module.cfg.attention
    config = config.replace({"data.max_len": 511})
    assert (kernel("v5e"), kernel("h100")) == ("auto", "fused")
    for length in (512, 4089):
        config = config.replace({"data.max_len": length})
        assert kernel("v5e") == kernel("h100") == "fused"


def test_several_slices_are_counted_as_one(make_run):
    run = make_run(T5, mesh__slices=2, mesh__data=2)
    assert run.config.mesh.slices == 1 and "between slices" in run.notes[-1]


def test_answers_in_a_text_are_planned_without_a_tokenizer(make_run):
    run = make_run(ELECTRA, task__name="squad", head__name="spans", data__max_len=64)
    assert run.batch.encoder.ids.shape[1] == 64 and run.batch.label_pos.size


def test_a_stand_in_tokenizer_says_where_words_are():
    encoded = WordTokenizer("<{}>")(["ab  c ab"])
    (ids,), (offsets,) = encoded["input_ids"], encoded["offset_mapping"]
    assert offsets == [(0, 2), (4, 5), (6, 8)] and ids[0] == ids[2] != ids[1]
