"""Count what a block takes in Gluon by a plan and without it, of which a plan counts the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Collection, NamedTuple

from memonger.api.plan import Plan
from memonger.costs.bind import has_mkldnn
from memonger.graph.read import forward_graph
from memonger.graph.training import HEAD_COPY, NO_NODE, training_graph
from memonger.schedules.execution.symbol import ScheduledSymbol
from memonger.solve.facts import find_wanted
from memonger.support.errors import MemongerError, format_size


class Count(NamedTuple):
    """Bytes of calls of one kind."""

    planned: int  # that a step takes by the plan
    plain: int  # that it takes without
    planned_together: int  # that a call holds by the plan, if another one is alive too
    plain_together: int  # that it holds without


def count_bytes(plan: Plan, inputs: Collection[str]) -> Count:
    """Count the bytes of calls of a block with these inputs, by a plan and without.

    Without it, MXNet's executor, whose pool a plan counts, copies gradients of outputs, and Gluon
    does not. Marks need copies of inputs and outputs, and arrays for the gradients of inputs.

    Raises
    ------
    MemongerError
        If a step takes no less by the plan.
    """
    request, symbol = plan.request, plan.symbol
    graph = forward_graph(request.symbol, request.spec)
    training = training_graph(graph, find_wanted(graph, request.grad_req))
    rows = training.arrays.walk_row.tolist()
    copies = [r for r in rows if training.ops[r] == HEAD_COPY and training.origin[r] == NO_NODE]
    plain = plan.before.pool_bytes - sum(training.signatures[r].tensors[0].nbytes for r in copies)
    heads = [(a, b) for a, b in graph.heads if a not in graph.arguments]
    outputs = sum(graph.tensors[a][b].nbytes for a, b in heads)
    if isinstance(symbol, ScheduledSymbol):
        planned, mkldnn = plan.after.pool_bytes, has_mkldnn(request.ctx)
        step = symbol.find_step(forward_graph(symbol, request.spec), request.grad_req, mkldnn)
        together = replace(step, is_split=True).split_bytes + outputs
    else:
        tensors = {graph.nodes[a].name: graph.tensors[a][0] for a in graph.arguments}
        names = [name for name in inputs if name in tensors]
        names += [name for name in names if request.grad_req[name] != "null"]
        planned = plan.after.pool_bytes + outputs + sum(tensors[name].nbytes for name in names)
        together = planned
    if planned >= plain:
        raise MemongerError(
            f"by its plan it would take {format_size(planned)} in Gluon, and without it "
            f"{format_size(plain, planned)}"
        )
    return Count(planned, plain, together, training.kept_bytes)
