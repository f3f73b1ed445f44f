"""DeepSpeed and the models of its tests, loaded once in the process that ranks are forked from; starts no thread."""

import importlib
import os

os.environ["DS_ACCELERATOR"] = "cpu"
for name in ("deepspeed", "deepspeed.moe.layer", "deepspeed.runtime.zero.stage3", "scripts.deepspeed_runs.proof"):
    importlib.import_module(name)
for name in ("deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe"):
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
