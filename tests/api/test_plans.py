"""``memonger.plan``: what a Plan tells is what MXNet does, whatever is asked for."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.api import planning
from memonger.solve import ways as solution
from memonger.costs.memory import CostModel
from memonger.costs.bind import planned_mb
from memonger.solve.request import Options, read_request
from memonger.support.cache import forget

import networks
from planned import forward, marked, nodes

pytestmark = pytest.mark.python_differs

S = mx.sym
MB = 2**20
SHAPES: Any = {"data": (256, 512)}


def net(layers: int = 8) -> Any:
    """Results of 0.5 MB each."""
    x = S.Variable("data")
    for i in range(layers):
        x = S.FullyConnected(x, num_hidden=512, name="fc%d" % i)
        x = S.Activation(S.BatchNorm(x, name="bn%d" % i), act_type="tanh", name="tanh%d" % i)
    return S.LinearRegressionOutput(x, name="out")


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each search that is made."""
    made: list[int] = []
    real = solution.smallest

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return real(*args, **options)

    monkeypatch.setattr(solution, "smallest", counted)
    return made


# -- what a plan tells ------------------------------------------------------------------------


def test_figures_are_what_mxnet_plans() -> None:
    symbol = net()
    plan = memonger.plan(symbol, SHAPES)
    assert plan.exact and not plan.interrupted
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=SHAPES)
    assert plan.pool_bytes == memonger.pool_bytes(plan.symbol, shapes=SHAPES)
    assert plan.unplanned_bytes == memonger.pool_bytes(symbol, shapes=SHAPES)
    assert 0 < plan.peak_bytes <= plan.pool_bytes < plan.unplanned_bytes
    assert plan.candidates["no plan"] == plan.unplanned_bytes
    assert plan.counted_bytes == plan.candidates[plan.planner] == min(plan.candidates.values())
    assert memonger.check(symbol, plan.symbol, SHAPES)


def test_names_in_execution_order() -> None:
    plan = memonger.plan(net(), SHAPES)
    operators = [n["name"] for n in nodes(net()) if n["op"] != "null"]
    assert list(plan.recomputed) == [n for n in operators if n in set(plan.recomputed)]
    assert list(plan.kept) == [n for n in operators if n in set(plan.kept)]
    assert sorted(plan.kept + plan.recomputed) == sorted(operators)
    assert list(plan.recomputed) == marked(plan.symbol)


def test_kept_copies() -> None:
    """They are named, lower the cost here, and are not there if they are not wanted."""
    symbol, shapes = networks.model_zoo("densenet121", 4)
    plan = memonger.plan(symbol, shapes)
    before = {n["name"] for n in nodes(symbol)}
    assert plan.exact and plan.copies
    assert plan.pool_bytes == memonger.pool_bytes(plan.symbol, shapes=shapes)
    assert list(plan.copies) == [n["name"] for n in nodes(plan.symbol) if n["name"] not in before]
    assert memonger.unplan(plan.symbol).tojson() == symbol.tojson()
    untouched = memonger.plan(symbol, shapes, kept_copies=False)
    assert not untouched.copies and untouched.counted_bytes > plan.counted_bytes
    assert [n["name"] for n in nodes(untouched.symbol)] == [n["name"] for n in nodes(symbol)]


def test_recomputed_flops() -> None:
    """A product is 2 x 256 x 512 x 512 + 256 x 512 operations; all other operators are cheap."""
    plan = memonger.plan(net(), SHAPES)
    again = [n for n in plan.recomputed if n.startswith("fc")]
    assert plan.recomputed
    assert abs(plan.recomputed_flops - len(again) / 8) < 0.02
    everything = memonger.plan(net(), SHAPES, planner="chen2016", rules=False)
    assert len(everything.recomputed) == 25
    assert 0.98 < everything.recomputed_flops <= 1


def test_real_element_sizes() -> None:
    single = memonger.plan(net(), SHAPES)
    double = memonger.plan(net(), SHAPES, type_dict={"data": "float64"}, rules=False)
    assert double.exact
    assert double.unplanned_bytes == 2 * single.unplanned_bytes
    assert double.pool_bytes == 2 * double.counted_bytes


