"""Soft prompts and prefixes against PEFT: equal numbers give equal hidden states and logits."""

import jax
import numpy as np
import pytest
import transformers
from reference_peft import peft

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.peft import read_peft
from jaxprompt.heads.linear import Classifier as Head
from jaxprompt.heads.spans import SpanScores
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import END, START, span_loss
from jaxprompt.types import Batch, Tokens

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TOLERANCE = 1e-5  # max abs, float32
P, CLASSES, TEXT = 4, 3, 7
SIZES = dict(
    vocab_size=60, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=40, max_position_embeddings=32, initializer_range=0.1,
)  # fmt: skip
FAMILIES = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {}),
    "electra": ("Electra", {"embedding_size": 24}),
    "electra-narrow": ("Electra", {"embedding_size": 16}),
}


def base_model(family, folder, head="Model"):
    """Saves a model whose every number counts and returns it as torch reads it."""
    name, extra = FAMILIES[family]
    torch.manual_seed(1)
    labels = 2 if head == "ForQuestionAnswering" else CLASSES
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra, num_labels=labels)
    model_class = getattr(transformers, name + head)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model_class.from_pretrained(folder).eval()


def with_adapter(model, kind, task, folder, **config_fields):
    """Wraps a model in a random adapter and saves it."""
    config_class = {"soft": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[kind]
    config = config_class(task_type=task, num_virtual_tokens=P, **config_fields)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "prompt_encoder" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    return model


def text(pad):
    """Draws right-padded ids. -> ids, mask [B, TEXT]"""
    lengths = np.array([TEXT, 4, 2])[:, None]
    mask = np.arange(TEXT)[None] < lengths
    ids = np.random.default_rng(5).integers(5, SIZES["vocab_size"], mask.shape)
    return np.where(mask, ids, pad), mask


def batch_for(kind, ids, mask):
    """Lays soft tokens in front as PEFT does, or shifts positions by the prefix."""
    rows = len(ids)
    slot = np.full(ids.shape, -1)
    if kind == "soft":
        ids = np.concatenate([np.zeros((rows, P), int), ids], axis=1)
        mask = np.concatenate([np.ones((rows, P), bool), mask], axis=1)
        slot = np.concatenate([np.tile(np.arange(P), (rows, 1)), slot], axis=1)
    positions = np.where(mask, mask.cumsum(1) - 1 + (P if kind == "prefix" else 0), 0)
    arrays = [np.int32(ids), mask, np.int32(slot), np.int32(positions)]
    tokens = Tokens(*arrays, np.zeros_like(arrays[0]), np.zeros(ids.shape, np.int8))
    index = np.arange(rows, dtype=np.int32)
    return Batch(tokens, np.zeros((rows, 1), np.int32), index * 0, np.ones(rows), index)


def our_model(family, folder, adapter, heads=None):
    """Loads the backbone and puts the adapter's numbers into our method. -> Model, params"""
    family, config = family.removesuffix("-narrow"), read_config(folder)
    backbone, report = load_backbone(folder, family, config)
    module = make_backbone(family, config, report.heads)
    if adapter.method == "soft":
        table = adapter.soft
    else:
        table = np.stack([adapter.k, adapter.v], axis=1)  # [L, 2, P, N, D]
    prompt = make_prompt(adapter.method, module.dims, length=P)
    model = Model(module, prompt, heads or {})
    params = model.init(jax.random.key(0), backbone)
    assert params["prompt"]["table"].shape == table.shape
    return model, params | {"prompt": {"table": table}}


@pytest.mark.long_cases("bert-*")
@pytest.mark.parametrize("kind", ["soft", "prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states(tmp_path, family, kind):
    """PEFT prepends rows of the embeddings' width, so a narrow ELECTRA is told its token_dim."""
    base = base_model(family, tmp_path / "base")
    fields = {"token_dim": base.config.embedding_size} if family == "electra-narrow" else {}
    if kind == "prefix":
        fields = {}
    theirs = with_adapter(base, kind, "FEATURE_EXTRACTION", tmp_path / "adapter", **fields)
    ids, mask = text(base.config.pad_token_id)
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long()
        ).last_hidden_state.numpy()
    model, params = our_model(family, tmp_path / "base", read_peft(tmp_path / "adapter"))
    batch = batch_for(kind, ids, mask)
    hidden = np.asarray(model.hidden(params, batch))
    assert hidden.shape == expected.shape
    error = np.abs(hidden - expected)[batch.encoder.mask]
    assert error.max() <= TOLERANCE


@pytest.mark.long_cases("soft")
@pytest.mark.parametrize("kind", ["soft", "prefix"])
def test_bert_classifier_logits(tmp_path, kind):
    """PEFT pools column 0: [CLS] behind a prefix, the first soft token of a soft prompt."""
    base = base_model("bert", tmp_path / "base", "ForSequenceClassification")
    theirs = with_adapter(base, kind, "SEQ_CLS", tmp_path / "adapter")
    ids, mask = text(base.config.pad_token_id)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long())
    adapter = read_peft(tmp_path / "adapter")
    head = Head(classes=CLASSES, pooler="checkpoint")
    model, params = our_model("bert", tmp_path / "base", adapter, {"main": head})
    kernel, bias = adapter.head["classifier.weight"].T, adapter.head["classifier.bias"]
    params["head"] = {"main": {"out": {"kernel": kernel, "bias": bias}}}
    scores = model.forward(params, batch_for(kind, ids, mask))
    np.testing.assert_allclose(scores, expected.logits.numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["roberta", "electra"])
def test_prefix_classifier_logits(tmp_path, family):
    """RoBERTa and ELECTRA classify [CLS] through a trained dense layer (tanh and gelu)."""
    base = base_model(family, tmp_path / "base", "ForSequenceClassification")
    theirs = with_adapter(base, "prefix", "SEQ_CLS", tmp_path / "adapter")
    ids, mask = text(base.config.pad_token_id)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long())
    adapter = read_peft(tmp_path / "adapter")
    model, params = our_model(family, tmp_path / "base", adapter)
    hidden = np.asarray(model.hidden(params, batch_for("prefix", ids, mask)))
    head = {name: torch.tensor(tensor) for name, tensor in adapter.head.items()}
    act = torch.tanh if family == "roberta" else torch.nn.functional.gelu
    x = torch.tensor(hidden[:, 0])
    x = act(x @ head["classifier.dense.weight"].T + head["classifier.dense.bias"])
    scores = x @ head["classifier.out_proj.weight"].T + head["classifier.out_proj.bias"]
    np.testing.assert_allclose(scores, expected.logits.numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.long
def test_loss_and_gradients_of_spans(tmp_path):
    """The prefix under the same head and loss, in two segments.

    PEFT's own forward drops the token types of question answering; they are handed to its base.
    """
    base = base_model("bert", tmp_path / "base", "ForQuestionAnswering")
    theirs = with_adapter(base, "prefix", "QUESTION_ANS", tmp_path / "adapter")
    ids, mask = text(base.config.pad_token_id)
    types = (np.arange(TEXT) >= 2) & mask
    seen = np.concatenate([np.ones((len(ids), P), bool), mask], axis=1)
    given = {"input_ids": ids, "token_type_ids": types, "attention_mask": seen}
    given = {name: torch.tensor(np.asarray(x)).long() for name, x in given.items()}
    out = theirs.base_model(**given, past_key_values=theirs.get_prompt(batch_size=len(ids)))
    own = theirs(**given | {"attention_mask": torch.tensor(mask).long()})
    assert (own.start_logits - out.start_logits).abs().max() > 0.01  # what it does itself
    hide = torch.where(torch.tensor(mask), 0.0, -1e9)
    ends = np.array([[2, 4], [1, 3], [0, 1]])
    pairs = zip((out.start_logits, out.end_logits), torch.tensor(ends.T), strict=True)
    entropy = torch.nn.functional.cross_entropy
    expected = sum(entropy(logits + hide, own) for logits, own in pairs) / 2
    (leaf,) = (p for n, p in theirs.named_parameters() if "prompt_encoder" in n)
    expected.backward()
    wanted = leaf.grad.numpy().reshape(P, SIZES["num_hidden_layers"], 2, 4, -1)

    model, params = our_model(
        "bert", tmp_path / "base", read_peft(tmp_path / "adapter"), {"main": SpanScores()}
    )
    head = {n: p.detach().numpy() for n, p in theirs.named_parameters() if "modules_to_save" in n}
    kernel, bias = (next(x for n, x in head.items() if n.endswith(y)) for y in ("weight", "bias"))
    params["head"] = {"main": {"out": {"kernel": kernel.T, "bias": bias}}}
    batch = batch_for("prefix", ids, mask)
    labels = np.zeros(ids.shape, np.int32)
    rows = np.arange(len(ids))
    labels[rows, ends[:, 0]] |= START
    labels[rows, ends[:, 1]] |= END
    batch = batch._replace(
        encoder=batch.encoder._replace(types=types.astype(np.int32)),
        label_pos=np.tile(np.arange(TEXT, dtype=np.int32), (len(ids), 1)), labels=labels,
        counts=mask.sum(1).astype(np.int32),
    )  # fmt: skip

    def loss(prompt):
        scores = model.forward(params | {"prompt": prompt}, batch)
        total, count = span_loss(scores, batch.labels, batch.weights)
        return total / count

    found, grads = jax.value_and_grad(loss)(params["prompt"])
    np.testing.assert_allclose(found, expected.item(), rtol=TOLERANCE)
    found = np.asarray(grads["table"]).transpose(2, 0, 1, 3, 4)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
