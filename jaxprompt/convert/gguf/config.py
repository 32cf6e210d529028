"""Builds the config.json of a GGUF file's model from its metadata.

Missing metadata take the defaults of llama.cpp (src/llama-model.cpp, load_hparams).
"""

import os
from typing import Any

import numpy as np

from jaxprompt.data.text.gguf_header import ArrayField, Header, read_header
from jaxprompt.errors import InputError, brief, is_kind, nearest

_CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}  # fmt: skip
GEMMAS = ("gemma", "gemma2", "gemma3")
_SIZES = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
# Fields that ask for another function, and the values with which they do not.
_REFUSED = {
    "expert_count": (0,), "attention.causal": (True,), "attention.scale": (0,),
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "rope.scaling.attn_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,),
    "attention.output_scale": (0, 1), "attention.temperature_scale": (0,),
    "attention.shared_kv_layers": (0,), "use_parallel_residual": (False,), "swin_norm": (False,),
}  # fmt: skip
# Layers of a Gemma of 27B, whose scores are divided by the root of another number.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_EVERY = {"gemma2": 2, "gemma3": 6}  # the last of so many layers sees all that is before it
_KINDS = ("full_attention", "sliding_attention")
_LOCAL_THETA = 10000.0
CURE = "use another file of the model, or its folder with config.json"


