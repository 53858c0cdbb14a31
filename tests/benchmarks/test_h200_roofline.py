"""The reader of optimized GPU programs and the roofline, on programs written by hand and on one
that is compiled.
"""

import h200
import keras
import numpy as np
import pytest

import fastaccum as fa
from benchmarks.h200 import kernels, roofline, summary
from benchmarks.h200.programs import Compiled, Gpt
from fastaccum.step.compiler_ir import MemoryAnalysis

# Two computations that others call, then the one under test, the body of a loop of 3 inside a loop
# of 5.
MODULE = """\
HloModule step, is_scheduled=true

%sum (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}}

%fused (ignored: f32[]) -> f32[] {{
{fused}
}}

%inner (state: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %state = (s32[], f32[4]{{0}}) parameter(0)
{body}
}}

%outer (state.1: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %state.1 = (s32[], f32[4]{{0}}) parameter(0)
  ROOT %while = (s32[], f32[4]{{0}}) while(%state.1), condition=%never_run, body=%inner, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
}}

ENTRY %main (start: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %start = (s32[], f32[4]{{0}}) parameter(0)
  ROOT %while.1 = (s32[], f32[4]{{0}}) while(%start), condition=%never_run, body=%outer, \
metadata={{op_name="loop/while"}}, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""


def program(body, fused="  ROOT %c = f32[] constant(0)"):
    lines = "\n".join(f"  {line.strip()}" for line in body.splitlines() if line.strip())
    inside = "\n".join(f"  {line.strip()}" for line in fused.splitlines() if line.strip())
    return MODULE.format(fused=inside, body=lines)


def only(body, fused="  ROOT %c = f32[] constant(0)"):
    """The one kernel of a program."""
    (kernel,) = kernels.read(program(body, fused))
    assert (kernel.loops, kernel.times) == ((5, 3), 15)
    return kernel


def fusion(fused, *operands, result="f32[4]"):
    """The one kernel of a program that calls a fusion with operands of these types."""
    given = "".join(
        f"%p{i} = {type_} get-tuple-element(%state), index=1\n" for i, type_ in enumerate(operands)
    )
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    return only(f"{given}ROOT %f = {result} fusion({names}), kind=kLoop, calls=%fused", fused)


DOT = """\
%a = bf16[64,8]{1,0} parameter(0)
%b = bf16[64,16]{1,0} parameter(1)
%acc = f32[8,16]{1,0} parameter(2)
%dot = f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={0}, rhs_contracting_dims={0}
ROOT %added = f32[8,16]{1,0} add(%acc, %dot)
"""
OPERANDS = ("bf16[64,8]{1,0}", "bf16[64,16]{1,0}", "f32[8,16]{1,0}")


def test_a_matmul_in_a_fusion():
    kernel = fusion(DOT, *OPERANDS, result="f32[8,16]{1,0}")
    assert (kernel.kind, kernel.types) == ("gemm", "bf16 x bf16 -> f32")
    assert kernel.flops == 2 * 64 * 8 * 16
    assert kernel.bytes == 2 * (64 * 8 + 64 * 16) + 4 * (8 * 16 + 8 * 16)


def test_a_matmul_by_a_library():
    given = "".join(
        f"%p{i} = {type_} get-tuple-element(%state), index=1\n" for i, type_ in enumerate(OPERANDS)
    )
    kernel = only(
        given
        + 'ROOT %call = (f32[8,16]{1,0}, s8[4096]{0}) custom-call(%p0, %p1, %p2), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"beta":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    assert (kernel.kind, kernel.types, kernel.flops) == (
        "gemm",
        "bf16 x bf16 -> f32",
        2 * 64 * 8 * 16,
    )
    assert kernel.bytes == 2 * (64 * 8 + 64 * 16) + 4 * (8 * 16 + 8 * 16), "not the workspace"


STACK, ROW, ID = "f32[6,100]{1,0}", "f32[1,100]{1,0}", "s32[]"
UPDATE = f"""\
%stack = {STACK} parameter(0)
%row = {ROW} parameter(1)
%i = {ID} parameter(2)
%zero = {ID} constant(0)
"""
SLICED = UPDATE + f"%old = {ROW} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={{1,100}}\n"


@pytest.mark.parametrize(
    ("fused", "elements", "kind"),
    [
        (
            UPDATE + f"ROOT %new = {STACK} dynamic-update-slice(%stack, %row, %i, %zero)",
            100 + 100,
            "slice",
        ),
        (
            SLICED
            + f"%s = {ROW} add(%old, %row)\nROOT %new = {STACK} dynamic-update-slice(%stack, %s, %i, %zero)",
            3 * 100,
            "elementwise",
        ),
        (
            UPDATE
            + f"%n = {STACK} negate(%stack)\nROOT %new = {STACK} dynamic-update-slice(%n, %row, %i, %zero)",
            600 + 100 + 600,
            "elementwise",
        ),
        (
            UPDATE + f"%one = {STACK} dynamic-update-slice(%stack, %row, %i, %zero)\n"
            f"ROOT %new = {STACK} dynamic-update-slice(%one, %row, %zero, %zero)",
            600 + 100 + 600,
            "slice",
        ),
    ],
    ids=[
        "a slice is written",
        "a slice is added to",
        "the whole is computed anew",
        "two are written",
    ],
)
def test_an_update_in_place_moves_its_slice_alone(fused, elements, kind):
    kernel = fusion(fused, STACK, ROW, ID, result=STACK)
    assert (kernel.kind, kernel.bytes) == (kind, 4 * elements + 4)


def test_an_update_counted_as_a_whole_write_is_noticed(monkeypatch):
    monkeypatch.setattr(kernels, "_updates_in_place", lambda result, lines: False)
    with pytest.raises(AssertionError):
        test_an_update_in_place_moves_its_slice_alone(
            UPDATE + f"ROOT %new = {STACK} dynamic-update-slice(%stack, %row, %i, %zero)",
            100 + 100,
            "slice",
        )


def test_what_is_sliced_or_gathered_is_read_in_part():
    kernel = fusion(SLICED + f"ROOT %s = {ROW} add(%old, %row)", STACK, ROW, ID, result=ROW)
    assert kernel.bytes == 4 * (100 + 100 + 1 + 100)
    widened = (
        UPDATE
        + """\
        %wide = f64[6,100]{1,0} convert(%stack)
        ROOT %old = f64[1,100]{1,0} dynamic-slice(%wide, %i, %zero), dynamic_slice_sizes={1,100}"""
    )
    assert (
        fusion(widened, STACK, ROW, ID, result="f64[1,100]{1,0}").bytes == 4 * (100 + 1) + 8 * 100
    )
    both = """\
        %p = f32[10,8]{1,0} parameter(0)
        %low = f32[6,8]{1,0} slice(%p), slice={[0:6], [0:8]}
        %high = f32[6,8]{1,0} slice(%p), slice={[4:10], [0:8]}
        ROOT %s = f32[6,8]{1,0} add(%low, %high)"""
    assert fusion(both, "f32[10,8]{1,0}", result="f32[6,8]{1,0}").bytes == 4 * (80 + 48), (
        "never more than all of it"
    )
    rows = """\
        %table = f32[1000,64]{1,0} parameter(0)
        %ids = s32[20,1]{1,0} parameter(1)
        ROOT %g = f32[20,64]{1,0} gather(%table, %ids), offset_dims={1}, collapsed_slice_dims={0}"""
    kernel = fusion(rows, "f32[1000,64]{1,0}", "s32[20,1]{1,0}", result="f32[20,64]{1,0}")
    assert (kernel.kind, kernel.bytes) == ("gather", 4 * (20 * 64 + 20 + 20 * 64))


def test_a_scatter_reads_and_writes_the_rows_that_it_adds_to():
    fused = """\
        %table = f32[1000,64]{1,0} parameter(0)
        %ids = s32[20,1]{1,0} parameter(1)
        %rows = f32[20,64]{1,0} parameter(2)
        ROOT %s = f32[1000,64]{1,0} scatter(%table, %ids, %rows), update_window_dims={1}, to_apply=%sum"""
    kernel = fusion(
        fused, "f32[1000,64]{1,0}", "s32[20,1]{1,0}", "f32[20,64]{1,0}", result="f32[1000,64]{1,0}"
    )
    assert (kernel.kind, kernel.bytes) == ("scatter", 4 * (3 * 20 * 64 + 20))


def test_each_result_of_a_fusion_is_written():
    fused = """\
        %p = bf16[10,8]{1,0} parameter(0)
        %w = f32[10,8]{1,0} convert(%p)
        %z = f32[] constant(0)
        %r = f32[10]{0} reduce(%w, %z), dimensions={1}, to_apply=%sum
        ROOT %t = (f32[10,8]{1,0}, f32[10]{0}) tuple(%w, %r)"""
    kernel = fusion(fused, "bf16[10,8]{1,0}", result="(f32[10,8]{1,0}, f32[10]{0})")
    assert (kernel.kind, kernel.types) == ("reduce", "f32[10,8], f32[10]")
    assert kernel.bytes == 2 * 80 + 4 * (80 + 10)


FMHA = """\
%q = bf16[2,4,32,16]{3,2,1,0} get-tuple-element(%state), index=1
ROOT %o = (bf16[2,4,32,16]{3,2,1,0}, f32[2,4,32]{2,1,0}, u8[64]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": \
{"element_type": "BF16", "dimensions": ["2", "4", "32", "32"], "layout": {"minor_to_major": ["3"]}}, \
"mask_type": "CAUSAL"}}
"""


@pytest.mark.parametrize(
    ("body", "products"),
    [
        (FMHA, 1),
        (FMHA.replace("CAUSAL", "NO_MASK"), 2),
        (FMHA.replace("Softmax", "SoftmaxBackward"), 2.5),
    ],
    ids=["causal", "full", "backward"],
)
def test_attention_by_cudnn(body, products):
    kernel = only(body)
    assert (kernel.kind, kernel.types) == ("attention", "bf16 x bf16 -> bf16")
    assert kernel.flops == products * 2 * (2 * 4 * 32 * 32 * 16)
    assert kernel.bytes == 2 * 4 * (2 * 4 * 32 * 16) + 4 * (2 * 4 * 32)


# An image of 9 x 9, 3 x 3 weights, every second place, one row and column of padding on either
# side.
CONVOLUTION = """\
%image = f16[2,9,9,4]{3,2,1,0} get-tuple-element(%state), index=1
%weights = f16[3,3,4,8]{3,2,1,0} get-tuple-element(%state), index=1
%result = f16[2,5,5,8]{3,2,1,0} get-tuple-element(%state), index=1
"""
WINDOW = "window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"


def products_of_a_convolution():
    """Counted one by one: two for each weight of each output that meets the image."""
    line = sum(0 <= 2 * output + weight - 1 < 9 for output in range(5) for weight in range(3))
    return 2 * 2 * 4 * 8 * line**2


@pytest.mark.parametrize(
    "line",
    [
        "f16[2,5,5,8]{3,2,1,0} convolution(%image, %weights), {}",
        '(f16[2,5,5,8], u8[9]{0}) custom-call(%image, %weights), {}, custom_call_target="__cudnn$convForward"',
        '(f16[2,9,9,4], u8[9]{0}) custom-call(%result, %weights), {}, custom_call_target="__cudnn$convBackwardInput"',
        '(f16[3,3,4,8], u8[9]{0}) custom-call(%image, %result), {}, custom_call_target="__cudnn$convBackwardFilter"',
    ],
)
def test_convolutions_meet_no_padding(line):
    kernel = only(CONVOLUTION + f"ROOT %c = {line.replace('{}', WINDOW)}")
    assert (kernel.kind, kernel.flops) == ("convolution", products_of_a_convolution())


@pytest.mark.parametrize(
    ("window", "out", "groups"),
    [
        ("size=3x3 pad=1_1x1_1", 9, 1),
        ("size=3x3 stride=2x2 pad=0_1x0_1", 4, 1),
        ("size=3x3 pad=2_2x2_2 lhs_dilate=2x2", 19, 1),
        ("size=3x3 pad=2_2x2_2 rhs_dilate=2x2", 9, 1),
        ("size=3x3 pad=1_1x1_1", 9, 4),
    ],
    ids=["same", "strided", "an input's gradient", "dilated", "grouped"],
)
def test_flops_of_convolutions_are_those_that_xla_counts(window, out, groups):
    pytest.importorskip("jaxlib")
    result = f"f32[2,{out},{out},8]{{3,2,1,0}}"
    text = f"""\
HloModule convolution, is_scheduled=true

ENTRY %main (image: f32[2,9,9,4], weights: f32[3,3,{4 // groups},8]) -> f32[2,{out},{out},8] {{
  %image = f32[2,9,9,4]{{3,2,1,0}} parameter(0)
  %weights = f32[3,3,{4 // groups},8]{{3,2,1,0}} parameter(1)
  ROOT %c = {result} convolution(%image, %weights), window={{{window}}}, dim_labels=b01f_01io->b01f, \
feature_group_count={groups}
}}
"""
    (kernel,) = kernels.read(text)
    assert kernel.flops == h200.cost_analysis(text)["flops"]


def test_calls_branches_and_what_runs_beside():
    text = program("""\
        %p = f32[4]{0} get-tuple-element(%state), index=1
        %start = ((f32[4]{0}), f32[4]{0}, s32[]) async-start(%p), calls=%fused
        %done = f32[4]{0} async-done(%start)
        %copied = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%done)
        %there = f32[4]{0} copy-done(%copied)
        %called = f32[4]{0} call(%there), to_apply=%fused
        ROOT %either = f32[4]{0} conditional(%p, %there, %called), branch_computations={%fused, %sum}""",
        fused="%x = f32[4]{0} parameter(0)\nROOT %copy = f32[4]{0} copy(%x)",
    )  # fmt: skip
    found = [(kernel.kind, kernel.bytes) for kernel in kernels.read(text)]
    assert found == [("copy", 32)] * 4
    assert kernels.facts(text) == {"unknown trip counts": 0, "conditionals": 1, "host transfers": 0}
    unknown = text.replace('"known_trip_count":{"n":"3"}', "")
    assert kernels.facts(unknown)["unknown trip counts"] == 1


def test_a_kernel_takes_the_longest_of_its_parts():
    rates = roofline.Rates(
        half=1e12, float8=2e12, tf32=5e11, bandwidth=1e9, launch=1e-6, attention=0.5
    )
    each = [
        kernels.Kernel("a", "gemm", "", "bf16 x bf16 -> f32", 1e9, 1e3, (8,)),
        kernels.Kernel("b", "gemm", "", "f32 x f32 -> f32", 1e9, 1e3, (8, 2)),
        kernels.Kernel("c", "attention", "", "f16 x f16 -> f16", 1e9, 1e3),
        kernels.Kernel("d", "copy", "", "f32[8]", 0, 1e6),
        kernels.Kernel("e", "copy", "", "f32[8]", 0, 1, (8, 3)),
    ]
    float8 = kernels.Kernel("f", "gemm", "", "f8e4m3fn x f8e5m2 -> f32", 1e9, 1e3, (8,))
    (timed,) = roofline.predict([float8], rates).kernels
    assert timed.ms == pytest.approx(4.0)
    found = roofline.predict(each, rates)
    assert [timed.ms for timed in found.kernels] == pytest.approx([8.0, 32.0, 2.0, 1.0, 24e-3])
    assert found.ms == pytest.approx(43.024)
    parts = (
        8 * (1 + 1e-3 + 1e-3)
        + 16 * (2 + 1e-3 + 1e-3)
        + (2 + 1e-3 + 1e-3)
        + (1 + 1e-3)
        + 24 * (1e-6 + 1e-3)
    )
    assert found.serial_ms == pytest.approx(parts)
    assert found.launches(8) == 1 + 2 + 3
    assert found.mfu(1e9) == pytest.approx(1 / 43.024)


def test_the_arithmetic_of_a_gpt_by_hand():
    options = Gpt(layers=1, width=256, vocabulary=100, context=8, batch=3, micro_batches=2)
    tokens, parameters = 2 * 3 * 8, 256 * 768 + 256 * 256 + 2 * 256 * 1024 + 100 * 256
    scores = 2 * 3 * 8 * 8 / 2  # half of them are masked
    assert options.flops == 3 * 2 * tokens * parameters + 3 * 2 * (2 * scores * 256)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_flops_of_a_step_are_those_that_xla_counts(stacked):
    """XLA counts a loop's body once, and elementwise arithmetic too."""
    ids = np.zeros((2, 8, 512), "int32")
    with h200.weightless():
        model = fa.gpt(8192, 512, 1024, 2, 8, tied=True, stacked=stacked, dtype="mixed_bfloat16")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        exported = h200.export_step(
            fa.Trainer(model, keras.optimizers.AdamW(1e-4), loss), (ids, ids)
        )
    text, _ = h200.compile_for_h200(exported)
    matmuls = sum(kernel.flops for kernel in kernels.read(text) if kernel.kind == "gemm")
    assert matmuls == pytest.approx(h200.cost_analysis(text)["flops"], rel=0.02)


def test_a_summary_tells_what_a_program_comes_to():
    text = program(
        "ROOT %f = f32[8,16]{1,0} fusion(%state, %state, %state), kind=kCustom, calls=%fused", DOT
    )
    compiled = Compiled(text, MemoryAnalysis(0, 0, 0, 2 * 10**9), 5, flops=1e9)
    totals = summary.of(compiled)
    assert totals["launches a micro-batch"] == 3
    assert totals["temp GB"] == 2
    assert totals["matmuls"] == {"bf16 x bf16 -> f32": 15}
    assert totals["kernels"] == {"gemm": 15}
    assert "100.0        15" in summary.text(compiled, rows=3)


GRADIENT = """\
%i = f32[] get-tuple-element(%state), index=0
%x = bf16[64,8]{1,0} get-tuple-element(%state), index=1
%dy = bf16[64,16]{1,0} get-tuple-element(%state), index=2
%acc = f32[8,16]{1,0} get-tuple-element(%state), index=3
"""
CONFIG = 'backend_config={"gemm_backend_config":{"beta":0,"lhs_contracting_dimensions":["0"]}}'
APART = f"""{GRADIENT}
%dw = f32[8,16]{{1,0}} custom-call(%x, %dy), custom_call_target="__cublas$gemm", {CONFIG}
ROOT %new = f32[8,16]{{1,0}} fusion(%acc, %dw), kind=kLoop, calls=%fused
"""
IN_EPILOGUE = f"""{GRADIENT}
ROOT %new = f32[8,16]{{1,0}} custom-call(%x, %dy, %acc), custom_call_target="__cublas$gemm", \
output_to_operand_aliasing={{{{}}: (2, {{}})}}, {CONFIG.replace('"beta":0', '"beta":1')}
"""
SUM = """\
%a = f32[8,16]{1,0} parameter(0)
%b = f32[8,16]{1,0} parameter(1)
ROOT %s = f32[8,16]{1,0} add(%a, %b)
"""


@pytest.mark.parametrize(
    ("body", "how", "sizes"),
    [
        (APART, "apart", 4),
        (IN_EPILOGUE, "epilogue", 2),
        (APART + "%zeros = f32[3,8,16]{2,1,0} broadcast(%i), dimensions={}", "apart", 4 + 3),
    ],
    ids=["apart", "in the epilogue", "with a buffer of zeros each time"],
)
def test_what_accumulating_moves(body, how, sizes):
    """Three layers: each computes its gradient in a turn of the inner loop."""
    text = program(body, SUM)
    compiled = Compiled(text, MemoryAnalysis(0, 0, 0, 0), 5, matrices=((8, 16),) * 3)
    assert summary.added(compiled) == {how: 3}
    assert summary.accumulation(compiled) == pytest.approx(sizes, rel=0.01)
