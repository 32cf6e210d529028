"""GLM as its paper and its released code define it, for one sequence at a time, in torch.

The input and the answer stand in one sequence [A; B]; a mask says who sees whom (Du et al. 2022,
section 2.1, figure 2).
"""

import math

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Layer(nn.Module):
    """A layer under the names of the release."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.input_layernorm = nn.LayerNorm(width, eps=1e-5)
        self.attention = nn.ModuleDict(
            {"query_key_value": nn.Linear(width, 3 * width), "dense": nn.Linear(width, width)}
        )
        self.post_attention_layernorm = nn.LayerNorm(width, eps=1e-5)
        self.mlp = nn.ModuleDict(
            {
                "dense_h_to_4h": nn.Linear(width, 4 * width),
                "dense_4h_to_h": nn.Linear(4 * width, width),
            }
        )

    def forward(self, x, sees, front=None):
        """x [T, H], sees bool [T, P+T], front: keys and values [P, N, D] or none"""
        size = x.shape[-1] // self.heads
        y = self.input_layernorm(x)
        q, k, v = self.attention["query_key_value"](y).chunk(3, -1)
        q, k, v = (z.view(-1, self.heads, size).transpose(0, 1) for z in (q, k, v))  # [N, T, D]
        if front is not None:
            k, v = (
                torch.cat([prefix.transpose(0, 1), z], 1)
                for prefix, z in ((front[0], k), (front[1], v))
            )
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        probs = scores.masked_fill(~sees, -1e30).softmax(-1)
        self.probs = probs.detach()  # [N, T, P+T] of the last call, to look at
        y = (probs @ v).transpose(0, 1).reshape(x.shape)
        x = x + self.attention["dense"](y)
        y = self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x))
        return x + self.mlp["dense_4h_to_h"](F.gelu(y, approximate="tanh"))


class GLM(nn.Module):
    """The whole model under the names of the release, without their prefix."""

    def __init__(self, hf):
        super().__init__()
        width, rows = hf["hidden_size"], hf["max_sequence_length"] + 1
        self.word_embeddings = nn.Embedding(hf["vocab_size"], width)
        self.transformer = nn.ModuleDict({
            "position_embeddings": nn.Embedding(rows, width),
            "block_position_embeddings": nn.Embedding(rows, width),
            "layers": nn.ModuleList(
                Layer(width, hf["num_attention_heads"]) for _ in range(hf["num_layers"])
            ),
            "final_layernorm": nn.LayerNorm(width, eps=1e-5),
        })  # fmt: skip

    def get_input_embeddings(self):
        """Names the word table as transformers' models do."""
        return self.word_embeddings

    def forward(self, source, answer, blank, fronts=None, shift=0):
        """Reads ids [A] and [B], the answer's place `blank`. -> the answer's logits [B, V]

        `fronts` has for each layer keys and values [P, N, D] that every token sees.
        """
        a, b = len(source), len(answer)
        ids = torch.cat([source, answer])
        first = torch.cat([torch.arange(a) + shift, torch.full((b,), blank + shift)])
        second = torch.cat([torch.zeros(a, dtype=torch.long), torch.arange(1, b + 1)])
        parts = self.transformer
        x = self.word_embeddings(ids)
        x = x + parts["position_embeddings"](first) + parts["block_position_embeddings"](second)
        sees = torch.ones(a + b, a + b).tril().bool()
        sees[:a, :a] = True
        for i, layer in enumerate(parts["layers"]):
            front = None if fronts is None else fronts[i]
            length = 0 if front is None else len(front[0])
            x = layer(x, F.pad(sees, (length, 0), value=True), front)
        return F.linear(parts["final_layernorm"](x)[a:], self.word_embeddings.weight)
