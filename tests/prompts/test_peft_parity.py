"""Soft prompts and prefixes against PEFT: equal parameters give equal hidden states and logits."""

import jax
import numpy as np
import pytest
import transformers
from reference_peft import peft
from tiny import MIXTURE, jit

from jaxprompt.backbones import make_backbone
from jaxprompt.build.backbone import model_family
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.peft import read_peft, write_peft
from jaxprompt.heads.linear import Classifier
from jaxprompt.heads.spans import SpanScores
from jaxprompt.models.model import Model
from jaxprompt.models.text_keys import text_keys
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import END, START, span_loss
from jaxprompt.types import Batch, Tokens

torch = pytest.importorskip("torch")
cartridge = pytest.importorskip("peft.tuners.cartridge.utils")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

P, VOCAB, CLASSES = 4, 60, 3
ENCODER_TOLERANCE, DECODER_TOLERANCE = 1e-5, 1e-4  # max abs, float32
ENCODER = dict(
    vocab_size=VOCAB, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=40, max_position_embeddings=32, initializer_range=0.1, num_labels=CLASSES,
)  # fmt: skip
LLAMA = dict(
    vocab_size=VOCAB, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=40, max_position_embeddings=32, bos_token_id=1,
    eos_token_id=2, tie_word_embeddings=True,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCAB, d_model=24, num_heads=4, d_kv=6, d_ff=40, num_layers=4,
    feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    relative_attention_num_buckets=8, relative_attention_max_distance=12,
)  # fmt: skip
BART = dict(
    vocab_size=VOCAB, d_model=24, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=32, pad_token_id=0,
)  # fmt: skip
GPT2 = dict(vocab_size=VOCAB, n_embd=24, n_layer=3, n_head=4, n_positions=32)
FAMILIES = {
    "bert": ("Bert", "Model", ENCODER),
    "roberta": ("Roberta", "Model", ENCODER),
    "xlm-roberta-xl": ("XLMRobertaXL", "Model", ENCODER),
    "electra": ("Electra", "Model", ENCODER | {"embedding_size": 24}),
    "electra-narrow": ("Electra", "Model", ENCODER | {"embedding_size": 16}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "llama": ("Llama", "ForCausalLM", LLAMA),
    "mixtral": ("Mixtral", "ForCausalLM", LLAMA | MIXTURE),
    # It scales soft tokens too.
    "granite": ("Granite", "ForCausalLM", LLAMA | dict(embedding_multiplier=3.0)),
    "phi3": ("Phi3", "ForCausalLM", LLAMA | dict(pad_token_id=0)),
    "olmo3": ("Olmo3", "ForCausalLM", LLAMA | dict(sliding_window=8)),
    "smollm3": ("SmolLM3", "ForCausalLM", LLAMA | dict(pad_token_id=0, no_rope_layer_interval=2)),
    "cohere2": ("Cohere2", "ForCausalLM", LLAMA | dict(sliding_window=8, logit_scale=1.0)),
    "glm4": ("Glm4", "ForCausalLM", LLAMA | dict(pad_token_id=0, head_dim=8)),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", ENCODER | dict(rotary_pct=0.67)),
    "opt": ("OPT", "ForCausalLM", ENCODER | dict(ffn_dim=40)),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "bart": ("Bart", "ForConditionalGeneration", BART),
}
ENCODERS = ("bert", "roberta", "xlm-roberta-xl", "electra", "electra-narrow")
KEY_HEADS = {"gpt2": 4, "llama": 2, "mixtral": 2}
LATER = {
    "granite": 2, "phi3": 2, "olmo3": 2, "smollm3": 2, "cohere2": 2, "glm4": 2, "gpt_neox": 4,
    "opt": 4,
}  # fmt: skip


def base_model(folder, family, suffix=None, **changes):
    """Saves a random model and returns it as torch reads it."""
    name, default, fields = FAMILIES[family]
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model_class = getattr(transformers, name + (suffix or default))
    model = model_class(getattr(transformers, f"{name}Config")(**fields | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model_class.from_pretrained(folder).eval()


TASKS, TASK = 3, 1  # of a multi-task adapter
CONFIGS = {
    "soft": (peft.PromptTuningConfig, dict(num_virtual_tokens=P)),
    "multitask": (
        peft.MultitaskPromptTuningConfig,
        dict(num_virtual_tokens=P, num_tasks=TASKS, num_ranks=2),
    ),
    # Token types: input template, input, and 0, which may not move.
    "cpt": (peft.CPTConfig, dict(cpt_token_ids=[7, 8, 9, 9], cpt_tokens_type_mask=[1, 2, 2, 0])),
    "prefix": (peft.PrefixTuningConfig, dict(num_virtual_tokens=P)),
    "cartridge": (peft.CartridgeConfig, dict(num_virtual_tokens=P, num_frozen_tokens=1)),
}


def with_adapter(model, kind, task, folder, **fields):
    """Wraps a model in a random adapter and saves it."""
    config_class, options = CONFIGS[kind]
    model = peft.get_peft_model(model, config_class(task_type=task, **options, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "prompt_encoder" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    return model.eval()


def text(seed=5, lengths=(7, 4, 2), pad=0):
    """Draws right-padded ids. -> ids, mask [B, T]"""
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    ids = np.random.default_rng(seed).integers(5, VOCAB, mask.shape)
    return np.where(mask, ids, pad), mask


def run_torch(model, ids, mask, **inputs):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long(), **inputs
        )


def make_tokens(ids, mask, slots=0, shift=0):
    """Puts soft tokens before a text, or shifts its positions."""
    width = [(0, 0), (slots, 0)]
    slot = np.pad(np.full(ids.shape, -1), width) + np.pad(0 * ids, width)
    slot[:, :slots] = np.arange(slots)
    ids, mask = np.pad(ids, width), np.pad(mask, width, constant_values=True)
    positions = np.where(mask, mask.cumsum(1) - 1 + shift, 0)
    ids, slot, positions = (x.astype(np.int32) for x in (ids, slot, positions))
    return Tokens(ids, mask, slot, positions, 0 * ids, np.zeros(ids.shape, np.int8))


def prompt_inputs(kind, adapter, ids, mask):
    """-> the parameters of our method, and its tokens"""
    if kind == "soft":
        return {"table": adapter.soft}, make_tokens(ids, mask, slots=P)
    return {"table": prefix_table(adapter)}, make_tokens(ids, mask, shift=P)


def prefix_table(adapter):
    return np.stack([adapter.k, adapter.v], axis=1)  # [L, 2, P, N, D]


def our_model(folder, name, fields, table, encoder, decoder=None, heads=None):
    """Loads the backbone and puts a table into our method. -> model, params, batch"""
    config = read_config(folder)
    family = model_family(config["model_type"])
    backbone, report = load_backbone(folder, family, config)
    module = make_backbone(family, config, report.heads)
    rows = np.arange(len(encoder.ids), dtype=np.int32)
    batch = Batch(encoder, 0 * rows[:, None], 0 * rows, np.ones(len(rows)), rows, decoder)
    model = Model(module, make_prompt(name, module.dims, **fields), heads or {})
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), backbone))["prompt"]
    assert jax.tree.map(np.shape, shapes) == jax.tree.map(np.shape, table)
    return model, {"backbone": backbone, "prompt": table}, batch


def our_logits(*args):
    """Returns the logits of the language model. -> [B, T, V]"""
    model, params, batch = our_model(*args)

    @jit
    def logits(params):
        bound = model.backbone.bind({"params": params["backbone"]})
        return bound.lm_features(model.hidden(params, batch)) @ bound.lm_table()[0].T

    return np.asarray(logits(params))


def assert_agree(actual, expected, mask):
    assert actual.shape == expected.shape
    assert np.abs(actual - expected)[mask].max() <= DECODER_TOLERANCE
    assert np.abs(expected[mask]).max() > 0.3


@pytest.mark.long_cases("bert-*", "xlm-roberta-xl-soft")
@pytest.mark.parametrize("kind", ["soft", "prefix"])
@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states(tmp_path, family, kind):
    """PEFT prepends rows of the embeddings' width, so a narrow ELECTRA is told its token_dim."""
    base = base_model(tmp_path / "base", family)
    narrow = family == "electra-narrow" and kind == "soft"
    fields = {"token_dim": base.config.embedding_size} if narrow else {}
    theirs = with_adapter(base, kind, "FEATURE_EXTRACTION", tmp_path / "adapter", **fields)
    ids, mask = text(pad=base.config.pad_token_id)
    expected = run_torch(theirs, ids, mask).last_hidden_state.numpy()
    table, tokens = prompt_inputs(kind, read_peft(tmp_path / "adapter"), ids, mask)
    model, params, batch = our_model(tmp_path / "base", kind, dict(length=P), table, tokens)
    hidden = np.asarray(model.hidden(params, batch))
    assert hidden.shape == expected.shape
    assert np.abs(hidden - expected)[tokens.mask].max() <= ENCODER_TOLERANCE


@pytest.mark.long_cases("soft")
@pytest.mark.parametrize("kind", ["soft", "prefix"])
def test_bert_classifier_logits(tmp_path, kind):
    """PEFT pools column 0: [CLS] behind a prefix, the first soft token of a soft prompt."""
    base = base_model(tmp_path / "base", "bert", "ForSequenceClassification")
    theirs = with_adapter(base, kind, "SEQ_CLS", tmp_path / "adapter")
    ids, mask = text(pad=base.config.pad_token_id)
    expected = run_torch(theirs, ids, mask).logits.numpy()
    adapter = read_peft(tmp_path / "adapter")
    table, tokens = prompt_inputs(kind, adapter, ids, mask)
    heads = {"main": Classifier(classes=CLASSES, pooler="checkpoint")}
    model, params, batch = our_model(
        tmp_path / "base", kind, dict(length=P), table, tokens, heads=heads
    )
    kernel, bias = adapter.head["classifier.weight"].T, adapter.head["classifier.bias"]
    params["head"] = {"main": {"out": {"kernel": kernel, "bias": bias}}}
    scores = model.forward(params, batch)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=ENCODER_TOLERANCE)


