"""Tests the memory of a step that is read off XLA's plan."""

import keras
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

import fastaccum as fa
from fastaccum.data.stacks import Batch, Dispatch
from fastaccum.memory import analysis, buffers
from fastaccum.memory.analysis import _computed, bytes_at_most, dispatch_memory, stacked

BATCH = Batch(tf.TensorSpec([256, 32]), tf.TensorSpec([256], tf.int64))


@pytest.fixture(scope="module")
def memory():
    layers = [
        keras.layers.Dense(64, activation="gelu", name="wide"),
        keras.layers.Dense(10, name="head"),
    ]
    model = keras.Sequential([keras.Input((32,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = fa.Trainer(model, "adam", loss, gradient_accumulation_steps=4)
    return trainer, dispatch_memory(
        trainer._builder.get_or_build(BATCH, trainer._present_options),
        Dispatch((stacked(BATCH, 4),)),
    )


def test_kinds_add_up_to_the_peak(memory):
    trainer, found = memory
    parameters = trainer.model.count_params()
    assert list(found.by_kind) == [
        "weights",
        "optimizer slots",
        "accumulators",
        "activations",
        "data",
        "other",
    ]
    assert (
        sum(found.by_kind.values())
        == found.peak_bytes
        == sum(buffer.bytes for buffer in found.largest)
    )
    assert found.by_kind["weights"] == 4 * parameters
    assert found.by_kind["optimizer slots"] == pytest.approx(8 * parameters, abs=32)


def test_temporary_buffers_are_those_of_the_plan(memory):
    _, found = memory
    parts = ("accumulators", "activations", "other")
    held = sum(
        b.bytes for b in found.buffers if b.kind in parts or b.operation.startswith("Gather")
    )
    assert held == pytest.approx(found.analysis.temp_bytes, abs=2048)


def test_a_buffer_is_alive_until_the_last_value_in_it_is_freed():
    assignment = hlo_pb2.BufferAssignmentProto()
    for value in (1, 2, 3, 4):
        assignment.logical_buffers.add(id=value, size=100)
    event = hlo_pb2.HeapSimulatorTrace.Event
    events = assignment.heap_simulator_traces.add().events
    events.add(kind=event.ALLOC, buffer_id=1)
    events.add(kind=event.SHARE_WITH, buffer_id=2, share_with_canonical_id=1)
    events.add(kind=event.FREE, buffer_id=1)
    events.add(kind=event.ALLOC, buffer_id=3)  # the peak: the values 1 and 2 take 100 bytes
    events.add(kind=event.FREE, buffer_id=2)
    events.add(kind=event.ALLOC, buffer_id=4)
    assert buffers._alive_at_peak(assignment) == {1: [1, 2], 3: [3]}


def test_what_is_known_without_compiling_bounds_the_peak(memory):
    trainer, found = memory
    programs = trainer._engine.trace(Dispatch((stacked(BATCH, 4),)))
    assert found.peak_bytes <= bytes_at_most(trainer._engine, programs) < 20 * found.peak_bytes


def test_the_results_in_a_branch_are_bounded_too():
    @tf.function(autograph=False)
    def branch(x):
        return tf.switch_case(tf.size(x), [lambda: tf.reduce_sum(tf.ones([1000, 16]) * x)])

    assert _computed(branch.get_concrete_function(tf.TensorSpec([16]))) >= 4 * 1000 * 16


@pytest.mark.parametrize(("shape", "known"), [([16], True), (None, False)])
def test_writes_of_loops_are_bounded_if_their_size_is_known(shape, known):
    """Bounds the writes of a LayerStack's loops: otherwise each such step would be compiled twice."""

    @tf.function(autograph=False)
    def loop(x):
        rows = tf.TensorArray(tf.float32, 1000, element_shape=shape)
        body = lambda i, rows: (i + 1, rows.write(i, x))  # noqa: E731
        return tf.while_loop(lambda i, _: i < 1000, body, (0, rows))[1].stack()[0]

    found = _computed(loop.get_concrete_function(tf.TensorSpec([16])))
    assert (found or 0) >= 4 * 1000 * 16 if known else found is None


def test_the_largest_activation_is_named_by_layer_and_operation(memory):
    _, found = memory
    largest = next(b for b in found.largest if b.kind == "activations")
    assert largest.layer.endswith("wide") and largest.operation
    assert largest.bytes == 4 * 256 * 64 and largest.shape == (256, 64)


def test_data_is_named_by_its_place():
    first, second = (tf.TensorSpec([2, n]) for n in (3, 5))
    batch = Batch(
        {"text": [second, first], "image": first}, second, valid=tf.TensorSpec([2], tf.bool)
    )
    concrete = tf.function(lambda *_: 0.0, autograph=False).get_concrete_function(
        batch, (first, second)
    )
    named = [(b.operation, b.shape) for b in analysis._arguments(concrete)]
    assert named[:3] == [("x['image']", (2, 3)), ("x['text'][0]", (2, 5)), ("x['text'][1]", (2, 3))]
    assert named[3:] == [("y", (2, 5)), ("valid", (2,)), ("", (2, 3)), ("", (2, 5))]


@pytest.mark.parametrize(
    ("scopes", "named"),
    [
        (("a", "a_1"), ("a", "a_1")),
        (("a_1", "a_1_2", "a_2_1"), ("a", "a_1", "a_2")),  # each scope had been entered before
        (("a", "a_1", "a_1_1"), ("a", "a_1", "a_1")),  # layer a_1 is called twice
    ],
)
def test_a_scope_belongs_to_one_of_layers_that_differ_by_a_number(scopes, named):
    proto = hlo_pb2.HloProto()
    computation = proto.hlo_module.computations.add()
    for number, scope in enumerate(scopes):
        computation.instructions.add(id=number).metadata.op_name = f"forward/model/{scope}/MatMul"
    module = buffers._Module(proto, {"a", "a_1", "a_2"}, set())
    assert [module._layer(scope) for scope in scopes] == list(named)
