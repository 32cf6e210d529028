"""NaN and infinity in a backbone's weights are refused while they are hashed, by name and file."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from folders import save_model
from safetensors.numpy import load_file, save_file

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.weights import is_finite
from jaxprompt.errors import InputError
from jaxprompt.parallel.sharding import make_placement

FILE = "model.safetensors"
NAME = "bert.encoder.layer.1.output.dense.weight"


@pytest.mark.long_cases("float16")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    finite = np.isfinite(every.astype(np.float32))
    assert [is_finite(x) for x in every.reshape(-1, 1)] == list(finite)
    assert is_finite(every[finite]) and not is_finite(every)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_edges_of_wider_numbers(dtype):
    top = np.finfo(np.float32).max
    for good in (0.0, -0.0, 1e-45, top, -top):
        assert is_finite(np.array([[1, good]], dtype))
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        assert not is_finite(np.array([[1, bad]], dtype))
    assert is_finite(np.zeros((0, 3), dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_finite(np.array([[1e39]]))  # it is computed with as float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    save_model(folder, "bert")
    return folder


@pytest.mark.parametrize("dtype, value", [(np.float32, np.nan), (ml_dtypes.bfloat16, -np.inf)])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_tensor_is_named(saved, tmp_path, dtype, value, sharded):
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(saved / FILE).items()}
    placement = make_placement(4, 2) if sharded else None
    save_file(tensors, tmp_path / FILE)
    config = read_config(saved)
    options = dict(dtype="bfloat16", placement=placement)
    load_backbone(tmp_path, "bert", config, **options)
    tensors[NAME][-1, -1] = value
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(InputError) as error:
        load_backbone(tmp_path, "bert", config, **options)
    assert f"{NAME} in {tmp_path / FILE} contains NaN or infinity" in str(error.value)
    assert "optim.lr" not in str(error.value) and "\n" not in str(error.value)
