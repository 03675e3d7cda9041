"""Pointwise fusion on MXNet's GPU build: what is told of it is what MXNet makes of a network.

Runs on stand-ins for CUDA (see the package's docstring). Run with ``-s`` to see the figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memonger.support.errors
import mxnet as mx
import pytest

from .child import DryRun
from .dry_run import GpuDryRun

pytestmark = pytest.mark.gpu_dry_run

MB = memonger.support.errors.MB
TESTS = str(Path(__file__).resolve().parents[1] / "helpers")
NETWORKS = 150
FUSION = {"MXNET_USE_FUSION": "1"}


def fused_networks(dry: DryRun) -> Any:
    """Random marks and copies on random networks: their fused graphs, replayed and bound.

    Counts the networks, those in which something is recomputed, those with copies, those with sums
    that are kept apart from fusion, those in which anything is fused, those whose memory is another
    with fusion, and fused operators.
    """
    import dataclasses
    import re
    import sys

    paths, networks = dry.args
    sys.path[:0] = paths
    import memonger
    import mxnet as mx
    import numpy as np
    from generated import build, recipes
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from memonger.graph import marks
    from memonger.costs.replay import replay
    from memonger.costs.bind import bind, planned_mb
    from memonger.graph.forward import KeptCopy
    from memonger.costs.fusion import replay_fused
    from memonger.graph.operators.recompute import targets_of
    from memonger.planners.marks.copies import copyable, settle
    from planned import rules_of

    counted = ("networks", "recomputed", "copies", "apart", "fused", "other memory", "operators")
    count = dict.fromkeys(counted, 0)

    def of_mxnet(text: str) -> Any:
        """The operators of a bound graph, in order, and which outputs of theirs each reads."""
        found = []
        for block in re.split(r"^-{20}$", text, flags=re.M):
            op = re.search(r"^Op:(\w+), Name=", block, re.M)
            if op is not None and "Helper" not in op.group(1):
                found.append([op.group(1), re.findall(r"arg\[\d+\]=.*\((\d+)\)", block)])
        return found

    def of_replay(found: Any) -> Any:
        tables, ops = found.training.tables, found.training.ops
        return [
            [ops[row], list(map(str, tables.read_output[start:stop]))]
            for row, start, stop in zip(
                found.order, tables.read_start[found.order], tables.read_start[found.order + 1]
            )
            if ops[row] != "null"
        ]

    @settings(
        max_examples=10 * networks,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def try_one(recipe: Any, seed: int, share: float) -> None:
        if count["networks"] == networks:
            return
        recipe = dataclasses.replace(recipe, batch=recipe.batch * 65537)  # MXNet tells whole MB
        symbol, shapes = build(recipe)
        rules = rules_of(symbol, shapes, targets_of("gpu"))
        random = np.random.RandomState(seed)
        drawn = random.uniform(size=len(rules.graph.nodes)) < share
        kept = tuple(c for c in copyable(rules) if drawn[c.node] and random.uniform() < 0.3)
        same, graph = rules.trainings[0].same, rules.graph
        read = {a for node in graph.nodes for a, _ in node.inputs} - {a for a, _ in graph.heads}
        kept += tuple(
            KeptCopy(i, unfused=True, apart=True)
            for i in sorted(read)
            if graph.nodes[i].op == "elemwise_add" and same.count(i) == 1 and drawn[-i]
        )
        kept = tuple(sorted({copy.node: copy for copy in kept}.values()))
        settled, full, mask, copies = settle(rules, drawn & rules.allowed, kept)
        if marks.inferable(symbol, copies, shapes) != copies:
            return
        training = settled.trainings[0]
        if training.inexact:
            return
        planned = marks.apply(symbol, mask, rules.native(mask), copies)
        try:
            bind(marks.clear(symbol), rules.graph, mx.gpu(0))
        except memonger.MemongerError:
            return  # MXNet cannot bind it unmarked
        bound = bind(planned, rules.graph, mx.gpu(0))
        found, plain = replay_fused(training, full), replay(training, full)
        text = bound.debug_str()
        assert of_replay(found) == of_mxnet(text), "%r %d %s" % (recipe, seed, share)
        told = found.pool_bytes // 2**20
        assert told == planned_mb(bound), "%r %d %s %d" % (recipe, seed, share, told)
        count["networks"] += 1
        count["recomputed"] += bool(full.any())
        count["copies"] += bool(copies)
        count["apart"] += any(copy.apart for copy in copies)
        count["fused"] += "_FusedOp" in found.training.ops
        count["other memory"] += found.pool_bytes != plain.pool_bytes
        count["operators"] += found.training.ops.count("_FusedOp")

    try_one()
    return count


def test_generated_networks_are_fused_as_mxnet_fuses_them(gpu_dry_run: GpuDryRun) -> None:
    """Operator by operator and to the MB, with marks and copies and without."""
    result = gpu_dry_run.run(fused_networks, args=[[TESTS], NETWORKS], env=FUSION)
    assert result.ok, result.message
    print("\n", result.value)
    count = result.value
    assert count["networks"] == NETWORKS
    assert count["recomputed"] > NETWORKS / 2 and count["copies"] > 20
    assert count["apart"] > 10
    assert count["fused"] > NETWORKS / 2 and count["other memory"] > NETWORKS / 5


# -- whole plans ------------------------------------------------------------------------------


def plans(dry: DryRun) -> Any:
    """Plan networks for the GPU with fusion on and off, and train them; what is told and taken.

    Emits, for each network and setting: the bytes of the plan's pool and of the device, MXNet's own
    MB, the bytes that a step asks of the device, whether the plan is exact, and the warnings.
    """
    import gc
    import logging
    import os

    import memonger
    import mxnet as mx
    from memonger.costs.bind import planned_mb

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memonger").addHandler(handler)
    mx.nd.ones((4,), ctx=mx.gpu(0)).wait_to_read()
    for name, (text, shapes) in dry.args[0].items():
        symbol = mx.sym.load_json(text)
        shapes = {n: tuple(shape) for n, shape in shapes.items()}
        requests = {n: "null" if n in shapes else "write" for n in symbol.list_arguments()}
        for setting in ("fused", "without copies", "unfused"):
            fusion, copies = str(int(setting != "unfused")), setting != "without copies"
            os.environ["MXNET_USE_FUSION"] = fusion  # read at each bind
            options = {"ctx": mx.gpu(0), "grad_req": requests, "patience": 0.02}
            del said[:]
            plan = memonger.plan(symbol, shapes, kept_copies=copies, **options)
            gc.collect()
            mx.nd.waitall()
            mx.gpu(0).empty_cache()
            before = dry.used_bytes()
            dry.reset_peak()
            executor = plan.symbol.simple_bind(mx.gpu(0), grad_req=requests, **shapes)
            pool = planned_mb(executor)
            executor.forward(is_train=True)
            executor.backward()
            mx.nd.waitall()
            taken = dry.peak_bytes() - before
            del executor
            figures = plan.counted_bytes, plan.device_bytes, pool, taken, plan.exact, list(said)
            dry.emit([name, setting, *figures])
    return "done"


def wavenet() -> Any:
    """Gated convolutions whose results are added up: a sum that is fused holds all its terms."""
    S, steps = mx.sym, 2048
    x = S.Convolution(S.Variable("data"), num_filter=32, kernel=(1,), name="first")
    total = None
    for i in range(8):
        y = S.expand_dims(x, axis=2)
        y = S.Convolution(y, num_filter=64, kernel=(1, 2), dilate=(1, 2**i), pad=(0, 2**i))
        y = S.slice_axis(S.squeeze(y, axis=2), axis=2, begin=0, end=steps)
        one, other = S.SliceChannel(y, num_outputs=2, axis=1)
        z = S.tanh(one) * S.sigmoid(other)
        skip = S.Convolution(z, num_filter=32, kernel=(1,))
        total = skip if total is None else total + skip
        x = x + S.Convolution(z, num_filter=32, kernel=(1,))
    y = S.Convolution(S.relu(total), num_filter=64, kernel=(1,))
    net = S.SoftmaxOutput(y, multi_output=True, name="softmax")
    return net, {"data": (16, 1, steps), "softmax_label": (16, steps)}


def style_transfer() -> Any:
    """Convolutions with InstanceNorm, residuals, and two ways to grow an image again."""
    S = mx.sym

    def conv(x: Any, filters: int, kernel: int, stride: int, name: str) -> Any:
        pad = (kernel // 2, kernel // 2)
        x = S.Convolution(
            x, num_filter=filters, kernel=(kernel, kernel), stride=(stride, stride), pad=pad
        )
        return S.InstanceNorm(x, S.Variable(name + "_gamma"), S.Variable(name + "_beta"))

    x = S.relu(conv(S.Variable("data"), 16, 9, 1, "first"))
    x = S.relu(conv(x, 32, 3, 2, "second"))
    for i in range(4):
        y = S.relu(conv(x, 32, 3, 1, "a%d" % i))
        x = x + conv(y, 32, 3, 1, "b%d" % i)
    x = S.UpSampling(x, scale=2, sample_type="nearest")
    x = S.relu(conv(x, 16, 3, 1, "third"))
    x = S.Deconvolution(x, num_filter=16, kernel=(4, 4), stride=(2, 2), pad=(1, 1))
    x = S.tanh(conv(x, 3, 9, 2, "last")) * 150 + 127.5
    image = (8, 3, 126, 126)  # no array of it fills its blocks of 2 MB
    net = S.LinearRegressionOutput(x, S.Variable("image_label"))
    return net, {"data": image, "image_label": image}


def test_device_bytes_with_fusion_and_without(gpu_dry_run: GpuDryRun) -> None:
    """To 3 % of what is asked of the device; where fusion takes more memory, that is said."""
    nets = {"wavenet": wavenet(), "style_transfer": style_transfer()}
    texts = {name: [symbol.tojson(), shapes] for name, (symbol, shapes) in nets.items()}
    result = gpu_dry_run.run(plans, args=[texts])
    assert result.ok, result.message
    found = {(name, setting): figures for name, setting, *figures in result.emitted[:-1]}
    for (name, setting), (counted, device, pool, taken, exact, said) in found.items():
        print("\n", name, setting, counted // MB, pool, device / MB, taken / MB, said)
        assert exact and counted // MB == pool
        assert abs(device - taken) < 0.03 * taken
        costs = [text for text in said if "pointwise fusion" in text]
        if (name, setting) != ("wavenet", "fused"):  # a little more than without fusion
            assert len(costs) == ((name, setting) == ("wavenet", "without copies"))
        for text in costs:
            assert "MXNET_USE_FUSION=0" in text and "how='schedule'" in text
            assert f"with it {counted / MB:.1f} MB" in text
    fused, without_copies, unfused = (figures[0] for figures in list(found.values())[:3])
    assert unfused < 0.8 * without_copies  # the sum holds all its terms
    assert fused < 1.1 * unfused  # but where it is kept apart from fusion


def leaky(dry: DryRun) -> Any:
    """Plan a LeakyReLU without act_type, with fusion and without."""
    import os

    import memonger
    import mxnet as mx

    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4)
    net = mx.sym.MakeLoss(mx.sym.LeakyReLU(x, name="leaky") * 2)
    said = []
    for fusion in ("1", "0"):
        os.environ["MXNET_USE_FUSION"] = fusion
        try:
            memonger.plan(net, {"data": (4, 4)}, ctx=mx.gpu(0), patience=0.02)
            said.append("")
        except memonger.MemongerError as error:
            said.append(str(error))
    return said


def test_a_leaky_relu_that_fusion_cannot_read(gpu_dry_run: GpuDryRun) -> None:
    """MXNet's own message is ``_Map_base::at``."""
    result = gpu_dry_run.run(leaky)
    assert result.ok, result.message
    with_fusion, without = result.value
    assert "'leaky'" in with_fusion and "act_type" in with_fusion
    assert "MXNET_USE_FUSION=0" in with_fusion and "_Map_base" not in with_fusion
    assert without == ""
