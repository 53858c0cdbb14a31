"""Counts the arithmetic of a compiled program from its instructions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fastaccum.memory.buffers import HloProto


class Cost(NamedTuple):
    """The arithmetic of one run of a program.

    A multiplication and its addition are two operations. Recomputed products count again, and
    elementwise operations do not count.
    """

    flops: int  # floating point operations of matrix products and convolutions
    # True if XLA does not know the length of a loop with products, which counts as one turn.
    at_least: bool = False


def count(protos: Iterable[HloProto]) -> Cost:
    """Adds up the costs of optimized programs; of a conditional, the costliest branch counts."""
    costs = []
    for proto in protos:
        module = proto.hlo_module
        costs.append(_Reader(module.computations).cost(module.entry_computation_id))
    return _sum(costs)


class _Reader:
    """The computations of a module, by their ids."""

    def __init__(self, computations: Iterable[HloProto]):
        self._computations: dict[int, HloProto] = {}
        self._instructions: dict[int, HloProto] = {}
        for computation in computations:
            self._computations[computation.id] = computation
            for instruction in computation.instructions:
                self._instructions[instruction.id] = instruction

    def cost(self, computation: int) -> Cost:
        """Adds up the costs of a computation and of those that it calls."""
        return _sum(map(self._cost_of, self._computations[computation].instructions))

    def _cost_of(self, instruction: HloProto) -> Cost:
        called = list(instruction.called_computation_ids)
        if instruction.opcode == "while":
            config = json.loads(instruction.backend_config or b"{}")
            trip_count = config.get("known_trip_count", {})
            body = self.cost(called[0])
            flops = int(trip_count.get("n", 1)) * body.flops
            has_unknown_turns = not trip_count and body.flops > 0
            return Cost(flops, body.at_least or has_unknown_turns)
        if instruction.opcode == "conditional":
            return max(map(self.cost, called))
        return _sum([Cost(self._flops(instruction)), *map(self.cost, called)])

    def _flops(self, instruction: HloProto) -> int:
        """Counts the operations of an instruction itself, which may be a library's call."""
        target = instruction.custom_call_target
        if instruction.opcode == "dot":
            dimensions = instruction.dot_dimension_numbers
            return self._product(instruction, dimensions.lhs_contracting_dimensions)
        if target.startswith("__cublas$"):
            config = json.loads(instruction.backend_config)["gemm_backend_config"]
            contracted = config["dot_dimension_numbers"]["lhs_contracting_dimensions"]
            return self._product(instruction, map(int, contracted))
        if instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
            return self._convolution(instruction)
        if target.startswith("__cudnn$fmha"):
            return self._attention(instruction)
        return 0

    def _product(self, instruction: HloProto, contracted: Iterable[int]) -> int:
        """Counts two operations for each element of the result and each contracted index."""
        sizes = self._operand(instruction, 0).shape.dimensions
        elements = math.prod(_arrays(instruction.shape)[0].dimensions)
        return 2 * elements * math.prod(sizes[axis] for axis in contracted)

    def _convolution(self, instruction: HloProto) -> int:
        """Counts two operations for each product of a weight and an input that an output adds up.

        A weight takes none where it lies on the padding.
        """
        image = list(self._operand(instruction, 0).shape.dimensions)
        filters = list(self._operand(instruction, 1).shape.dimensions)
        result = list(_arrays(instruction.shape)[0].dimensions)
        # cuDNN's gradients keep the names of axes of the forward pass, but return the gradient of
        # the image or the filters, and take that of the result as the operand in its place.
        if instruction.custom_call_target.endswith("BackwardInput"):
            image, result = result, image
        elif instruction.custom_call_target.endswith("BackwardFilter"):
            filters, result = result, filters

        axes = instruction.convolution_dimension_numbers
        rows = result[axes.output_batch_dimension] // max(1, instruction.batch_group_count)
        products = (
            rows
            * filters[axes.kernel_input_feature_dimension]
            * filters[axes.kernel_output_feature_dimension]
        )
        for window, image_axis, result_axis in zip(
            instruction.window.dimensions,
            axes.input_spatial_dimensions,
            axes.output_spatial_dimensions,
            strict=True,
        ):
            products *= _count_products(window, image[image_axis], result[result_axis])
        return 2 * products

    def _attention(self, instruction: HloProto) -> int:
        """Counts cuDNN's two products forward and five backward; a causal mask halves each."""
        config = json.loads(instruction.backend_config)["cudnn_fmha_backend_config"]
        scores = math.prod(map(int, config["intermediate_tensor_shape"]["dimensions"]))
        products = 2
        if "Backward" in instruction.custom_call_target:
            products = 5
        head_dim = self._operand(instruction, 0).shape.dimensions[-1]
        flops = 2 * products * scores * head_dim
        if "CAUSAL" in config.get("mask_type", ""):
            return flops // 2
        return flops

    def _operand(self, instruction: HloProto, number: int) -> HloProto:
        return self._instructions[instruction.operand_ids[number]]


def _count_products(window: HloProto, length: int, outputs: int) -> int:
    """Counts the products of a weight with an input that the outputs add up, along one axis."""
    base_dilation = window.base_dilation or 1
    stride = window.stride or 1
    window_dilation = window.window_dilation or 1
    dilated_length = (length - 1) * base_dilation + 1

    # The place in the dilated input that each output [rows] reads for each weight [columns].
    starts = np.arange(outputs)[:, np.newaxis] * stride - window.padding_low
    places = starts + np.arange(window.size) * window_dilation
    is_inside = (places >= 0) & (places < dilated_length)
    is_input = places % base_dilation == 0
    return int(np.sum(is_inside & is_input))


def _sum(costs: Iterable[Cost]) -> Cost:
    flops = 0
    at_least = False
    for cost in costs:
        flops += cost.flops
        at_least = at_least or cost.at_least
    return Cost(flops, at_least)


def _arrays(shape: HloProto) -> list[HloProto]:
    """Lists the arrays in a shape, which may be a tuple of tuples."""
    if not shape.tuple_shapes:
        return [shape]
    arrays = []
    for part in shape.tuple_shapes:
        arrays += _arrays(part)
    return arrays
