"""The replay of MXNet's memory planner: what is alive when."""

from typing import Any

import memonger  # noqa: F401
import numpy as np
import pytest
from memonger.allocator import BACKWARD, FORWARD, RECOMPUTED, replay, timeline
from memonger.forward import ForwardGraph
from memonger.training import training_graph

import networks
from planned import forward

MB = 2**20


def operators(graph: ForwardGraph) -> np.ndarray:
    """All that MXNet can recompute."""
    return np.array([node.op not in ("null", "Dropout") for node in graph.nodes])


# ------------------------------------------------------------------ memory over time

#: chain(2), every tensor 1 MB: name, kind, first and last step, storage. Step 0 to 2 are variables.
#: The loss's gradient gives way to that of tanh1, and so on (in-place); the outputs of a network
#: stay to the end, the gradients of variables are the user's memory.
KEPT = [
    ("fc0", FORWARD, 3, 14, 0),
    ("tanh0", FORWARD, 4, 14, 1),
    ("fc1", FORWARD, 7, 12, 2),
    ("tanh1", FORWARD, 8, 12, 3),
    ("out", FORWARD, 10, 15, 4),
    ("out_backward", BACKWARD, 11, 11, 5),
    ("tanh1_backward", BACKWARD, 12, 13, 5),
    ("fc1_backward", BACKWARD, 13, 13, 6),
    ("tanh0_backward", BACKWARD, 14, 15, 6),
]
#: The same with fc0 and tanh0 recomputed: tanh0 takes the place of fc0, the gradient of fc1 that of
#: tanh0, for the copies are what the gradients of fc0 and tanh0 read.
AGAIN = [
    ("fc0", FORWARD, 3, 3, 0),
    ("tanh0", FORWARD, 4, 12, 0),
    ("fc1", FORWARD, 7, 12, 1),
    ("tanh1", FORWARD, 8, 12, 2),
    ("out", FORWARD, 10, 17, 3),
    ("out_backward", BACKWARD, 11, 11, 4),
    ("tanh1_backward", BACKWARD, 12, 13, 4),
    ("fc1_backward", BACKWARD, 13, 15, 0),
    ("fc0_mirror", RECOMPUTED, 14, 16, 5),
    ("tanh0_mirror", RECOMPUTED, 15, 16, 6),
    ("tanh0_backward", BACKWARD, 16, 17, 0),
]


@pytest.mark.parametrize(
    "again, table, live",
    [
        ((), KEPT, [0, 0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 6, 6, 5, 4, 2]),
        (("fc0", "tanh0"), AGAIN, [0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 5, 5, 3, 3, 4, 4, 2]),
    ],
)
def test_what_is_alive_when(again: Any, table: Any, live: Any) -> None:
    graph = forward(*networks.chain(depth=2))
    training = training_graph(graph)
    mask = np.array([node.name in again for node in graph.nodes])
    found = timeline(training, mask)
    names = [training.names[row] for row in found.row]
    assert list(zip(names, found.kind, found.start, found.stop, found.storage)) == table
    assert not found.output.any() and set(found.nbytes) == {MB}
    assert (found.live_bytes() // MB).tolist() == live
    assert replay(training, mask).peak_bytes == max(live) * MB


def test_kinds_add_up_and_nothing_outlives_the_pool() -> None:
    graph = forward(*networks.lstm(layers=2, steps=10, hidden=64, batch=8, labels=50))
    training = training_graph(graph)
    for mask in (np.zeros(len(graph.nodes), bool), operators(graph)):
        plan = replay(training, mask)
        found = plan.timeline()
        kinds = [found.live_bytes(kind) for kind in (FORWARD, RECOMPUTED, BACKWARD)]
        assert np.array_equal(np.sum(kinds, axis=0), found.live_bytes())
        assert plan.peak_bytes == found.live_bytes().max() <= plan.allocated_bytes
        assert kinds[RECOMPUTED].any() == mask.any()