def read_gguf_config(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the fields of config.json, as transformers would write them.

    Raises:
      InputError: if the file is not a GGUF file, its architecture is not supported, or it lacks a
        field.
    """
    return _Fields(read_header(path)).config()


class _Fields:
    """The metadata of the file's architecture."""

    def __init__(self, header: Header):
        self.header, self.kind = header, header.architecture
        count = self.header.fields.get("split.count", 0)
        if is_kind(count, int) and count > 1:
            raise InputError(
                f"{self.header.path} is one of {count} files of a model; join them with "
                "llama-gguf-split --merge"
            )
        if self.kind not in _CLASSES:
            raise InputError(
                f"{header.path} contains a model of architecture {brief(self.kind)}, which is not "
                f"supported; {nearest('', _CLASSES)}"
            )

    def config(self) -> dict[str, Any]:
        self._refuse()
        sizes = {ours: self.whole(key) for key, ours in _SIZES.items()}
        heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
        sizes["num_key_value_heads"] = self.whole("attention.head_count_kv", heads)
        # Heads that are turned in part, or whose values differ in size, are refused below.
        turned = self.whole("rope.dimension_count", width // heads)
        sizes["head_dim"] = self.whole("attention.key_length", turned)
        for key in ("rope.dimension_count", "attention.value_length"):
            if self.whole(key, sizes["head_dim"]) != sizes["head_dim"]:
                raise self.refused(key, f"{sizes['head_dim']}, the same for all heads")
        hf = sizes | {
            "model_type": "gemma3_text" if self.kind == "gemma3" else self.kind,
            "architectures": [_CLASSES[self.kind]],
            "rms_norm_eps": self.needed("attention.layer_norm_rms_epsilon"),
            "vocab_size": self.whole("vocab_size", self._words()),
            # llama.cpp leaves an output table out that is the word table.
            "tie_word_embeddings": "output.weight" not in self.header.tensors,
            "rope_parameters": self._turns(sizes),
        }
        hf |= {
            f"{ours}_token_id": self.header.fields[key]
            for ours, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if (key := f"tokenizer.ggml.{name}_token_id") in self.header.fields
        }
        # The end of a turn and of a message end a text too, as in llama.cpp.
        names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        ends = list(dict.fromkeys(self.header.fields[x] for x in names if x in self.header.fields))
        if len(ends) > 1:
            hf["eos_token_id"] = ends
        return hf | (self._gemma(sizes) if self.kind in GEMMAS else self._plain())

    def _refuse(self) -> None:
        for key, known in _REFUSED.items():
            if self.get(key, known[0]) not in known:
                raise self.refused(key, " or ".join(map(str, known)))

    def _words(self) -> int:
        """Counts the rows of the word table."""
        found = self.header.tensors.get("token_embd.weight")
        if found is None or len(found.shape) != 2:
            raise InputError(
                f"{self.header.path} has no embedding matrix token_embd.weight; download it again"
            )
        return found.shape[0]

    def _plain(self) -> dict[str, Any]:
        """Makes the fields of those that are no Gemma."""
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self.get(key, 0) != 0:
                raise self.refused(key, "0")
        window = self.whole("attention.sliding_window", 0, least=0)
        if window and self.get("attention.sliding_window_pattern", True) not in (True, 1):
            raise self.refused("attention.sliding_window_pattern", "a window in every layer")
        part = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
        # The metadata does not tell of biases; the tensors of the first layer do.
        biases = {x: f"blk.0.{part[x]}.bias" in self.header.tensors for x in part}
        # A Llama of transformers has no window; Mistral is a Llama with one, and without biases.
        if self.kind == "mistral" or (self.kind == "llama" and window):
            if found := [f"blk.0.{part[x]}.bias" for x in part if biases[x]]:
                raise InputError(
                    f"{self.header.path} has {found[0]}, but Mistral models and Llama models with "
                    f"a sliding window are only supported without biases; {CURE}"
                )
            own = {"model_type": "mistral", "architectures": [_CLASSES["mistral"]]}
            return own | {"hidden_act": "silu", "sliding_window": window or None}
        fields = {"llama": tuple(part), "qwen3": ("attention_bias",)}.get(self.kind, ())
        return {"hidden_act": "silu"} | {name: biases[name] for name in fields}

    def _gemma(self, sizes: dict[str, int]) -> dict[str, Any]:
        if self.kind == "gemma":
            return {"hidden_act": "gelu_pytorch_tanh"}
        layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
        large = layers == _LAYERS_OF_27B[self.kind]
        has_caps = self.kind == "gemma2"
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": sizes["hidden_size"] // heads if large else sizes["head_dim"],
            "sliding_window": self.whole("attention.sliding_window", 4096),
            "layer_types": self._kinds(layers),
            **{name: self.number(name, cap if has_caps else None) for name, cap in caps.items()},
        }

    def _kinds(self, layers: int) -> list[str]:
        """Returns the type of each layer; the metadata contain a period, or a flag per layer."""
        key = f"{self.kind}.attention.sliding_window_pattern"
        if isinstance(self.header.fields.get(key), ArrayField):
            local = self.header.array(key)
            if len(local) != layers:
                raise self.refused("attention.sliding_window_pattern", f"{layers} flags", local)
        else:
            every = self.whole("attention.sliding_window_pattern", _EVERY[self.kind])
            local = [(i + 1) % every > 0 for i in range(layers)]
        return [_KINDS[bool(one)] for one in local]

    def _turns(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Makes rope_parameters, of each kind of layer where these differ."""
        theta = self.needed("rope.freq_base", 10000.0)
        own = {"rope_theta": theta} | self._scaling(sizes, theta)
        if self.kind != "gemma3":
            return own
        local = self.number("rope.freq_base_swa", _LOCAL_THETA)
        return {_KINDS[0]: own, _KINDS[1]: {"rope_theta": local, "rope_type": "default"}}

    def _scaling(self, sizes: dict[str, int], theta: float) -> dict[str, Any]:
        # As llama.cpp has it: what is not named is linear, and what is "none" is never scaled.
        name = self.get("rope.scaling.type", "linear")
        factor = 1.0 if name == "none" else self._factor()
        # Factors for each number, as of Phi-3, stand in tensors and not in the metadata.
        if any(tensor.startswith("rope_factors") for tensor in self.header.tensors):
            name = "longrope"
        if "rope_freqs.weight" in self.header.tensors:
            if factor not in (None, 1):  # llama.cpp would scale by both
                raise self.refused("rope.scaling.factor", "1 (with rope_freqs.weight)", factor)
            return self._llama3(sizes, theta)
        if name == "none" or name == "linear":
            scaled = {"rope_type": "linear", "factor": factor}
            return scaled if factor not in (None, 1) else {"rope_type": "default"}
        if name != "yarn":
            raise self.refused("rope.scaling.type", "none, linear or yarn", name)
        trained = "rope.scaling.original_context_length"
        found = {
            "rope_type": "yarn",
            "factor": factor or self.needed("rope.scaling.factor"),
            "original_max_position_embeddings": self.whole(
                trained, sizes["max_position_embeddings"]
            ),
        }
        for end in ("beta_fast", "beta_slow"):
            if (value := self.number(f"rope.scaling.yarn_{end}")) is not None:
                found[end] = value
        return found

    def _factor(self) -> float | None:
        """Reads by how much positions are scaled, under today's name or the one before."""
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            if (found := self.get(key)) is not None:
                return 1.0 if found == 0 else self.number(key)
        return None

    def _llama3(self, sizes: dict[str, int], theta: float) -> dict[str, Any]:
        """Finds the scaling of Llama 3.1 and later behind the factors that are written for it.

        All released have low_freq_factor 1, high_freq_factor 4 and 8,192 positions before.
        """
        place = self.header.tensors["rope_freqs.weight"]
        low, high, trained = 1.0, 4.0, 8192
        # How far, in radians, each pair of numbers turns over the positions of pre-training.
        turns = trained * theta ** (-np.arange(0, sizes["head_dim"], 2) / sizes["head_dim"])
        # 0 is ggml's number of float32.
        if place.kind != 0 or place.shape != turns.shape:
            raise self.refused("rope_freqs.weight", f"{len(turns)} factors of type F32", place)
        factors = np.frombuffer(
            self.header.read_bytes(place.start, place.start + 4 * len(turns)), "<f4"
        )
        # What turns slowest is scaled by the whole factor, so the largest number is the factor.
        factor = float(factors.max())
        smooth = np.clip((turns / (2 * np.pi) - low) / (high - low), 0, 1)
        if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            raise self.refused(
                "rope_freqs.weight", "the factors of Llama 3.1 and later", factors[:3]
            )
        if factor == 1:
            return {"rope_type": "default"}
        return {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": trained,
        }  # fmt: skip

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field; a field with one value per layer must have the same value in all."""
        name = f"{self.kind}.{key}"
        found = self.header.fields.get(name, default)
        if isinstance(found, ArrayField):
            values = set(self.header.array(name))
            if len(values) != 1:
                raise self.refused(key, "the same in all layers", sorted(values))
            return values.pop()
        return found

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Returns an integer. Raises InputError if it is missing and there is no default."""
        found = self.get(key, default)
        if not is_kind(found, int) or not least <= found < 2**31:
            raise self.refused(key, f"an integer of at least {least}", found)
        return found

    def number(self, key: str, default: float | None = None) -> float | None:
        """Returns a number above 0, or `default` if the field is missing."""
        found = self.get(key, default)
        if found is not None and not (is_kind(found, float) and found > 0):
            raise self.refused(key, "a number above 0", found)
        return found

    def needed(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0. Raises InputError if it is missing without a default."""
        found = self.number(key, default)
        if found is None:
            raise self.refused(key, "a number above 0")
        return found

    def refused(self, key: str, needed: str, found: Any = None) -> InputError:
        """Returns the error for a field whose value is not supported."""
        name = key if key.endswith(".weight") else f"{self.kind}.{key}"
        found = self.get(key) if found is None and not key.endswith(".weight") else found
        held = f"no {name}" if found is None else f"{name}={brief(found)}"
        return InputError(f"{self.header.path} has {held}, but only {needed} is supported; {CURE}")
