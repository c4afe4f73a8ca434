"""Tests of costs read from HLO text against numbers worked out by hand."""

import pytest

from speedyzero_jax.plan import hlo, plan, target

MODULE = """HloModule jit_f, is_scheduled=true

%fused_update (p.0: f32[10,8], p.1: f32[1,8], p.2: s32[]) -> f32[10,8] {
  %p.0 = f32[10,8]{1,0} parameter(0)
  %p.1 = f32[1,8]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = f32[10,8]{1,0} dynamic-update-slice(%p.0, %p.1, %p.2, %zero)
}

%fused_pick (q.0: f32[10,8], q.1: s32[]) -> f32[1,8] {
  %q.0 = f32[10,8]{1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %flat = f32[10,8]{1,0} bitcast(%q.0)
  ROOT %ds = f32[1,8]{1,0} dynamic-slice(%flat, %q.1, %zero.1), dynamic_slice_sizes={1,8}
}

%fused_parts (r.0: f32[10,8], r.1: f32[10,8]) -> (f32[1,8], f32[2,8]) {
  %r.0 = f32[10,8]{1,0} parameter(0)
  %r.1 = f32[10,8]{1,0} parameter(1)
  %both = f32[10,8]{1,0} add(%r.0, %r.1)
  %upper = f32[1,8]{1,0} slice(%both), slice={[0:1], [0:8]}
  %lower = f32[2,8]{1,0} slice(%both), slice={[8:10], [0:8]}
  ROOT %parts = (f32[1,8]{1,0}, f32[2,8]{1,0}) tuple(%upper, %lower)
}

%fused_gather (u.0: f32[10,8], u.1: s32[2,1]) -> f32[2,4] {
  %u.0 = f32[10,8]{1,0} parameter(0)
  %u.1 = s32[2,1]{1,0} parameter(1)
  %rows = f32[2,8]{1,0} gather(%u.0, %u.1), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,8}
  ROOT %half = f32[2,4]{1,0} slice(%rows), slice={[0:2], [4:8]}
}

%fused_sum (t.0: f32[10,8], t.1: f32[10,8]) -> f32[10,8] {
  %t.0 = f32[10,8]{1,0} parameter(0)
  %t.1 = f32[10,8]{1,0} parameter(1)
  ROOT %whole = f32[10,8]{1,0} add(%t.0, %t.1)
}

%matmul (m.0: bf16[4,16], m.1: bf16[16,32]) -> bf16[4,32] {
  %m.0 = bf16[4,16]{1,0} parameter(0)
  %m.1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,32]{1,0} dot(%m.0, %m.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (f32[10,8], s32[])) -> (f32[10,8], /*index=1*/s32[]) {
  %state = (f32[10,8]{1,0}, /*index=1*/s32[]) parameter(0)
  %table = f32[10,8]{1,0} get-tuple-element(%state), index=0
  %i = s32[] get-tuple-element(%state), index=1
  %row = f32[1,8]{1,0} fusion(%table, %i), kind=kLoop, calls=%fused_pick
  %new = f32[10,8]{1,0} fusion(%table, %row, %i), kind=kLoop, calls=%fused_update
  ROOT %out = (f32[10,8]{1,0}, s32[]) tuple(%new, %i)
}

%condition (state.1: (f32[10,8], s32[])) -> pred[] {
  %state.1 = (f32[10,8]{1,0}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=1
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %five), direction=LT
}

ENTRY %main (a: bf16[4,16], b: bf16[16,32], x: bf16[2,6,6,3], k: bf16[8,3,3,3], s: (f32[10,8], s32[]), j: s32[2,1]) -> f32[10,8] {
  %a = bf16[4,16]{1,0} parameter(0), metadata={op_name="a(b)"}
  %b = bf16[16,32]{1,0} parameter(1)
  %x = bf16[2,6,6,3]{3,2,1,0} parameter(2)
  %k = bf16[8,3,3,3]{3,2,1,0} parameter(3)
  %s = (f32[10,8]{1,0}, s32[]) parameter(4)
  %j = s32[2,1]{1,0} parameter(5)
  %gemm = bf16[4,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%matmul
  %conv = (bf16[2,6,6,8]{3,2,1,0}, u8[4096]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %y = bf16[2,6,6,8]{3,2,1,0} get-tuple-element(%conv), index=0
  %dk = (bf16[8,3,3,3]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %dx = (bf16[2,6,6,3]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %sum = bf16[4,32]{1,0} all-reduce-start(%gemm), to_apply=%add
  %summed = bf16[4,32]{1,0} all-reduce-done(%sum)
  %rows = (bf16[4,32]{1,0}, bf16[8,32]{1,0}) all-gather-start(%gemm), dimensions={0}
  %told = f32[] custom-call(%gemm), custom_call_target="xla_ffi_python_gpu_callback"
  %LOOP
  %sliced = (f32[1,8]{1,0}, f32[2,8]{1,0}) fusion(%result, %result), kind=kLoop, calls=%fused_parts
  %gathered = f32[2,4]{1,0} fusion(%result, %j), kind=kLoop, calls=%fused_gather
  %added = f32[10,8]{1,0} fusion(%result, %result), kind=kLoop, calls=%fused_sum
  ROOT %result = f32[10,8]{1,0} get-tuple-element(%loop), index=0
}
"""  # noqa: E501
LOOP = "loop = (f32[10,8]{1,0}, s32[]) while(%s), condition=%condition, body=%body"
KNOWN = LOOP + ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{}}'
UNKNOWN = LOOP + ", metadata={}"


