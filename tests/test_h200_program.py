"""Compiles the step of a large GPT for an H200 and finds weight gradients summed in float32 where
they are computed.
"""

import collections
import re

import h200
import hlo
import keras
import numpy as np
import pytest

import fastaccum as fa
from fastaccum.kernels.devices import has_gpu

WIDTH, LAYERS, VOCABULARY, CONTEXT = 2048, 2, 256, 512
ALIASES = {"bitcast", "get-tuple-element", "parameter", "tuple", "while"}
K, B = 4, 8  # 4,096 tokens a micro-batch: no width has this size


def export_gpt(loss=None, form=None, **options):
    """The step of a mixed_float16 GPT, and the shapes of its blocks' matrices, one for each
    layer.
    """
    ids = np.zeros((K, B, CONTEXT), "int32")
    with h200.weightless():
        model = fa.gpt(
            VOCABULARY, CONTEXT, WIDTH, LAYERS, heads=16, dtype="mixed_float16", **(form or {})
        )
        loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = fa.Trainer(model, keras.optimizers.AdamW(1e-4), loss, clip_norm=1.0, **options)
        exported = h200.export_step(trainer, (ids, ids))
    kernels = []
    for variable in model.trainable_variables:
        depth, rows, columns = (1, 1, *variable.shape)[-3:]
        if min(rows, columns) > VOCABULARY:  # neither embedding nor head
            kernels += depth * [(rows, columns)]
    return exported, kernels


def compile_gpt(exported, **flags):
    return hlo.Program(h200.compile_for_h200(exported, **flags)[0])


@pytest.fixture(scope="module")
def exported():
    return export_gpt()


# XLA would time both on a device, and take the faster for each matmul.
@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["triton", "cublas"],
)
def gpt(exported, request):
    step, kernels = exported
    return compile_gpt(step, xla_gpu_enable_triton_gemm=request.param), kernels


def runs_by_shape(found):
    """Counts the computations of weight gradients of each shape in one step."""
    runs = collections.Counter()
    for each in found:
        runs[each.shape] += each.times
    return runs


def runs_by_shape_of(kernels):
    """Returns the count that they must have: once a micro-batch."""
    return collections.Counter(tuple(sorted(shape)) for shape in K * kernels)


def test_weight_gradients_are_added_in_float32_by_their_matmuls(gpt):
    program, kernels = gpt
    assert len(kernels) == 4 * LAYERS
    found = list(program.weight_gradients(kernels))
    assert {(each.operands, each.dtype) for each in found} == {("f16", "f32")}
    assert {each.added for each in found} <= {"epilogue", "reduction"}
    assert runs_by_shape(found) == runs_by_shape_of(kernels)


def attention_calls(program):
    """Counts a step's calls of each of cuDNN's attention kernels."""
    calls = collections.Counter()
    for value in program.values:
        if value.opcode == "custom-call" and "__cudnn$fmha" in value.instruction.attributes:
            calls[re.search(r'"__cudnn\$fmha(\w+)"', value.instruction.attributes)[1]] += (
                value.times
            )
    return calls


def test_attention_is_cudnns_on_tensors_as_they_lie_in_memory(gpt):
    program, _ = gpt
    assert attention_calls(program) == {"Softmax": K * LAYERS, "SoftmaxBackward": K * LAYERS}
    sizes = sorted((B, CONTEXT, 16, WIDTH // 16))
    assert any(sorted(value.shape) == sizes for value in program.values)
    assert not [
        v for v in program.values if v.opcode in ("copy", "transpose") and sorted(v.shape) == sizes
    ]


def test_the_loop_asks_the_host_nothing_and_copies_no_weights(gpt):
    program, kernels = gpt
    assert program.count("while") and not program.unknown_trip_counts
    assert not program.count("conditional", "infeed", "outfeed", "send", "recv")
    assert not program.copies_in_loops([*kernels, *((LAYERS, *shape) for shape in kernels)])


def test_weights_are_rounded_and_positions_turned_to_angles_before_the_loop(gpt):
    program, kernels = gpt
    rounded = [each for each in program.values if each.opcode == "convert" and each.dtype == "f16"]
    assert {each.times for each in rounded if each.shape in kernels} == {1}
    assert {each.times for each in program.values if each.opcode in ("cosine", "sine")} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "loops"), [("auto", 0), (["projection", "attention"], 2)])
