"""`Program`: called with nests of any form, it returns what the same `tf.function` returns."""

import collections
import re

import numpy as np
import optree
import pytest
import tensorflow as tf

from fastaccum.step.program import Program

Pair = collections.namedtuple("Pair", "first second")


def half_and_sum(nest):
    """Tells its leaves apart, and returns a nest of its own: keys out of order, None, a tuple
    without leaves.
    """
    leaves = tf.nest.flatten(nest)
    total = tf.add_n(
        [float(10**i) * leaf for i, leaf in enumerate(leaf for leaf in leaves if leaf is not None)]
    )
    ordered = collections.OrderedDict(
        y=3.0 * total, x=[5.0 * total, {"d": 7.0 * total, "c": 9.0 * total}]
    )
    return {"z": total, "a": Pair(0.5 * total, None), "none": (), "ordered": ordered}


@pytest.mark.parametrize(
    "nest",
    [
        [1.0, 2.0],
        {"z": 1.0, "a": 2.0},
        collections.OrderedDict(z=1.0, a=2.0),
        collections.defaultdict(float, z=1.0, a=2.0),
        Pair({"z": 1.0, "a": (2.0, 3.0)}, None),
        (1.0, [None, collections.OrderedDict(y=2.0, x=3.0)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_call_is_that_of_the_function(nest, jit_compile):
    nest = optree.tree_map(tf.constant, nest)
    program = Program(half_and_sum, jit_compile)
    expected = tf.function(half_and_sum, jit_compile=jit_compile)(nest)
    for _ in range(2):
        returned = program(nest)
        assert list(returned) == list(expected), "keys come in another order"
        assert optree.tree_structure(returned) == optree.tree_structure(expected)
        assert optree.tree_map(float, returned) == optree.tree_map(float, expected)
    assert program.function.experimental_get_tracing_count() == 1


def test_the_order_of_an_ordered_dict_is_told_apart():
    """Negative control for the one structure in which optree and TensorFlow number leaves
    differently.
    """
    keys = collections.OrderedDict(z=1.0, a=2.0)
    assert optree.tree_leaves(keys) != tf.nest.flatten(keys)


def test_a_program_in_a_graph():
    program = Program(half_and_sum)
    stack = {"z": tf.constant(1.0), "a": tf.constant(2.0)}
    inside = tf.function(lambda z: program({"z": z, "a": stack["a"]})["z"], jit_compile=True)
    assert float(inside(stack["z"])) == float(program(stack)["z"])


def test_a_program_traced_anew_computes_what_the_function_does_now():
    factor = [2.0]
    program = Program(lambda x: factor[0] * x, jit_compile=False)
    one = tf.constant(1.0)
    assert float(program(one)) == 2.0
    factor[0] = 3.0
    assert float(program(one)) == 2.0
    program.retrace()
    assert float(program(one)) == 3.0


def test_a_program_without_outputs():
    counter = tf.Variable(0)

    def count(by):
        counter.assign_add(by)

    program = Program(count)
    assert program(tf.constant(2)) is None and int(counter) == 2


def test_an_error_in_a_program_is_that_of_the_function():
    def check(x):
        return tf.debugging.check_numerics(x, "not a number")

    messages = []
    for function in (tf.function(check), Program(check, jit_compile=False)):
        function(tf.constant(1.0))
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            function(tf.constant(np.nan))
        first, *trace, _, last = re.sub(
            r"__inference_\w+", "name", error.value.message
        ).splitlines()
        assert any(__file__ in line for line in trace) or not trace
        messages.append((first, bool(trace), last))
    assert messages[0] == messages[1]


def test_composite_outputs_are_those_of_the_function():
    def ragged(x):
        return {"ragged": tf.RaggedTensor.from_row_lengths(x, [1, 2]), "x": x}

    returned = Program(ragged, jit_compile=False)(tf.constant([1.0, 2.0, 3.0]))
    assert returned["ragged"].to_list() == [[1.0], [2.0, 3.0]]


class Dictionary(dict):
    """A mapping that optree takes for a leaf."""


def test_a_stack_without_tensors_is_an_error():
    with pytest.raises(TypeError, match=r"plain dicts.*Dictionary"):
        Program(half_and_sum)(Dictionary(z=tf.constant(1.0)))


@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_tape_sees_what_it_sees_of_the_function(jit_compile):
    x, program = tf.Variable(2.0), Program(lambda x: x**3, jit_compile)
    program(tf.constant(2.0))
    with tf.GradientTape() as tape:
        y = program(tf.identity(x))
    assert float(tape.gradient(y, x)) == 12.0


def test_functions_called_in_a_program_are_graphs_where_functions_run_eagerly():
    """AutoGraph, which makes a condition of this `if`, works in a `tf.function` that is traced."""

    @tf.function
    def clipped(x):
        if x > 1.0:
            return tf.constant(1.0)
        return x

    tf.config.run_functions_eagerly(True)
    try:
        program = Program(lambda x: clipped(x) + 1.0)
        assert [float(program(tf.constant(x))) for x in (0.5, 3.0)] == [1.5, 2.0]
        assert tf.config.functions_run_eagerly()
    finally:
        tf.config.run_functions_eagerly(False)
