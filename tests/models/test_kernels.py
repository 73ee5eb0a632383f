"""The whole model on its Triton kernels, by the interpreter: every launcher takes what the model hands it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firetower.models import hybrid as _hybrid
from firetower.ops.registry import REGISTRY, load_all

SCRIPT = """
import importlib.util, pathlib, sys
import torch

spec = importlib.util.spec_from_file_location("helpers", sys.argv[1])
helpers = sys.modules["helpers"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
from firetower.sensors.panel import decode_panel

torch.set_num_threads(1)
layers = ["linear_attention", "full_attention"]
saved = helpers.build(sys.argv[3], pathlib.Path(sys.argv[2]), num_layers=2, layer_types=layers, num_experts=4,
                      num_experts_per_tok=2)
text = torch.randint(1, 160, (80,), generator=torch.Generator().manual_seed(1)).tolist()
reference, model = saved.logits(text), saved.load()
run, panels = helpers.Driver(model), [model.new_panel(128) for _ in range(3)]
out = [run.prefill({0: text[:64]}, panel=panels[0])]
both = run.prefill({0: text[64:75], 1: text[:3]}, panel=panels[1])
out.append(both[:11])
ahead, behind = run.step([(0, text[75:79]), None, (1, text[3:6])], window=5, panel=panels[2])
out += [ahead, run.step([(0, text[79:])])[0]]
torch.testing.assert_close(torch.cat(out), reference, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(torch.cat([both[11:], behind]), reference[:6], rtol=1e-4, atol=1e-4)
for panel, ran in zip(panels, (model.prefill_signals, model.prefill_signals, model.window_signals)):
    reading = decode_panel(panel.tolist(), len(model.signals), 128)
    assert reading.is_clean and not reading.first_pads
    assert tuple(i for i, r in enumerate(reading.ran) if r) == ran
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_the_model_runs_on_its_kernels(tmp_path, family):
    pytest.importorskip("triton")
    assert _hybrid
    load_all()
    pins = ",".join(f"{name}=triton" for name in REGISTRY.kernels() if "triton" in REGISTRY.backends(name))
    helpers = Path(__file__).with_name("conftest.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(helpers), str(tmp_path), family],
        env={**os.environ, "TRITON_INTERPRET": "1", "FIRETOWER_OPS": pins},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr[-3000:]
