"""Runs one exported program on JAX's default device: `python -m benchmarks.gpu.run FOLDER PROGRAM`.

The module needs JAX and NumPy. The program goes to PJRT as it is. Each variable's buffer is donated
to its next value, as the program's aliases say, so that weights and slots exist once; results
become the next step's arguments.
"""

import argparse
import gzip
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import _jax, xla_client

from benchmarks.gpu import manifest, measure


class Executable:
    """Program compiled for JAX's default device.

    Args:
        folder: the exported programs.
        program: the program's entry in the manifest.
        **flags: XLA's debug options.
    """

    def __init__(self, folder, program, **flags):
        self.program = program
        self.device = jax.devices()[0]
        options = xla_client.CompileOptions()
        options.env_option_overrides = list(flags.items())
        stablehlo = gzip.decompress(Path(folder, program["file"]).read_bytes())
        start = time.perf_counter()
        self._loaded = self.device.client.compile_and_load(
            stablehlo, _jax.DeviceList((self.device,)), options
        )
        self.compile_seconds = time.perf_counter() - start

    def memory(self):
        """Returns XLA's memory plan in bytes, and the peak that it makes."""
        stats = self._loaded.get_compiled_memory_stats()
        argument = stats.argument_size_in_bytes
        output = stats.output_size_in_bytes
        alias = stats.alias_size_in_bytes
        temp = stats.temp_size_in_bytes
        return {
            "argument_bytes": argument,
            "output_bytes": output,
            "alias_bytes": alias,
            "temp_bytes": temp,
            "planned_peak_bytes": argument + output - alias + temp,
        }

    def start(self):
        """Puts the first values on the device."""
        values = manifest.initial_values(self.program)
        self._arguments = [
            jax.device_put(values.pop(argument["name"]), self.device)
            for argument in self.program["arguments"]
        ]

    def step(self):
        """Runs one train step and returns the loss, on the device."""
        results = [shards[0] for shards in self._execute()]
        for place, argument in enumerate(self.program["arguments"]):
            if argument["output"] is not None:
                self._arguments[place] = results[argument["output"]]
        return results[self.program["loss"]]

    def _execute(self):
        return self._loaded.execute_sharded(self._arguments).disassemble_into_single_device_arrays()


def matmul_rate(dtype):
    """Measures the FLOP/s of a large matmul of random numbers."""
    size = 8192 if jax.devices()[0].platform != "cpu" else 256
    left, right = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
    product = jax.jit(jnp.matmul)
    return measure.rate_of_matmuls(lambda: product(left, right), jax.block_until_ready, size)


def peak_bytes():
    """Returns the most bytes that JAX has held on the device, or None if it does not count them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def require_gpu(program, platform):
    """Raises SystemExit where JAX has only a CPU, and the program is large or calls cuDNN."""
    if platform == "cpu" and (program["purpose"] != "check" or program["attention"] == "auto"):
        raise SystemExit(
            f"{program['name']} needs a GPU, and JAX sees none: is it installed with CUDA?"
        )


def require_aliases(program, memory):
    """Raises AssertionError if weights and slots would exist twice."""
    kept = sum(
        int(np.prod(argument["shape"])) * np.dtype(argument["dtype"]).itemsize
        for argument in program["arguments"]
        if argument["output"] is not None
    )
    if memory["alias_bytes"] < 0.99 * kept:
        raise AssertionError(
            f"{program['name']}: of {kept} bytes of variables {memory['alias_bytes']} are "
            "updated in place."
        )


def main(argv=None):
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="from benchmarks.gpu.export")
    parser.add_argument("program", help="a program's name")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)  # some counters are int64
    program = manifest.chosen(parser, arguments)
    require_gpu(program, jax.devices()[0].platform)
    if program["purpose"] == "memory":
        # The program is not run, so it needs no tuning.
        memory = Executable(arguments.folder, program, xla_gpu_autotune_level=0).memory()
        require_aliases(program, memory)
        measure.show(contestant="fastaccum", program=program["name"], **memory)
        return
    executable = Executable(arguments.folder, program)
    memory = executable.memory()
    require_aliases(program, memory)
    executable.start()
    losses, seconds = measure.timed(executable.step, jax.block_until_ready)
    measure.require_losses(program, losses)
    peak = peak_bytes()  # before the matmul's operands
    measure.report(
        "fastaccum",
        program,
        losses,
        seconds,
        matmul_rate=matmul_rate(program["dtype"]),
        peak_bytes=peak,
        compile_seconds=executable.compile_seconds,
        device=executable.device.device_kind,
        versions={"jax": jax.__version__},
        **memory,
    )


if __name__ == "__main__":
    main()
