"""Run by test_compiles.py without the interpreter: build every kernel of a model for an H200 without one.

A model of the sizes of Qwen3.6-35B-A3B, but for layers, experts and vocabulary, goes through windows and prompts; a
launch compiles and then does nothing. Prints the kernels that were built, and fails with the first that was not.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch


def compiler() -> Any:
    """The stand-ins of the op library's own script."""
    path = Path(__file__).parents[1] / "ops" / "compile_all.py"
    spec = importlib.util.spec_from_file_location("tests_ops_compile_all", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    ops = compiler()
    ops.pretend()
    # only now: an op keeps the function that chooses its kernels when it is imported
    from firetower.models.batch import new_prefill_batch, new_window_batch
    from firetower.models.config import FULL, LINEAR, HybridConfig
    from firetower.models.hybrid import HybridModel
    from firetower.models.state import commit, new_state
    from firetower.models.weights import random_weights

    config = HybridConfig(
        family="qwen3_5_moe", vocab_size=512, hidden_size=2048, num_layers=2, layer_types=(LINEAR, FULL),
        num_heads=16, num_kv_heads=2, head_dim=256, num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128,
        num_experts=16, top_k=8, moe_width=512, shared_width=512, max_position_embeddings=4096,
        rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    weights = random_weights(config, torch.bfloat16)
    for kv_dtype in (torch.bfloat16, torch.int8):
        model = HybridModel(config, weights, inside_experts=kv_dtype is torch.int8)
        state = new_state(config, num_pages=8, num_slots=8, kv_dtype=kv_dtype)
        panel = model.new_panel(64)
        for rows, window in ((1, 1), (3, 5)):
            batch = new_window_batch(rows, window, 4, max_seq_len=256)
            model.window(batch, state, panel)
            model.window(batch, state)
            commit(state, batch.state_slots)
        for prefix in (0, 64):
            prompt = new_prefill_batch(
                [[1] * 70, [2] * 3], block_tables=[[1, 2, 3], [4, 5, 6]], state_slots=[0, 1], page_size=64,
                prefix_lens=[prefix, 0],
            )  # fmt: skip
            model.prefill(prompt, state, panel)
    print(*sorted(ops.BUILT))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
