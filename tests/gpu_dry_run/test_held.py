"""What operators take beside the pool, on a GPU; ``costs/test_held.py`` has it on the CPU."""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import pytest

from zoo import Recurrent
from planned import HOWS

from .dry_run import GpuDryRun
from .steps import STEPS, Network, check_plans

pytestmark = pytest.mark.gpu_dry_run

S = mx.sym
IMAGES = (16, 16, 64, 64)
ASKED = "cudnnGetRNNTrainingReserveSize"


def check(dry_run: GpuDryRun, net: Network, *hows: str) -> dict[str, Any]:
    """Check that no plan takes more than none, nor tells what cuDNN does not ask for."""
    # A schedule for any device has the gradient of a Dropout in place, which it is on a CPU alone.
    devices = {"schedule": {"ctx": "gpu"}}
    options = {how: {"patience": 0.02, **HOWS[how], **devices.get(how, {})} for how in hows}
    plans, steps_of = check_plans(dry_run, net, options)
    assert max(taken.peak for taken in steps_of.values()) == steps_of["no plan", "0"].peak
    for (how, _), taken in steps_of.items():
        reserves = [int(line.split()[1]) for line in taken.calls if line.startswith(ASKED)]
        # An operator of a schedule has a reserve of its own in each step.
        assert plans[how].held_bytes == sum(reserves) // (STEPS if how == "schedule" else 1)
    return plans


RECURRENT: dict[str, Recurrent] = {
    "residual LSTM with Dropout": Recurrent(
        "lstm", residual=True, dropout=True, inputs=512, units=512, steps=200, blocks=8
    ),
    "bidirectional GRU": Recurrent("gru", True, stacked=2, residual=True, steps=200, units=256),
    "relu": Recurrent("rnn_relu", steps=50),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_plans_of_fused_rnn_take_what_is_told(gpu_dry_run: GpuDryRun, name: str) -> None:
    check(gpu_dry_run, RECURRENT[name].build(), *HOWS)


def features(x: Any, name: str, blocks: int = 3, filters: int = 16) -> Any:
    for k in range(blocks):
        x = S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=filters, name=name + str(k))
        x = S.Activation(x, act_type="tanh")
    return x


def connected(x: Any, units: tuple[int, ...], **options: Any) -> Any:
    for k, hidden in enumerate(units):
        x = S.FullyConnected(x, num_hidden=hidden, name=f"fc{k}", **options)
        x = S.Activation(x, act_type="tanh")
    return x


def ctc() -> Network:
    """Build a CTC whose probabilities are, of so many characters, as large as its data."""
    x = connected(S.Variable("data"), (64, 64, 512), flatten=False)
    # Labels are zero in a dry run, which pads where the blank is the first.
    loss = S.CTCLoss(x, S.Variable("label"), blank_label="last", name="ctc")
    return S.MakeLoss(loss), {"data": (100, 32, 64), "label": (32, 50)}


def cross_entropy() -> Network:
    x = connected(S.Variable("data"), (64, 64, 1024))
    net = S.MakeLoss(S.softmax_cross_entropy(x, S.Variable("label")))
    return net, {"data": (4096, 64), "label": (4096,)}


def detector() -> Network:
    """Build the head of an SSD: MultiBoxTarget sorts pairs of 16384 anchors and 20 boxes."""
    batch, classes, size = 4, 5, 64
    x = features(S.Variable("data"), "conv", filters=64)
    anchors = S.contrib.MultiBoxPrior(x, sizes=(0.1, 0.2), ratios=(1, 2, 0.5))
    scores = S.Convolution(x, kernel=(1, 1), num_filter=4 * classes, name="scores")
    scores = S.reshape(S.transpose(scores, (0, 2, 3, 1)), (batch, -1, classes))
    scores = S.transpose(scores, (0, 2, 1))
    *_, target = S.contrib.MultiBoxTarget(anchors, S.Variable("label"), scores, name="target")
    loss = S.SoftmaxOutput(scores, target, multi_output=True, name="softmax")
    return loss, {"data": (batch, 3, size, size), "label": (batch, 20, 5)}


#: Hidden outputs are in the pool; temporary space is the device's: its least share of the device.
HOLDERS: dict[str, tuple[Callable[[], Network], float]] = {
    "CTCLoss": (ctc, 0),
    "softmax_cross_entropy": (cross_entropy, 0),
    "detector": (detector, 0.3),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_plans_take_what_is_told(gpu_dry_run: GpuDryRun, name: str) -> None:
    build, temporary = HOLDERS[name]
    plan = check(gpu_dry_run, build(), "marks")["marks"]
    assert plan.held_bytes == 0 and plan.temporary_bytes >= temporary * plan.device_bytes
