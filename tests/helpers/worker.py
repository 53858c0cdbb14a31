"""One worker of several: `python worker.py PORTS INDEX MODE FOLDER`; `test_workers.py` starts them.

With MODE "train" it trains 20 steps, evaluates, predicts, then is given data that workers may not be given, and leaves
what came of it in FOLDER; with "forever" it trains until something ends it; with "saved" it trains with checkpoints in
FOLDER and goes on from them, and leaves its weights there.
"""

import json
import os
import pathlib
import sys
import time

import numpy as np

STEPS = 20


def data():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(45, width)).astype("float32") for width in (6, 3)]


def trained(model, optimizer, fa, x, y):
    """The trainer after STEPS steps: three of 2 micro-batches of 5 rows, then one of a single one, and so on."""
    trainer = fa.Trainer(model, optimizer, "mse", ["mae"], gradient_accumulation_steps=2, clip_norm=0.5)
    history = trainer.fit(x[:35], y[:35], batch_size=5, epochs=STEPS // 4, verbose=0)
    return trainer, history.history["loss"]


def make(keras, seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)])


def with_dropout(keras, seed):
    model = make(keras, seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.2), *model.layers])


def refusals(trainer, x, y, worker, tf):
    """The errors of data that differ between workers, by name."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

    def own_batches():
        for i in range(4 + 4 * worker):
            yield x[i : i + 4], y[i : i + 4]

    specs = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 3])
    apart = tf.data.Dataset.from_generator(own_batches, output_signature=specs).with_options(options)
    tf.random.set_seed(worker)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(45).batch(5)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    by_file = tf.data.Dataset.from_tensor_slices((x, y)).batch(5).with_options(options)
    errors = {}
    for name, dataset in (("apart", apart), ("shuffled", shuffled), ("by_file", by_file)):
        before = trainer.model.get_weights()
        applied = int(trainer.optimizer.iterations.numpy())
        try:
            trainer.fit(dataset, epochs=1, verbose=0)
            errors[name] = None
        except ValueError as error:
            moved = any((a != b).any() for a, b in zip(trainer.model.get_weights(), before, strict=True))
            errors[name] = [str(error), int(trainer.optimizer.iterations.numpy()) - applied, moved]
    return errors


def main(ports, index, mode, folder):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports.split(",")]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import fastaccum as fa

    x, y = data()
    with strategy.scope():
        make_model = with_dropout if mode == "saved" else make
        model = make_model(keras, seed=index)  # the chief's initial weights and shuffling are everyone's
    if mode == "forever":
        trainer = fa.Trainer(model, "adam", "mse", gradient_accumulation_steps=2, jit_compile=False)

        def told(batch, logs):
            print("step", flush=True)
            time.sleep(0.05)

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=told)
        trainer.fit(x, y, batch_size=5, epochs=10**6, verbose=0, callbacks=[callback])
        return
    if mode == "saved":
        adam = keras.optimizers.Adam(0.01)
        trainer = fa.Trainer(model, adam, "mse", gradient_accumulation_steps=2, jit_compile=False)
        slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.03))
        saved = {"checkpoint_dir": f"{folder}/checkpoints", "checkpoint_every": 7}
        trainer.fit(x, y, batch_size=5, epochs=12, callbacks=[slow], verbose=2, **saved)
        arrays = [*model.get_weights(), *(v.numpy() for v in trainer.optimizer.variables)]
        np.savez(pathlib.Path(folder) / f"weights{index}.npz", *arrays)
        return
    trainer, losses = trained(model, keras.optimizers.Adam(0.01), fa, x, y)
    weights = model.get_weights()
    outcome = {
        "losses": losses,
        "evaluated": trainer.evaluate(x, y, batch_size=6, verbose=0),
        "chief": trainer._replicas.is_chief,
        "broadcast": trainer._replicas.broadcast([index + 7]),
    }
    predicted = trainer.predict(x, batch_size=6, verbose=0)
    trainer._replicas.barrier()
    outcome["refused"] = refusals(trainer, x, y, index, tf)
    np.savez(pathlib.Path(folder) / f"weights{index}.npz", *weights, predicted)
    (pathlib.Path(folder) / f"outcome{index}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
