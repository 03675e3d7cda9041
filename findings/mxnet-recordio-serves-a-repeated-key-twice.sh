#!/bin/bash
# Expected: if a key is written twice to an indexed record file, the second write is refused, replaces the first, or both can
# be read.
# (Guess: read_idx gives the last; the dataset has two entries.)
# Seen: the file holds three records, and RecordFileDataset has three entries, but entries 0 and 1 are both the second record.
# The first can only be read in sequence. Nothing is raised, and the length is right.
# MXNet 1.9.1.
# Hurts: datasets whose keys are ids of images or users (two lists that both count from 0 and are packed into one file): some
# samples are seen twice and others never, and no count shows it. Make keys unique, or check len(set(record.keys)).
# Source: MXIndexedRecordIO keeps a list of keys and a dict of positions (python/mxnet/recordio.py); RecordFileDataset reads
# by key (gluon/data/dataset.py).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 MXNET_SUBGRAPH_VERBOSE=0
python=
for version in 3.8 3.9 3.10 3.11; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            python=$candidate
            break 2
        fi
    done
done
[ -n "$python" ] || { echo "needs one of Python 3.8, 3.9, 3.10, 3.11" >&2; exit 2; }
"$python" -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-compile mxnet==1.9.1 numpy==1.23.5 graphviz==0.8.4 'requests<3'
venv/bin/python - <<'EOF'
import mxnet as mx

writer = mx.recordio.MXIndexedRecordIO("data.idx", "data.rec", "w")
for key, text in ((7, b"first"), (7, b"second"), (8, b"third")):
    writer.write_idx(key, text)
writer.close()
dataset = mx.gluon.data.RecordFileDataset("data.rec")
served = [dataset[i] for i in range(len(dataset))]
reader = mx.recordio.MXRecordIO("data.rec", "r")
in_sequence = [reader.read() for _ in range(3)]
print("mxnet", mx.__version__, "| in the file", in_sequence, "| served", served)
assert in_sequence == [b"first", b"second", b"third"]
assert served == [b"second", b"second", b"third"]
EOF
