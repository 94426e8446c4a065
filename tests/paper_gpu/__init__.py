"""A GPU of paper: CUDA devices and NCCL for builds of torch for CPUs, on machines without a GPU.

``import tests.paper_gpu.cuda`` before torch. Then there are CUDA tensors, streams, events, pinned memory, an allocator
and an "nccl" backend, and code that is for GPUs alone runs: this package's own, DeepSpeed's, accelerate's, FSDP2's.

What it is strict about, because real GPUs are:

- The host cannot read or write the memory of a device: who tries ends by a segmentation fault.
- Streams lag behind on purpose. Who does not wait for one where that is needed meets values that are not there yet.
- The allocator gives freed memory out at once, and fills it with NaN.
- Copies from and to pinned memory leave the host alone; their memory must not be touched before they are done.
- Collectives refuse what NCCL refuses, must be the same on all ranks, and do not notice that a rank has died.

What it is not: it has no GPU arithmetic (sums come out as on a CPU) and no speed, no Triton, none of bitsandbytes'
kernels, no graphs, no memory shared between processes. What passes on it may still fail on a GPU.
"""
