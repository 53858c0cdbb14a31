"""Predicts the least time of a program's kernels at stated rates.

A kernel takes the longest of its arithmetic, its memory traffic and a launch. The prediction does
not know which form of a matmul autotuning finds, what caches save, and clocks under load.
"""

from __future__ import annotations

import dataclasses

from benchmarks.h200.kernels import Kernel


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates that a device sustains; by default an H200.

    Attributes:
        half: FLOP/s of matmuls of half-precision operands: about 80% of the peak of 989e12.
        float8: of float8 operands: the same share of their peak, 1979e12 (NVIDIA's data sheet of
            the H200, without sparsity).
        tf32: of float32 operands, as TF32.
        bandwidth: bytes/s of memory: 83% of 4.8e12.
        launch: seconds of the smallest kernel.
        attention: cuDNN's rate as a fraction of `half`.
    """

    half: float = 790e12
    float8: float = 1580e12
    tf32: float = 400e12
    bandwidth: float = 4.0e12
    launch: float = 3e-6
    attention: float = 0.6


@dataclasses.dataclass(frozen=True)
class Timed:
    """Kernel with the milliseconds of all its launches in one run of the program.

    Attributes:
        kernel: the kernel.
        compute: milliseconds of its arithmetic.
        memory: milliseconds of its traffic.
        launches: milliseconds of its launches.
    """

    kernel: Kernel
    compute: float
    memory: float
    launches: float

    @property
    def ms(self) -> float:
        """The predicted milliseconds: the longest of the three."""
        return max(self.compute, self.memory, self.launches)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted times of a whole program, one train step.

    Attributes:
        kernels: each with its time.
        rates: of the device.
    """

    kernels: tuple[Timed, ...]
    rates: Rates

    @property
    def ms(self) -> float:
        """The milliseconds of all kernels, one after the other."""
        return sum(timed.ms for timed in self.kernels)

    @property
    def serial_ms(self) -> float:
        """The milliseconds if arithmetic, traffic and launches do not overlap at all."""
        return sum(timed.compute + timed.memory + timed.launches for timed in self.kernels)

    @property
    def flops(self) -> float:
        """The floating point operations of all kernels."""
        return sum(timed.kernel.flops * timed.kernel.times for timed in self.kernels)

    @property
    def bytes(self) -> float:
        """The bytes that all kernels move."""
        return sum(timed.kernel.bytes * timed.kernel.times for timed in self.kernels)

    def mfu(self, model_flops: float) -> float:
        """Returns the model's own arithmetic as a fraction of `rates.half`.

        Args:
            model_flops: of one train step, without recomputation.
        """
        return model_flops / (self.ms * 1e-3 * self.rates.half)

    def launches(self, micro_batches: int) -> float:
        """Returns the launches a micro-batch: those in loops over the micro-batches."""
        kernels = [timed.kernel for timed in self.kernels]
        launches = [kernel.times for kernel in kernels if kernel.loops[:1] == (micro_batches,)]
        return sum(launches) / micro_batches


def predict(kernels: list[Kernel], rates: Rates | None = None) -> Prediction:
    """Puts a program's kernels on the roofline of a device."""
    rates = rates or Rates()
    return Prediction(tuple(_timed(kernel, rates) for kernel in kernels), rates)


def _timed(kernel: Kernel, rates: Rates) -> Timed:
    rate = rates.half
    if kernel.types.startswith("f32"):
        rate = rates.tf32
    elif kernel.is_float8:
        rate = rates.float8
    if kernel.kind == "attention":
        rate *= rates.attention
    milliseconds = 1e3 * kernel.times
    return Timed(
        kernel,
        compute=milliseconds * (kernel.flops / rate),
        memory=milliseconds * (kernel.bytes / rates.bandwidth),
        launches=milliseconds * rates.launch,
    )
