"""With this folder on PYTHONPATH, Python imports this module when it starts: ``hf-zero-stream run`` puts it there.

Python of any version may meet it, with this package or without.
"""

import os
import sys


# The script's modules are found where they would be without us, and so is a `sitecustomize` that lies behind this one.
_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _folder]

if sys.version_info >= (3, 11) and os.environ.get("HF_ZERO_STREAM_RUN") != "0":
    try:
        from hf_zero_stream.prefix import reach

        reach()
    except Exception:  # the package is not there, or not whole: what this Python does is as without us
        pass

# If there is no other, this is the error that Python expects where there is no `sitecustomize`.
sys.modules.pop(__name__, None)
import sitecustomize  # noqa: E402, F401, I001
