"""Schedules: the training step that is written out is the network's, bit for bit and byte for byte."""

from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.executor import planned_mb
from memonger.gradients import environment, read_debug_str, unallocated
from memonger.schedule import check, plain
from memonger.scheduled import scheduled
from memonger.unrolled import BIND, parts, unroll, write

import networks
from operator_cases import CASES, PLANNED_SHAPES, SMALL_SHAPES, planned_net, small_net
from planned import positive
from schedules import schedules, work_of

REFUSED = {"Custom", "foreach", "while_loop", "cond"}


def equal(symbol: Any, planned: Any, shapes: Any, **more: Any) -> None:
    report = memonger.check(symbol, planned, shapes, **more)
    assert report, str(report)


def same_memory(work: Any, schedule: Any) -> None:
    """The replay is what MXNet does: every operator in its turn, and the pool."""
    step = unroll(parts(work), schedule)
    written, graph = write(step), work.training.graph
    tensors = {graph.nodes[i].name: graph.tensors[i][0] for i in graph.arguments}
    tensors.update({graph.nodes[i].name: graph.tensors[i][0] for i in graph.auxiliary})
    tensors.update(written.scratch)
    for k, name in written.heads.items():
        tensors[name] = graph.tensors[graph.heads[k][0]][graph.heads[k][1]]
    symbol = written.symbol
    with environment(**BIND):
        executor = symbol.bind(
            mx.cpu(),
            {n: unallocated(*tensors[n], mx.cpu()) for n in symbol.list_arguments()},
            None,
            "null",
            {n: unallocated(*tensors[n], mx.cpu()) for n in symbol.list_auxiliary_states()},
        )
    found = step.replay()
    assert found.pool_bytes >> 20 == planned_mb(executor)
    ops = [step.ops[row] for row in found.order]
    made = [node["op"] for node in read_debug_str(executor.debug_str())[1]]
    assert [op for op in ops if op != "null"] == made


@pytest.mark.parametrize("name", sorted(set(CASES) - REFUSED))
@pytest.mark.parametrize("net", [small_net, planned_net], ids=["alone", "inside"])
def test_operators(name: str, net: Any) -> None:
    symbol = net(CASES[name])
    shapes = SMALL_SHAPES if net is small_net else PLANNED_SHAPES
    work = work_of(symbol, shapes)
    for schedule in schedules(work):
        check(work, schedule)
        equal(symbol, scheduled(symbol, schedule), shapes, values=positive(symbol, shapes))
