"""GPU executor dry run: MXNet's real GPU build, on stand-ins for CUDA, cuDNN and the driver.

What it shows: whether a network binds and steps on ``mx.gpu(0)`` or crashes, the device memory that
MXNet asks for, and the sequence of kernel launches and library calls. What it cannot show: numbers
(kernels are recorded, not carried out) and speed. Convolution and RNN workspaces count as 0 bytes,
and what cuDNN keeps of an RNN is what it was once measured to be.

``dry_run.py`` has the pytest fixture ``gpu_dry_run``; ``child.py`` is what it starts;
``gen_stub.py`` and ``cuda_stub.c`` build the stand-ins.
"""
