"""Make the helper modules beside the tests importable by their bare names.

With `--import-mode=importlib` names of test files may repeat across packages, and pytest adds no folder to
the import path. The root itself stays off the path: tests import the installed packages, not the checkout.
With `consider_namespace_packages` a test file has the name that these folders give it, so that a process of
a test finds what is defined there.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent
FILES = [file for tests in ("tests", "*/*/tests") for file in ROOT.glob(f"{tests}/**/*.py")]

# Folders without tests are not for everybody: they hold stand-ins for vendors' libraries, for example.
sys.path[:0] = sorted({str(file.parent) for file in FILES if file.name.startswith(("test_", "conftest"))})
