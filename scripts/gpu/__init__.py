"""The GPU day: what only a machine with an NVIDIA GPU can show, in two calls that fit fifteen minutes.

    python -m scripts.gpu wheels FOLDER     # where there is a network: what such a machine may lack, for pip there
    python -m scripts.gpu a [RESULTS]       # at most 4 minutes: ceilings, our reader, two ranks, bits and losses
    python -m scripts.gpu b [RESULTS]       # at most 7 minutes: speed at size, saves, resumes, offload, memory

A call is a list of groups of processes. Groups that time something have the machine to themselves and come first; the
others run beside each other. Each step writes one line of JSON into ``RESULTS/CALL.jsonl`` at once, and prints it, so
that a machine that goes away takes little with it. A step that fails does not end its processes. Checkpoints lie in
``--data``, never among the results. Needs torch, transformers, accelerate, DeepSpeed and pytest, and no network.

The tests run both calls on paper GPUs (:mod:`tests.paper_gpu`), at small sizes.
"""
