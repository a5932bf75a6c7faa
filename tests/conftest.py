"""Set before any test module is imported: fla reads it once, and a test may import fla before harts_titan does."""

import os

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
