"""An exported prompt in PEFT's format scores as ours does; PEFT's soft prompts start ours."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from exports import make_metadata
from reference_peft import peft
from spoil import files
from tiny_run import jaxprompt, make_backbone, make_config, read_lines, write_rows

from jaxprompt.__main__ import main
from jaxprompt.build.backbone import open_backbone
from jaxprompt.build.check import check_config
from jaxprompt.build.examples import read_examples
from jaxprompt.build.initial_params import read_rows
from jaxprompt.build.prompt_artifact import plain_tokens, read_export, unpack
from jaxprompt.build.task import scorer_from_config
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.peft import read_peft
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.errors import InputError
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.serving.adapters import make_peft_arguments

# PEFT calls what transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

torch = pytest.importorskip("torch")


def _train(capsys, tmp_path, backbone, data, **fields):
    c = make_config(backbone, data, **fields)
    config, workdir = tmp_path / "config.json", tmp_path / "run"
    config.write_text(c.to_json())
    given = [f"--config={config}", f"--workdir={workdir}"]
    assert jaxprompt(capsys, "train", *given)[0] == 0
    code, _, err = jaxprompt(capsys, "export", *given, f"--peft={tmp_path / 'peft'}")
    return code, err, workdir


def test_peft_scores_an_exported_prefix_as_we_do(capsys, tmp_path, backbone, data):
    from transformers import AutoTokenizer, BertForSequenceClassification

    code, _, workdir = _train(capsys, tmp_path, backbone, data)
    assert code == 0
    rows = [{"text": "a new hammer was near the saw"}, {"text": "the old wolf with a hare"}]
    inputs = write_rows(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out.jsonl"
    jaxprompt(capsys, "predict", f"--workdir={workdir}", f"--input={inputs}", f"--output={out}")
    ours = np.array([list(line["scores"].values()) for line in read_lines(out)])
    base = BertForSequenceClassification.from_pretrained(backbone, num_labels=3)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**batch).logits.softmax(-1).numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.long
def test_a_soft_prompt_goes_to_peft_and_back(capsys, tmp_path, backbone, data):
    code, _, workdir = _train(capsys, tmp_path, backbone, data, method="soft")
    assert code == 0
    card = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (card["peft_type"], card["num_virtual_tokens"]) == ("PROMPT_TUNING", 4)
    start = {"prompt.start": "file", "prompt.file": tmp_path / "peft", "optim.lr": 0.0}
    fields = {name.replace(".", "__"): value for name, value in start.items()}
    c = make_config(backbone, data, "soft", **fields)
    config = tmp_path / "again.json"
    config.write_text(c.to_json())
    given = [f"--config={config}", f"--workdir={tmp_path / 'again'}"]
    assert jaxprompt(capsys, "train", *given)[0] == 0
    for folder in (workdir, tmp_path / "again"):
        config = folder / "config.json"
        npy = folder / "soft.npy"
        jaxprompt(capsys, "export", f"--config={config}", f"--workdir={folder}", f"--npy={npy}")
    assert np.array_equal(np.load(workdir / "soft.npy"), np.load(tmp_path / "again" / "soft.npy"))
    both = [f"--peft={tmp_path / 'peft'}", f"--npy={tmp_path / 'peft' / 'soft.npy'}"]
    for _ in range(2):  # what the first has written does not stop the second
        code, _, err = jaxprompt(capsys, "export", f"--workdir={workdir}", *both)
        assert code == 0, err


@pytest.mark.long
@pytest.mark.parametrize("encoder", ["lstm", "mlp"])
def test_peft_takes_what_p_tuning_computed(encoder, capsys, tmp_path, backbone, data):
    """The encoder is folded away, and what is left scores as the run did."""
    from transformers import BertForSequenceClassification

    fields = {"prompt__encoder": encoder, "optim__lr": 1e-2}
    code, err, workdir = _train(capsys, tmp_path, backbone, data, method="p_tuning", **fields)
    assert code == 0, err
    exported, _ = read_export(str(workdir / "export"))
    assert {name for name in exported if name.startswith("prompt/")} == {"prompt/slots"}
    base = BertForSequenceClassification.from_pretrained(backbone, num_labels=3)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    with torch.no_grad():
        theirs = model.get_prompt(batch_size=1)[0].numpy()
    np.testing.assert_array_equal(theirs, exported["prompt/slots"])
    out = tmp_path / "out.jsonl"
    words = [f"--workdir={workdir}", f"--input={data / 'test.jsonl'}", f"--output={out}"]
    assert jaxprompt(capsys, "predict", *words)[0] == 0
    right = np.mean([line["prediction"] == line["label"] for line in read_lines(out)])
    result = json.loads((workdir / "result.json").read_text())
    assert right == pytest.approx(result["test"]["accuracy"])


def test_a_folder_that_holds_other_files_is_refused_before_anything_is_computed(
    run, backbone, tmp_path, refused, capsys, monkeypatch
):
    place, folder = f"--workdir={run}", tmp_path / "peft"
    for _ in range(2):  # over its own files it may write again
        code, _, err = jaxprompt(capsys, "export", place, f"--peft={folder}")
        assert code == 0, err
    (folder / "README.md").write_text("# Mine\n")
    before = [files(folder), files(backbone)]

    def compute(*_):
        raise AssertionError("read before the folder was checked")

    monkeypatch.setattr("jaxprompt.serving.export.pack_run", compute)
    for given in (folder, backbone):
        line = refused("export", place, f"--peft={given}")
        assert line.startswith(f"{given} contains ") and line.endswith("or give another folder")
    assert before == [files(folder), files(backbone)]


@pytest.mark.long
def test_a_prefix_that_peft_cannot_hold_is_refused(capsys, tmp_path, backbone, data):
    code, err, _ = _train(capsys, tmp_path, backbone, data, prompt__shift=False)
    assert code == 2
    assert "shifts by 0" in err
    assert not (tmp_path / "peft").exists()


@pytest.mark.default_cases("deberta")
@pytest.mark.parametrize("family", ["albert", "modernbert", "deberta", "deberta_v2"])
def test_a_family_whose_torch_model_reads_no_prefix_is_refused(
    family, capsys, tmp_path, data, tmp_path_factory
):
    """Of these the adapter would be loaded, and change nothing or fail."""
    backbone = make_backbone(tmp_path_factory.mktemp(family) / family, family)
    code, err, _ = _train(capsys, tmp_path, backbone, data)
    assert code == 2
    article = "an" if family == "albert" else "a"
    assert f"--peft: {article} {family} of transformers does not support a prefix" in err
    assert not (tmp_path / "peft").exists()


# -- a T5 whose embeddings are divided ------------------------------------------------------------

SENTINEL = {"head.name": "verbalizer", "task.template": "{text} about [mask] ."}
SENTINEL |= {"optim.lr": 0.0, "train.total_steps": 1, "prompt.start": "file"}


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return make_backbone(tmp_path_factory.mktemp("t5") / "t5", "t5")


@pytest.fixture(scope="module")
def divided(t5, data, tmp_path_factory):
    """An export under rescale=100 of soft tokens as large as a T5's own embeddings. -> folder"""
    folder = tmp_path_factory.mktemp("divided")
    rows = np.random.default_rng(0).normal(0, 9, (4, 32)).astype(np.float32)
    np.save(folder / "given.npy", rows)
    fields = SENTINEL | {"prompt.file": folder / "given.npy", "backbone.rescale": 100.0}
    config = folder / "config.json"
    config.write_text(make_config(t5, data, "soft", **fields).to_json())
    given = [f"--config={config}", f"--workdir={folder / 'run'}"]
    assert main(["train", *given]) == 0
    written = [f"--npy={folder / 'soft.npy'}", f"--peft={folder / 'peft'}"]
    assert main(["export", *given, *written]) == 0
    return folder


