"""The kernels run in Triton's interpreter, which is chosen when they are decorated: before they are imported."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # macOS: there is no Triton; test_growth.py knows what importing them says
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
