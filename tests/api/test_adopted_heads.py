"""Heads that PEFT saves beside a prefix, by the task that its adapter is of."""

import numpy as np
import pytest
from reference_peft import peft
from tiny_run import make_backbone

import jaxprompt as jp
from jaxprompt.convert.peft import write_peft

torch = pytest.importorskip("torch")
# PEFT calls what transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TAGS = ("O", "B-x", "I-x")
WORDS = "the cat eats rice with a saw and a hammer".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_backbone(tmp_path_factory.mktemp("backbone") / "roberta", "roberta")


def make_adapter(folder, where, task, auto, **fields):
    """Saves a prefix of 3 tokens and a head, both random. -> PEFT's model"""
    import transformers

    torch.manual_seed(0)
    base = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(folder, **fields)
    setting = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3)
    theirs = peft.get_peft_model(base, setting).eval()
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "classifier" in name or "qa_outputs" in name:
                x.normal_(0, 1)
    theirs.save_pretrained(where)
    return theirs


def asked(theirs, folder, *texts):
    """Asks torch's model with PEFT's prefix. -> its output, [begin, end) of the tokens, their texts

    A RoBERTa's tokenizer gives no segments: both texts are of the first.
    """
    from transformers import AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(folder)(
        *texts, return_tensors="pt", return_offsets_mapping=True
    )
    length = inputs.input_ids.shape[1]
    with torch.no_grad():
        output = theirs.base_model(
            inputs.input_ids, past_key_values=theirs.get_prompt(1),
            attention_mask=torch.ones(1, 3 + length), token_type_ids=torch.zeros(1, length).long(),
        )  # fmt: skip
    return output, inputs.offset_mapping[0].tolist(), inputs.sequence_ids(0)


def test_tags_of_an_adapter_are_those_of_peft(folder, tmp_path):
    theirs = make_adapter(folder, tmp_path, "TOKEN_CLS", "TokenClassification", num_labels=3)
    backbone, prompt = jp.load_backbone(str(folder)), jp.load_prompt(tmp_path)
    task = jp.task("tokens", tags="tags", labels=TAGS)
    model = jp.attach(backbone, prompt, task=task, max_len=40)
    predictions = jp.predict(model, [{"tokens": WORDS}])[0]["prediction"]
    # The space in front of the first word is that of a tokenizer that takes words.
    output, offsets, _ = asked(theirs, folder, " " + " ".join(WORDS))
    best = output.logits[0].argmax(-1).tolist()
    # A word's first token may have the space in front, or be that alone; token 0 is <s>.
    begins = [1 + len("".join(f"{word} " for word in WORDS[:i])) for i in range(len(WORDS))]
    ends = [end for _, end in offsets[1:]]
    firsts = [1 + next(i for i, end in enumerate(ends) if end >= begin) for begin in begins]
    expected = [TAGS[best[i]] for i in firsts]
    assert predictions == expected and len(set(expected)) > 1
    # A tagger's layer is none on the pooled state.
    with pytest.raises(jp.InputError, match="head.name=tags does not support"):
        jp.attach(backbone, prompt, task=jp.task("text", labels=TAGS), max_len=40)


def test_spans_of_an_adapter_are_those_of_peft(folder, tmp_path):
    theirs = make_adapter(folder, tmp_path, "QUESTION_ANS", "QuestionAnswering")
    backbone, prompt = jp.load_backbone(str(folder)), jp.load_prompt(tmp_path)
    model = jp.attach(backbone, prompt, task="squad", max_len=60)
    question, context = "what eats rice", " ".join(WORDS)
    predictions = jp.predict(model, [{"question": question, "context": context}])[0]
    output, offsets, parts = asked(theirs, folder, question, context)
    starts, ends = output.start_logits[0].tolist(), output.end_logits[0].tolist()
    inside = [i for i, part in enumerate(parts) if part == 1]
    first, last = max(
        ((i, j) for i in inside for j in inside if i <= j),
        key=lambda at: starts[at[0]] + ends[at[1]],
    )
    assert predictions["prediction"] == context[offsets[first][0] : offsets[last][1]].strip()


@pytest.mark.parametrize(
    "task_type, names",
    [
        ("CAUSAL_LM", ("classifier.weight", "classifier.bias")),
        ("QUESTION_ANS", ("classifier.weight", "classifier.bias")),
        ("TOKEN_CLS", ("classifier.weight",)),
    ],
)
def test_other_heads_are_refused(tmp_path, task_type, names):
    k = np.ones((2, 3, 2, 4), np.float32)
    head = dict.fromkeys(names, np.ones((3, 8), np.float32))
    about = dict(base="x", layers=2, heads=2, task_type=task_type)
    write_peft(tmp_path, prefix=(k, k), head=head, **about)
    message = f"task_type='{task_type}' with {', '.join(sorted(names))}, which is not supported"
    with pytest.raises(jp.InputError, match=message):
        jp.load_prompt(tmp_path)


def test_a_prefix_that_peft_gives_to_the_decoder_is_refused_on_a_t5(tmp_path):
    import transformers

    backbone = make_backbone(tmp_path / "t5", "t5")
    setting = peft.PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=3)
    base = transformers.AutoModel.from_pretrained(backbone)
    peft.get_peft_model(base, setting).save_pretrained(tmp_path / "adapter")
    task = jp.task("text", labels=("a", "b"), words=("lion", "rice"), template="{text} [mask]")
    opened, prompt = jp.load_backbone(str(backbone)), jp.load_prompt(tmp_path / "adapter")
    with pytest.raises(jp.InputError, match="submodules=1, which PEFT uses in the decoder of a t5"):
        jp.attach(opened, prompt, task=task, head=jp.verbalizer(), max_len=16)