@pytest.mark.long
def test_loss_and_gradients_of_spans(tmp_path):
    """The prefix under the same head and loss, in two segments.

    PEFT's own forward drops the token types of question answering, so its base gets them here.
    """
    base = base_model(tmp_path / "base", "bert", "ForQuestionAnswering", num_labels=2)
    theirs = with_adapter(base, "prefix", "QUESTION_ANS", tmp_path / "adapter")
    ids, mask = text(pad=base.config.pad_token_id)
    types = (np.arange(ids.shape[1]) >= 2) & mask
    attention_mask = np.concatenate([np.ones((len(ids), P), bool), mask], axis=1)
    inputs = {"input_ids": ids, "token_type_ids": types, "attention_mask": attention_mask}
    inputs = {name: torch.tensor(np.asarray(x)).long() for name, x in inputs.items()}
    out = theirs.base_model(**inputs, past_key_values=theirs.get_prompt(batch_size=len(ids)))
    hide = torch.where(torch.tensor(mask), 0.0, -1e9)
    ends = np.array([[2, 4], [1, 3], [0, 1]])
    pairs = zip((out.start_logits, out.end_logits), torch.tensor(ends.T), strict=True)
    entropy = torch.nn.functional.cross_entropy
    expected = sum(entropy(logits + hide, end) for logits, end in pairs) / 2
    (leaf,) = (p for n, p in theirs.named_parameters() if "prompt_encoder" in n)
    expected.backward()

    table, tokens = prompt_inputs("prefix", read_peft(tmp_path / "adapter"), ids, mask)
    tokens = tokens._replace(types=types.astype(np.int32))
    model, params, batch = our_model(
        tmp_path / "base", "prefix", dict(length=P), table, tokens, heads={"main": SpanScores()}
    )
    head = {n: p.detach().numpy() for n, p in theirs.named_parameters() if "modules_to_save" in n}
    kernel, bias = (next(x for n, x in head.items() if n.endswith(y)) for y in ("weight", "bias"))
    params["head"] = {"main": {"out": {"kernel": kernel.T, "bias": bias}}}
    labels, rows = np.zeros(ids.shape, np.int32), np.arange(len(ids))
    labels[rows, ends[:, 0]] |= START
    labels[rows, ends[:, 1]] |= END
    columns = np.arange(ids.shape[1], dtype=np.int32)
    batch = batch._replace(
        label_pos=np.tile(columns, (len(ids), 1)), labels=labels,
        counts=mask.sum(1).astype(np.int32),
    )  # fmt: skip

    def loss(prompt):
        scores = model.forward(params | {"prompt": prompt}, batch)
        total, count = span_loss(scores, batch.labels, batch.weights)
        return total / count

    actual, grads = jax.value_and_grad(loss)(params["prompt"])
    np.testing.assert_allclose(actual, expected.item(), rtol=ENCODER_TOLERANCE)
    wanted = leaf.grad.numpy().reshape(P, ENCODER["num_hidden_layers"], 2, 4, -1)
    actual = np.asarray(grads["table"]).transpose(2, 0, 1, 3, 4)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=ENCODER_TOLERANCE)


