"""The train step compiled for an H200, on any machine: no GPU, driver or CUDA toolkit is needed.

XLA compiles for a device that is only described, with the compiler that JAX's CUDA plugin ships
(`pip install "fastaccum[h200]"`). What it shows is a proxy, to be read again on hardware: that
compiler's version of XLA is not TensorFlow's, and with no device it cannot time its candidates for
a matmul, so it takes one by rule.
"""

import contextlib
import functools
import importlib.util
import math
import re
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from fastaccum.kernels import cudnn_attention, devices, layer_loop, xla_ops
from fastaccum.memory import device
from fastaccum.step.compiler_ir import MemoryAnalysis

# stream_executor.GpuTargetConfigProto, what XLA knows of a device; the figures are those of
# OpenXLA's own description, xla/backends/gpu/target_config/specs/h200.txtpb.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200 141GB HBM3e"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200 141GB HBM3e"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def export_step(trainer, stack):
    """The step for a stack of this shape, as the StableHLO that a GPU would get.

    Args:
        trainer: a Trainer that has not been used yet: this traces its step as on a GPU.
        stack: as `trainer.train_step` takes it.
    """
    _compiler()  # skips first
    with as_on_a_gpu():
        return trainer.compiler_ir(stack, stage="stablehlo_serialized")


def compile_for_h200(exported, **flags):
    """Compiles StableHLO.

    Args:
        exported: from `export_step`.
        **flags: XLA's debug options.

    Returns:
        The optimized HLO, and the memory that XLA planned, a `MemoryAnalysis`.
    """
    client, devices = _compiler()
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.env_option_overrides = list(flags.items())
    executable = client.compile(parse(exported), devices, options)
    (optimized,) = executable.hlo_modules()
    memory = executable.get_compiled_memory_stats()
    return optimized.to_string(), MemoryAnalysis(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def cost_analysis(optimized):
    """Returns XLA's counts of an optimized module, "flops" and "bytes accessed".

    Each loop's body counts once, and library calls do not count.
    """
    from jaxlib import _jax, xla_client

    return _jax.hlo_module_cost_analysis(
        xla_client.make_cpu_client(), xla_client.hlo.hlo_module_from_text(optimized)
    )


@contextlib.contextmanager
def as_on_a_gpu(cudnn=True, compute_capability=(9, 0)):
    """Lets `has_gpu()` say so: what is traced inside is what a GPU would get.

    Args:
        cudnn: what the trial of cuDNN's attention answers, which no description can run; None lets
            it run here.
        compute_capability: of that GPU; an H200's by default.
    """
    asked, details = (
        (devices.has_gpu, devices.compute_capability),
        {"compute_capability": compute_capability},
    )
    memory = int(re.search(r"device_memory_size: (\d+)", H200)[1])
    with contextlib.ExitStack() as stack:
        for each in asked:
            each.cache_clear()
            stack.callback(each.cache_clear)
        with (
            mock.patch.object(tf.config, "list_logical_devices", return_value=["GPU"]),
            mock.patch.object(tf.config, "get_visible_devices", return_value=["GPU"]),
            mock.patch.object(tf.config.experimental, "get_device_details", return_value=details),
        ):
            for each in asked:
                each()
        stack.enter_context(mock.patch.object(layer_loop, "device_memory", lambda: memory))
        described = device.DeviceMemory(memory, 0, memory, "the description")
        stack.enter_context(mock.patch.object(device, "_gpu", lambda name: described))
        stack.enter_context(mock.patch.object(xla_ops, "_allocates", lambda device: True))
        stack.enter_context(mock.patch.object(cudnn_attention, "_device", lambda: "/device:GPU:0"))
        if cudnn is not None:
            reason = None if cudnn else "the description says so"
            stack.enter_context(
                mock.patch.object(cudnn_attention, "_tried", lambda call, device: reason)
            )
        yield


@contextlib.contextmanager
def weightless():
    """Keras variables made inside are zeros that share one buffer for each dtype, of which nobody
    takes memory: it is not written.
    """
    buffers, init = {}, keras.Variable.__init__

    def zeros(shape, dtype):
        dtype = tf.as_dtype(dtype)
        # TensorFlow takes no bfloat16 of NumPy's, and seeds are few numbers.
        taken_as = {tf.float32: "float32", tf.int8: "int8", tf.bfloat16: "int16"}.get(dtype)
        if taken_as is None:
            return tf.zeros(shape, dtype)
        size = math.prod(shape)
        if taken_as not in buffers or size > buffers[taken_as].shape[0]:
            buffers[taken_as] = _unwritten_zeros(size, taken_as)
        values = tf.reshape(buffers[taken_as][:size], shape)
        return tf.bitcast(values, dtype) if dtype == tf.bfloat16 else values

    def init_with_zeros(self, initializer, shape=None, **kwargs):
        init(self, initializer if shape is None else zeros, shape=shape, **kwargs)

    with mock.patch.object(keras.Variable, "__init__", init_with_zeros):
        yield


def _unwritten_zeros(size, dtype):
    """Zeros, [size], in memory that the system hands out when it is written."""
    zeros = np.zeros(size + 64, dtype)
    # as TensorFlow takes memory without copying
    aligned = -zeros.ctypes.data % 64 // zeros.itemsize
    return tf.experimental.dlpack.from_dlpack(zeros[aligned : aligned + size].__dlpack__())


@functools.cache
def _compiler():
    """The compile-only client and its one device; skips the test where the plugin is not
    installed.
    """
    plugin = _plugin()
    if plugin is None:
        pytest.skip(
            'compiling for a GPU takes the compiler in JAX\'s CUDA plugin: pip install "fastaccum[h200]"'
        )
    from jaxlib import _jax, xla_client

    api = xla_client.load_pjrt_plugin_dynamically("cuda compiler", str(plugin))
    xla_client.initialize_pjrt_plugin("cuda compiler")
    topology = _jax.get_c_api_topology(api, "", {"target_config": H200, "topology": "1x1x1"})
    devices = tuple(topology._make_compile_only_devices())
    return devices[0].client, _jax.DeviceList(devices)


def _plugin():
    """The plugin's library. Its Python package is not imported, since it would want a driver and
    JAX itself.
    """
    if all(importlib.util.find_spec(name) for name in ("jaxlib", "jax_plugins")):
        package = importlib.util.find_spec("jax_plugins.xla_cuda12")
        return package and Path(package.origin).with_name("xla_cuda_plugin.so")
    return None


def parse(exported):
    """TensorFlow's StableHLO as MLIR that jaxlib takes."""
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, stablehlo

    context, dialects = ir.Context(), ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(dialects)
    context.append_dialect_registry(dialects)
    context.load_all_available_dialects()
    for register in (stablehlo.register_dialect, chlo.register_dialect, mhlo.register_mhlo_dialect):
        register(context)
    with context:
        module = ir.Module.parse(exported)
        _drop_copies(module.operation)
    return module


def _drop_copies(operation):
    """TensorFlow marks some values with `mhlo.copy`, the one operation that is no StableHLO: XLA
    copies as it needs.
    """
    for region in operation.regions:
        for block in region:
            for inner in list(block.operations):
                _drop_copies(inner.operation)
                if inner.operation.name == "mhlo.copy":
                    inner.operation.results[0].replace_all_uses_with(inner.operation.operands[0])
                    inner.operation.erase()
