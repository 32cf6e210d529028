"""A tokenizer whose token n is the nth letter."""


class Letters:
    """Has six tokens, a to f."""

    def __len__(self):
        return 6

    def convert_ids_to_tokens(self, token):
        return "abcdef"[token]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