@pytest.mark.default_cases(
    "gpt2-prefix", "llama-prefix", "llama-soft", "gpt2-cpt", "gpt2-cartridge", "llama-multitask"
)
@pytest.mark.parametrize(
    "family, kind",
    [(family, kind) for family in KEY_HEADS for kind in CONFIGS]
    + [(family, kind) for family in LATER for kind in ("soft", "prefix")],
)
def test_a_decoder(tmp_path, family, kind):
    """Soft tokens take the positions 0 .. P - 1; behind a prefix the text starts at P.

    An adapter is read as it scores while it trains, and written in the same form.
    """
    theirs = with_adapter(
        base_model(tmp_path / "base", family), kind, "CAUSAL_LM", tmp_path / "adapter"
    )
    ids, mask = text()
    is_multitask = kind == "multitask"
    inputs = dict(task_ids=torch.tensor([TASK] * len(ids))) if is_multitask else {}
    expected = run_torch(theirs, ids, mask, **inputs).logits.numpy()
    adapter = read_peft(tmp_path / "adapter", TASK if is_multitask else None)
    assert adapter.stream == "encoder"
    method = adapter.method
    table, tokens = prompt_inputs(method, adapter, ids, mask)
    logits = our_logits(tmp_path / "base", method, dict(length=P), table, tokens)
    assert_agree(logits, expected, tokens.mask)

    prefix = None if method == "soft" else (adapter.k, adapter.v)
    write_peft(
        tmp_path / "ours", base="tiny", layers=3, heads=(KEY_HEADS | LATER)[family],
        soft=adapter.soft,
        prefix=prefix, task_type="CAUSAL_LM", peft_type=adapter.config["peft_type"],
    )  # fmt: skip
    plain = base_model(tmp_path / "base", family)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    assert loaded.peft_config["default"].peft_type == adapter.config["peft_type"]
    one_task = dict(task_ids=torch.zeros(len(ids), dtype=torch.int64)) if is_multitask else {}
    actual = run_torch(loaded, ids, mask, **one_task).logits.numpy()
    # The sums of a Mixtral are not the same every time.
    atol = 1e-5 if is_multitask or family == "mixtral" else 0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.mark.long
