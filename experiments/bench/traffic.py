"""Bytes that one step of a compiled program moves between a device's memory and its cores, read off the program's text.

The compiler's own count adds up the operands and results of every instruction, those in a TPU's scratchpad included, so
that an array which is first fetched there counts twice or three times. Here an array counts where it lies in the
device's memory, and only the part that is read or written: the slice of a `dynamic-slice`, the rows of a gather, the
update of a `dynamic-update-slice`. A loop inside the step counts as often as its condition lets it run, where that is a
constant.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvjax import KvjaxError

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
ARRAY = re.compile(r"(?P<type>[a-z]+[0-9]*\w*)\[(?P<shape>[0-9,]*)\](?P<layout>\{[^}]*\})?")
SPACE = re.compile(r"S\((\d+)\)")
CALLED = re.compile(r"(?:body|condition|calls|to_apply|branch_computations)=\{?%?([\w.\-]+)")
RUN = re.compile(r"(?:body|to_apply|branch_computations)=\{?%?([\w.\-]+)")  # the computations that are a step's work
# These move nothing: they name arrays, look at them in another way, or end what another instruction started.
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id", "iota"}
# Inside a fusion the other instructions run number by number, and only where a later one reads their result.
WHOLE = {"convolution", "dot", "reduce", "reduce-window", "sort", "custom-call", "pad", "concatenate", "reverse"}
SLICES = {"dynamic-slice", "slice", "gather"}
HOST = "5"  # the memory space of the host in layouts, S(5); the device's own memory has no number
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # -> the operand that is written


class Instruction(NamedTuple):
    """One instruction of a computation."""

    name: str
    types: tuple[tuple[int, str], ...]  # (bytes, memory space) of each array of the result
    count: int  # numbers in the first of them
    kind: str
    operands: tuple[str, ...]
    text: str  # behind the operands
    is_root: bool

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.types)

    @property
    def device_size(self) -> int:
        return sum(size for size, space in self.types if not space)

    @property
    def is_on_host(self) -> bool:
        """Whether an array of the result, which a start shares with its operand, lies in host memory."""
        return any(space == HOST for _, space in self.types)


@dataclasses.dataclass(eq=False)
class Program:
    """The computations of a compiled program, by name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @classmethod
    def from_text(cls, text: str) -> Program:
        computations: dict[str, dict[str, Instruction]] = {}
        entry = name = ""
        for line in text.splitlines():
            if found := COMPUTATION.match(line):
                name = found[2]
                computations[name] = {}
                entry = name if found[1] else entry
            elif name and (found := INSTRUCTION.match(line)):
                instruction = _parse(found["name"], found["rest"], bool(found["root"]))
                computations[name][instruction.name] = instruction
        return cls(computations, entry)

    @functools.cached_property
    def body(self) -> str:
        """The computation that is one step: the body of the longest loop; raises KvjaxError if there is no loop."""
        loops = [x for x in self.computations[self.entry].values() if x.kind == "while"]
        bodies = [name for x in loops for name in re.findall(r"body=%?([\w.\-]+)", x.text)]
        if not bodies:
            raise KvjaxError("the compiled program has no loop")
        # Preparations may loop, too; none of their loops is as long as a step of all layers.
        return max(bodies, key=self._length)

    def step_counts(self, full_size: int) -> dict[str, int]:
        """Counts the bytes that a step moves.

        Args:
          full_size: bytes from which on a copy counts as one of a whole array.

        Returns:
          `step_bytes` read and written in the device's memory; `copied_bytes` of what copies write there, `full_copies`
          as many of them as are that large; `fetched_bytes` from host memory.
        """
        body = list(self.unrolled(self.body))
        # A copy from the device's memory into the scratchpad is how an array is read, and no waste; one back is.
        copies = [x.types[0][0] for x in body if x.kind in ("copy", "copy-start") and not x.types[0][1]]
        started = {x.name for x in body if x.kind.endswith("-start") and x.is_on_host}
        fetched = [x for x in body if x.kind.endswith("-done") and x.operands[0] in started]
        return {
            "step_bytes": self._step_bytes(),
            "copied_bytes": sum(copies),
            "full_copies": sum(size >= max(full_size, 1) for size in copies),
            "fetched_bytes": sum(x.size for x in fetched if any(space != HOST for _, space in x.types)),
        }

    def _step_bytes(self) -> int:
        # The scratchpad holds arrays through the whole loop where it has room, which it has for a layer or two and not
        # for a model: such arrays count as if they lay in the device's memory, and so do they after an update in place.
        scope = self.computations[self.body]
        carried = {name for name, x in scope.items() if x.kind == "parameter"}
        held: set[str] = set()
        for name, x in scope.items():
            is_carried = x.kind == "get-tuple-element" and x.operands[0] in carried
            updated = [scope[y] for y in x.operands if y in held and scope[y].size == x.size]
            if x.kind == "fusion":
                in_place = bool(updated) and self._written(CALLED.findall(x.text)[0], x, anywhere=True) < x.size
            else:
                in_place = x.kind in (*UPDATES, "bitcast") and bool(updated)
            if is_carried or in_place:
                held.add(name)
                scope[name] = x._replace(types=tuple((size, "" if at != HOST else at) for size, at in x.types))
        return self.bytes_of(self.body)

    def unrolled(self, computation: str) -> Iterator[Instruction]:
        """Instructions of a computation and, in place of the loops, calls and branches in it, of these, each once."""
        for x in self.computations[computation].values():
            if x.kind in ("while", "call", "conditional"):
                for name in RUN.findall(x.text):
                    yield from self.unrolled(name)
            else:
                yield x

    def bytes_of(self, computation: str) -> int:
        """Bytes that a computation reads and writes in the device's memory."""
        return sum(self.instruction_bytes(computation, x) for x in self.computations[computation].values())

    def _length(self, computation: str) -> int:
        called = (name for x in self.computations[computation].values() for name in CALLED.findall(x.text))
        return len(self.computations[computation]) + sum(self._length(name) for name in called)

    def instruction_bytes(self, computation: str, x: Instruction) -> int:
        """Bytes that an instruction of a computation reads and writes in the device's memory."""
        if x.kind in FREE or x.kind.endswith("-done"):
            return 0
        called = [name for name in CALLED.findall(x.text) if name in self.computations]
        if x.kind == "while":
            (body,) = re.findall(r"body=%?([\w.\-]+)", x.text)
            return self.num_rounds(x) * self.bytes_of(body)
        if x.kind == "conditional":
            return max(map(self.bytes_of, called), default=0)
        if x.kind == "call":
            return sum(map(self.bytes_of, called))
        scope = self.computations[computation]
        operands = [scope[name] for name in x.operands if name in scope]
        if x.kind in ("copy-start", "slice-start"):
            # The result is the copy, its source and a context; the copy is what is moved, whichever side it is on.
            copy, source = x.types[:2] if x.kind == "copy-start" else (x.types[1], x.types[0])
            return copy[0] * ((not copy[1]) + (not source[1]))
        if x.kind == "fusion" and called:
            return self._fusion_bytes(called[0], operands) + self._written(called[0], x)
        if x.kind in UPDATES:
            update = operands[UPDATES[x.kind]] if len(operands) > UPDATES[x.kind] else x
            return update.device_size + (update.size if x.device_size else 0)
        if x.kind in SLICES:
            return (x.size if operands and operands[0].device_size else 0) + x.device_size
        return sum(y.device_size for y in operands) + x.device_size

    def _fusion_bytes(self, computation: str, operands: Sequence[Instruction]) -> int:
        """Bytes that a fusion reads of its operands."""
        inside = self.computations[computation]
        parameters = {int(x.operands[0]): x for x in inside.values() if x.kind == "parameter" and x.operands}
        read = 0.0
        for i, operand in enumerate(operands):
            if operand.device_size and i in parameters:
                read += operand.device_size * self._fraction_read(computation, parameters[i].name)
        return round(read)

    def _fraction_read(self, computation: str, name: str) -> float:
        """The fraction of an array that a fused computation reads; 1 where all of it may be read."""
        inside, fraction = self.computations[computation], 0.0
        for user in inside.values():
            if name not in user.operands or user.kind == "parameter":
                continue
            is_first, count = user.operands[0] == name, max(inside[name].count, 1)
            if user.kind in SLICES and is_first:
                fraction += user.count / count
            elif user.kind in UPDATES and is_first:
                continue  # in place: the rest of the array stays where it is
            elif user.kind == "fusion" and (called := CALLED.findall(user.text)):
                for i, operand in enumerate(user.operands):
                    if operand == name:
                        parameters = self.computations[called[0]].values()
                        inner = [x.name for x in parameters if x.kind == "parameter" and x.operands == (str(i),)]
                        read = sum(self._fraction_read(called[0], x) for x in inner)
                        # A fusion within, of as many numbers, hands them on one by one.
                        hands_on = read >= 1 and user.count == count and not user.is_root
                        fraction += self._fraction_read(computation, user.name) if hands_on else read
            elif user.kind not in WHOLE and user.count == count and not user.is_root:
                fraction += self._fraction_read(computation, user.name)
            else:
                return 1.0
        return min(fraction, 1.0)

    def _written(self, computation: str, fusion: Instruction, anywhere: bool = False) -> int:
        """Bytes that a fusion writes to the device's memory, or to any."""
        inside = self.computations[computation]
        (root,) = [x for x in inside.values() if x.is_root]
        results = [inside[name] for name in root.operands if name in inside] if root.kind == "tuple" else [root]
        if len(results) != len(fusion.types):
            return fusion.device_size
        written = 0
        for result, (size, space) in zip(results, fusion.types, strict=True):
            if anywhere or not space:
                written += min(size, self._update_size(inside, result))
        return written

    def _update_size(self, inside: dict[str, Instruction], result: Instruction) -> int:
        while result.kind in ("bitcast", "reshape") and result.operands[0] in inside:
            result = inside[result.operands[0]]
        if result.kind in UPDATES and len(result.operands) > UPDATES[result.kind]:
            return inside[result.operands[UPDATES[result.kind]]].size
        if result.kind == "fusion" and (called := CALLED.findall(result.text)):
            (root,) = [x for x in self.computations[called[0]].values() if x.is_root]
            return self._update_size(self.computations[called[0]], root)
        return result.size

    def num_rounds(self, loop: Instruction) -> int:
        """Rounds of a loop that counts up to a constant; 1 where the program does not tell."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(known[1])
        (condition,) = re.findall(r"condition=%?([\w.\-]+)", loop.text)
        return max(1, *self._constants(condition)) if condition in self.computations else 1

    def _constants(self, computation: str) -> list[int]:
        found = [1]
        for x in self.computations[computation].values():
            if x.kind == "constant" and x.operands and x.operands[0].isdigit():
                found.append(int(x.operands[0]))
            for called in CALLED.findall(x.text):
                found += self._constants(called)
        return found


def _parse(name: str, rest: str, is_root: bool) -> Instruction:
    # A type is one array, or a tuple in parentheses, which layouts have too.
    end = _closes(rest, " ", 0)
    types, (kind, _, behind) = rest[:end], rest[end + 1 :].partition("(")
    close = _closes(behind, ")", 1)
    operands = tuple(word.strip().rpartition(" ")[2].lstrip("%") for word in _split(behind[:close]))
    found = list(ARRAY.finditer(types))
    arrays = tuple((array_bytes(x["type"], x["shape"]), (SPACE.findall(x["layout"] or "") or [""])[0]) for x in found)
    count = math.prod(int(n) for n in found[0]["shape"].split(",") if n) if found else 0
    return Instruction(name, arrays, count, kind, operands, behind[close:], is_root)


def _closes(text: str, letter: str, depth: int) -> int:
    """The index of the first such letter outside of all brackets, of which `depth` are open at the start."""
    for i, x in enumerate(text):
        depth += (x in "({[") - (x in ")}]")
        if x == letter and depth == 0:
            return i
    return len(text)


def _split(operands: str) -> list[str]:
    """Splits at the commas outside of all brackets."""
    words, depth = [""], 0
    for letter in re.sub(r"/\*.*?\*/", "", operands):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word for word in words if word.strip()]


@functools.cache
def array_bytes(dtype: str, shape: str) -> int:
    """Bytes of an array by its type in HLO, such as "bf16" and "4,128"."""
    bits = 8 if dtype == "pred" else int(re.sub(r"\D.*", "", dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) or 0)
    return math.ceil(bits * math.prod(int(n) for n in shape.split(",") if n) / 8)
