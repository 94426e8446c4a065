"""Frameworks that call ``from_pretrained`` and save in ways of their own, each run in an environment of its own.

`benchmarks.ecosystem` starts them; each module here is one environment's::

    torchrun --nproc_per_node 2 [-m hf_zero_stream.run] -m benchmarks.clients lightning FOLDER [--resume]

A client trains the checkpoint in FOLDER for three steps on CPUs, saves into FOLDER/trained, and rank 0 writes what
it gave. With ``--resume`` it goes on from there for three more. Both arms run the same code, which names
hf_zero_stream nowhere, but for Ray's workers: they are processes of Ray's, and enter ``streaming()`` themselves.
"""
