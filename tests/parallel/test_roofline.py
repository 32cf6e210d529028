"""Kernels of programs: bytes, FLOPs and copies of weights against counts by hand."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.hlo import DeviceWork
from jaxprompt.parallel.roofline import (
    ATTENTION,
    COLLECTIVE,
    INTEGER,
    LAYOUT,
    OTHER,
    PRODUCT,
    Kernel,
    read_kernels,
    step_time,
)

# One layer of a stack of 3 is sliced out of the frozen weights, multiplied, and its result stored.
LOOP = """
HloModule example, is_scheduled=true

%copied (p.0: f32[3,8,8], p.1: s32[]) -> f32[1,8,8] {
  %p.0 = f32[3,8,8]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,8,8]{2,1,0} dynamic-slice(%p.0, %p.1, %zero, %zero), dynamic_slice_sizes={1,8,8}
}

%stored (p.2: bf16[3,4,8], p.3: f32[4,8], p.4: s32[]) -> bf16[3,4,8] {
  %p.2 = bf16[3,4,8]{2,1,0} parameter(0)
  %p.3 = f32[4,8]{1,0} parameter(1)
  %p.4 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %narrow = bf16[4,8]{1,0} convert(%p.3)
  %one = bf16[1,4,8]{2,1,0} bitcast(%narrow)
  ROOT %update = bf16[3,4,8]{2,1,0} dynamic-update-slice(%p.2, %one, %p.4, %zero.1, %zero.1)
}

%body (arg: (s32[], f32[4,8], bf16[3,4,8], f32[3,8,8])) -> (s32[], f32[4,8], bf16[3,4,8], f32[3,8,8]) {
  %arg = (s32[], f32[4,8]{1,0}, bf16[3,4,8]{2,1,0}, f32[3,8,8]{2,1,0}) parameter(0)
  %layer = s32[] get-tuple-element(%arg), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%arg), index=1
  %stack = bf16[3,4,8]{2,1,0} get-tuple-element(%arg), index=2
  %w = f32[3,8,8]{2,1,0} get-tuple-element(%arg), index=3
  %copy = f32[1,8,8]{2,1,0} fusion(%w, %layer), kind=kLoop, calls=%copied
  %w.1 = f32[8,8]{1,0} bitcast(%copy)
  %y = f32[4,8]{1,0} dot(%x, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %store = bf16[3,4,8]{2,1,0} fusion(%stack, %y, %layer), kind=kLoop, calls=%stored
  ROOT %out = (s32[], f32[4,8]{1,0}, bf16[3,4,8]{2,1,0}, f32[3,8,8]{2,1,0}) tuple(%layer, %y, %store, %w)
}

