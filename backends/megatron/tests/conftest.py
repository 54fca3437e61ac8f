"""Where megatron-core is not installed, only what needs none of it runs; workers import it once."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

collect_ignore: list[str] = []
if find_spec("megatron") is None or find_spec("transformers") is None:
    tests = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [file.name for file in tests if file.name != "test_megatron_config.py"]
else:
    os.environ.setdefault(
        "ACCEL_TEST_PRELOAD",
        "megatron.core.distributed,megatron.core.optimizer,megatron.core.pipeline_parallel,"
        "megatron.core.models.gpt,transformers.models.gpt2.modeling_gpt2,transformers.models.llama.modeling_llama,"
        "transformers.models.bert.modeling_bert,megatron.core.models.bert.bert_model",
    )
