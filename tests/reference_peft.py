"""PEFT, the implementation that prompts are compared with; skips the module where it is absent."""

import inspect
from types import SimpleNamespace

import pytest
import transformers
from packaging.version import Version

pytest.importorskip("torch")
peft = pytest.importorskip("peft")


def _signature(function):
    """Lists the parameters of a forward, its cache also under the name that PEFT expects."""
    parameters = dict(inspect.signature(function).parameters)
    if "cache" in parameters:
        parameters["past_key_values"] = parameters["cache"]
    return SimpleNamespace(parameters=parameters)


def _rename_cache():
    """Makes PEFT 0.21 run on transformers 5.24, which calls `past_key_values` `cache`.

    The models of transformers still take the old name, with a FutureWarning. PEFT misses it in
    their signatures, and in what they prepare for generation.
    """
    peft.peft_model.inspect = SimpleNamespace(**vars(inspect) | {"signature": _signature})
    decoder = peft.PeftModelForCausalLM
    prepare = decoder.prepare_inputs_for_generation

    def prepare_renaming(self, *args, **kwargs):
        prepare_base = self.base_model_prepare_inputs_for_generation

        def prepare_base_renaming(*args, **kwargs):
            inputs = prepare_base(*args, **kwargs)
            return inputs | {"past_key_values": inputs.pop("cache", None)}

        self.base_model_prepare_inputs_for_generation = prepare_base_renaming
        try:
            return prepare(self, *args, **kwargs)
        finally:
            self.base_model_prepare_inputs_for_generation = prepare_base

    decoder.prepare_inputs_for_generation = prepare_renaming


if Version(transformers.__version__) >= Version("5.24") and Version(peft.__version__) < Version(
    "0.22"
):
    _rename_cache()