@pytest.mark.parametrize("modules", [1, 2])
def test_t5_soft_prompt(tmp_path, modules):
    """PEFT's second half of rows, which a decoder once took, is never used."""
    theirs = with_adapter(
        base_model(tmp_path / "base", "t5", d_kv=10), "soft", "SEQ_2_SEQ_LM", tmp_path / "adapter",
        num_transformer_submodules=modules,
    )  # fmt: skip
    (ids, mask), (fed, fed_mask) = text(), text(6, (3, 5, 1))
    inputs = dict(decoder_input_ids=torch.tensor(fed))
    expected = run_torch(theirs, ids, mask, **inputs).logits.numpy()
    adapter = read_peft(tmp_path / "adapter")
    rows = theirs.get_prompt_embedding_to_save("default").numpy()
    assert len(rows) == modules * P
    np.testing.assert_array_equal(adapter.soft, rows[:P])
    table, tokens = prompt_inputs("soft", adapter, ids, mask)
    decoder = make_tokens(fed, fed_mask)
    logits = our_logits(tmp_path / "base", "soft", dict(length=P), table, tokens, decoder)
    assert_agree(logits, expected, fed_mask)

    write_peft(
        tmp_path / "ours", base="tiny", layers=4, heads=4, soft=adapter.soft,
        task_type="SEQ_2_SEQ_LM",
    )  # fmt: skip
    again = read_peft(tmp_path / "ours")
    assert again.config["num_transformer_submodules"] == 1
    np.testing.assert_array_equal(again.soft, adapter.soft)
    plain = base_model(tmp_path / "base", "t5", d_kv=10)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    np.testing.assert_array_equal(run_torch(loaded, ids, mask, **inputs).logits.numpy(), expected)