def test_the_form_of_the_large_presets_adds_in_place(policy, loops):
    """A fusion for each layer reads its part of the accumulators and writes it, with a loop over
    the layers or without.

    Attention's output is kept: it is not computed again on the way back. Nothing fills a stack of
    what is kept before it is written.
    """
    exported, kernels = export_gpt(
        fa.LinearCrossEntropy(), {"stacked": True, "tied": True, "policy": policy}
    )
    program = compile_gpt(exported)
    assert attention_calls(program) == {"Softmax": K * LAYERS, "SoftmaxBackward": K * LAYERS}
    found = list(program.weight_gradients(kernels))
    assert {(each.operands, each.dtype, each.added) for each in found} == {("f16", "f32", "apart")}
    assert runs_by_shape(found) == runs_by_shape_of(kernels)
    stacks = {(LAYERS, *shape) for shape in kernels}
    assert not program.copies_in_loops(stacks)
    in_loops = [value for value in program.values if value.times > 1]
    of_accumulators = {
        value.opcode for value in in_loops if value.dtype == "f32" and value.shape in stacks
    }
    assert of_accumulators <= ALIASES | {"dynamic-update-slice"}
    filled = [
        value.shape for value in in_loops if value.opcode == "broadcast" and value.dtype == "f16"
    ]
    assert not [shape for shape in filled if shape[:1] == (LAYERS,)]
    assert program.count("while") == 1 + loops and not program.unknown_trip_counts
    assert not program.count("conditional", "infeed", "outfeed", "send", "recv")


@pytest.mark.slow
def test_plain_autodiff_rounds_weight_gradients_to_float16():
    exported, kernels = export_gpt(fp32_weight_gradients=False)
    found = list(compile_gpt(exported).weight_gradients(kernels))
    assert found and {(each.dtype, each.added) for each in found} == {("f16", "apart")}


@pytest.mark.parametrize(
    "flags", [{}, {"xla_gpu_deterministic_ops": True}], ids=["plain", "deterministic"]
)
def test_deterministic_ops_sort_what_an_embeddings_gradient_adds(flags):
    """Then each row is added to once: without the flag, atomics add to it in any order."""
    ids, y = np.zeros((2, 8, 16), "int32"), np.zeros((2, 8, 1), "float32")
    layers = [
        keras.layers.Embedding(500, 8),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((16,), dtype="int32"), *layers])
    text, _ = h200.compile_for_h200(
        h200.export_step(fa.Trainer(model, "sgd", "mse"), (ids, y)), **flags
    )
    scatters = [line for line in text.splitlines() if " scatter(" in line]
    assert scatters and (" sort(" in text) == bool(flags)
    assert {"unique_indices=true" in line for line in scatters} == {bool(flags)}


# The parser, on programs written by hand.

LOOP = """\
HloModule step, is_scheduled=true

%gemm (a: f16[64,8], b: f16[64,16]) -> {product} {{
  %a = f16[64,8]{{1,0}} parameter(0)
  %b = f16[64,16]{{1,0}} parameter(1)
{gemm}
}}

%gemm_add (a.1: f16[64,8], b.1: f16[64,16], acc: f32[8,16]) -> f32[8,16] {{
  %a.1 = f16[64,8]{{1,0}} parameter(0)
  %b.1 = f16[64,16]{{1,0}} parameter(1)
  %acc = f32[8,16]{{1,0}} parameter(2)
  %dot.1 = f32[8,16]{{1,0}} dot(%a.1, %b.1), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  ROOT %add.1 = f32[8,16]{{1,0}} add(%acc, %dot.1)
}}

%sum (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.2 = f32[] add(%x, %y)
}}

%add (p: {product}, acc.1: f32[8,16]) -> f32[8,16] {{
  %p = {product} parameter(0)
  %acc.1 = f32[8,16]{{1,0}} parameter(1)
{add}
}}

%body (state: (s32[], f32[8,16], f16[64,8], f16[64,16])) -> (s32[], f32[8,16], f16[64,8], f16[64,16]) {{
  %state = (s32[], f32[8,16]{{1,0}}, f16[64,8]{{1,0}}, /*index=3*/f16[64,16]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %acc.2 = f32[8,16]{{1,0}} get-tuple-element(%state), index=1
  %x.1 = f16[64,8]{{1,0}} get-tuple-element(%state), index=2
  %dy = f16[64,16]{{1,0}} get-tuple-element(%state), index=3
{body}
  ROOT %tuple = (s32[], f32[8,16]{{1,0}}, f16[64,8]{{1,0}}, f16[64,16]{{1,0}}) tuple(%i, %new, %x.1, %dy)
}}

%condition (state.1: (s32[], f32[8,16], f16[64,8], f16[64,16])) -> pred[] {{
  %state.1 = (s32[], f32[8,16]{{1,0}}, f16[64,8]{{1,0}}, f16[64,16]{{1,0}}) parameter(0)
  ROOT %less = pred[] constant(true)
}}

ENTRY %main (start: (s32[], f32[8,16], f16[64,8], f16[64,16])) -> (s32[], f32[8,16], f16[64,8], f16[64,16]) {{
  %start = (s32[], f32[8,16]{{1,0}}, f16[64,8]{{1,0}}, f16[64,16]{{1,0}}) parameter(0)
  ROOT %while = (s32[], f32[8,16]{{1,0}}, f16[64,8]{{1,0}}, f16[64,16]{{1,0}}) while(%start), condition=%condition, \
body=%body, backend_config={{"known_trip_count":{{"n":"5"}},"dynamic_variables":[]}}
}}
"""
DOT = "ROOT %dot = {0} dot(%a, %b), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}"
SPLIT = (
    "ROOT %dot = {0} dot(%a, %b), lhs_batch_dims={{0}}, lhs_contracting_dims={{1}}, "
    "rhs_contracting_dims={{1}}"
)
WIDENED = "%w = f32[8,16] convert(%p)\n  ROOT %sum.1 = f32[8,16] add(%acc.1, %w)"
REDUCED = (
    "%w = f32[4,8,16] convert(%p)\n  %zero = f32[] constant(0)\n  %r = f32[8,16] reduce(%w, "
    "%zero), dimensions={0}, to_apply=%sum\n  ROOT %sum.1 = f32[8,16] add(%acc.1, %r)"
)
PLAIN = "ROOT %sum.1 = f32[8,16] add(%acc.1, %p)"
TWO_KERNELS = (
    "%g = {0} fusion(%x.1, %dy), kind=kCustom, calls=%gemm\n"
    "  %new = f32[8,16]{{1,0}} fusion(%g, %acc.2), kind=kLoop, calls=%add"
)
ONE_KERNEL = "%new = f32[8,16]{1,0} fusion(%x.1, %dy, %acc.2), kind=kCustom, calls=%gemm_add"
LIBRARY = (
    '%c = (f32[8,16]{1,0}, s8[64]{0}) custom-call(%x.1, %dy, %acc.2), custom_call_target="__cublas$lt$matmul", '
    'output_to_operand_aliasing={{0}: (2, {})}, backend_config={"gemm_backend_config":{"alpha_real":1,"beta":1}}\n'
    "  %new = f32[8,16]{1,0} get-tuple-element(%c), index=0"
)
LIBRARY_APART = (
    '%c = (f32[8,16]{1,0}, s8[64]{0}) custom-call(%x.1, %dy), custom_call_target="__cublas$lt$matmul", '
    'backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0}}\n'
    "  %g = f32[8,16]{1,0} get-tuple-element(%c), index=0\n"
    "  %new = f32[8,16]{1,0} fusion(%g, %acc.2), kind=kLoop, calls=%add"
)
NEVER_ADDED = "%new = f32[8,16]{1,0} fusion(%x.1, %dy), kind=kCustom, calls=%gemm"


