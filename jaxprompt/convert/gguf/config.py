"""Builds the config.json of a GGUF file's model from its metadata.

Missing metadata take the defaults of llama.cpp (src/llama-model.cpp, load_hparams).
"""

import math
import os
from typing import Any

import numpy as np

from jaxprompt.convert.hf_config import LIMIT, max_size
from jaxprompt.data.text.gguf_header import ArrayField, Header, read_header
from jaxprompt.errors import InputError, brief, is_kind, nearest

_CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM", "granite": "GraniteForCausalLM",
    "cohere2": "Cohere2ForCausalLM", "glm4": "Glm4ForCausalLM",
}  # fmt: skip
GEMMAS = ("gemma", "gemma2", "gemma3")
_SIZES = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
# Fields of unsupported functions, and the values with which they have no effect.
_IGNORED_VALUES = {
    "expert_count": (0,), "attention.causal": (True,), "attention.scale": (0,),
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "rope.scaling.attn_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,),
    "attention.output_scale": (0, 1), "attention.temperature_scale": (0,),
    "attention.shared_kv_layers": (0,), "use_parallel_residual": (False,), "swin_norm": (False,),
}  # fmt: skip
# Architectures with functions of those fields.
_READ_FIELDS = {
    "granite": ("attention.scale", "logit_scale", "residual_scale", "embedding_scale"),
    "cohere2": ("logit_scale",), "phi3": ("rope.scaling.attn_factor",),
}  # fmt: skip
_PARTLY_ROTATED = ("phi3", "glm4")  # rope.dimension_count is a part of a head
_BIAS_FIELDS = {
    "llama": ("attention_bias", "mlp_bias"), "granite": ("attention_bias", "mlp_bias"),
    "smollm3": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",),
    "glm4": ("attention_bias",),
}  # fmt: skip
# The layers of a Gemma of 27B, which has another query_pre_attn_scalar.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6, "cohere2": 4}  # every n-th layer has full attention
_LAYER_TYPES = ("full_attention", "sliding_attention")
_LOCAL_ROPE_THETA = 10000.0
ADVICE = "use another file of the model, or its folder with config.json"


