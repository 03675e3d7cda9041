"""What a training step of a schedule takes, by a plain walk: no compiled code, no arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from memonger.schedules.training_step import ALIGNMENT, ROOM, TrainingStep


class Block:
    """Memory of a tensor, or of several that are computed over one another."""

    def __init__(self, row: int, nbytes: int) -> None:
        self.row, self.nbytes = row, nbytes
        self.waiting: set[Any] = set()  # the reads that are to come; a head's never does
        self.stop = -1


def walked(step: TrainingStep) -> dict[tuple[int, int], Block]:
    """Return the block of each tensor, (row, output)."""
    views = not step.parts.mkldnn
    reads_of, signatures = step.reads, step.signatures
    readers: dict[tuple[int, int], set[Any]] = {}
    for row, reads in enumerate(reads_of):
        for k, entry in enumerate(reads):
            if k not in signatures[row].ignored:
                readers.setdefault(entry, set()).add((row, k))
    for head, entry in enumerate(step.heads):
        readers.setdefault(entry, set()).add(head)
    blocks: dict[tuple[int, int], Block] = {}
    for row, (reads, signature) in enumerate(zip(reads_of, signatures)):
        if signature.op == "null":
            continue
        for k, output, identity in signature.options:
            source, out = reads[k], (row, output)
            if source not in blocks or out in blocks or out not in readers:
                continue
            block, old, new = blocks[source], step.tensor(source), step.tensor(out)
            alike = old.dtype == new.dtype and old.elements == new.elements
            alone = block.waiting == {(row, k)}
            if alike and (views or old.shape == new.shape) and (identity or alone):
                block.waiting |= readers[out]
                blocks[out] = block
        for output, tensor in enumerate(signature.tensors):
            if (row, output) not in blocks:
                blocks[row, output] = Block(row, tensor.nbytes)
                blocks[row, output].waiting |= readers.get((row, output), set())
        here = [
            blocks[e] for k, e in enumerate(reads) if e in blocks and k not in signature.ignored
        ]
        here += [blocks[row, output] for output in range(len(signature.tensors))]
        for block in here:
            block.waiting -= {(row, k) for k in range(len(reads))}
            block.stop = row
    for block in blocks.values():
        block.stop = len(reads_of) - 1 if block.waiting else block.stop
    return blocks


def check_memory(step: TrainingStep) -> int:
    """Compare the blocks of a step, and where they lie, with a walk; the most bytes alive."""
    walked_blocks, blocks, outputs = walked(step), step.alive, step.arrays.outputs
    forward = int(np.flatnonzero(step.rows.time == 0)[-1])
    of_caller = {id(walked_blocks[head]) for head in step.heads[:outputs] if head in walked_blocks}
    for head in step.heads[outputs:]:  # a gradient's array is left alone in the forward pass
        if head in walked_blocks and walked_blocks[head].row > forward:
            of_caller.add(id(walked_blocks[head]))
    number: dict[int, int] = {}
    for entry, block in walked_blocks.items():
        k = number.setdefault(id(block), step.block(entry))
        predicted = blocks.start[k], blocks.stop[k], blocks.nbytes[k], blocks.of_caller[k]
        assert k == step.block(entry)
        assert predicted == (block.row, block.stop, block.nbytes, id(block) in of_caller), entry
    assert len(number) == len({*number.values()}) == len(blocks.start)
    starts, ends = np.zeros((2, len(step.rows.source)), dtype=np.int64)
    for block in {id(block): block for block in walked_blocks.values()}.values():
        if id(block) not in of_caller:
            starts[block.row] += block.nbytes
            ends[block.stop] += block.nbytes
    most = live = 0
    for started, ended in zip(starts.tolist(), ends.tolist()):
        live += started
        most, live = max(most, live), live - ended
    assert live == 0 and step.arena_bytes - ROOM >= most
    check_placement(step)
    return most


def check_placement(step: TrainingStep) -> None:
    """Check that no two blocks of the arena overlap that are alive at the same time."""
    blocks, (offset, arena_bytes) = step.alive, step.placement
    ours = np.flatnonzero(~blocks.of_caller)
    start, stop, nbytes = blocks.start[ours], blocks.stop[ours], blocks.nbytes[ours]
    end = offset + nbytes
    assert not (offset % ALIGNMENT).any() and arena_bytes >= max(end, default=0)
    for k in range(len(ours)):
        together = (start[k] <= stop[:k]) & (start[:k] <= stop[k])
        assert not (together & (offset[k] < end[:k]) & (offset[:k] < end[k])).any()
