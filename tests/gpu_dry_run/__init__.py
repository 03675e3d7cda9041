"""GPU executor dry run: MXNet's real GPU build, on stand-ins for CUDA, cuDNN and the driver.

It shows whether a network binds and steps on ``mx.gpu(0)`` or crashes, the device memory that MXNet
asks for, and the kernel launches and library calls. It cannot show numbers (kernels are recorded,
not carried out) and speed. Convolution and RNN workspaces count as 0 bytes, and what cuDNN keeps of
an RNN is what it was once measured to be.
"""