@pytest.fixture(scope="module")
def known():
  return hlo.cost(MODULE.replace("LOOP", KNOWN), steps=3)


def by_name(cost):
  return {kernel.name: kernel for kernel in cost.kernels}


def test_matrix_products_and_convolutions_have_their_flops(known):
  kernels = by_name(known)
  assert kernels["gemm"].flops == 2 * 4 * 16 * 32
  forward = 2 * (2 * 6 * 6) * (3 * 3 * 3) * 8
  assert [kernels[name].flops for name in ("conv", "dk", "dx")] == [forward] * 3


@pytest.mark.parametrize(
  ("inputs", "outputs", "forward", "kernel_gradient", "input_gradient"),
  [(64, 64, 1, 1, 1), (16, 32, 2, 8, 4), (64, 96, 4 / 3, 4 / 3, 1)],
)
def test_convolutions_compute_tiles_of_64_channels(
  inputs, outputs, forward, kernel_gradient, input_gradient
):
  text = MODULE.replace("LOOP", KNOWN).replace("2,6,6,3]", f"2,6,6,{inputs}]")
  text = text.replace("[8,3,3,3]", f"[{outputs},3,3,{inputs}]")
  text = text.replace("2,6,6,8]", f"2,6,6,{outputs}]")
  kernels = by_name(hlo.cost(text, steps=3))
  ratios = [kernels[name].computed / kernels[name].flops for name in ("conv", "dk", "dx")]
  assert ratios == pytest.approx([forward, kernel_gradient, input_gradient])
  assert kernels["gemm"].computed == kernels["gemm"].flops


def test_a_kernel_takes_the_longer_of_its_computation_and_its_traffic():
  h200 = target.load("h200")

  def seconds(kind, computed, moved):
    kernel = hlo.Kernel("x", kind, 3, computed / 2, computed, moved, "bf16")
    return plan.roofline_seconds(hlo.Cost((kernel,), 0, 0, 0), h200)

  # 989 TFLOP/s, of which products reach 80% and convolutions 40%; 4.8 TB/s, reached to 60%.
  assert seconds("__cublas$gemm", 1e12, 0) == pytest.approx(3 / (0.8 * 989))
  assert seconds("__cudnn$convForward", 1e12, 0) == pytest.approx(3 / (0.4 * 989))
  assert seconds("fusion", 1e9, 1e9) == pytest.approx(3e-3 / (0.6 * 4.8))


def test_kernels_move_their_operands_and_results(known):
  kernels = by_name(known)
  assert kernels["gemm"].bytes == 2 * (4 * 16 + 16 * 32 + 4 * 32)
  assert kernels["conv"].bytes == 2 * (2 * 6 * 6 * 3 + 8 * 27 + 2 * 6 * 6 * 8)  # no workspace
  assert kernels["rows"].bytes == 2 * (4 * 32 + 8 * 32)


