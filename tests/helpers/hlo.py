"""Optimized HLO as a graph of values: how often each is computed, in which kernel, and where
gradients are summed.

Fusions are opened: what stands in one is a value like any other, and its `kernel` names the fusion.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r'known_trip_count":\{"n":"(\d+)"\}')
# What hands a value on without summing or selecting: in another layout, dtype or shape, or one
# layer of it.
_CARRIES = (
    "bitcast",
    "copy",
    "convert",
    "dynamic-slice",
    "get-tuple-element",
    "reshape",
    "slice",
    "transpose",
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `%name = dtype[shape] opcode(operands), attributes`.

    Attributes:
        types: dtype and shape of what it yields, of each part where that is a tuple.
        is_root: whether it yields what its computation does.
    """

    name: str
    types: tuple[tuple[str, tuple[int, ...]], ...]
    opcode: str
    arguments: str
    attributes: str
    is_root: bool = False

    @property
    def dtype(self):
        """Returns the dtype, of a tuple its first element's."""
        return self.types[0][0]

    @property
    def shape(self):
        """Returns the shape, of a tuple its first element's."""
        return self.types[0][1]

    @property
    def operands(self):
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def called(self, attribute):
        """The computation that an attribute names."""
        return re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)[1]

    @property
    def trip_count(self):
        """Returns how often a while loop runs, or None where XLA does not know."""
        known = _TRIP_COUNT.search(self.attributes)
        return int(known[1]) if known else None


@dataclasses.dataclass(eq=False)
class Value:
    """A value that an instruction yields at one of its calls.

    Attributes:
        instruction: the line that computes it.
        inputs: the values it is computed from.
        kernel: the fusion it is part of, or its own name.
        times: how often it is computed each time the program runs: the product of the trip counts
            around it.
        users: the values computed from it.
    """

    instruction: Instruction
    inputs: list[Value]
    kernel: str
    times: int
    users: list[Value] = dataclasses.field(default_factory=list)

    @property
    def opcode(self):
        return self.instruction.opcode

    @property
    def dtype(self):
        return self.instruction.dtype

    @property
    def shape(self):
        return self.instruction.shape


@dataclasses.dataclass(frozen=True)
class WeightGradient:
    """A matmul that yields the gradient of a kernel.

    Attributes:
        shape: the kernel's, smaller size first.
        operands: dtype of the matrices multiplied.
        dtype: the narrowest float on the way from the product (or its partial sums) to the
            accumulator.
        added: where the accumulator is added: in the matmul's "epilogue", in the "reduction" of its
            partial sums, "apart" in a kernel of its own, or None, nowhere.
        times: how often it is computed each time the program runs.
    """

    shape: tuple[int, ...]
    operands: str
    dtype: str
    added: str | None
    times: int


class Program:
    """The values of an optimized HLO module.

    Args:
        text: the module, as XLA prints it.
    """

    def __init__(self, text):
        self._computations, entry = parse(text)
        self.values: list[Value] = []
        self._open(entry, None, None, 1)
        for value in self.values:
            for given in value.inputs:
                given.users.append(value)

    def _open(self, computation, arguments, kernel, times):
        """Adds a computation's values; returns that of its root, a list where it is a tuple."""
        yielded = {}
        for instruction in self._computations[computation]:
            given = [yielded[name] for name in instruction.operands]
            inside = kernel or instruction.name
            opcode = instruction.opcode
            if opcode == "parameter" and arguments is not None:
                result = arguments[int(instruction.arguments)]
            elif opcode == "tuple":
                result = given
            elif opcode == "get-tuple-element" and isinstance(given[0], list):
                result = given[0][int(re.search(r"index=(\d+)", instruction.attributes)[1])]
            elif opcode == "fusion":
                result = self._open(instruction.called("calls"), given, inside, times)
            elif opcode == "call":
                result = self._open(instruction.called("to_apply"), given, kernel, times)
            else:
                if opcode == "while":
                    self._open(
                        instruction.called("body"),
                        None,
                        None,
                        times * (instruction.trip_count or 1),
                    )
                result = Value(instruction, _flat(given), inside, times)
                self.values.append(result)
            yielded[instruction.name] = result
        return result

    def count(self, *opcodes):
        """Counts the instructions with one of these opcodes, in any computation."""
        return sum(i.opcode in opcodes for lines in self._computations.values() for i in lines)

    @property
    def unknown_trip_counts(self):
        """Counts the loops whose trip count XLA does not know."""
        return sum(
            i.opcode == "while" and i.trip_count is None
            for lines in self._computations.values()
            for i in lines
        )

    def copies_in_loops(self, shapes):
        """float32 copies of something of one of these shapes, inside a loop."""
        shapes = {_size_ordered(shape) for shape in shapes}
        return [
            value
            for value in self.values
            if value.opcode in ("copy", "copy-start")
            and value.times > 1
            and value.dtype == "f32"
            and _size_ordered(value.shape) in shapes
        ]

    def weight_gradients(self, kernels):
        """The matmuls, split over their inner dimension or not, whose product has the shape of one
        of the kernels.

        Args:
            kernels: shapes, [in, out]. No other product of the program may have one of them, so the
                number of tokens must differ from all widths.
        """
        kernels = {_size_ordered(kernel) for kernel in kernels}
        for value in self.values:
            if value.opcode != "dot" and "__cublas$" not in value.instruction.attributes:
                continue
            split = "lhs_batch_dims" in value.instruction.attributes
            shape = _size_ordered(value.shape[1:] if split else value.shape)
            if shape in kernels:
                yield _weight_gradient(value, shape, split)


