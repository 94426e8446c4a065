"""The test suites of transformers, accelerate and TRL, run twice: by themselves, and with this package entered.

    python -m tests.peers                       # all suites, in both arms (make peers)
    python -m tests.peers mixins --only Llama   # tests of one suite whose names have a word

Nothing of theirs is in this repository. transformers' mixins come from the source distribution of the version that is
installed, which pip fetches into `.peers/`; accelerate's and TRL's launches are installed with them. What cannot be
had is skipped, with the reason. DeepSpeed's source distribution has no tests.

The arm "ours" differs in one thing: every process, ranks too, enters ``streaming()`` as `hf_zero_stream.run` does. The
arms are compared test by test: outcomes, and what a test records, such as losses and a digest of the weights it saves.
The exit code is 1 if anything differs, if no test passed, or if nothing streamed in the arm "ours".

| file | what it is |
|---|---|
| `fetch.py` | source distributions |
| `arms.py` | one suite in one arm; its results and what streamed |
| `compare.py` | two arms, test by test |
| `site/` | on PYTHONPATH of all processes: enters the package, counts, and has what asks for GPUs run on a CPU |
| `suites/` | what pytest runs: a driver of transformers' mixins, and launches |
"""
