"""Other versions of the libraries that are bent: what of the table each of them has, and what works there.

    python -m tests.drift contracts              # by the sources of many versions, which are downloaded and only read
    python -m tests.drift stacks                 # in an environment of its own for each set of versions
    python -m tests.drift stacks --only newest   # of some of them
    python -m tests.drift here                   # what is tried there, in the environment that runs this

The first two write their part of docs/support.md. Nothing is downloaded or installed twice: see `.drift/`.
"""
