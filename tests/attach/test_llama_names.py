"""llama.cpp's tensor names to (layer, stage, module)."""

from __future__ import annotations

import pytest

from firetower.attach.llama.names import is_weight, place, strip


@pytest.mark.parametrize(
    ("name", "op", "sources", "expected"),
    [
        ("embd", "GET_ROWS", ["token_embd.weight", "inp_tokens"], (None, "input", "token_embd")),
        ("norm-3", "RMS_NORM", ["l_out-2"], (3, "input", "norm-3")),
        ("norm-3", "RMS_NORM", ["ffn_inp-3"], (3, "attention", "norm-3")),
        ("attn_norm-3", "MUL", ["norm-3", "blk.3.attn_norm.weight"], (3, "input", "blk.3.attn_norm")),
        ("Qcur-12", "MUL_MAT", ["blk.12.attn_q.weight", "attn_norm-12"], (12, "attention", "blk.12.attn_q")),
        ("Qcur-12 (view) (permuted)", "PERMUTE", ["Qcur-12 (view)"], (12, "attention", "Qcur-12")),
        ("node_21", "FLASH_ATTN_EXT", ["Qcur-7 (view)", "cache_k_l7 (view)"], (7, "attention", "node_21")),
        ("cache_k_l7 (view)", "SET_ROWS", ["Kcur-7 (view)"], (7, "kv", "cache_k_l7")),
        ("cache_s_l4", "CPY", [], (4, "recurrent_state", "cache_s_l4")),
        ("cache_r_l4", "CPY", [], (4, "conv_state", "cache_r_l4")),
        ("ffn_inp-12", "ADD", ["attn_out-12", "l_out-11"], (12, "attention", "ffn_inp-12")),
        (
            "ffn_gate-12",
            "MUL_MAT",
            ["blk.12.ffn_gate.weight", "ffn_norm-12"],
            (12, "gate", "blk.12.ffn_gate"),
        ),
        ("ffn_swiglu-12", "SWIGLU", ["ffn_gate-12", "ffn_up-12"], (12, "swiglu", "ffn_swiglu-12")),
        ("ffn_out-12", "MUL_MAT", ["blk.12.ffn_down.weight"], (12, "down", "blk.12.ffn_down")),
        ("l_out-12", "ADD", ["ffn_out-12", "ffn_inp-12"], (12, "output", "l_out-12")),
        ("ffn_moe_logits-5", "MUL_MAT", ["blk.5.ffn_gate_inp.weight"], (5, "router", "blk.5.ffn_gate_inp")),
        ("ffn_moe_weights_norm-5", "DIV", ["ffn_moe_weights-5"], (5, "router", "ffn_moe_weights_norm-5")),
        ("ffn_moe_weighted-5", "MUL", ["ffn_moe_down-5"], (5, "routed", "ffn_moe_weighted-5")),
        ("ffn_moe_out-5", "ADD", [], (5, "routed", "ffn_moe_out-5")),
        ("ffn_moe_down-5", "MUL_MAT_ID", ["blk.5.ffn_down_exps.weight"], (5, "down", "blk.5.ffn_down_exps")),
        # a shared expert's products carry a dense MLP's names: its weight tells
        ("ffn_gate-5", "MUL_MAT", ["blk.5.ffn_gate_shexp.weight"], (5, "shared", "blk.5.ffn_gate_shexp")),
        ("ffn_shexp-5", "MUL", [], (5, "shared", "ffn_shexp-5")),
        ("conv_states-1", "GET_ROWS", [], (1, "conv_state", "conv_states-1")),
        ("new_state-1", "GATED_DELTA_NET", [], (1, "recurrent_state", "new_state-1")),
        ("linear_attn_out-1", "MUL_MAT", ["blk.1.ssm_out.weight"], (1, "attention", "blk.1.ssm_out")),
        ("norm", "RMS_NORM", ["l_out-29"], (None, "output", "norm")),
        ("result_norm", "MUL", ["norm", "output_norm.weight"], (None, "output", "output_norm")),
        # tied embeddings: the weight's own place is the input, the product's is the logits
        ("result_output", "MUL_MAT", ["token_embd.weight", "result_norm"], (None, "logits", "result_output")),
        ("node_923", "GET_ROWS", ["attn_out-29", "out_ids"], (29, "attention", "node_923")),
        ("node_5", "CONV_2D", ["who_knows"], (None, "conv_2d", "node_5")),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_place(name: str, op: str, sources: list[str], expected: tuple[int | None, str, str]) -> None:
    found = place(name, op, sources)
    assert (found.layer, found.stage, found.module) == expected


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.weight", "blk.3.attn_q.bias", "output.weight", "blk.0.x.weight (view)"]
)
def test_weights_are_told_from_activations(name: str) -> None:
    assert is_weight(name)


@pytest.mark.parametrize("name", ["ffn_out-12", "cache_k_l0", "attn_inp_kq_mask", "node_3", ""])
def test_other_tensors_are_no_weights(name: str) -> None:
    assert not is_weight(name)


def test_strip_removes_what_views_append() -> None:
    assert strip("cache_k_l0 (view) (permuted)") == "cache_k_l0"
    assert strip("plain-1") == "plain-1"