def test_it_prints_what_counts() -> None:
    plan = memonger.plan(net(), SHAPES)
    text = str(plan)
    for words in (
        f"before     {plan.unplanned_bytes / MB:.1f} MB",
        f"after      {plan.pool_bytes / MB:.1f} MB",
        f"floor      {plan.floor_bytes / MB:.1f} MB",
        "the gradient of ",
        plan.slowest,
        f"{plan.device_bytes / MB:.1f} MB of a GPU, {plan.unplanned_device_bytes / MB:.1f} MB "
        "without",
        f"{len(plan.recomputed)} of 25 operators",
        f"{100 * plan.recomputed_flops:.0f} % of the forward pass is recomputed",
        plan.planner,
    ):
        assert words in text, text
    assert plan.slowest and len(text.splitlines()) == 10
    assert repr(plan).startswith("Plan(pool_bytes=%d, " % plan.pool_bytes)
    assert plan.recompute_overhead == plan.recomputed_flops and plan.time_overhead is None


def test_it_is_frozen_and_pickles() -> None:
    plan = memonger.plan(net(), SHAPES)
    with pytest.raises(AttributeError):
        plan.pool_bytes = 0  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(plan))
    assert again.symbol.tojson() == plan.symbol.tojson() and str(again) == str(plan)


def test_search_plan_gives_the_same_symbol() -> None:
    options: Any = {"until": "tanh5", "devices": 2, "grad_req": "add", "kept_copies": False}
    symbol = memonger.search_plan(net(), shapes=SHAPES, **options)
    assert symbol.tojson() == memonger.plan(net(), SHAPES, **options).symbol.tojson()
    assert symbol.tojson() != memonger.search_plan(net(), shapes=SHAPES).tojson()
    assert memonger.plan(net(), **SHAPES).symbol.tojson() == (
        memonger.search_plan(net(), **SHAPES).tojson()
    )


def test_nothing_helps(caplog: pytest.LogCaptureFixture) -> None:
    symbol = S.Dropout(S.Dropout(S.Variable("data"), p=0.5), p=0.5)
    for _ in range(2):  # the second comes from the cache
        caplog.clear()
        plan = memonger.plan(symbol, {"data": (64, 4096)})
        assert plan.planner == "no plan" and not plan.recomputed
        assert plan.pool_bytes == plan.unplanned_bytes and plan.recomputed_flops == 0
        assert plan.symbol.tojson() == symbol.tojson()
        assert "no plan costs less" in caplog.text and "every operator must be kept" in caplog.text


def test_the_original_planner_says_that_it_makes_it_worse(caplog: pytest.LogCaptureFixture) -> None:
    symbol, shapes = networks.model_zoo("densenet121", 4)
    plan = memonger.plan(symbol, shapes, planner="chen2016")
    assert plan.planner == "chen2016"
    assert plan.counted_bytes == plan.candidates["chen2016"] > plan.candidates["no plan"]
    assert "more memory" in caplog.text and "no mirror_stage marks" in caplog.text


def test_a_network_that_cannot_be_replayed(caplog: pytest.LogCaptureFixture) -> None:
    symbol, shapes = networks.detection(batch=2, image=64, filters=8)
    plan = memonger.plan(symbol, shapes)
    assert not plan.exact
    assert plan.counted_bytes == MB * memonger.get_cost(plan.symbol, shapes=shapes)
    assert plan.device_bytes > plan.pool_bytes
    assert "bound, in whole MB" in str(plan)


