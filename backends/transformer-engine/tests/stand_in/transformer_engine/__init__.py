"""TE's own Python files, from its wheel, on the CPU, over `transformer_engine_torch` beside this.

The folder of the wheel is named by ACCEL_TEST_VENDOR. Files here take the place of the wheel's where those
load libraries that need a GPU. In the others the device's name is replaced as they are read.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

WHEEL = Path(os.environ["ACCEL_TEST_VENDOR"]) / "transformer_engine"
HERE = Path(__file__).parent.parent
WORDS = {
    "torch.cuda.is_available()": "True",
    "inp.is_cuda": "True",
    "torch.is_autocast_enabled()": 'torch.is_autocast_enabled("cpu")',
    'torch.get_autocast_dtype("cuda")': 'torch.get_autocast_dtype("cpu")',
    'torch.is_autocast_enabled("cuda")': 'torch.is_autocast_enabled("cpu")',
    'device_type="cuda"': 'device_type="cpu"',
    '"cuda"': '"cpu"',
    "torch.cuda.get_device_properties(": "__import__('transformer_engine_torch').properties(",
    "torch.cuda.get_device_capability()": "__import__('transformer_engine_torch').CAPABILITY",
    "torch.Tensor().cuda()": "torch.Tensor()",
    "torch.version.cuda": '"12.9"',
    "torch.cuda.current_device()": "0",
    "torch.cuda.synchronize()": "None",
    "torch.cuda.is_current_stream_capturing()": "False",
}
os.environ["NVTE_TORCH_COMPILE"] = "0"
(_told,) = WHEEL.parent.glob("transformer_engine-*.dist-info")
__version__ = _told.stem.partition("-")[2]


class OnTheCpu(SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        text = super().get_data(path).decode()
        for word, here in WORDS.items():
            text = text.replace(word, here)
        return text.encode()

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError  # no compiled copy of another text


class Finder(MetaPathFinder):
    """Finds a file here, else the wheel's."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        for root, loader in ((HERE, SourceFileLoader), (WHEEL.parent, OnTheCpu)):
            file = root.joinpath(*name.split("."))
            if (first := file / "__init__.py").is_file():
                folders = [str(file)]
                made = loader(name, str(first))
                return importlib.util.spec_from_file_location(
                    name, first, loader=made, submodule_search_locations=folders
                )
            if (file := file.with_suffix(".py")).is_file():
                return importlib.util.spec_from_file_location(name, file, loader=loader(name, str(file)))
        return None


sys.meta_path.insert(0, Finder())