@pytest.mark.long
def test_soft_tokens_of_a_divided_t5_leave_as_they_came(divided, t5, data):
    """Written for a T5 that nothing divides, and taken in again by one that is divided."""
    given = np.load(divided / "given.npy")
    np.testing.assert_array_max_ulp(np.load(divided / "soft.npy"), given, maxulp=1)
    np.testing.assert_array_max_ulp(read_peft(divided / "peft").soft, given, maxulp=1)
    inside, metadata = read_export(str(divided / "run" / "export"))
    assert metadata.backbone.rescale == 100.0
    np.testing.assert_allclose(inside["prompt/slots"], given / 100, rtol=1e-6)
    prompt = SimpleNamespace(length=4, decoder=0, dims=SimpleNamespace(embed=32))
    for source in ("soft.npy", "peft", "run/export"):
        for rescale in (1.0, 100.0):
            rows = read_rows(str(divided / source), prompt, rescale)
            np.testing.assert_allclose(rows, given / rescale, rtol=3e-7)
    rows = read_rows(str(divided / "soft.npy"), prompt, 100.0)
    np.testing.assert_array_max_ulp(rows, inside["prompt/slots"], maxulp=1)


@pytest.mark.long
def test_peft_scores_a_divided_t5_as_we_do(divided, t5, data):
    """Logits of the whole vocabulary behind the sentinel, of torch and of the export."""
    import transformers

    export, placement = str(divided / "run" / "export"), make_placement(1, 1)
    exported = unpack(export, backbone=BackboneConfig(), batch=4, placement=placement)
    scorer, params = exported.scorer, exported.params
    rows = read_lines(data / "test.jsonl")[:4]
    examples = [read_example(scorer.task, row, "here", need_label=False) for row in rows]
    encoded = [row for (row,) in scorer.encode(examples).rows]
    batch = scorer.one_batch([[row] for row in encoded])
    bound = scorer.model.backbone.bind({"params": params["backbone"]})
    features = bound.lm_features(scorer.model.hidden(params, batch))
    ours = np.asarray(features @ bound.lm_table()[0].T)  # [B, T, V]
    base = transformers.T5ForConditionalGeneration.from_pretrained(t5)
    model = peft.PeftModel.from_pretrained(base, divided / "peft").eval()
    for row, logits in zip(encoded, ours, strict=True):
        ids, said = (torch.tensor(x.ids)[None] for x in (row, row.decoder))
        ids = ids[:, 4:]  # without the places of the soft tokens
        with torch.no_grad():
            theirs = (
                model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=said)
                .logits[0]
                .numpy()
            )
            bare = base(input_ids=ids, decoder_input_ids=said).logits[0].numpy()
        found = logits[: len(theirs), : theirs.shape[1]]
        np.testing.assert_allclose(found, theirs, atol=1e-4, rtol=0)
        assert np.abs(theirs - bare).max() > 0.1  # the prompt matters


