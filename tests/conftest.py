"""Set before any test module is imported."""

import os

# fla reads them once, and a test may import fla before harts_titan does.
os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
os.environ.setdefault("FLA_TENSOR_CACHE_SIZE", "128")

# The package prepares torchtitan, which binds its device type at import; a test may import torchtitan first.
import harts_titan  # noqa: F401