def test_a_wrong_prediction_is_not_passed_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search believes in 1 MB less than there is: the figures are MXNet's, and it is said."""
    real = solution.smallest

    def optimistic(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        return found._replace(cost=found.cost - MB)

    expected = memonger.plan(net(), SHAPES)
    monkeypatch.setattr(solution, "smallest", optimistic)
    forget()
    plan = memonger.plan(net(), SHAPES)
    assert not plan.exact and "was predicted as" in caplog.text
    assert plan.counted_bytes == MB * memonger.get_cost(expected.symbol, shapes=SHAPES)


def test_what_mxnet_finds_worse_than_no_plan_is_not_returned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = solution.smallest

    def wrong(stages: Any, cost: Any, rules: Any, *args: Any, **options: Any) -> Any:
        """Recompute a layer for nothing, and say that it costs nothing."""
        mask = np.array([n.name == "tanh7" for n in rules.graph.nodes])
        return real(stages, cost, rules, *args, **options)._replace(mask=mask, copies=(), cost=0)

    monkeypatch.setattr(solution, "smallest", wrong)
    plan = memonger.plan(net(), SHAPES)
    assert not plan.recomputed and plan.planner == "no plan"
    assert plan.pool_bytes == plan.unplanned_bytes
    assert "was predicted as" in caplog.text and "no plan costs less" in caplog.text


# -- gradients --------------------------------------------------------------------------------


def as_module(symbol: Any, shapes: Any, request: str = "write") -> dict[str, str]:
    return {name: "null" if name in shapes else request for name in symbol.list_arguments()}


REQUESTS: dict[str, Any] = {
    "write": lambda names: "write",
    "add": lambda names: "add",
    "parameters": lambda names: {n: "write" for n in names if n not in ("data", "softmax_label")},
    "parameters, added": lambda names: [
        "null" if n in ("data", "softmax_label") else "add" for n in names
    ],
    "last layer": lambda names: {n: "write" for n in names if n.startswith("fc")},
    "mixed": lambda names: [("write", "add", "null")[k % 3] for k in range(len(names))],
}


@pytest.mark.parametrize("case", REQUESTS)
def test_grad_req(case: str) -> None:
    symbol, shapes = networks.resnet((1, 1, 1, 1), batch=8, image=64, classes=10, filters=16)
    grad_req = REQUESTS[case](symbol.list_arguments())
    plan = memonger.plan(symbol, shapes, grad_req=grad_req)
    assert plan.exact
    for net, counted in ((plan.symbol, plan.counted_bytes), (symbol, plan.unplanned_bytes)):
        executor = net.simple_bind(mx.cpu(), grad_req=grad_req, **shapes)
        assert planned_mb(executor) == counted // MB
    # The plan is right for other gradients too.
    small = {name: (2, *shape[1:]) for name, shape in shapes.items()}
    for other in (grad_req, "write", None):
        assert memonger.check(symbol, plan.symbol, small, grad_req=other)


def test_grad_req_of_module() -> None:
    symbol, shapes = networks.resnet((1, 1, 1, 1), batch=8, image=64, classes=10, filters=16)
    plan = memonger.plan(symbol, shapes, grad_req=as_module(symbol, shapes))
    module = mx.mod.Module(plan.symbol)
    module.bind([("data", shapes["data"])], [("softmax_label", (8,))])
    assert planned_mb(module._exec_group.execs[0]) == plan.counted_bytes // MB


# -- until ------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["smallest", "chen2016"])
@pytest.mark.parametrize("rules", [True, False])
def test_until(planner: str, rules: bool) -> None:
    symbol = net(16)
    order = [n["name"] for n in nodes(symbol)]
    for until, first in (("bn8", "bn8"), ("bn8_output", "bn8"), ("fc12", "fc12")):
        plan = memonger.plan(symbol, SHAPES, planner=planner, rules=rules, until=until)
        assert plan.recomputed
        assert all(order.index(name) < order.index(first) for name in plan.recomputed)
    free = memonger.plan(symbol, SHAPES, planner=planner, rules=rules)
    assert any(order.index(name) > order.index("fc12") for name in free.recomputed)


def test_until_is_part_of_the_search() -> None:
    """A plan that is searched for a part costs no more than the whole's plan cut off there."""
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=8)
    order = [n["name"] for n in nodes(symbol)]
    until = [n["name"] for n in nodes(symbol) if n["op"] == "Convolution"][-4]
    graph = forward(symbol, shapes)
    mask = np.array([n.name in set(memonger.plan(symbol, shapes).recomputed) for n in graph.nodes])
    mask[order.index(until) :] = False
    way = solution.Marks(read_request({"net": symbol, "shapes": shapes}), Options())
    cut_off = way.cost(way.rules.apply(mask))
    plan = memonger.plan(symbol, shapes, until=until)
    assert plan.exact
    assert plan.counted_bytes <= cut_off
    assert plan.counted_bytes < plan.candidates["no plan"]


def test_until_in_make_mirror_plan() -> None:
    planned = memonger.make_mirror_plan(net(), 0, until="tanh3", shapes=SHAPES)
    assert marked(planned) == ["%s%d" % (n, i) for i in range(4) for n in ("fc", "bn", "tanh")][:-1]