@pytest.mark.long
def test_bare_soft_tokens_are_no_export(divided, t5, data, refused):
    for path in (divided / "soft.npy", divided / "peft"):
        c = make_config(t5, data, "soft", **SENTINEL | {"prompt.start": "vocab"}, prompt__init=path)
        config = divided / "wrong.json"
        config.write_text(c.to_json())
        line = refused("train", f"--config={config}", f"--workdir={divided / 'none'}")
        assert f"prompt.start=file and prompt.file={path}" in line


# -- where soft tokens stand ----------------------------------------------------------------------

PLACES = {
    ("bert", "{text}"): True,
    ("bert", "[soft] [cls] {text} is [mask]"): True,
    ("bert", "[soft] {text}"): False,  # behind the tokenizer's own [CLS]
    ("bert", "[cls] [soft] {text}"): False,
    ("bert", "[soft*2] [cls] {text} [soft*2]"): False,
    ("t5", "{text} about [mask] ."): True,
    ("t5", "[soft] {text} about [mask] ."): True,
    ("t5", "it is [soft] {text} about [mask] ."): False,
    ("t5", "{text} [soft] [mask]"): False,
    ("t5", "[soft*1] {text} [soft*3] [mask]"): False,
}


@pytest.mark.parametrize("family, template", PLACES)
def test_peft_holds_soft_tokens_in_front_alone(family, template, backbone, t5, data):
    fields = {"task.template": template, "prompt.start": "normal"}
    fields |= {"head.name": "verbalizer" if "[mask]" in template else "linear"}
    c = make_config(t5 if family == "t5" else backbone, data, "soft", **fields)
    check_config(c)
    placement = make_placement(1, 1)
    opened = open_backbone(c.backbone)
    scorer = scorer_from_config(c, opened, read_examples(c, ["train"]), placement)
    tensors = {"prompt/slots": np.ones((4, 32), np.float32)}
    metadata = make_metadata(
        template=template,
        method="soft",
        backbone={"revision": "v2", "family": family, "dims": scorer.model.prompt.dims._asdict()},
    )
    if PLACES[family, template]:
        found = make_peft_arguments(scorer, tensors, metadata)
        assert found["soft"].shape == (4, 32) and found["revision"] == "v2"
    else:
        with pytest.raises(InputError, match="PEFT puts soft tokens before.*use prompt.safe"):
            make_peft_arguments(scorer, tensors, metadata)


def test_what_is_computed_from_a_text_is_refused_as_that_on_a_t5_too(t5, data):
    c = make_config(t5, data, "ipt", head__name="verbalizer", task__template="{text} [mask]")
    check_config(c)
    opened = open_backbone(c.backbone)
    examples = read_examples(c, ["train"])
    scorer = scorer_from_config(c, opened, examples, make_placement(1, 1))
    metadata = make_metadata(method="ipt", backbone={"family": "t5"})
    tensors = {"prompt/embed": np.ones((4, 32), np.float32)}
    with pytest.raises(InputError, match="--peft: an ipt prompt is computed from each text"):
        make_peft_arguments(scorer, tensors, metadata)


def test_soft_tokens_beside_a_prefix_are_no_adapter(backbone, data, tmp_path, capsys):
    c = make_config(
        backbone,
        data,
        "compose",
        prompt__parts="prefix(length=2)+soft(length=2)",
        train__total_steps=1,
        train__eval_steps=1,
    )
    (tmp_path / "c.json").write_text(c.to_json())
    place = [f"--config={tmp_path / 'c.json'}", f"--workdir={tmp_path / 'run'}"]
    assert jaxprompt(capsys, "train", *place)[0] == 0
    code, _, err = jaxprompt(capsys, "export", *place, f"--peft={tmp_path / 'peft'}")
    assert code == 2 and "--peft: a compose prompt has soft tokens and a prefix, and PEFT" in err
    assert not (tmp_path / "run/export").exists() and not (tmp_path / "peft").exists()


def test_soft_tokens_of_a_decoder_are_the_last():
    tensors = {"prompt/slots": np.ones((2, 4)), "prompt/decoder_slots": np.full((1, 4), 2.0)}
    assert plain_tokens(tensors, 10.0)[:, 0].tolist() == [10.0, 10.0, 20.0]
    assert plain_tokens({"prompt/k": np.ones((1, 2, 2, 2))}, 10.0) is None
