"""Groups of what plays one part in the repeated parts of a network, so that it is told once.

What is alike has one operator, one fate, and names that differ in numbers alone. The first of
several such numbers stays where the shapes differ with it: stages of a ResNet are told apart,
layers of a transformer together. Groups of one fate become one where their names are the same up
to the first number that differs: ``stage3_unit*``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import chain
from typing import Hashable, Iterable, NamedTuple, Sequence

KINDS = 3  # of operators that a group names
NUMBERS, OUTPUT = re.compile("([0-9]+)"), re.compile(r"(\[[0-9]+\])?$")


class Member(NamedTuple):
    """What can be in a group: a tensor, or an operator."""

    name: str  # with ``[1]`` for the second output of an operator and so on
    op: str
    shape: Sequence[int]
    nbytes: int
    choice: str
    why: str


class Group(NamedTuple):
    """Tensors of one part in a network, and what becomes of them."""

    name: str  # of all, with ``*`` for numbers that differ; what follows the first may differ too
    operators: str  # how many of the most frequent kinds: '16 x BatchNorm, Activation'
    nbytes: int
    choice: str
    why: str
    members: tuple[int, ...]  # their places among the tensors

    def __str__(self) -> str:
        return f"{self.operators} of {self.name!r}"


def find_groups(members: Sequence[Member]) -> tuple[Group, ...]:
    """Find the groups of a network, the largest first; each member is in one."""
    by_name: defaultdict[Hashable, list[int]] = defaultdict(list)
    names = [NUMBERS.split(m.name) for m in members]
    for k, m in enumerate(members):
        by_name[m.op, tuple(names[k][::2])].append(k)
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for key, places in by_name.items():
        shapes: defaultdict[str, set[Hashable]] = defaultdict(set)  # by the number that may stay
        numbers = _find_first([names[k] for k in places])
        for k, number in zip(places, numbers):
            shapes[number].add(tuple(members[k].shape))
        for k, number in zip(places, numbers):
            m = members[k]
            alike[key, frozenset(shapes[number]), m.choice, m.why].append(k)
    together: defaultdict[tuple[str, str, str], dict[str, list[int]]] = defaultdict(dict)
    for places in alike.values():
        pieces = _generalise(names[k] for k in places)
        begin = pieces[: pieces.index("*") + 1] if "*" in pieces else pieces
        first = members[places[0]]
        parts = together[first.choice, first.why, "".join(begin)]
        parts.setdefault("".join(pieces), []).extend(places)
    groups = []
    for (choice, why, stem), parts in together.items():
        places = sorted(chain.from_iterable(parts.values()))
        chosen, name = [members[k] for k in places], stem if len(parts) > 1 else next(iter(parts))
        nbytes = sum(m.nbytes for m in chosen)
        groups.append(Group(name, _count(chosen), nbytes, choice, why, tuple(places)))
    return tuple(sorted(groups, key=lambda group: -group.nbytes))


def _find_first(names: Sequence[Sequence[str]]) -> Sequence[str]:
    """Find the first number of each name where several differ, otherwise nothing."""
    differing = [numbers for numbers in [*zip(*names)][1::2] if len(set(numbers)) > 1]
    return differing[0] if len(differing) > 1 else [""] * len(names)


def _generalise(names: Iterable[Sequence[str]]) -> list[str]:
    """Return the pieces of names that differ in numbers alone, with ``*`` where they do."""
    pieces = [set(piece) for piece in zip(*names)]
    return [piece.pop() if len(piece) == 1 else "*" for piece in pieces]


def _count(members: Iterable[Member]) -> str:
    """Count operators of the most frequent kinds; some have several outputs among the members."""
    outputs = Counter((m.op, OUTPUT.search(m.name)[0]) for m in members)  # type: ignore[index]
    most: Counter[str] = Counter()
    for (op, _), count in outputs.items():
        most[op] = max(most[op], count)
    if sum(most.values()) == 1:
        return "".join(most)
    ops: defaultdict[int, list[str]] = defaultdict(list)
    for op, count in most.most_common(KINDS):
        ops[count].append(op)
    rest = sum(most.values()) - sum(count * len(names) for count, names in ops.items())
    texts = [f"{count} x {', '.join(names)}" for count, names in ops.items()]
    return " and ".join([*texts, f"{rest} others"] if rest else texts)