def test_until_the_first_layer(caplog: pytest.LogCaptureFixture) -> None:
    plan = memonger.plan(net(), SHAPES, until="fc0")
    assert not plan.recomputed
    assert "nothing that could be recomputed comes before 'fc0'" in caplog.text


# -- devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, devices, share", [(16, 2, 8), (16, 4, 4), (16, 1, 16), (10, 4, 4), (7, 2, 4), (9, 4, 3)]
)
def test_devices(batch: int, devices: int, share: int) -> None:
    """As Module splits it: of 10 among 4 devices the last gets 4 (2, 2, 2, 4)."""
    symbol, whole = networks.resnet((1, 1, 1, 1), batch=batch, image=64, classes=10, filters=16)
    grad_req = as_module(symbol, whole)
    plan = memonger.plan(symbol, whole, devices=devices, grad_req=grad_req)
    small = {name: (share, *shape[1:]) for name, shape in whole.items()}
    alone = memonger.plan(symbol, small, grad_req=grad_req)
    assert plan.pool_bytes == alone.pool_bytes
    assert plan.symbol.tojson() == alone.symbol.tojson()
    module = mx.mod.Module(plan.symbol, context=[mx.cpu(i) for i in range(devices)])
    module.bind([("data", whole["data"])], [("softmax_label", (batch,))])
    assert max(map(planned_mb, module._exec_group.execs)) == plan.counted_bytes // MB


def test_devices_and_layouts() -> None:
    """The batch is where the layout has its N, and an input without is not split."""
    Desc = mx.io.DataDesc
    shapes = [Desc("data", (6, 8, 4), layout="TNC"), Desc("shift", (1, 1, 4), layout="TC")]
    symbol = S.MakeLoss(S.broadcast_add(S.Variable("data"), S.Variable("shift")))
    request = read_request({"net": symbol, "shapes": shapes, "devices": 4})
    assert request.spec.shapes == {"data": (6, 2, 4), "shift": (1, 1, 4)}


# -- the cache --------------------------------------------------------------------------------


def test_the_same_is_planned_once(searches: list[int]) -> None:
    first = memonger.plan(net(), SHAPES)
    first.symbol._set_attr(spoiled="yes")
    first.candidates.clear()
    again = memonger.plan(net(), SHAPES)
    assert len(searches) == 1
    assert "spoiled" not in again.symbol.tojson() and again.candidates
    assert again.pool_bytes == first.pool_bytes and again.recomputed == first.recomputed
    forget()
    assert memonger.plan(net(), SHAPES).symbol.tojson() == again.symbol.tojson()
    assert len(searches) == 2


def test_names_that_mxnet_makes_do_not_matter(searches: list[int]) -> None:
    """A network built twice has other operator names; the plan has those of its own network."""

    def built() -> Any:
        x = S.FullyConnected(S.Variable("data"), S.Variable("w"), num_hidden=512, no_bias=True)
        for _ in range(8):
            x = S.tanh(x * 2)
        return S.LinearRegressionOutput(x, S.Variable("label"))

    one, other = built(), built()
    assert one.tojson() != other.tojson()
    plan, again = memonger.plan(one, SHAPES), memonger.plan(other, SHAPES)
    assert len(searches) == 1
    assert again.recomputed and not set(again.recomputed) & set(plan.recomputed)
    assert list(again.recomputed) == marked(again.symbol)
    assert memonger.unplan(again.symbol).tojson() == other.tojson()


