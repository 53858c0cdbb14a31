"""Holds correct uses: type checkers must accept all of it, and infer the results."""

import keras
import numpy as np
import tensorflow as tf

import fastaccum as fa


def trains(model: keras.Model, x: np.ndarray, y: np.ndarray) -> list[float]:
    trainer = fa.Trainer(
        model,
        keras.optimizers.AdamW(3e-4),
        fa.LinearCrossEntropy(),
        metrics=["accuracy"],
        gradient_accumulation_steps=16,
        loss_scale=fa.DynamicLossScale(init_scale=1024.0),
        clip_norm=1.0,
        steps_per_execution=4,
        on_nonfinite="raise",
        shard_optimizer=True,
        max_programs=6,
    )
    plan: fa.Plan = fa.plan(
        trainer, (x, y), global_batch_size=64, memory_limit="16GiB", recompute="auto"
    )
    print(plan)
    summary: fa.Summary = trainer.summary(x, y, batch_size=8, verbose=False)
    print(summary.flops, summary.memory.by_kind["activations"])
    trainer.fit(
        x, y, batch_size="auto", global_batch_size=plan.batch_size * plan.accumulation_steps
    )
    try:
        history = trainer.fit(
            x,
            y,
            batch_size=4,
            epochs=3,
            verbose=2,
            validation_data=(x, y),
            callbacks=[keras.callbacks.CSVLogger("log.csv")],
            checkpoint_dir="checkpoints",
            checkpoint_every=50,
            resume={"learning_rate"},
        )
    except (fa.NonFiniteError, fa.Preempted):
        return []
    trainer.evaluate(x, y, batch_size=8, return_dict=True)
    trainer.predict(x)
    found = fa.checkpoint.latest("checkpoints")
    print(fa.__version__, found.step if found else 0)
    return history.history["loss"]


def takes_one_step(model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> float:
    trainer = fa.Trainer(model, "sgd", "mse", loss_scale=fa.NoLossScale())
    result: fa.StepResult = trainer.train_step((x, y))
    print(
        trainer.memory_analysis((x, y)).temp_bytes,
        trainer.compiler_ir((x, y), stage="optimized_hlo"),
    )
    return float(result.loss)


def reads(
    trainer: fa.Trainer, dataset: tf.data.Dataset, batches: keras.utils.PyDataset, rows: np.ndarray
) -> None:
    trainer.fit(dataset, validation_data=batches)
    trainer.fit(batches, validation_data=dataset)
    trainer.fit((pair for pair in [(rows, rows)]), steps_per_epoch=1)
    trainer.fit(
        {"ids": rows, "mask": tf.constant(rows)}, [rows, rows], validation_data=(rows, rows, rows)
    )
    trainer.evaluate([rows, rows], rows.tolist(), sample_weight={"a": rows})
    trainer.predict(tf.ragged.constant([[1], [2, 3]]))
    fa.plan(trainer, dataset, global_batch_size=64)
    trainer.train_step((rows, None))


def core(w: tf.Variable, stack: tf.Tensor) -> fa.StepResult:
    def loss(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.reduce_sum((x @ w) ** 2), tf.constant(4.0)

    step = fa.TrainStep(loss, [w], keras.optimizers.SGD(0.1), loss_scale=fa.StaticLossScale(8.0))
    return step(stack)


def kernels(
    hidden: tf.Tensor, kernel: tf.Variable, labels: tf.Tensor, query: tf.Tensor
) -> tf.Tensor:
    fa.kernels.fp32_weight_gradients(fa.gpt(preset="nano"))
    fa.kernels.LayerStack(lambda: keras.layers.Dense(8), depth=4)
    attended = fa.kernels.attention(query, query, query, causal=True, implementation="reference")
    product = fa.kernels.matmul_fp32_wgrad(hidden, kernel)
    product += fa.kernels.matmul_float8(hidden, kernel, implementation="reference")
    product += fa.kernels.einsum_float8("ti,io->to", hidden, kernel)
    return fa.kernels.linear_cross_entropy(product, kernel, labels) + tf.reduce_sum(attended)
