"""Reads the compiled step: the structure that makes it fast, and the memory that XLA plans."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.step import compiler_ir as compiled

K, B = 4, 8


def make_trainer(policy="mixed_float16", **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(11, 12, dtype=policy),
            keras.layers.Dense(16, "relu", dtype=policy),
            keras.layers.Dropout(0.5, dtype=policy),
            keras.layers.Flatten(dtype=policy),
            keras.layers.BatchNormalization(dtype=policy),
            keras.layers.Dense(7, dtype=policy),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fa.Trainer(
        model, keras.optimizers.AdamW(1e-3), loss, ["accuracy"], clip_norm=1.0, **options
    )


def make_stack(micro_batches=K):
    rng = np.random.default_rng(0)
    return rng.integers(0, 11, (micro_batches, B, 6)), rng.integers(0, 7, (micro_batches, B))


@pytest.fixture(scope="module")
def trainer():
    return make_trainer()


@pytest.fixture(scope="module")
def hlo(trainer):
    return trainer.compiler_ir(make_stack(), stage="optimized_hlo")


@pytest.fixture(scope="module")
def memory(trainer):
    return trainer.memory_analysis(make_stack())


def instructions(hlo, opcode):
    return re.findall(rf"^.* = .*\b{opcode}\(.*$", hlo, re.MULTILINE)


def test_one_loop_with_a_trip_count_that_xla_knows(hlo):
    loops = [
        line
        for line in instructions(hlo, "while")
        if "known_trip_count" not in line or f'"n":"{K}"' in line
    ]
    assert len(loops) == 1
    assert re.search(rf'known_trip_count":\{{"n":"{K}"\}}', loops[0])


def test_every_loop_has_a_known_trip_count(hlo):
    assert all("known_trip_count" in line for line in instructions(hlo, "while"))


def transformer():
    ids = np.zeros((K, 2, 8), "int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fa.Trainer(fa.gpt(width=8, layers=2, heads=2, context=8), "adamw", loss), (ids, ids)


def two_outputs():
    """Trains two losses with denominators of their own, which are known before the first gradient
    at no cost.
    """
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activity_regularizer="l2")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1)(hidden), keras.layers.Dense(2)(hidden)])
    x, y, z = (np.zeros((K, B, n), "float32") for n in (3, 1, 2))
    return fa.Trainer(model, "adamw", ["mse", "mae"]), (x, (y, z))


@pytest.mark.parametrize(
    "make",
    [pytest.param(transformer, marks=[pytest.mark.slow, pytest.mark.sample]), two_outputs],
)
def test_every_loop_has_a_known_trip_count_in_other_models_too(make):
    trainer, stack = make()
    hlo = trainer.compiler_ir(stack)
    loops = instructions(hlo, "while")
    assert loops and all(f'known_trip_count":{{"n":"{K}"}}' in line for line in loops)
    matmuls = [line for line in loops if len(re.findall(r"f32\[\d+,\d+\]", line)) > 1]
    assert len(matmuls) == 1, "the forward pass stands in a second loop"
    assert not instructions(hlo, "conditional")


@pytest.mark.parametrize(
    "opcode", ["conditional", "infeed", "outfeed", "send", "recv", "send-done", "recv-done"]
)
def test_nothing_asks_the_host(hlo, opcode):
    assert not instructions(hlo, opcode)
    assert "xla_python" not in hlo and "host_callback" not in hlo and "xla_ffi_python" not in hlo


def test_accumulators_are_float32_under_mixed_float16(trainer, hlo):
    assert re.search(r"\bf16\[", trainer.compiler_ir(make_stack(), stage="hlo"))
    (loop,) = [line for line in instructions(hlo, "while") if f'"n":"{K}"' in line]
    carried = re.findall(r"\b(\w+)\[([\d,]*)\]", loop.split(" while(")[0])
    for variable in trainer.model.trainable_variables:
        shape = ",".join(map(str, variable.shape))
        assert ("f32", shape) in carried, variable.path
        if len(variable.shape) > 1:
            # (float16 copies of the weights may be carried: XLA hoists the cast out of the loop.)
            assert not re.search(rf"= f16\[{shape}\]\S* add\(", hlo), variable.path


def test_the_update_is_in_place(trainer, memory):
    """Variables and slots live in their arguments' buffers: no second copy of the weights."""
    parameters = sum(int(np.prod(v.shape)) for v in trainer.model.trainable_variables)
    assert memory.alias_bytes >= 3 * 4 * parameters


def test_memory_is_flat_in_the_number_of_micro_batches(trainer, memory):
    many = trainer.memory_analysis(make_stack(16 * K))
    assert many.temp_bytes <= 1.01 * memory.temp_bytes
    assert many.argument_bytes > memory.argument_bytes


def test_memory_is_that_of_a_plain_micro_step_and_the_accumulators():
    """Bounds memory by 4.2 bytes per parameter above one plain XLA step: the select of a skip costs
    none.
    """

    def model():
        return keras.Sequential(
            [keras.Input((64,)), *(keras.layers.Dense(512, "relu") for _ in range(3))]
        )

    plain, optimizer, loss = model(), keras.optimizers.AdamW(1e-3), keras.losses.MeanSquaredError()
    optimizer.build(plain.trainable_variables)

    @tf.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, plain(x, training=True))
        optimizer.apply(
            tape.gradient(value, [v.value for v in plain.trainable_variables]),
            plain.trainable_variables,
        )

    x, y = np.zeros((K, B, 64), "float32"), np.zeros((K, B, 512), "float32")
    fused = fa.Trainer(model(), keras.optimizers.AdamW(1e-3), loss).memory_analysis((x, y))
    alone = compiled.memory_analysis(step, tf.constant(x[0]), tf.constant(y[0]))
    assert fused.temp_bytes <= alone.temp_bytes + 4.2 * plain.count_params()


def test_memory_adds_up(memory):
    assert memory.peak_bytes == (
        memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temp_bytes
    )
    assert memory.temp_bytes > 0


def test_several_steps_in_one_program():
    """`steps_per_execution` is one loop around the loop, both with known trip counts."""
    trainer = make_trainer("float32", steps_per_execution=3)
    step, stack = trainer._step_inputs.prepare(make_stack())
    stacks = tf.nest.map_structure(lambda t: tf.stack([t] * 3), stack)
    hlo = compiled.compiler_ir(step.compiled_execute_many, stacks)
    counts = [int(n) for n in re.findall(r'known_trip_count":\{"n":"(\d+)"\}', hlo)]
    assert {3, K} <= set(counts)
    assert len(instructions(hlo, "while")) == len(counts)
    assert not instructions(hlo, "conditional")


def test_no_program_without_xla():
    with pytest.raises(ValueError, match=r"runs without XLA.*jit_compile=True"):
        make_trainer("float32", jit_compile=False).compiler_ir(make_stack())