CHANGES: dict[str, Any] = {
    "network": lambda p: p(net(9), SHAPES),
    "argument's name": lambda p: p(net()(data=S.Variable("pixels")), {"pixels": SHAPES["data"]}),
    "attribute": lambda p: p(
        mx.sym.load_json(net().tojson().replace('"tanh"', '"sigmoid"')), SHAPES
    ),
    "shapes": lambda p: p(net(), {"data": (255, 512)}),
    "types": lambda p: p(net(), SHAPES, type_dict={"data": "float64"}),
    "gradients": lambda p: p(net(), SHAPES, grad_req={"fc0_weight": "write"}),
    "device": lambda p: p(net(), SHAPES, ctx=mx.cpu()),
    "trials": lambda p: p(net(), SHAPES, ntrial=7),
    "until": lambda p: p(net(), SHAPES, until="bn4"),
    "devices": lambda p: p(net(), SHAPES, devices=2),
    "copies": lambda p: p(net(), SHAPES, kept_copies=False),
    "rules": lambda p: p(net(), SHAPES, rules=False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_differs_is_planned_anew(what: str, searches: list[int]) -> None:
    memonger.plan(net(), SHAPES)
    CHANGES[what](memonger.plan)
    assert len(searches) == 2


def test_the_environment_counts(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    memonger.plan(net(), SHAPES)
    monkeypatch.setenv("NNVM_AUTO_SEARCH_MATCH_RANGE", "1")
    plan = memonger.plan(net(), SHAPES)
    assert len(searches) == 2
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=SHAPES)


def test_the_cache_is_bounded(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning._solutions, "most", 2)
    for batch in (8, 16, 8, 32):  # 16 is used least
        memonger.plan(net(2), {"data": (batch, 512)})
    assert len(searches) == 3
    memonger.plan(net(2), {"data": (8, 512)})
    assert len(searches) == 3
    memonger.plan(net(2), {"data": (16, 512)})
    assert len(searches) == 4


def test_bucketing_module_plans_each_bucket_once(searches: list[int]) -> None:
    buckets = list(range(2, 22))
    calls: list[int] = []

    def generate(length: int) -> Any:
        calls.append(length)
        weight, bias = S.Variable("shared_weight"), S.Variable("shared_bias")
        x = S.Embedding(S.Variable("data"), input_dim=20, output_dim=16, name="embed")
        x = S.sum(x, axis=1)
        for _ in range(length):  # MXNet numbers these anew in each call
            x = S.tanh(S.FullyConnected(x, weight, bias, num_hidden=16) + x)
        x = S.SoftmaxOutput(x, name="softmax")
        shapes = {"data": (4, length), "softmax_label": (4,)}
        return memonger.search_plan(x, shapes=shapes), ("data",), ("softmax_label",)

    def batch(length: int) -> Any:
        return mx.io.DataBatch(
            [mx.nd.ones((4, length))],
            [mx.nd.zeros((4,))],
            bucket_key=length,
            provide_data=[("data", (4, length))],
            provide_label=[("softmax_label", (4,))],
        )

    module = mx.mod.BucketingModule(generate, default_bucket_key=max(buckets))
    longest = batch(max(buckets))
    module.bind(longest.provide_data, longest.provide_label)
    module.init_params()
    module.init_optimizer()
    for _ in range(2):
        for length in buckets:
            module.forward_backward(batch(length))
            module.update()
    mx.nd.waitall()
    assert set(calls) == set(buckets) and len(calls) > len(buckets)
    assert len(searches) == len(buckets)


# -- progress, and Ctrl-C ---------------------------------------------------------------------


def interrupt() -> None:
    """Ctrl-C; a shell has its background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # the handler runs between two of these
        pass


def test_interrupted_with_something_in_hand(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, searches: list[int]
) -> None:
    """A planner that hands over what it has."""
    counted = solution.smallest

    def stopped(*args: Any, **options: Any) -> Any:
        return counted(*args, **options)._replace(interrupted=True)

    monkeypatch.setattr(solution, "smallest", stopped)
    plan = memonger.plan(net(), SHAPES)
    assert plan.interrupted and plan.exact and plan.recomputed
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=SHAPES)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("interrupted: this is the best plan")
    assert f"{plan.counted_bytes / MB:.1f} MB" in warnings[0]
    assert "interrupted" in str(plan)
    monkeypatch.setattr(solution, "smallest", counted)
    assert not memonger.plan(net(), SHAPES).interrupted  # was not cached
    assert len(searches) == 2


@pytest.mark.parametrize("share", [0.05, 0.9])
def test_the_search_interrupted(
    share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C early and late in a search of seconds."""
    monkeypatch.undo()  # the whole search
    calls: list[float] = []

    def progress(done: float) -> None:
        calls.append(done)
        if done >= share and not any(earlier >= share for earlier in calls[:-1]):
            interrupt()

    monkeypatch.setattr(solution, "progress_bar", lambda what: contextlib.nullcontext(progress))
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=8)
    plan = memonger.plan(symbol, shapes)
    assert plan.interrupted and plan.exact and "interrupted" in caplog.text
    assert plan.counted_bytes < plan.candidates["no plan"]
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=shapes)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Ctrl-C while the cost of the so many-th plan is learned."""
    real = CostModel.__call__
    calls: list[int] = []

    def costed(self: Any, mask: np.ndarray) -> int:
        calls.append(1)
        if len(calls) == call:
            interrupt()
        return real(self, mask)

    monkeypatch.setattr(CostModel, "__call__", costed)


def test_interrupted_with_nothing_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for planner in ("smallest", "chen2016"):
        interrupt_at(monkeypatch, 1)
        with pytest.raises(KeyboardInterrupt):
            memonger.plan(net(), SHAPES, planner=planner)
        monkeypatch.undo()
    assert not memonger.plan(net(), SHAPES).interrupted


def test_the_original_planner_interrupted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    symbol, shapes = networks.lstm(steps=12)
    whole = memonger.plan(symbol, shapes, planner="chen2016")
    forget()
    interrupt_at(monkeypatch, 3)
    plan = memonger.plan(symbol, shapes, planner="chen2016")
    assert plan.interrupted and "interrupted" in caplog.text
    assert whole.counted_bytes <= plan.counted_bytes < plan.candidates["no plan"]
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=shapes)


SLOW = """
import conftest, memonger, sys, time
from memonger.solve import ways as solution
from memonger.planners.marks import smallest
from test_plans import SHAPES, net

