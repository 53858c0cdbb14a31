"""tf_keras with the `gradient-accumulator` package: a wrapped model, and its `fit`."""

import tf_keras

import fastaccum as fa
from benchmarks.support.contestants import Fit, ForeignModel


def make(workload):
    """Makes the peer's `Fit` for a `Sequential` of `Dense` layers, rebuilt in tf_keras."""
    # The package finds its base classes behind `tf.keras`, which becomes tf_keras with
    # tensorflow-addons.
    fa.addons.optimizers  # noqa: B018
    from gradient_accumulator import GradientAccumulateModel

    keras_model = workload.model()
    adam = workload.optimizer()
    model = tf_keras.Sequential([tf_keras.Input(keras_model.input_shape[1:])])
    for layer in keras_model.layers:
        model.add(tf_keras.layers.Dense(layer.units, activation=layer.activation.__name__))
    model.set_weights(keras_model.get_weights())

    wrapped = GradientAccumulateModel(
        accum_steps=workload.micro_batches, inputs=model.input, outputs=model.output
    )
    wrapped.compile(
        optimizer=tf_keras.optimizers.Adam(
            float(adam.learning_rate), adam.beta_1, adam.beta_2, adam.epsilon
        ),
        loss=tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    def epoch(x, y):
        history = wrapped.fit(
            x, y, batch_size=workload.batch_size, epochs=1, shuffle=False, verbose=0
        )
        return history.history["loss"][-1]

    # The wrapper's own weights have its accumulators too; the layers are shared.
    return Fit(ForeignModel(model.get_weights), epoch)