def loop(body, product="f32[8,16]", gemm=DOT, add=PLAIN):
    return hlo.Program(
        LOOP.format(
            body=f"  {body}", product=product, gemm=f"  {gemm.format(product)}", add=f"  {add}"
        )
    )


@pytest.mark.parametrize(
    ("program", "dtype", "added"),
    [
        (loop(ONE_KERNEL), "f32", "epilogue"),
        (loop(LIBRARY), "f32", "epilogue"),
        (loop(LIBRARY.replace("output_to_operand_aliasing={{0}: (2, {})}, ", "")), "f32", "apart"),
        (loop(LIBRARY_APART), "f32", "apart"),
        (loop(TWO_KERNELS.format("f32[8,16]")), "f32", "apart"),
        (loop(TWO_KERNELS.format("f16[8,16]"), "f16[8,16]", DOT, WIDENED), "f16", "apart"),
        (
            loop(TWO_KERNELS.format("f32[4,8,16]"), "f32[4,8,16]", SPLIT, REDUCED),
            "f32",
            "reduction",
        ),
        (
            loop(TWO_KERNELS.format("f16[4,8,16]"), "f16[4,8,16]", SPLIT, REDUCED),
            "f16",
            "reduction",
        ),
        (loop(NEVER_ADDED), "f32", None),
    ],
)
def test_the_parser_sees_where_a_weight_gradient_is_added(program, dtype, added):
    assert list(program.weight_gradients([(16, 8)])) == [
        hlo.WeightGradient((8, 16), "f16", dtype, added, times=5)
    ]


def test_the_parser_counts_loops_copies_and_conditionals():
    copied = ONE_KERNEL + "\n  %copy = f32[8,16]{0,1} copy(%new)\n  %small = f32[4] copy(%i)"
    program = loop(copied)
    assert [value.instruction.name for value in program.copies_in_loops([(8, 16)])] == ["copy"]
    assert not loop(ONE_KERNEL).copies_in_loops([(8, 16)])
    assert (program.count("while"), program.count("conditional"), program.unknown_trip_counts) == (
        1,
        0,
        0,
    )
    text = LOOP.format(body=f"  {copied}", product="f32[]", gemm="", add="")
    unknown = text.replace("known_trip_count", "trip_count")
    assert hlo.Program(unknown).unknown_trip_counts == 1


def test_traced_as_on_a_gpu_only_inside():
    before = has_gpu()
    with h200.as_on_a_gpu():
        assert has_gpu()
    assert has_gpu() == before