def read_gguf_config(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the fields of config.json, as transformers would write them.

    Raises:
      InputError: if the file is not a GGUF file, its architecture is not supported, or it lacks a
        field.
    """
    return _Metadata(read_header(path)).config()


class _Metadata:
    """The metadata of the file's architecture."""

    def __init__(self, header: Header):
        self.header, self.architecture = header, header.architecture
        count = self.header.fields.get("split.count", 0)
        if is_kind(count, int) and count > 1:
            raise InputError(
                f"{self.header.path} is one of {count} files of a model; join them with "
                "llama-gguf-split --merge"
            )
        if self.architecture not in _CLASSES:
            raise InputError(
                f"{header.path} contains a model of architecture {brief(self.architecture)}, which "
                f"is not supported; {nearest('', _CLASSES)}"
            )

    def config(self) -> dict[str, Any]:
        self._check_unsupported()
        sizes = {ours: self.read_int(key, maximum=max_size(ours)) for key, ours in _SIZES.items()}
        heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
        sizes["num_key_value_heads"] = self.read_int("attention.head_count_kv", heads)
        rotary_size = self.read_int("rope.dimension_count", width // heads)
        is_partial = self.architecture in _PARTLY_ROTATED
        default_size = width // heads if is_partial else rotary_size
        sizes["head_dim"] = self.read_int("attention.key_length", default_size)
        # Values of another size, and partial rotary embeddings of other architectures.
        whole = (
            ("attention.value_length",)
            if is_partial
            else ("rope.dimension_count", "attention.value_length")
        )
        for key in whole:
            if self.read_int(key, sizes["head_dim"]) != sizes["head_dim"]:
                raise self.unsupported(key, f"{sizes['head_dim']}, the same for all heads")
        hf: dict[str, Any] = sizes | {
            "model_type": "gemma3_text" if self.architecture == "gemma3" else self.architecture,
            "architectures": [_CLASSES[self.architecture]],
            "vocab_size": self.read_int("vocab_size", self._vocab_size()),
            # llama.cpp omits an output table that equals the word table.
            "tie_word_embeddings": "output.weight" not in self.header.tensors,
            "rope_parameters": self._rope_parameters(sizes),
        }
        if self.architecture == "cohere2":
            hf["layer_norm_eps"] = self.require_positive("attention.layer_norm_epsilon")
        else:
            hf["rms_norm_eps"] = self.require_positive("attention.layer_norm_rms_epsilon")
        if is_partial:
            hf["rope_parameters"]["partial_rotary_factor"] = rotary_size / sizes["head_dim"]
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
        if self.architecture in GEMMAS:
            return hf | self._gemma_fields(sizes)
        return hf | self._common_fields() | self._specific_fields(sizes)

    def _check_unsupported(self) -> None:
        read = _READ_FIELDS.get(self.architecture, ())
        for key, ignored in _IGNORED_VALUES.items():
            if key not in read and self.get(key, ignored[0]) not in ignored:
                raise self.unsupported(key, " or ".join(map(str, ignored)))

    def _vocab_size(self) -> int | None:
        """Returns the number of rows of the word table."""
        table = self.header.tensors.get("token_embd.weight")
        return table.shape[0] if table else None

    def _common_fields(self) -> dict[str, Any]:
        """Returns the fields of architectures other than Gemma."""
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self.get(key, 0) != 0:
                raise self.unsupported(key, "0")
        window = self.read_int("attention.sliding_window", 0, minimum=0)
        has_types = self.architecture in _GLOBAL_EVERY
        pattern = True if has_types else self.get("attention.sliding_window_pattern", True)
        if window and pattern not in (True, 1):
            raise self.unsupported("attention.sliding_window_pattern", "a window in every layer")
        # The metadata do not contain biases, but the tensors of the first layer do.
        bias_tensors = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
        has_bias = {field: name in self.header.tensors for field, name in bias_tensors.items()}
        # transformers' Llama has no window; its Mistral is a Llama with a window and no biases.
        if self.architecture == "mistral" or (self.architecture == "llama" and window):
            if biases := [name for field, name in bias_tensors.items() if has_bias[field]]:
                raise InputError(
                    f"{self.header.path} has {biases[0]}, but Mistral models and Llama models with "
                    f"a sliding window are only supported without biases; {ADVICE}"
                )
            return {
                "model_type": "mistral",
                "architectures": [_CLASSES["mistral"]],
                "hidden_act": "silu",
                "sliding_window": window or None,
            }
        names = _BIAS_FIELDS.get(self.architecture, ())
        return {"hidden_act": "silu"} | {name: has_bias[name] for name in names}

    def _specific_fields(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Returns the fields of single architectures."""
        window = self.read_int("attention.sliding_window", 0, minimum=0)
        if self.architecture == "phi3":
            trained = self.read_int(
                "rope.scaling.original_context_length", sizes["max_position_embeddings"]
            )
            return {"sliding_window": window or None, "original_max_position_embeddings": trained}
        if self.architecture == "cohere2":
            return {
                "sliding_window": window or None,
                "layer_types": self._layer_types(sizes["num_hidden_layers"]),
                "logit_scale": self.require_positive("logit_scale"),
            }
        # OLMo 3 is an olmo2 with windows, and rotates differently in them.
        if window and self.architecture in ("olmo2", "smollm3", "granite", "glm4"):
            raise self.unsupported("attention.sliding_window", "0")
        if self.architecture == "granite":
            width = sizes["head_dim"]
            return {
                "attention_multiplier": self.read_scale("attention.scale", width**-0.5),
                "embedding_multiplier": self.read_scale("embedding_scale", 1.0),
                "residual_multiplier": self.read_scale("residual_scale", 1.0),
                "logits_scaling": self.require_positive("logit_scale"),
            }
        return {}

    def read_scale(self, key: str, default: float) -> float:
        """Returns a number above 0; 0 and a missing field are `default`, as in llama.cpp."""
        return self.require_positive(key, default) if self.get(key, 0) else default

    def _gemma_fields(self, sizes: dict[str, int]) -> dict[str, Any]:
        if self.architecture == "gemma":
            return {"hidden_act": "gelu_pytorch_tanh"}
        layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
        large = layers == _LAYERS_OF_27B[self.architecture]
        caps: dict[str, float | None] = {
            "attn_logit_softcapping": None, "final_logit_softcapping": None,
        }  # fmt: skip
        if self.architecture == "gemma2":
            caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": sizes["hidden_size"] // heads if large else sizes["head_dim"],
            "sliding_window": self.read_int("attention.sliding_window", 4096),
            "layer_types": self._layer_types(layers),
            **{name: self.read_positive(name, default) for name, default in caps.items()},
        }

    def _layer_types(self, layers: int) -> list[str]:
        """Returns the type of each layer; the metadata contain a period, or a flag per layer."""
        key = f"{self.architecture}.attention.sliding_window_pattern"
        if isinstance(self.header.fields.get(key), ArrayField):
            local = self.header.array(key)
        else:
            default = _GLOBAL_EVERY[self.architecture]
            every = self.read_int("attention.sliding_window_pattern", default)
            local = [(i + 1) % every > 0 for i in range(layers)]
        return [_LAYER_TYPES[bool(is_local)] for is_local in local]

    def _rope_parameters(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Returns rope_parameters, for each type of layer if they differ."""
        theta = self.require_positive("rope.freq_base", 10000.0)
        parameters = {"rope_theta": theta} | self._rope_scaling(sizes, theta)
        if self.architecture != "gemma3":
            return parameters
        full, sliding = _LAYER_TYPES
        local_theta = self.read_positive("rope.freq_base_swa", _LOCAL_ROPE_THETA)
        return {full: parameters, sliding: {"rope_theta": local_theta, "rope_type": "default"}}

    def _rope_scaling(self, sizes: dict[str, int], theta: float) -> dict[str, Any]:
        # As in llama.cpp, the default is linear, and "none" is never scaled.
        name = self.get("rope.scaling.type", "linear")
        factor = 1.0 if name == "none" else self._rope_factor()
        # Factors for each dimension, as in Phi-3, are tensors and not metadata.
        if any(tensor.startswith("rope_factors") for tensor in self.header.tensors):
            name = "longrope"
        if "rope_freqs.weight" in self.header.tensors:
            if factor not in (None, 1):  # llama.cpp would scale by both
                raise self.unsupported("rope.scaling.factor", "1 (with rope_freqs.weight)", factor)
            return self._llama3(sizes, theta)
        if name == "longrope" and self.architecture == "phi3":
            return self._longrope(sizes)
        if name == "none" or name == "linear":
            scaled = {"rope_type": "linear", "factor": factor}
            return scaled if factor not in (None, 1) else {"rope_type": "default"}
        if name != "yarn":
            raise self.unsupported("rope.scaling.type", "none, linear or yarn", name)
        yarn = {
            "rope_type": "yarn",
            "factor": factor or self.require_positive("rope.scaling.factor"),
            "original_max_position_embeddings": self.read_int(
                "rope.scaling.original_context_length", sizes["max_position_embeddings"]
            ),
        }
        for field in ("beta_fast", "beta_slow"):
            if (value := self.read_positive(f"rope.scaling.yarn_{field}")) is not None:
                yarn[field] = value
        return yarn

    def _rope_factor(self) -> float | None:
        """Reads the scale of positions, from the current or the earlier field."""
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            if (value := self.get(key)) is not None:
                return 1.0 if value == 0 else self.read_positive(key)
        return None

    def _llama3(self, sizes: dict[str, int], theta: float) -> dict[str, Any]:
        """Reconstructs the scaling of Llama 3.1 and later from the factors of its frequencies.

        All released models have low_freq_factor 1, high_freq_factor 4 and were trained on 8,192
        positions before.
        """
        place = self.header.tensors["rope_freqs.weight"]
        low, high, trained = 1.0, 4.0, 8192
        # The rotation of each pair of dimensions over these positions, in radians.
        angles = trained * theta ** (-np.arange(0, sizes["head_dim"], 2) / sizes["head_dim"])
        # 0 is ggml's type float32.
        if place.kind != 0 or place.shape != angles.shape:
            raise self.unsupported("rope_freqs.weight", f"{len(angles)} factors of type F32", place)
        factors = np.frombuffer(
            self.header.read_bytes(place.start, place.start + 4 * len(angles)), "<f4"
        )
        # The lowest frequencies are divided by the factor itself, which is the largest value.
        factor = float(factors.max())
        smooth = np.clip((angles / (2 * np.pi) - low) / (high - low), 0, 1)
        if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            raise self.unsupported(
                "rope_freqs.weight", "the factors of Llama 3.1 and later", factors[:3]
            )
        if factor == 1:
            return {"rope_type": "default"}
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": trained,
        }

    def _longrope(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Returns the scaling of a Phi-3 with factors for short and for long texts."""
        positions = sizes["max_position_embeddings"]
        trained = self.read_int("rope.scaling.original_context_length", positions)
        scaling: dict[str, Any] = {
            "rope_type": "longrope", "original_max_position_embeddings": trained,
        }  # fmt: skip
        for length in ("short", "long"):
            scaling[f"{length}_factor"] = self._read_factors(f"rope_factors_{length}.weight")
        # That of transformers, unless the file has another.
        expected = math.sqrt(1 + math.log(max(positions / trained, 1)) / math.log(trained))
        scale = self.read_scale("rope.scaling.attn_factor", expected)
        return (
            scaling
            if math.isclose(scale, expected, rel_tol=1e-5)
            else scaling | {"attention_factor": scale}
        )

    def _read_factors(self, name: str) -> list[float]:
        place = self.header.tensors.get(name)
        # 0 is ggml's type float32.
        if place is None or place.kind != 0 or len(place.shape) != 1:
            raise self.unsupported(name, "a list of factors of type F32", place)
        end = place.start + 4 * place.shape[0]
        return np.frombuffer(self.header.read_bytes(place.start, end), "<f4").tolist()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field; a field with one value per layer must have the same value in all."""
        name = f"{self.architecture}.{key}"
        value = self.header.fields.get(name, default)
        if isinstance(value, ArrayField):
            values = set(self.header.array(name))
            if len(values) != 1:
                raise self.unsupported(key, "the same in all layers", sorted(values))
            return values.pop()
        return value

    def read_int(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = LIMIT - 1
    ) -> int:
        """Returns an integer. Raises InputError if it is missing and there is no default."""
        value = self.get(key, default)
        if not is_kind(value, int) or not minimum <= value <= maximum:
            raise self.unsupported(key, f"an integer from {minimum} to {maximum:,}", value)
        return value

    def read_positive(self, key: str, default: float | None = None) -> float | None:
        """Returns a number above 0, or `default` if the field is missing."""
        value = self.get(key, default)
        return None if value is None else self.require_positive(key, value)

    def require_positive(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0. Raises InputError if it is missing without a default."""
        value = self.get(key, default)
        if not is_kind(value, float) or value <= 0:
            raise self.unsupported(key, "a number above 0", value)
        return value

    def unsupported(self, key: str, supported: str, value: Any = None) -> InputError:
        """Returns the error for a field whose value is not supported."""
        is_tensor = key.endswith(".weight")
        name = key if is_tensor else f"{self.architecture}.{key}"
        if value is None and not is_tensor:
            value = self.get(key)
        state = f"no {name}" if value is None else f"{name}={brief(value)}"
        return InputError(
            f"{self.header.path} has {state}, but only {supported} is supported; {ADVICE}"
        )
