"""The feed-forward blocks and their activations."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.product import cast_matrix, dot_general, einsum, promote_dtype
from jaxprompt.layers.quantized import as_matrices, as_planes, freeze_planes
from jaxprompt.layers.recompute import recompute
from jaxprompt.parallel.sharding import constrain, current_target
from jaxprompt.types import Array


@jax.custom_vjp
def gelu(x):
    """Computes x * Phi(x), Phi the exact normal (Hendrycks & Gimpel 2016). [...] -> [...]"""
    return _gelu_and_slope(x)[0]


def _gelu_and_slope(x):
    # Float32 inside: the value and the slope are each rounded once, to the type of x.
    wide = x.astype(jnp.float32)
    cdf = 0.5 + 0.5 * jax.lax.erf(wide * 2**-0.5)
    slope = cdf + wide * jnp.exp(-0.5 * wide * wide) * (2 * jnp.pi) ** -0.5
    return (wide * cdf).astype(x.dtype), slope.astype(x.dtype)


# Only the slope is stored for the backward pass; automatic differentiation stores three arrays.
gelu.defvjp(_gelu_and_slope, lambda slope, g: (g * slope,))


@jax.custom_vjp
def tanh_gelu(x):
    """Computes gelu, Phi(x) = (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. [...] -> [...]"""
    return _tanh_gelu_and_slope(x)[0]


def _tanh_gelu_and_slope(x):
    wide = x.astype(jnp.float32)
    inner = (2 / jnp.pi) ** 0.5 * wide * (1 + 0.044715 * wide * wide)
    slope_of_inner = (2 / jnp.pi) ** 0.5 * (1 + 3 * 0.044715 * wide * wide)
    tanh = jnp.tanh(inner)
    cdf = 0.5 + 0.5 * tanh
    slope = cdf + 0.5 * wide * (1 - tanh * tanh) * slope_of_inner
    return (wide * cdf).astype(x.dtype), slope.astype(x.dtype)


tanh_gelu.defvjp(_tanh_gelu_and_slope, lambda slope, g: (g * slope,))


@jax.custom_vjp
def relu(x):
    """Computes max(x, 0). [...] -> [...]"""
    return jax.nn.relu(x)


# Automatic differentiation also stores the zeros, an array as large as x in every layer.
relu.defvjp(
    lambda x: (relu(x), x > 0),
    lambda is_positive, g: (jnp.where(is_positive, g, jnp.zeros_like(g)),),
)

# By their names in transformers' configs.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_fast": tanh_gelu,
    "gelu_new": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "relu": relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


class Mlp(nn.Module):
    """Two linear maps with an activation between. [..., H] -> [..., F] -> [..., H]"""

    hidden: int
    activation: str = "gelu"
    dtype: jnp.dtype = jnp.float32
    recomputed: bool = False  # the wide activations, in the backward pass

    @nn.compact
    def __call__(self, x):
        """Applies both maps."""
        dense = functools.partial(
            nn.Dense, dtype=self.dtype, dot_general=dot_general, promote_dtype=promote_dtype
        )
        y = _widen(self, dense, ("up",), x)
        return dense(x.shape[-1], name="down")(y)


def _widen(module: "Mlp | GatedMlp", dense: Callable, names: tuple[str, ...], x):
    """Computes act(up x), or act(gate x) * up x by the layers `names`. [..., H] -> [..., F]"""
    act = ACTIVATIONS[module.activation]
    if not module.recomputed or module.is_initializing():
        up, *gate = (dense(module.hidden, name=name)(x) for name in names)
        if gate:
            return _store_inputs(lambda gate, up: act(gate) * up, gate[0], up)
        return activate(module.activation, up)

    def compute(params, x):
        layer = dense(module.hidden, parent=None)
        matrices = as_matrices(freeze_planes(params))
        up, *gate = (layer.apply({"params": param}, x) for param in matrices)
        return act(*gate) * up if gate else act(up)

    params = [module.variables["params"][name] for name in names]
    return recompute(compute, as_planes(params), x)


def activate(name: str, x):
    """Applies one of the `ACTIVATIONS`. [...] -> [...]

    The backward pass computes the slope of a tanh gelu from x: on a GPU, XLA would also write its
    float32 tanh to memory and read it for the slope. Those of a gelu and a relu are computed in
    the pass that computes their values.
    """
    act = ACTIVATIONS[name]
    return act(x) if name in ("gelu", "relu") else _store_inputs(act, x)


def _store_inputs(function: Callable, *arrays):
    """Computes a function whose backward pass computes it again, except on a CPU."""
    # A CPU takes longer to compute an activation again than to read it.
    is_cpu = current_target().platform == "cpu"
    return function(*arrays) if is_cpu else recompute(function, *arrays)


class GatedMlp(nn.Module):
    """T5's block: down(drop(act(up x))), or down(drop(act(gate x) * up x)) with a gate (Shazeer
    2020), without biases unless asked for. [..., H] -> [..., F] -> [..., H]
    """

    hidden: int
    activation: str
    gated: bool
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32
    use_bias: bool = False
    recomputed: bool = False  # as in `Mlp`

    @nn.compact
    def __call__(self, x, *, deterministic: bool):
        """Applies the maps."""
        dense = functools.partial(
            nn.Dense,
            use_bias=self.use_bias,
            dtype=self.dtype,
            dot_general=dot_general,
            promote_dtype=promote_dtype,
        )
        y = _widen(self, dense, ("up", "gate") if self.gated else ("up",), x)
        y = Dropout(self.dropout)(y, deterministic=deterministic)
        return dense(x.shape[-1], name="down")(y)


class ExpertKernel(nn.Module):
    """A matrix for each expert, and any bias. -> [E, inputs, outputs], [E, outputs] or None"""

    shape: tuple[int, int, int]
    dtype: jnp.dtype
    use_bias: bool = False

    @nn.compact
    def __call__(self):
        """Returns the matrices and biases."""
        experts, _, outputs = self.shape
        init, bias = nn.initializers.lecun_normal(batch_axis=0), None
        kernel = self.param("kernel", init, self.shape)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (experts, outputs)).astype(self.dtype)
        return cast_matrix(kernel, self.dtype), bias


class Experts(nn.Module):
    """The sum of gated blocks, the experts, with weights. [..., H], [..., E] -> [..., H]

    Every expert computes every token: nothing depends on how many tokens prefer an expert, none is
    dropped, and each device of a mesh computes its own experts.
    """

    num_experts: int
    hidden: int
    activation: str
    dtype: jnp.dtype
    recomputed: bool  # as in `Mlp`

    @nn.compact
    def __call__(self, x, weights):
        """Applies the experts."""
        act, width = ACTIVATIONS[self.activation], x.shape[-1]

        def kernel(name, *shape):
            return ExpertKernel((self.num_experts, *shape), self.dtype, name=name)()[0]

        def widen(x, matrices):
            return einsum("...h,ehf->...ef", x, matrices)

        def weighted(gate, up, weights):
            # Before the last product, which then also sums over the experts.
            return act(gate) * up * weights[..., None].astype(up.dtype)

        def compute(x, weights, *kernels):
            return weighted(*(widen(x, matrices) for matrices in kernels), weights)

        kernels = [kernel(name, width, self.hidden) for name in ("gate", "up")]
        if self.recomputed:
            y = recompute(compute, x, weights, *kernels)
        else:
            y = _store_inputs(weighted, *(widen(x, matrices) for matrices in kernels), weights)
        return einsum("...ef,efh->...h", y, kernel("down", self.hidden, width))


class ClampedExperts(nn.Module):
    """The experts of gpt-oss: their inner values are clamped, and all products have biases.

    [..., H], [..., E] -> [..., H]
    """

    num_experts: int
    alpha: float  # of the gate, gate * sigmoid(alpha * gate)
    limit: float  # of the inner values
    hidden: int
    dtype: jnp.dtype
    recomputed: bool  # as in `Mlp`

    @nn.compact
    def __call__(self, x, weights):
        """Applies the experts."""
        width = x.shape[-1]

        def dense(name, *shape):
            return ExpertKernel((self.num_experts, *shape), self.dtype, True, name=name)()

        def weighted(y, weights):
            # The columns of both are by turns, as in the checkpoint.
            gate, up = y[..., ::2], y[..., 1::2]
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
            y = gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)
            return y * weights[..., None].astype(y.dtype)

        def widen(x, kernel, bias):
            return einsum("...h,ehu->...eu", x, kernel) + bias

        def compute(x, weights, *wide):
            return weighted(widen(x, *wide), weights)

        wide = dense("gate_up", width, 2 * self.hidden)
        kernel, bias = dense("down", self.hidden, width)
        if self.recomputed:
            y = recompute(compute, x, weights, *wide)
        else:
            y = _store_inputs(weighted, widen(x, *wide), weights)
        y = einsum("...ef,efh->...h", y, kernel)
        return y + einsum("...e,eh->...h", weights.astype(y.dtype), bias)


class MixtureMlp(nn.Module):
    """Experts, of which a router chooses some for each token (Shazeer et al. 2017).

    [..., H] -> [..., H]
    """

    num_experts: int
    per_token: int
    normalized: bool  # the weights of a token's experts sum to 1
    alpha: float  # of `ClampedExperts`, as `limit`
    limit: float  # 0 = not these
    hidden: int
    activation: str
    dtype: jnp.dtype = jnp.float32
    recomputed: bool = False

    def setup(self):
        """Declares the router and the experts."""
        self.router = nn.Dense(
            self.num_experts,
            use_bias=self.limit > 0,
            dtype=self.dtype,
            # float32: rounding to 16 bits would make different scores equal.
            dot_general=functools.partial(dot_general, dtype=jnp.float32),
        )
        options = self.dtype, self.recomputed
        if self.limit:
            inner = self.alpha, self.limit, self.hidden
            self.experts = ClampedExperts(self.num_experts, *inner, *options)
        else:
            self.experts = Experts(self.num_experts, self.hidden, self.activation, *options)

    def __call__(self, x, *, deterministic: bool):
        """Computes each token's experts."""
        x = x.astype(self.dtype)
        return self.experts(x, self.route(x))

    def route(self, x):
        """Returns the weights of the experts, 0 unless chosen. [..., H] -> float32 [..., E]"""
        weights = jax.nn.softmax(self.router(x), axis=-1)
        # By comparisons: jax.lax.top_k would gather the tokens of all devices.
        one, other = weights[..., :, None], weights[..., None, :]
        expert = jnp.arange(self.num_experts)
        is_before = (other > one) | ((other == one) & (expert < expert[:, None]))
        weights = jnp.where(is_before.sum(axis=-1) < self.per_token, weights, 0.0)
        if self.normalized:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        # On all devices alike: otherwise they would gather several arrays of this size.
        return constrain(weights, "act_batch", *[None] * (weights.ndim - 1))
