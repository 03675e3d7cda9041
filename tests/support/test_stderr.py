"""Nothing but one line of MXNet's is kept from standard error."""

import os
import threading

import pytest
from memonger.support.mxnet import without_line
from planned import run_python

TRAIN = """
import memonger, mxnet as mx, os
x = mx.sym.FullyConnected(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4), num_hidden=4)
net = mx.sym.SoftmaxOutput(x, name="softmax")
planned = memonger.plan(net, {"data": (2, 3)}, how="schedule", patience=0.02).symbol
os.environ["MXNET_EXEC_VERBOSE_LOGGING"] = "1"  # MXNet logs its memory plan at each bind
for _ in range(3):
    executor = planned.simple_bind(mx.cpu(), data=(2, 3), softmax_label=(2,))
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()
"""


def test_a_schedule_is_bound_without_a_word_of_its_backend() -> None:
    done = run_python("-c", TRAIN)
    assert done.returncode == 0, done.stderr
    assert "is detected" not in done.stderr


def test_all_else_is_handed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with without_line(b"no such line"):
        os.write(2, b"first\na line with no such line in it\nsec")
        os.write(2, b"ond\n")
        thread = threading.Thread(target=os.write, args=(2, b"third\n"))
        thread.start()
        thread.join()
    with without_line(b"no such line"), pytest.raises(ValueError):
        os.write(2, b"unfinished")
        raise ValueError
    os.write(2, b", after\n")
    assert capfd.readouterr().err.splitlines()[:3] == ["first", "second", "third"]
