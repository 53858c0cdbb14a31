"""Models of images beside Keras's JAX backend: which part a kernel belongs to, and the command with
a tiny model.
"""

import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import fastaccum as fa
from benchmarks.h200 import __main__ as command
from benchmarks.h200 import beside_jax, summary, vision
from benchmarks.h200.kernels import Kernel

OURS, JAX = "while/gradient_tape/forward/resnet50", "jit(train_step)/while/body/closed_call"
ACTIVATIONS, KERNEL, CHANNELS = (64, 56, 56, 64), (3, 3, 64, 64), (64,)


def kernel(kind, scope, shape, flops=0.0, loops=(8,)):
    return Kernel("k", kind, scope, "", flops, 0.0, loops, (("f32", shape),))


@pytest.mark.parametrize(
    ("each", "part"),
    [
        (kernel("elementwise", "update/adamw/mul", KERNEL, loops=()), beside_jax.UPDATE),
        (
            kernel("attention", f"{JAX}/jvp(mha)/custom_call", ACTIVATIONS, 1.0),
            beside_jax.ATTENTION,
        ),
        (
            kernel(
                "convolution", "while/forward/resnet50/conv1_conv/convolution", ACTIVATIONS, 1.0
            ),
            beside_jax.FORWARD,
        ),
        (kernel("convolution", f"{JAX}/jvp(conv1_conv)/conv", KERNEL, 1.0), beside_jax.FORWARD),
        (
            kernel("convolution", f"{OURS}/conv1_conv/Conv2DBackpropInput", ACTIVATIONS, 1.0),
            beside_jax.DATA,
        ),
        (
            kernel("gemm", f"{JAX}/transpose(jvp(dense))/dot_general", ACTIVATIONS, 1.0),
            beside_jax.DATA,
        ),
        (
            kernel("convolution", f"{OURS}/conv1_conv/Conv2DBackpropFilter", KERNEL, 1.0),
            beside_jax.WEIGHTS,
        ),
        (
            kernel("reduce", "while/forward/resnet50/conv1_bn/moments/mean", CHANNELS),
            beside_jax.STATISTICS,
        ),
        (
            kernel("reduce", f"{JAX}/transpose(jvp(conv1_bn))/reduce_sum", CHANNELS),
            beside_jax.STATISTICS,
        ),
        (
            kernel("reduce", f"{OURS}/conv1_bn_1/batchnorm/mul_1/Sum", (576, 64)),
            beside_jax.STATISTICS,
        ),
        (kernel("reduce", f"{OURS}/conv1_conv/Sum", CHANNELS), beside_jax.REDUCES),
        (
            kernel("elementwise", f"{JAX}/transpose(jvp(conv1_relu))/mul", ACTIVATIONS),
            beside_jax.ELEMENTWISE,
        ),
        (
            kernel("reduce-window", "while/forward/resnet50/pool1_pool/MaxPool", ACTIVATIONS),
            beside_jax.ELEMENTWISE,
        ),
        (kernel("convert", f"{OURS}/conv1_conv/Cast", ACTIVATIONS), beside_jax.COPIES),
        (kernel("convert", f"{JAX}/jvp(conv1_conv)/convert", KERNEL), beside_jax.SUMS),
        (kernel("elementwise", "while/accumulate/add", CHANNELS), beside_jax.SUMS),
    ],
)
def test_the_part_that_a_kernel_belongs_to(each, part):
    assert beside_jax.part(each, {9 * 64 * 64}) == part


@pytest.mark.slow
@pytest.mark.sample
def test_the_command_compares_a_tiny_model_with_jax(capfd):
    pytest.importorskip("jax", reason='a peer is JAX: pip install "fastaccum[bench]"')
    command.main(["images", "tiny", "--size", "16", "--batch", "4", "--micro-batches", "2"])
    printed = capfd.readouterr().out
    ms, theirs, ratio, *_ = map(
        float, re.search(r"^\| tiny \| (.*) \|$", printed, re.M)[1].split(" | ")
    )
    assert min(ms, theirs, ratio) > 0
    for part in (
        beside_jax.FORWARD,
        beside_jax.WEIGHTS,
        beside_jax.STATISTICS,
        beside_jax.SUMS,
        beside_jax.UPDATE,
    ):
        _, launches, _, _, their_launches, _ = re.search(rf"^\| {part} \| (.*) \|$", printed, re.M)[
            1
        ].split(" | ")
        assert int(launches.replace(",", "")) and int(their_launches.replace(",", "")), part


@pytest.mark.slow
def test_only_kernels_of_several_pixels_have_their_gradient_from_float32_copies():
    """The tiny model has a convolution of 3 x 3 and one of 1 x 1 pixels, whose gradient is a
    product of halves.
    """
    program, _ = beside_jax.ours("tiny", beside_jax.Sizes(16, 4, micro_batches=2))
    products = summary.of(program)["matmuls"]
    assert products["f32 x f32 -> f32"] == 2
    assert products["bf16 x bf16 -> f32"] >= 2


TRAINED_BY_JAX = """
import sys
import jax
import numpy as np
from benchmarks.h200 import vision
from benchmarks.peers import jax_keras

jax.config.update("jax_platforms", "cpu")
given = dict(np.load(sys.argv[1]))
model, optimizer = vision.tiny(8), vision.optimizer(global_clipnorm=1.0)
model.set_weights([given.pop(f"weight {i}") for i in range(len(model.weights))])
optimizer.build(model.trainable_variables)
kept = model.trainable_variables, model.non_trainable_variables, optimizer.variables
step = jax_keras.make_train_step(model, optimizer, vision.loss())
*values, loss = step(*([v.value for v in variables] for variables in kept), given["x"], given["y"])
for variables, new in zip(kept, values, strict=True):
    for variable, value in zip(variables, new, strict=True):
        variable.assign(value)
np.savez(sys.argv[1], loss=loss, **{f"weight {i}": weight for i, weight in enumerate(model.get_weights())})
"""


@pytest.mark.slow
def test_jax_trains_the_same_model_by_the_same_update(tmp_path):
    """One update in float32, on a CPU: losses, weights and BatchNorm's statistics are ours."""
    pytest.importorskip("jax", reason='a peer is JAX: pip install "fastaccum[bench]"')
    keras.utils.set_random_seed(0)
    model, rng, path = vision.tiny(8), np.random.default_rng(0), tmp_path / "step.npz"
    x, y = (
        rng.normal(size=(3, 4, 8, 8, 3)).astype("float32"),
        rng.integers(0, vision.CLASSES, (3, 4)).astype("int32"),
    )
    np.savez(
        path, x=x, y=y, **{f"weight {i}": weight for i, weight in enumerate(model.get_weights())}
    )
    before = model.get_weights()
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    subprocess.run(
        [sys.executable, "-c", TRAINED_BY_JAX, path],
        check=True,
        cwd=beside_jax.ROOT,
        env=environment,
    )
    result = fa.Trainer(model, vision.optimizer(), vision.loss(), clip_norm=1.0).train_step((x, y))
    theirs = np.load(path)
    np.testing.assert_allclose(theirs["loss"], result.loss, rtol=1e-6)
    for i, (weight, old) in enumerate(zip(model.get_weights(), before, strict=True)):
        assert np.any(weight != old), i
        np.testing.assert_allclose(theirs[f"weight {i}"] - old, weight - old, rtol=0.01, atol=1e-6)
