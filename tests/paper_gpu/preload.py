"""What the fork server of ranks on paper GPUs imports once."""

# ruff: isort: skip_file
import tests.paper_gpu.cuda  # noqa: F401
import tests.support.cluster_preload  # noqa: F401
