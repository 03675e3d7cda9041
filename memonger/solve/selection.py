"""Select operators of a network: by name, by kind or by a function, or up to one (until=)."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
from typing import Callable, Iterable, Mapping, NamedTuple, Union

from memonger.graph.inputs import InputSpec
from memonger.graph.operators.tensors import Attributes, Shape
from memonger.graph.read import forward_graph, read_nodes
from memonger.support.errors import MemongerError, UnmatchedError, did_you_mean
from memonger.support.symbols import read
from memonger.support.types import Symbol

log = logging.getLogger("memonger")

NEAREST = 3  # names in the message for a pattern without a match
KIND, OR = "::", "|"  # in front of a pattern of operator kinds; between two patterns


class Operator(NamedTuple):
    """An operator of a network, as it is passed to a function that selects operators."""

    name: str
    op: str  # its kind, such as 'Activation'
    attrs: Attributes  # its parameters, as text
    shapes: tuple[Shape, ...] = ()  # of its outputs
    nbytes: int = 0  # of its outputs


Operators = Mapping[int, Operator]  # by node
Selector = Union[str, Callable[[Operator], object], Iterable[object]]


class Selection(NamedTuple):
    """The operators that an option names."""

    patterns: tuple[str, ...] = ()  # with the names of operators that a function selected
    nodes: tuple[int, ...] = ()  # in execution order


def read_operators(symbol: Symbol, spec: InputSpec, *selectors: object) -> Operators:
    """Read the operators of a network for `select`, with shapes if one selector is a function."""
    items = [item for selector in selectors for item in _list(selector)]
    if not items:
        return {}
    if not any(map(callable, items)):
        nodes = enumerate(read_nodes(symbol))
        return {i: Operator(n.name, n.op, n.attrs) for i, n in nodes if not n.is_variable}
    graph, operators = forward_graph(symbol, spec), {}
    for i in graph.operators:
        node, tensors = graph.nodes[i], graph.shown_tensors(i)
        shapes, nbytes = tuple(t.shape for t in tensors), sum(t.nbytes for t in tensors)
        operators[i] = Operator(node.name, node.op, node.attrs, shapes, nbytes)
    return operators


def select(option: str, selector: object, operators: Operators) -> Selection:
    """Find the operators that the value of an option selects.

    Parameters
    ----------
    option : str
        The name of the option, for messages.
    selector : str, callable, or list of these
        A pattern such as ``'stage4_*'`` or ``'::Activation'``, or a function that is called with
        each `Operator` and returns whether it is selected.
    operators : mapping
        Node -> its `Operator`.

    Raises
    ------
    UnmatchedError
        If a pattern matches no operator.
    MemongerError
        If the selector has another type.
    """
    patterns: dict[str, None] = {}
    chosen: set[int] = set()
    for item in _list(selector):
        if callable(item):
            matches = [i for i, operator in operators.items() if item(operator)]
            patterns.update(dict.fromkeys(operators[i].name for i in matches))
        elif isinstance(item, str):
            matches = _match(option, item, operators)
            patterns[item] = None
        else:
            forms = "a pattern such as 'stage4_*' or '::Activation', a function, or a list of these"
            raise MemongerError(f"{option}={item!r} cannot be read; give {forms}")
        chosen.update(matches)
    return Selection(tuple(patterns), tuple(sorted(chosen)))


def _list(selector: object) -> list[object]:
    if selector is None:
        return []
    return [*selector] if isinstance(selector, (list, tuple)) else [selector]


def _match(option: str, pattern: str, operators: Operators) -> list[int]:
    """Find the operators that have this name, or otherwise those that match this pattern."""
    exact = [i for i, operator in operators.items() if operator.name == pattern]
    if exact:
        return exact
    names, _, ops = pattern.rpartition(KIND) if KIND in pattern else (pattern, "", "")
    named = {i: operator for i, operator in operators.items() if _fits(operator.name, names)}
    matches = [i for i, operator in named.items() if _fits(operator.op, ops)]
    if not matches:
        part, choices = names, [operator.name for operator in operators.values()]
        if named:
            part, choices = ops, [operator.op for operator in operators.values()]
        stem = part.replace("*", "").replace("?", "")
        nearest = difflib.get_close_matches(stem, dict.fromkeys(choices), n=NEAREST, cutoff=0.0)
        some = ", ".join(map(repr, nearest)) or "none, for it has no operators"
        text = f"{option}={pattern!r} matches no operator of the network; the nearest are {some}"
        raise UnmatchedError(text)
    return matches


def _fits(text: str, pattern: str) -> bool:
    """Return whether a text matches one of the patterns between bars; an empty pattern matches."""
    return not pattern or any(fnmatch.fnmatchcase(text, one) for one in pattern.split(OR))


def find_layer(symbol: Symbol, name: object) -> int:
    """Find the first operator with this name or an output of this name; raise if there is none.

    A name with ``*`` or ``?`` is a pattern; another name may also be a part of an operator's name,
    as in the original memonger.
    """
    internals = symbol.get_internals()
    graph = read(internals)
    nodes = graph["nodes"]
    operators = [(i, node["name"]) for i, node in enumerate(nodes) if node["op"] != "null"]
    heads = zip((head[0] for head in graph["heads"]), internals.list_outputs())
    outputs = [(i, output) for i, output in heads if nodes[i]["op"] != "null"]
    if isinstance(name, str):
        pattern = re.compile(fnmatch.translate(name))
        tests = name.__eq__, pattern.match if {*"*?"} & {*name} else lambda text: name in text
        for test in tests:
            for i, text in sorted([*operators, *outputs]):
                if test(text):
                    log.info("until=%r matches operator %r", name, nodes[i]["name"])
                    return i
    names = list(dict.fromkeys(text for _, text in operators))
    some = ", ".join(map(repr, names[len(names) // 2 :][:3]))
    hint = did_you_mean(name, names, f"give the name of one, such as {some}")
    raise UnmatchedError(f"until={name!r} matches no operator of the network{hint}")
