"""Tests of hf_zero_stream.

Folders that are the package's, with what users see of them:

- ``core``: what a load is made of: lazy tensors, boxes, conversions, plans, settings, reports, and who imports whom
- ``ports``: sources of bytes, formats of checkpoints and destinations: what each of them must do, and examples of them
- ``loading``: what ``from_pretrained`` gives is what plain loading gives: arguments, odd models, live models
- ``zero``: ZeRO-3 and the other stages: where partitions live, what training takes and gives
- ``sharded``: FSDP2, tensor parallelism and ``distributed_config``
- ``saving``: ``save_pretrained`` and its like; ``crash`` kills saves at each of their steps
- ``state``: training states and how training goes on; ``crash`` kills their saves
- ``ranks``: how ranks find and wait for each other
- ``bindings``: what is bent in other packages, other versions of them, and the frameworks above them
- ``cli``: the command line

Of plug-ins, each of which can be away: ``autoep``, ``autotp``, ``demo``, ``flat``, ``forecast``, ``from_files``,
``hosts``, ``nvme``, ``packed``, ``pickled``, ``relay``, ``remote``, ``stream``, ``tools``, ``verify`` and ``watch``;
and ``plugins``: those of others, and what plug-ins import of the core.

Topics across all of it:

- ``faults``: disks, ranks and networks that fail
- ``hostile``: checkpoints that somebody packed to do harm, or oddly
- ``situations``: trainings, saves and resumes that are drawn, beside stock's (``make situations``)
- ``docs``: documentation, examples and notebooks do what they say
- ``paper_gpu``: GPUs that are not there, strict about streams and memory, and what runs on them
- ``sweep``, ``peers``, ``drift``: programs of their own (``make sweep`` and so on), and samples of them
- ``support``: what tests share, and tests of that

``make test-all`` runs all of them. ``make test`` is what a change must pass: of each capability it runs a real sample.
What it leaves out is marked ``slow``:

- by hand: long trials, and those that differ from another one in the same file only by a setting,
- by ``conftest.py``: all but one row of a test that starts ranks, or all but n rows if it is marked ``sample(n)``.

Rows that share a fixture, as trials in one start of ranks do, are taken out of it too: see :func:`sampling.chosen`.
Where one test goes over many cases itself, it goes over some of them: see :func:`sampling.every`.
"""
