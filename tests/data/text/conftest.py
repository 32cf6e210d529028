"""A tokenizer with a chat template."""

import pytest
import transformers
from reading_rows import CHAT
from tokenizers import ByteLevelBPETokenizer, processors


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A byte-level BPE that begins every input, with two tokens for turns."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        ["the cat sat. It was good\nbad"] * 9, vocab_size=300, show_progress=False,
        special_tokens=["<s>", "</s>", "<|start|>", "<|end|>"],
    )  # fmt: skip
    bpe._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT,
        additional_special_tokens=["<|start|>", "<|end|>"],
    )  # fmt: skip
