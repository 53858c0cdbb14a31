"""Our own train step, compiled and run by JAX: the same program, with another XLA and without
TensorFlow's runtime.

Not a peer: it shows what TensorFlow's own runtime costs ours.
"""

import jax
import numpy as np
import tensorflow as tf
from jaxlib import _jax, xla_client

from benchmarks.support import contestants, stablehlo


def make(workload):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)  # some counters are int64
    trainer = contestants.trainer(workload, jit_compile=True)
    stack = contestants.feed_stack(workload.stacks(1)[0])
    module, variables = stablehlo.of_train_step(trainer, stack)
    device = jax.devices()[0]
    program = device.client.compile_and_load(
        stablehlo.portable(module), _jax.DeviceList((device,)), xla_client.CompileOptions()
    )
    next_values = stablehlo.next_values(module)
    values = [jax.device_put(variable.numpy(), device) for variable in variables]
    places = {id(variable): place for place, variable in enumerate(variables)}

    def feed(stack):
        return [
            jax.device_put(t.numpy(), device)
            for t in tf.nest.flatten(contestants.feed_stack(stack))
        ]

    def update(stack):
        nonlocal values
        executed = program.execute_sharded(
            [*stack, *values]
        ).disassemble_into_single_device_arrays()
        results = [shards[0] for shards in executed]
        values = [
            results[next_values[number]] if number in next_values else value
            for number, value in enumerate(values, len(stack))
        ]
        return results[0]  # the first field of the first result, StepResult.loss

    def weights():
        return [np.array(values[places[id(variable.value)]]) for variable in trainer.model.weights]

    return contestants.TrainStep(contestants.ForeignModel(weights), feed, update)
