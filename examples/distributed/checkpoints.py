"""Checkpoints of a worker after each epoch, and the epoch that all workers go on from."""

import os
import shutil
import tempfile
from typing import Any, List

import mxnet as mx


def saved(folder: str) -> List[int]:
    """List the epochs after which there is a checkpoint in this folder."""
    if not os.path.isdir(folder):
        return []
    return sorted(int(name[6:]) for name in os.listdir(folder) if name.startswith("epoch-"))


def save(folder: str, loop: Any, epoch: int) -> None:
    """Write a checkpoint, which is there as a whole or not at all, and keep the one before."""
    part = tempfile.mkdtemp(dir=folder)
    mx.nd.save(os.path.join(part, "net.params"), loop.states())
    loop.save_optimizer(os.path.join(part, "optimizer.states"))
    try:
        os.rename(part, os.path.join(folder, f"epoch-{epoch}"))
    except OSError:  # workers that share the folder write the same
        shutil.rmtree(part)
    for old in saved(folder)[:-2]:
        shutil.rmtree(os.path.join(folder, f"epoch-{old}"), ignore_errors=True)


def load_weights(folder: str, loop: Any, epoch: int) -> None:
    """Read the weights of a checkpoint."""
    loop.set_states(mx.nd.load(os.path.join(folder, f"epoch-{epoch}", "net.params")))


def load_optimizer(folder: str, loop: Any, epoch: int) -> None:
    """Read the state of the optimizer of a checkpoint, which has started."""
    loop.load_optimizer(os.path.join(folder, f"epoch-{epoch}", "optimizer.states"))


def first_epoch(folder: str, store: Any, key: Any) -> int:
    """Tell the epoch to begin with: that of the latest checkpoint that all workers have."""
    if not folder:
        return 0
    os.makedirs(folder, exist_ok=True)
    latest = mx.nd.zeros(store.num_workers)
    store.init(key, latest)
    latest[store.rank] = max(saved(folder), default=0)
    store.pushpull(key, latest, out=latest)  # the sum of what all have put in
    epochs = latest.asnumpy().astype(int)
    if epochs.max() - epochs.min() > 1:  # a crash leaves them one apart at most
        raise SystemExit(f"worker {epochs.argmin()} lacks the checkpoint of epoch {epochs.max()}")
    return int(epochs.min())
