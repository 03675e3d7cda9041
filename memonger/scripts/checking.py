"""Check a plan before a script is trained with it, in a process with random numbers of its own."""

from __future__ import annotations

import logging
import os
import tempfile
from typing import Iterator

from memonger.api.check import check
from memonger.api.plan import Plan
from memonger.api.saved import load_plan
from memonger.support.child import run_child
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx
from memonger.support.symbols import load_nodes, read
from memonger.support.types import Json, Symbol

log = logging.getLogger("memonger.scripts")


def check_plan(name: str, network: Symbol, plan: Plan) -> None:
    """Train three steps with a plan and without, and log what was compared.

    Raises
    ------
    MemongerError
        If the plan computes something else.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "plan.json")
        plan.save(file)
        job = {"network": read(network), "plan": file, "np_shape": mx.util.is_np_shape()}
        answers, status = run_child(__name__, job)
    if not answers:
        log.warning("%s cannot be checked: %s", name, status)
        return
    ((is_equal, report),) = answers
    if not is_equal:
        raise MemongerError(f"its plan computes something else: {report}")
    log.info("%s, checked: %s", name, report)


def answer(job: Json) -> Iterator[Json]:
    """Yield whether a plan computes the same, and what was compared, in the child process."""
    mx.util.set_np_shape(job["np_shape"])
    network = load_nodes(job["network"]["nodes"], job["network"]["heads"])
    plan = load_plan(job["plan"])
    (shapes, types), ctx = plan.request.spec, plan.request.ctx
    grad_req = plan.request.grad_req
    report = check(network, plan.symbol, shapes, type_dict=types, ctx=ctx, grad_req=grad_req)
    yield bool(report), str(report)