def parse(text):
    """The computations of an HLO module by name, each a list of instructions, and the name of its
    entry.
    """
    computations, entry, lines = {}, None, None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            root, name, type_, opcode, rest = found.groups()
            arguments, _, attributes = rest.partition(")")
            lines.append(
                Instruction(name, _types(type_), opcode, arguments, attributes, bool(root))
            )
    return computations, entry


def _types(text):
    found = _ARRAY.findall(text) or [(text, "")]
    return tuple(
        (dtype, tuple(int(size) for size in shape.split(",") if size)) for dtype, shape in found
    )


def _flat(given):
    return [
        value for each in given for value in (_flat(each) if isinstance(each, list) else [each])
    ]


def _size_ordered(shape):
    """A shape up to transposition and axes of size 1."""
    return tuple(sorted(size for size in shape if size != 1))


def _weight_gradient(product, shape, split):
    if re.search(r'"beta":1\b', product.instruction.attributes):
        # The library call adds its third operand, whose buffer it writes to.
        in_place = re.search(
            r"output_to_operand_aliasing=\{.*?: \(2, ", product.instruction.attributes
        )
        path, added = (
            [product],
            "epilogue" if in_place and _is_carried(product.inputs[2]) else "apart",
        )
    else:
        path, added = _way_to_the_accumulator(product, math.prod(shape)), None
        if path[-1].opcode == "add":
            reduced_in = [value.kernel for value in path if value.opcode == "reduce"]
            in_epilogue = not split and path[-1].kernel == product.kernel
            added = (
                "epilogue"
                if in_epilogue
                else "reduction"
                if path[-1].kernel in reduced_in
                else "apart"
            )
    narrowest = min(
        (value.dtype for value in path), key=lambda dtype: int(re.sub(r"\D", "", dtype))
    )
    return WeightGradient(shape, product.inputs[0].dtype, narrowest, added, product.times)


def _way_to_the_accumulator(product, size):
    """Returns the path from the product to the float32 add of the loop's value, or the product
    alone.
    """
    paths, seen = collections.deque([[product]]), {product}
    while paths:
        path = paths.popleft()
        for user in path[-1].users:
            if user in seen:
                continue
            if user.opcode == "add" and user.dtype == "f32":
                others = [value for value in user.inputs if value is not path[-1]]
                if all(_is_carried(value) and math.prod(value.shape) == size for value in others):
                    return [*path, user]
            if user.opcode in (*_CARRIES, "reduce"):
                seen.add(user)
                paths.append([*path, user])
    return [product]


def _is_carried(value):
    """Returns whether a value is what it was when the loop's body began."""
    # another layer's part of it may be new
    while value.opcode in (*_CARRIES, "dynamic-update-slice"):
        value = value.inputs[0]
    return value.opcode == "parameter"
