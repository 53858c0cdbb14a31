"""Train step of a GPT with the kernels, against unfused attention and Keras's own loss."""

import dataclasses

import keras
import tensorflow as tf

import fastaccum as fa
from benchmarks.support import agreement, contestants, models
from benchmarks.support.race import race
from benchmarks.support.scores import milliseconds, ratio
from fastaccum import transformer

NANO = dataclasses.replace(
    models.GPT,
    name="GPT nano",
    micro_batches=4,
    batch_size=8,
    build=lambda: fa.gpt(preset="nano"),
    step_updates=2,
    rounds=25,
)


class UnfusedAttention(transformer.CausalSelfAttention):
    """Causal self-attention without the kernel, as one writes it in Keras."""

    def call(self, x_BTD):
        batch = tf.shape(x_BTD)[0]
        _, time, width = x_BTD.shape
        qkv = tf.reshape(self.qkv(x_BTD), [batch, time, 3, self.heads, self.head_width])
        q, k, v = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))
        cos = tf.transpose(transformer._rotary(time, self.head_width, sine=False), [1, 0, 2])
        sin = tf.transpose(transformer._rotary(time, self.head_width, sine=True), [1, 0, 2])
        q = transformer._rotate(q, cos, sin)
        k = transformer._rotate(k, cos, sin)
        scores = tf.matmul(q * self.head_width**-0.5, k, transpose_b=True)
        position = tf.range(time)
        weights = tf.nn.softmax(tf.where(position[:, None] >= position[None, :], scores, -1e30))
        mixed = tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3])
        return self.out(tf.reshape(mixed, [batch, time, width]))


def unfused():
    model = NANO.model()
    for block in model.layers:
        if isinstance(block, transformer.TransformerBlock):
            block.attention.__class__ = UnfusedAttention
    return trainer(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def trainer(model, loss):
    accumulation = NANO.micro_batches
    return fa.Trainer(
        model, NANO.optimizer(), loss, gradient_accumulation_steps=accumulation, clip_norm=1.0
    )


def test_main_job(benchmark, report):
    ours = contestants.as_train_step(trainer(NANO.model(), fa.LinearCrossEntropy()))
    before = contestants.as_train_step(unfused())
    agreement.assert_agree(
        agreement.outcome_of_train_step(ours, NANO),
        agreement.outcome_of_train_step(before, NANO),
        "unfused",
    )
    updates = 1 if benchmark.disabled else NANO.step_updates
    batches = [contestants.feed_stack(stack) for stack in NANO.stacks(updates)]

    def block(step):
        def run():
            for batch in batches:
                loss = step.update(batch)
            return float(loss)

        return run

    times = race(benchmark, block(ours), {"unfused": block(before)}, NANO.rounds)
    if times:
        note = (
            f"ours {milliseconds(times['ours'], updates)}, unfused "
            f"{milliseconds(times['unfused'], updates)}"
        )
        report("train step: kernels / unfused", NANO, ratio(times["ours"], times["unfused"]), note)
