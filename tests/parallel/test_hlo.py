"""FLOPs and collectives of compiled programs against counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxprompt.parallel.hlo import count_work
from jaxprompt.parallel.sharding import make_placement

PROGRAM = """
HloModule example, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (arg: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %arg = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%arg), index=1
  %w = f32[8,8]{1,0} constant({...})
  %y = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[4,8]{1,0}) tuple(%y, %y)
}

%condition (arg.1: (s32[], f32[4,8])) -> pred[] {
  %arg.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %start = (s32[], f32[4,8]{1,0}) tuple(%p, %p)
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%condition, body=%body, LOOP
  ROOT %z = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  COLLECTIVE
}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'


def program(collective="", loop=TRIPS):
    return PROGRAM.replace("COLLECTIVE", collective).replace("LOOP", loop)


def test_a_loop_body_counts_once_per_iteration():
    assert count_work(program()).flops == 5 * 2 * 4 * 8 * 8
    assert count_work(program(loop="metadata={}")).flops == 2 * 4 * 8 * 8


def test_a_loop_without_annotation_has_the_limit_of_its_condition():
    """From libtpu."""
    condition = """
  %bound = s32[]{:T(128)} constant(7)
  %arg.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  %step = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%step, %bound), direction=LT, metadata={}
"""
    plain = program(loop="metadata={}")
    old = plain[plain.index("  %arg.1 =") : plain.index("}\n\nENTRY")]
    assert count_work(plain.replace(old, condition[1:])).flops == 7 * 2 * 4 * 8 * 8
    other = condition.replace("direction=LT", "direction=NE")
    assert count_work(plain.replace(old, other[1:])).flops == 2 * 4 * 8 * 8


@pytest.mark.parametrize(
    "line, kind, sent",
    [
        ("f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add",
         "all-reduce", 2 * 128 * 3 // 4),
        ("f16[4,8]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add",
         "all-reduce", 2 * 64 * 3 // 4),
        ("(f32[4,8]{1,0}, f32[2]{0}) all-reduce(%p, %q), "
         "replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%add", "all-reduce", 136),
        ("bf16[16,8]{1,0} all-gather(%p), replica_groups=mesh['a'=4,'b'=2], "
         "device_ids=([2,4]T(1,0)) {'a','b'}, dimensions={0}", "all-gather", 256 * 7 // 8),
        ("f32[4,8]{1,0} all-gather(%p), replica_groups=mesh['a'=8] {'a':(1)2}, dimensions={0}",
         "all-gather", 64),
        ("f32[1,8]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%add",
         "reduce-scatter", 32 * 3),
        ("f32[4,8]{1,0} all-to-all(%p), replica_groups={{0,1}}", "all-to-all", 64),
        ("s32[4,8]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
         "collective-permute", 128),
    ],
)  # fmt: skip
def test_each_kind_of_collective(line, kind, sent):
    work = count_work(program(f"%c = {line}"))
    assert work.counts == {kind: 1} and work.sent == {kind: sent} and not work.overlapped


def test_asynchronous_collectives_overlap():
    line = "(f32[1,8]{1,0}, f32[4,8]{1,0}) all-gather-start(%p), replica_groups={{0,1,2,3}}"
    work = count_work(program(f"%c = {line}\n  %d = f32[4,8]{{1,0}} all-gather-done(%c)"))
    assert work.counts == work.overlapped == {"all-gather": 1} and work.sent == {"all-gather": 96}
    line = "f32[4,8]{1,0} all-reduce-start(%p), replica_groups={{0,1,2,3}}, to_apply=%add"
    work = count_work(program(f"%c = {line}\n  %d = f32[4,8]{{1,0}} all-reduce-done(%c)"))
    assert work.counts == work.overlapped == {"all-reduce": 1} and work.sent == {"all-reduce": 192}
    # Its bytes take no time of their own only if products run before the device waits for it.
    assert not work.overlapped_sent
    product = "  %y.1 = f32[4,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}"
    end = "  %d = f32[4,8]{1,0} all-reduce-done(%c)"
    assert count_work(program(f"%c = {line}\n{product}\n{end}")).overlapped_sent == work.sent
    assert not count_work(program(f"%c = {line}\n{end}\n{product}")).overlapped_sent


def test_unknown_groups_are_an_error():
    with pytest.raises(ValueError, match="groups"):
        count_work(program("%c = f32[4,8]{1,0} all-reduce(%p), replica_groups=?, to_apply=%add"))


@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_a_compiled_chain_of_products_forward_and_backward(stack):
    layers, rows, width = 6, 16, 32

    def chain(x, weights):
        if stack == "scan":
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    flops = 2 * layers * rows * width**2
    for gradient, products in ((chain, 1), (jax.grad(chain, 0), 2), (jax.grad(chain, 1), 3)):
        text = jax.jit(gradient).lower(x, weights).compile().as_text()
        # Unrolled, a gradient by weights needs none of the first layer's input.
        spare = flops // layers if products == 3 and stack == "unroll" else 0
        assert count_work(text).flops == products * flops - spare


def test_a_sharded_product():
    placement = make_placement(2, 4, devices=jax.devices()[:8])
    shard = lambda *spec: NamedSharding(placement.mesh, PartitionSpec(*spec))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=shard("data", "model"))
    w = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=shard("model", None))
    product = jax.jit(jnp.matmul, out_shardings=shard("data", None))
    work = count_work(product.lower(x, w).compile().as_text())
    assert work.flops == 2 * 4 * 16 * 16  # rows / 2, shared axis / 4
    assert work.counts == {"all-reduce": 1}
    assert work.sent == {"all-reduce": 2 * (4 * 16 * 4) * 3 // 4}
