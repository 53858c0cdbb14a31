"""Reads the program of a trainer's step as StableHLO, and finds its variables there."""

import io
import sys
from pathlib import Path

# The helpers of the tests that compile for an H200 read such programs too.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
import h200
import hlo as hlo  # kept for other modules here

# Without a device to choose by, XLA's Triton would multiply float8 numbers in bfloat16.
FLOAT8_FLAGS = {"xla_gpu_enable_triton_gemm": False}


def of_train_step(trainer, stack):
    """Returns the parsed module, and the variables that follow the stack among its arguments."""
    exported = trainer.compiler_ir(stack, stage="stablehlo_serialized")
    step, batch = trainer._step_inputs.prepare(stack)
    signature = step.compiled_execute.function.get_concrete_function(batch)
    # A function that is called for several variables takes their handles: the program then has
    # these, and does not list the variables.
    of_keras = [*trainer.model.variables, *trainer.optimizer.variables]
    variables = [*signature.variables, *(variable.value for variable in of_keras)]
    by_handle = {id(variable.handle): variable for variable in variables}
    return h200.parse(exported), [by_handle[id(handle)] for handle in signature.captured_inputs]


def next_values(module):
    """Returns `{argument: result}`, the numbers of those that share a buffer."""
    results = {}
    with module.context:
        for entry in module.operation.attributes["mhlo.input_output_alias"]:
            argument = int(entry["alias"]["parameter_number"])
            results[argument] = int(entry["output_index"][0])
    return results


def serialized(module):
    """Returns the module's bytecode, with the locations of its operations in Python."""
    file = io.BytesIO()
    module.operation.write_bytecode(file)
    return file.getvalue()


def portable(module):
    """Returns the module in the serialized form that other versions of XLA read."""
    from jaxlib.mlir.dialects import stablehlo

    with module.context:
        return stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version())
