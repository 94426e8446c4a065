"""With this folder at the front of PYTHONPATH, and the repository behind it, every Python process has paper GPUs."""

import tests.paper_gpu.cuda  # noqa: F401