%condition (arg.1: (s32[], f32[4,8], bf16[3,4,8], f32[3,8,8])) -> pred[] {
  %arg.1 = (s32[], f32[4,8]{1,0}, bf16[3,4,8]{2,1,0}, f32[3,8,8]{2,1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x.1: f32[4,8], w.2: f32[3,8,8]) -> bf16[3,4,8] {
  %x.1 = f32[4,8]{1,0} parameter(0), metadata={op_name="batch.x"}
  %w.2 = f32[3,8,8]{2,1,0} parameter(1), metadata={op_name="frozen['backbone/w']"}
  %first = s32[] constant(0)
  %nothing = bf16[] constant(0)
  %zeros = bf16[3,4,8]{2,1,0} broadcast(%nothing), dimensions={}
  %start = (s32[], f32[4,8]{1,0}, bf16[3,4,8]{2,1,0}, f32[3,8,8]{2,1,0}) tuple(%first, %x.1, %zeros, %w.2)
  %loop = (s32[], f32[4,8]{1,0}, bf16[3,4,8]{2,1,0}, f32[3,8,8]{2,1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %z = bf16[3,4,8]{2,1,0} get-tuple-element(%loop), index=2
}
"""  # noqa: E501


def kernels_of(arguments, *lines):
    """Reads the kernels of a program of these instructions."""
    body = "\n".join(f"  {line}" for line in (*arguments, *lines))
    return read_kernels(f"ENTRY %main () -> f32[] {{\n{body}\n}}\n")


def test_a_slice_is_read_and_an_update_written_once_per_iteration():
    zeros, copy, product, store = read_kernels(LOOP)
    assert zeros[1:7] == (OTHER, 0, 2, 192, 0, 1)
    layer = 4 * 8 * 8
    # The counter of a loop, 4 bytes, is read too.
    assert copy[1:7] == (OTHER, 0, layer + 4, layer, 2 * layer, 3)
    assert product[1:7] == (PRODUCT, 2 * 4 * 8 * 8, 4 * 4 * 8 + layer, 4 * 4 * 8, 0, 3)
    assert store[1:7] == (OTHER, 0, 4 * 4 * 8 + 4, 2 * 4 * 8, 0, 3)


def test_wide_numbers_of_a_program_for_cpus_count_as_narrow_ones():
    _, copy, product, store = read_kernels(LOOP, float_bytes=2)
    assert (copy.read, copy.copied) == (2 * 64 + 4, 2 * 2 * 64)
    assert (product.read, product.written) == (2 * (32 + 64), 2 * 32)
    assert store.written == 2 * 32


def test_weights_that_mix_with_data_are_no_copies():
    text = LOOP.replace("frozen['backbone/w']", "state.trainable['w']")
    assert not any(kernel.copied for kernel in read_kernels(text))
    # What a loop carries is frozen only if its body returns it as it is.
    text = LOOP.replace(
        "tuple(%layer, %y, %store, %w)", "tuple(%layer, %y, %store, %other)"
    ).replace(
        "  ROOT %out", "  %other = f32[3,8,8]{2,1,0} broadcast(%y), dimensions={1,2}\n  ROOT %out"
    )
    assert not any(kernel.copied for kernel in read_kernels(text))


def test_calls_of_cublas_and_cudnn():
    arguments = (
        "%q = bf16[2,16,4,8]{3,2,1,0} parameter(0)",
        "%k = bf16[2,32,4,8]{3,2,1,0} parameter(1)",
        "%w = bf16[8,24]{1,0} parameter(2), metadata={op_name=\"frozen['w']\"}",
        "%x = bf16[16,8]{1,0} parameter(3)",
    )
    config = '"intermediate_tensor_shape": {"dimensions": ["2","4","16","32"]}'
    call = "(bf16[2,4,16,8]{3,2,1,0}, u8[99]{0}) custom-call(%q, %k, %k), "
    call += 'custom_call_target="__cudnn$fmha'
    forward, causal, backward, product = kernels_of(
        arguments,
        f'%a = {call}Softmax", backend_config={{{config}, "mask_type": "PADDING"}}}}',
        f'%b = {call}Softmax", backend_config={{{config}, "mask_type": "PADDING_CAUSAL"}}}}',
        f'%c = {call}SoftmaxBackward", backend_config={{{config}, "mask_type": "PADDING"}}}}',
        '%d = (bf16[16,24]{1,0}, s8[4096]{0}) custom-call(%x, %w), '
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
    )  # fmt: skip
    scores = 2 * 4 * 16 * 32
    assert forward[1:5] == (ATTENTION, 4 * scores * 8, 2 * (1024 + 2 * 2048), 2 * 1024)
    assert causal.flops == 2 * scores * 8 and backward.flops == 10 * scores * 8
    assert product[1:6] == (PRODUCT, 2 * 16 * 24 * 8, 2 * (16 * 8 + 8 * 24), 2 * 16 * 24, 0)


def test_a_programs_kernels_for_tpus():
    """Convolutions, copies between memories, an allocation, and a Pallas kernel."""
    arguments = (
        "%x = bf16[32,128,64]{2,1,0} parameter(0)",
        "%w = bf16[64,16,8]{2,1,0} parameter(1), metadata={op_name=\"frozen['w']\"}",
        "%q = bf16[32,16,128,8]{3,2,1,0} parameter(2)",
        "%x.1 = bf16[32,128,64,1]{2,1,0,3} bitcast(%x)",
        "%w.1 = bf16[64,16,8,1]{2,1,0,3} bitcast(%w)",
        "%k = bf16[32,16,148,8]{3,2,1,0:S(1)} bitcast(%q)",
    )
    heads, scores, fetched, sliced, flash = kernels_of(
        arguments,
        # A product with the weights of 16 heads: 15 of 16 inputs of each window are padding.
        "%a = bf16[32,128,16,8]{3,2,1,0} convolution(%x.1, %w.1), "
        "window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f",
        # Scores of 32 x 16 batched products: all inputs of a window but one are holes.
        "%b = f32[32,16,128,148]{3,2,1,0:S(1)} convolution(%q, %k), "
        "window={size=32x16 stride=31x15 lhs_dilate=32x16}, dim_labels=01bf_01oi->01bf",
        "%c = (bf16[64,16,8]{2,1,0:S(1)}, bf16[64,16,8]{2,1,0}, u32[]{:S(2)}) copy-start(%w)",
        "%d = ((bf16[64,16,8]{2,1,0}), bf16[8,16,8]{2,1,0:S(1)}, s32[]{:S(2)}) slice-start(%w), "
        "slice={[0:8], [0:16], [0:8]}",
        '%e = bf16[32,16,128,8]{3,2,1,0} custom-call(), custom_call_target="AllocateBuffer"',
        "%flash_mha_bwd_dq.1 = bf16[32,16,128,8]{3,2,1,0} custom-call(%q, %k, %k), "
        'custom_call_target="tpu_custom_call", metadata={op_name="layer/attention/pallas_call"}',
    )
    assert heads.flops == 2 * 32 * 128 * 16 * 8 * 64
    assert scores.flops == 2 * 32 * 16 * 128 * 148 * 8
    # The queries alone are not on the chip.
    assert (scores.read, scores.written) == (2 * 32 * 16 * 128 * 8, 0)
    assert (fetched.read, fetched.written, fetched.copied) == (2 * 64 * 16 * 8, 0, 0)
    assert (sliced.read, sliced.written) == (2 * 8 * 16 * 8, 0)
    assert flash[1:3] == (ATTENTION, 3 * 2 * 32 * 16 * 128 * 148 * 8)


def test_categories():
    arguments = (
        "%p = f32[4,8]{1,0} parameter(0)",
        "%i = s32[4,8]{1,0} parameter(1)",
    )
    kernels = kernels_of(
        arguments,
        "%a = f32[8,4]{1,0} transpose(%p), dimensions={1,0}",
        "%b = s32[4,8]{1,0} add(%i, %i)",
        "%c = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add",
        "%d = f32[4,8]{1,0} tanh(%p)",
    )
    assert [kernel.category for kernel in kernels] == [LAYOUT, INTEGER, COLLECTIVE, OTHER]


def test_a_compiled_program_moves_what_xlas_analysis_says():
    """Without loops, whose bodies that counts once, and without slices, which it counts whole."""

    def step(frozen, x):
        return jnp.tanh(x @ frozen["w"] + frozen["b"]).sum(0)

    shapes = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32), "b": jnp.zeros(32)}
    compiled = jax.jit(step).lower(shapes, jax.ShapeDtypeStruct((16, 64), jnp.float32)).compile()
    kernels, analysis = read_kernels(compiled.as_text()), compiled.cost_analysis()
    assert sum(kernel.flops for kernel in kernels) == 2 * 16 * 64 * 32
    moved = sum(kernel.bytes for kernel in kernels)
    assert moved == pytest.approx(analysis["bytes accessed"], rel=0.05)
    assert not any(kernel.copied for kernel in kernels)


def test_the_time_of_a_step_is_the_sum_over_its_kernels():
    gpu, tpu = DEVICES["h100"], DEVICES["v5e"]
    kernels = (
        Kernel("a", PRODUCT, 989e9, 0, 0, 0, 2, ""),  # 1 ms at the peak
        Kernel("b", ATTENTION, 0.0, 3_350_000, 0, 0, 3, ""),  # 1 us at full bandwidth
        Kernel("c", INTEGER, 0.0, 0, 3_350_000, 0, 4, ""),
        Kernel("d", COLLECTIVE, 0.0, 3_350_000, 0, 0, 1, ""),
    )
    work = DeviceWork(0.0, Counter(), Counter({"all-reduce": 450_000, "all-gather": 450_000}))
    time = step_time(kernels, work, gpu, "bfloat16")
    expected = (2e-3 / 0.72, 3e-6 / 0.9, 4e-6 / 0.9, 10 * 2.5e-6, 2e-6)
    assert time == pytest.approx(expected) and time.step == pytest.approx(sum(expected))
    # Collectives that run in parallel with kernels add what is longer than these.
    work = work._replace(overlapped_sent=Counter({"all-gather": 450_000}))
    assert step_time(kernels, work, gpu, "bfloat16").network == pytest.approx(1e-6)
    work = work._replace(overlapped_sent=work.sent)
    alone = step_time(kernels[1:2], work, gpu, "bfloat16")
    assert alone.network == pytest.approx(max(0, 2e-6 - 3e-6 / 0.9))
    assert step_time(kernels, work, tpu, "bfloat16").launches == 0
