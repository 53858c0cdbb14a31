"""The program of a trainer's step as StableHLO, and which of its arguments and results the
variables are.
"""

import io
import sys
from pathlib import Path

# The helpers of the tests that compile for an H200 read such programs too.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
import h200
import hlo as hlo  # kept for other modules here


def of_train_step(trainer, stack):
    """The parsed module, and the variables among its arguments, in order: they follow the stack's
    tensors.
    """
    exported = trainer.compiler_ir(stack, stage="stablehlo_serialized")
    step, batch = trainer._step_inputs.prepare(stack)
    signature = step.compiled_execute.function.get_concrete_function(batch)
    by_handle = {id(variable.handle): variable for variable in signature.variables}
    return h200.parse(exported), [by_handle[id(handle)] for handle in signature.captured_inputs]


def next_values(module):
    """The number of the result that an argument's buffer takes, by the argument's number."""
    with module.context:
        aliases = module.operation.attributes["mhlo.input_output_alias"]
        return {int(a["alias"]["parameter_number"]): int(a["output_index"][0]) for a in aliases}


def serialized(module):
    """The module's bytecode, with locations, which name where its operations come from."""
    file = io.BytesIO()
    module.operation.write_bytecode(file)
    return file.getvalue()


def portable(module):
    """The module in the serialized form that other versions of XLA read."""
    from jaxlib.mlir.dialects import stablehlo

    with module.context:
        return stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version())
