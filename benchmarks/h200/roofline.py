"""How long a program's kernels take at least, at stated rates; predicted, not measured.

A kernel takes the longest of its arithmetic, its memory traffic and a launch. What no device has
told: which form of a matmul autotuning finds, what caches save, what clocks do under load.
"""

from __future__ import annotations

import dataclasses

from benchmarks.h200.kernels import Kernel


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device sustains; by default an H200.

    Attributes:
        half: FLOP/s of matmuls of half-precision operands: about 80% of the peak of 989e12.
        tf32: of float32 operands, as TF32.
        bandwidth: bytes/s of memory: 83% of 4.8e12.
        launch: seconds that the smallest kernel takes.
        attention: part of `half` that cuDNN's attention reaches.
    """

    half: float = 790e12
    tf32: float = 400e12
    bandwidth: float = 4.0e12
    launch: float = 3e-6
    attention: float = 0.6


@dataclasses.dataclass(frozen=True)
class Timed:
    """A kernel and the milliseconds of all its launches in one run of the program.

    Attributes:
        kernel: what is launched.
        compute: milliseconds of its arithmetic.
        memory: of its traffic.
        launches: of its launches.
        ms: what it takes: the longest of the three, launch by launch.
    """

    kernel: Kernel
    compute: float
    memory: float
    launches: float

    @property
    def ms(self) -> float:
        return max(self.compute, self.memory, self.launches)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of a whole program, one train step.

    Attributes:
        kernels: each with its time.
        rates: what they are predicted with.
    """

    kernels: tuple[Timed, ...]
    rates: Rates

    @property
    def ms(self) -> float:
        """Each kernel at the pace of what holds it up; one after the other."""
        return sum(timed.ms for timed in self.kernels)

    @property
    def serial_ms(self) -> float:
        """Where nothing in a kernel overlaps, and no launch another kernel: all parts added up."""
        return sum(timed.compute + timed.memory + timed.launches for timed in self.kernels)

    @property
    def flops(self) -> float:
        return sum(timed.kernel.flops * timed.kernel.times for timed in self.kernels)

    @property
    def bytes(self) -> float:
        return sum(timed.kernel.bytes * timed.kernel.times for timed in self.kernels)

    def mfu(self, model_flops: float) -> float:
        """The part of `rates.half` that the model's own arithmetic takes.

        Args:
            model_flops: of one train step, where nothing is computed twice.
        """
        return model_flops / (self.ms * 1e-3 * self.rates.half)

    def launches(self, micro_batches: int) -> float:
        """Launches a micro-batch: those in loops over the micro-batches."""
        inside = (
            timed.kernel for timed in self.kernels if timed.kernel.loops[:1] == (micro_batches,)
        )
        return sum(kernel.times for kernel in inside) / micro_batches


def predict(kernels: list[Kernel], rates: Rates | None = None) -> Prediction:
    """Puts a program's kernels on the roofline of a device."""
    rates = rates or Rates()
    return Prediction(tuple(_timed(kernel, rates) for kernel in kernels), rates)


def _timed(kernel: Kernel, rates: Rates) -> Timed:
    half = not kernel.types.startswith("f32")
    rate = (rates.half if half else rates.tf32) * (
        rates.attention if kernel.kind == "attention" else 1
    )
    parts = (kernel.flops / rate, kernel.bytes / rates.bandwidth, rates.launch)
    return Timed(kernel, *(1e3 * kernel.times * part for part in parts))