def test_a_multitask_prompt_of_a_t5(tmp_path):
    """The second half of its rows is put before the input of the decoder."""
    theirs = with_adapter(
        base_model(tmp_path / "base", "t5"), "multitask", "SEQ_2_SEQ_LM", tmp_path / "adapter"
    )
    (ids, mask), (labels, fed_mask) = text(), text(6, (3, 5, 1))
    inputs = dict(labels=torch.tensor(labels), task_ids=torch.tensor([TASK] * len(ids)))
    expected = run_torch(theirs, ids, mask, **inputs).logits.numpy()
    adapter = read_peft(tmp_path / "adapter", TASK)
    table = {"table": np.concatenate([adapter.soft, adapter.decoder_soft])}
    fed = np.pad(labels, [(0, 0), (1, 0)])[:, :-1]  # behind the start token, 0
    tokens, decoder = make_tokens(ids, mask, slots=P), make_tokens(fed, fed_mask, slots=P)
    fields = dict(length=P, decoder=P)
    logits = our_logits(tmp_path / "base", "soft", fields, table, tokens, decoder)
    assert_agree(logits, expected, decoder.mask)

    # Soft tokens of the encoder alone are written as one task.
    inputs["task_ids"] = torch.zeros(len(ids), dtype=torch.int64)
    written = []
    for peft_type, feed in (
        ("PROMPT_TUNING", dict(decoder_input_ids=torch.tensor(fed))),
        ("MULTITASK_PROMPT_TUNING", inputs),
    ):
        fields = dict(base="tiny", layers=4, heads=4, soft=adapter.soft, task_type="SEQ_2_SEQ_LM")
        write_peft(tmp_path / peft_type, **fields, peft_type=peft_type)
        plain = base_model(tmp_path / "base", "t5")
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / peft_type).eval()
        written.append(run_torch(loaded, ids, mask, **feed).logits.numpy())
    np.testing.assert_allclose(*written, rtol=0, atol=1e-5)


@pytest.mark.long_cases("t5-4-*", "bart-4-6")
@pytest.mark.parametrize(
    "family, layers, head_dim",
    [("t5", 4, 6), ("t5", 3, 6), ("t5", 4, 10), ("bart", 4, 6), ("bart", 3, 6)],
)
def test_prefix_of_an_encoder_decoder(tmp_path, family, layers, head_dim):
    """PEFT's prefix is a decoder-self prefix of ours, some of its rows used twice, some never."""
    sizes = dict(num_layers=layers, d_kv=head_dim)
    if family == "bart":
        sizes = dict(encoder_layers=layers, decoder_layers=layers)
    base = base_model(tmp_path / "base", family, **sizes)
    theirs = with_adapter(
        base, "prefix", "SEQ_2_SEQ_LM", tmp_path / "adapter", token_dim=4 * head_dim
    )
    (ids, mask), (fed, fed_mask) = text(), text(6, (3, 5, 1))
    expected = run_torch(theirs, ids, mask, decoder_input_ids=torch.tensor(fed)).logits.numpy()
    adapter = read_peft(tmp_path / "adapter")
    assert adapter.stream == "decoder" and adapter.k.shape == (layers, P, 4, head_dim)
    streams = make_tokens(ids, mask), make_tokens(fed, fed_mask, shift=P)
    table = {"decoder_table": prefix_table(adapter)}
    logits = our_logits(tmp_path / "base", "prefix", dict(length=0, decoder=P), table, *streams)
    assert_agree(logits, expected, fed_mask)
    half = np.roll(adapter.k, layers // 2, axis=0)
    assert (layers % 2 == 0) == np.array_equal(half, adapter.k)  # layers share rows in pairs


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prefix_from_a_text_starts_as_in_peft(tmp_path, family):
    """Past keys of the first P tokens, as PEFT takes them over."""
    base = base_model(tmp_path / "base", family)
    ids = np.random.default_rng(2).integers(5, VOCAB, 9)
    with torch.no_grad():
        past = base(input_ids=torch.tensor(ids)[None], use_cache=True).past_key_values
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=P)
    theirs = peft.get_peft_model(base, config)
    cartridge.initialize_kv_prefix_from_past_key_values(theirs, past_key_values=past)
    theirs.save_pretrained(tmp_path / "adapter")
    adapter = read_peft(tmp_path / "adapter")
    config = read_config(tmp_path / "base")
    backbone, report = load_backbone(tmp_path / "base", family, config)
    module = make_backbone(family, config, report.heads)
    keys = text_keys(module, backbone, ids[:P])["encoder"]
    for values, expected in zip(keys, (adapter.k, adapter.v), strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
