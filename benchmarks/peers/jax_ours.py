"""Train step of ours, compiled and run by JAX: another XLA, and no TensorFlow runtime.

It is no peer: it shows the cost of TensorFlow's own runtime.
"""

import jax
import numpy as np
import tensorflow as tf
from jaxlib import _jax, xla_client

from benchmarks.support import contestants, stablehlo


def make(workload):
    """Makes the `TrainStep`."""
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
        tensors = tf.nest.flatten(contestants.feed_stack(stack))
        return [jax.device_put(tensor.numpy(), device) for tensor in tensors]

    def update(stack):
        execution = program.execute_sharded([*stack, *values])
        results = [shards[0] for shards in execution.disassemble_into_single_device_arrays()]
        for place in range(len(values)):
            argument = len(stack) + place
            if argument in next_values:
                values[place] = results[next_values[argument]]
        return results[0]  # the first field of the first result, StepResult.loss

    def weights():
        return [np.array(values[places[id(variable.value)]]) for variable in trainer.model.weights]

    return contestants.TrainStep(contestants.ForeignModel(weights), feed, update)