def test_slices_and_updates_in_place_move_what_they_touch(known):
  kernels = by_name(known)
  assert kernels["row"].bytes == 32 + 4 + 32  # a row, the index, the result
  assert kernels["new"].bytes == 32 + 4 + 32


def test_operations_before_slices_move_only_what_is_sliced(known):
  kernels = by_name(known)
  assert kernels["sliced"].bytes == 3 * (32 + 32 + 32)  # of three rows: two operands, the result
  assert kernels["gathered"].bytes == 32 + 8 + 32  # two half rows, two indices, the result
  assert kernels["added"].bytes == 10 * (32 + 32 + 32)


def test_loops_multiply_their_kernels(known):
  kernels = by_name(known)
  assert kernels["row"].count == kernels["new"].count == 5
  assert (known.round_trips, known.unknown_loops) == (0, 0)
  # gemm, three convolutions, two collectives, the callback, three fusions, and five times two.
  assert (known.launches, known.collectives, known.transfers) == (20, 2, 1)


def test_loops_of_unknown_length_ask_the_host():
  found = hlo.cost(MODULE.replace("LOOP", UNKNOWN), steps=3)
  assert (found.round_trips, found.unknown_loops) == (4, 1)
  assert found.launches == 10 + 3 * 2 + 4  # the condition runs once more than the body


def test_calls_of_cublas_have_the_costs_of_their_product():
  call = (
    '(bf16[4,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{'
    '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
  )
  fusion = "bf16[4,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%matmul"
  text = MODULE.replace("LOOP", KNOWN).replace(fusion, call)
  gemm = by_name(hlo.cost(text, steps=3))["gemm"]
  assert gemm.flops == 2 * 4 * 16 * 32
  assert gemm.bytes == 2 * (4 * 16 + 16 * 32 + 4 * 32)


def test_text_that_is_no_module_is_refused():
  with pytest.raises(ValueError, match="HLO"):
    hlo.cost("HloModule x\n", steps=1)


def test_calls_asynchronous_ones_branches_and_loops_in_loops_are_walked():
  text = """
%scaled (c.0: f32[4]) -> f32[4] {
  %c.0 = f32[4]{0} parameter(0)
  ROOT %half = f32[4]{0} multiply(%c.0, %c.0)
}

%few (d.0: f32[4]) -> f32[4] {
  %d.0 = f32[4]{0} parameter(0)
  ROOT %less = f32[4]{0} negate(%d.0)
}

%many (e.0: f32[4]) -> f32[4] {
  %e.0 = f32[4]{0} parameter(0)
  %more = f32[4]{0} negate(%e.0)
  ROOT %most = f32[4]{0} add(%more, %e.0)
}

%inner (f.0: f32[4]) -> f32[4] {
  %f.0 = f32[4]{0} parameter(0)
  ROOT %sine = f32[4]{0} sine(%f.0)
}

%outer (g.0: f32[4]) -> f32[4] {
  %g.0 = f32[4]{0} parameter(0)
  ROOT %again = f32[4]{0} while(%g.0), condition=%more_than, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (h: f32[4], which: pred[]) -> f32[4] {
  %h = f32[4]{0} parameter(0)
  %which = pred[] parameter(1)
  %called = f32[4]{0} call(%h), to_apply=%scaled
  %started = ((f32[4]{0}), f32[4]{0}) async-start(%called), calls=%scaled
  %done = f32[4]{0} async-done(%started)
  %chosen = f32[4]{0} conditional(%which, %done, %done), true_computation=%FIRST, false_computation=%SECOND
  ROOT %looped = f32[4]{0} while(%chosen), condition=%more_than, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""  # noqa: E501
  for first, second in (("few", "many"), ("many", "few")):
    found = hlo.cost(text.replace("FIRST", first).replace("SECOND", second), steps=7)
    launched = [(kernel.name, kernel.count) for kernel in found.kernels]
    assert launched == [("half", 1), ("half", 1), ("more", 1), ("most", 1), ("sine", 5 * 3)]
    assert (found.round_trips, found.unknown_loops) == (1, 0)
