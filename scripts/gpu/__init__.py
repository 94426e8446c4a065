"""The GPU day: what only a machine with an NVIDIA GPU can show, in three commands of at most eight minutes each.

    python -m scripts.gpu wheels FOLDER     # where there is a network: what such a machine may lack, for pip there
    python -m scripts.gpu correctness       # one rank: bits, losses, saves, resumes, memory
    python -m scripts.gpu ranks             # two ranks on one GPU, over NCCL
    python -m scripts.gpu speed             # against loops that do nothing but copy

Each writes what it has found into a file after every step, and prints it, so that a machine that goes away takes
little with it. A step that fails, or hangs, ends; the next one begins in new processes. Needs torch, transformers,
accelerate, DeepSpeed and pytest, and no network.

The tests run all of it on paper GPUs (:mod:`tests.paper_gpu`), at small sizes.
"""