smallest.WORK = smallest.MOST_TRIES = 1000
real = solution.smallest

def slow(*args, **options):
    progress = args[-1]
    for done in range(8):
        progress(done / 8)
        time.sleep(float(sys.argv[1]) / 8)
    return real(*args, **options)

solution.smallest = slow
memonger.plan(net(), SHAPES)
"""


def run_slow(seconds: float, stderr: int) -> subprocess.Popen[bytes]:
    here = Path(__file__).parents[1]  # whose conftest it is
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), *sys.path]))
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, str(seconds)], env=environment, stderr=stderr
    )


def on_terminal(seconds: float) -> str:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = run_slow(seconds, slave)
    os.close(slave)
    shown = b""
    try:
        while True:
            piece = os.read(master, 4096)
            if not piece:
                break
            shown += piece
    except OSError:  # Linux: the other end is closed
        pass
    assert process.wait(100) == 0
    os.close(master)
    return shown.decode()


def test_a_bar_on_a_terminal_for_what_takes_long() -> None:
    shown = on_terminal(2.4)
    assert "memonger: searching" in shown and "75%" in shown
    *_, wiped, end = shown.split("\r")
    assert not wiped.strip() and not end
    assert on_terminal(0.0) == ""


def test_no_bar_elsewhere() -> None:
    process = run_slow(2.4, subprocess.PIPE)
    assert process.communicate(timeout=100)[1] == b""
    assert process.returncode == 0


# -- misuse -----------------------------------------------------------------------------------

MISUSE: dict[str, tuple[Any, list[str]]] = {
    "how": ({"how": "luck"}, ["(how)", "'luck'", "'schedule'", "'marks'"]),
    "too little work": ({"how": "schedule", "work": 0.5}, ["work=0.5", "at least once"]),
    "work, no number": ({"how": "schedule", "work": "2"}, ["work must be a number", "'2'"]),
    "work, not a number": ({"how": "schedule", "work": float("nan")}, ["work=nan"]),
    "little work with marks": ({"work": 1.5}, ["work=1.5", "how='schedule'"]),
    "no budget": ({"how": "schedule", "budget": 0}, ["budget=0", "at least one byte"]),
    "budget by the original": (
        {"planner": "chen2016", "budget": "50%"},
        ["planner='chen2016'", "planner of its own"],
    ),
    "budget without rules": ({"rules": False, "budget": "50%"}, ["rules=False", "needs the rules"]),
    "no patience": ({"patience": 0}, ["patience=0", "more than 0"]),
    "schedule by the original": (
        {"how": "schedule", "planner": "chen2016"},
        ["planner='chen2016'", "how='marks'"],
    ),
    "schedule without rules": ({"how": "schedule", "rules": False}, ["rules=False", "no rules"]),
    "planner": ({"planner": "fastest"}, ["'fastest'", "'smallest', 'chen2016'"]),
    "planner of no type": ({"planner": ["chen2016"]}, ["planner", "'smallest', 'chen2016'"]),
    "until": ({"until": "tanh77"}, ["until='tanh77'", "did you mean 'tanh7'"]),
    "until, nothing near": ({"until": "zzzz"}, ["until='zzzz'", "'fc4'"]),
    "until a variable": ({"until": "fc3_weight"}, ["until='fc3_weight'", "no operator"]),
    "until no string": ({"until": 3}, ["until=3"]),
    "devices=0": ({"devices": 0}, ["devices must be at least 1"]),
    "devices, no integer": ({"devices": 1.5}, ["devices must be an integer"]),
    "more devices than samples": ({"devices": 300}, ["batch of 256", "devices=300"]),
    "a device left without": (
        {"devices": 4, "shapes": {"data": (6, 512)}},
        ["batch of 6", "devices=4", "multiple of 4"],
    ),
    "two batch sizes": (
        {"devices": 2, "shapes": {"data": (8, 512), "out_label": (4, 512)}},
        ["'data' has 8", "'out_label' 4"],
    ),
    "grad_req": ({"grad_req": "wirte"}, ["'wirte'", "'write', 'add', 'null'"]),
    "grad_req of one": ({"grad_req": {"data": 1}}, ["'data'", "is 1"]),
    "grad_req by a wrong name": (
        {"grad_req": {"fc0_weigth": "write"}},
        ["'fc0_weigth'", "did you mean 'fc0_weight'"],
    ),
    "grad_req too short": ({"grad_req": ["write"]}, ["1 requests", "34 arguments"]),
    "grad_req of nothing": ({"grad_req": "null"}, ["no gradient at all"]),
    "grad_req of no type": ({"grad_req": None}, ["grad_req must be"]),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse(case: str) -> None:
    options, words = MISUSE[case]
    with pytest.raises(memonger.MemongerError) as caught:
        memonger.plan(net(), **{"shapes": SHAPES, **options})
    assert all(word in str(caught.value) for word in words), caught.value


def test_devices_need_shapes() -> None:
    symbol = net()(data=S.Variable("data", shape=SHAPES["data"]))
    with pytest.raises(memonger.MemongerError, match="devices=2: no input was given"):
        memonger.plan(symbol, devices=2)


def test_a_schedule_tells_of_the_gradients_in_its_pool() -> None:
    """Results lie where they will be, so more may be alive than the rest of the pool holds."""
    x = S.Variable("data")
    for i in range(6):
        x = S.Activation(S.FullyConnected(x, num_hidden=256, name="fc%d" % i), act_type="tanh")
    net = S.SoftmaxOutput(x, name="softmax")
    plan = memonger.plan(net, {"data": (16, 256)}, how="schedule", patience=0.02)
    assert plan.peak_bytes > plan.pool_bytes and plan.floor_bytes <= plan.peak_bytes
    assert f"and {plan.gradient_bytes / 2**20:.1f} MB of gradients" in str(plan)


def test_the_figures_of_a_schedule_do_not_contradict_one_another() -> None:
    """The whole is told first, with the gradients, before and after."""
    symbol, shapes = networks.chain(12, hidden=512, batch=4096)
    plan = memonger.plan(symbol, shapes, how="schedule", patience=0.02)
    assert plan.recomputed and plan.gradient_bytes > 10 * MB
    before, after, saved, floor, device = map(figures, str(plan).splitlines()[:5])
    whole, pool, gradients = before
    assert whole == pytest.approx(pool + gradients, abs=0.11)
    assert saved[0] == pytest.approx(whole - after[0], abs=0.11)
    assert saved[1] == pytest.approx(100 * (1 - after[0] / whole), abs=0.6)
    assert whole > after[0] > after[1] >= floor[0] > 10
    assert device[1] > whole and device[1] > device[0] > after[0]
    # Blocks are rounded up, so that a device may have to give more.
    assert device[1] - device[0] == pytest.approx(saved[0], rel=0.1)


def figures(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\b\d+(?:\.\d)?(?= MB| %)", line)]
