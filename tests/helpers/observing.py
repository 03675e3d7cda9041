"""Every operator that MXNet has, bound alone as schedules observe gradients; run in a process.

What an operator takes is guessed from what MXNet tells of it: inputs of a few shapes and types, and
for what must be given the first values that could be meant.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
import re
import sys
from typing import Any, Iterator

import memonger  # noqa: F401
import mxnet as mx
from memonger.graph.operators import gradients
from memonger.graph.operators.tensors import Tensor
from memonger.support.errors import MemongerError
from memonger.support.symbols import load_nodes
from memonger.support.versions import MXNET_ERRORS

TRIES = 400  # of one operator

SHAPES = [[(4, 4)] * 5, [(2, 3, 4, 4)] * 5, [(4,)] * 5, [(2, 3, 4)] * 5, [(1,)] * 5]
SHAPES += [[(2, 3, 4, 4), (6, 3, 1, 1), (6,)], [(2, 3, 4, 4), *[(3,)] * 4], [(4, 4), (2,)]]
SHAPES += [[(2, 3, 4, 4), (2, 5)], [(4, 4), (1, 4), (1, 4)], [(2, 4), (3, 4), (3,)]]
TYPES = [["float32"] * 5, ["int32"] * 5, ["float32", *["int32"] * 4], ["bool"] * 5]
VALUES = {"Shape": ["(1, 1)", "(2,)", "(2, 2)", "(4, 4)"], "bool": ["True"], "float": ["0.5"]}
VALUES.update({"double": ["0.5"], "int": ["2", "1"], "long": ["2", "1"]})


def _text(text: bytes | None) -> str:
    return (text or b"").decode()


def _told(name: str) -> tuple[str, list[tuple[str, str]], str]:
    """Return what MXNet tells of an operator: its name, what it takes, what counts its inputs."""
    handle, text = mx.base.OpHandle(), ctypes.c_char_p
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(mx.base.c_str(name), ctypes.byref(handle)))
    own, said, counts, kind, count = text(), text(), text(), text(), ctypes.c_uint()
    lists = [ctypes.POINTER(text)() for _ in range(3)]
    pointers = [own, said, count, *lists, counts, kind]
    mx.base.check_call(
        mx.base._LIB.MXSymbolGetAtomicSymbolInfo(handle, *map(ctypes.byref, pointers))
    )
    takes = [(_text(lists[0][k]), _text(lists[1][k])) for k in range(count.value)]
    return _text(own.value), takes, _text(counts.value)


def _tries(takes: list[tuple[str, str]], counts: str) -> Iterator[tuple[dict[str, str], Any]]:
    inputs = [kind for _, kind in takes if "NDArray" in kind or "Symbol" in kind]
    needed = [input for input in takes if "required" in input[1] and input[1] not in inputs]
    values = []
    for name, kind in needed:
        listed = re.findall(r"'([^']*)'", kind)[:1] if kind.startswith("{") else []
        guesses = next((VALUES[key] for key in VALUES if key in kind), ["relu"])
        values.append([(name, value) for value in listed or guesses])
    sizes = [2, 1, 3] if counts else sorted({len(inputs), max(0, len(inputs) - 1)}, reverse=True)
    for size, chosen, types, shapes in itertools.product(
        sizes, itertools.product(*values), TYPES, SHAPES
    ):
        if size <= len(shapes):
            attrs = {**dict(chosen), **({counts: str(size)} if counts else {})}
            yield attrs, tuple(map(Tensor, shapes[:size], types))


def _verdict(op: str, takes: list[tuple[str, str]], counts: str) -> str:
    """'observed', 'no gradient', 'not tried' where no input was found to fit, or what is said."""
    verdict = "not tried"
    for attrs, inputs in itertools.islice(_tries(takes, counts), TRIES):
        try:
            symbol = load_nodes(*gradients.alone(op, attrs, len(inputs)))
            names = [f"x{k}" for k in range(len(inputs))]
            _, shapes, _ = symbol.infer_shape(**{n: t.shape for n, t in zip(names, inputs)})
            symbol.infer_type(**{n: t.dtype for n, t in zip(names, inputs)})
        except (*MXNET_ERRORS, MemongerError, ValueError):  # the inputs do not fit
            continue
        if shapes is None or any(min(shape, default=1) < 1 for shape in shapes):
            continue
        try:
            gradients.gradient_of(op, tuple(sorted(attrs.items())), inputs, False)
            return "observed"
        except gradients.NotDifferentiable:
            return "no gradient"
        except gradients.NotObservable as error:
            verdict = str(error) if verdict == "not tried" else verdict
    return verdict


def verdicts() -> dict[str, str]:
    """Return the verdict on every operator; each in a process, for MXNet dies of some inputs."""
    descriptions = [_told(name) for name in mx.operator.get_all_registered_operators()]
    operators = {
        op: (op, takes, counts) for op, takes, counts in descriptions if "backward" not in op
    }
    verdict_of = {}
    for op in sorted(operators.keys() - {"_copyto", "_NoGradient"}):
        end, start = os.pipe()
        child = os.fork()
        if child == 0:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, sys.stdout.fileno())
            os.dup2(silent, sys.stderr.fileno())
            os.write(start, pickle.dumps(_verdict(*operators[op])))
            os._exit(0)
        os.close(start)
        with os.fdopen(end, "rb") as answer:
            text = answer.read()
        os.waitpid(child, 0)
        verdict_of[op] = pickle.loads(text) if text else "not tried"
    return verdict_of
