"""The compiler's options are taken where they are known, and left out where they are not."""

import jax
import pytest

from jaxprompt import compiled


@pytest.fixture(autouse=True)
def ask_again():
    compiled._options.cache_clear()
    yield
    compiled._options.cache_clear()


def test_it_computes_and_donates():
    step = compiled.jit(lambda x, y: (x + y, x * y), donate_argnums=0)
    x = jax.numpy.arange(3.0)
    total, product = step(x, 2.0)
    assert total.tolist() == [2, 3, 4] and product.tolist() == [0, 2, 4]
    assert x.is_deleted()


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
    real = jax.jit

    def strict(function, compiler_options=None, **settings):
        if compiler_options:
            compiler_options = {"xla_no_such_option": False}
        return real(function, compiler_options=compiler_options, **settings)

    monkeypatch.setattr(jax, "jit", strict)
    assert compiled._options(True) is None
    assert compiled.jit(lambda x: x + 1)(1) == 2


def test_other_backends_keep_their_own(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiled._options(True) is None
