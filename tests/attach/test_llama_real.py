"""The tracer on the real llama.cpp: SmolLM2 with one bad block, and small models written here.

The small models have random weights, untied embeddings and byte tokens, so that a fault can wait for a token
that is only generated, or for an expert that is only routed to.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firetower.attach.llama import trace
from firetower.attach.llama.runtime import LlamaOptions, LlamaSession
from firetower.attach.llama.sensor import CheckedTensor
from firetower.core.errors import TraceError
from firetower.core.records import Fire, Kind, Phase

pytestmark = pytest.mark.peers
pytest.importorskip("llama_cpp")

OPTIONS = LlamaOptions(num_threads=1)
HIDDEN, FF, HEADS, KV_HEADS, LAYERS, EXPERTS = 64, 96, 4, 2, 3, 4
VOCAB = 3 + 256
Weights = dict[str, np.ndarray[Any, Any]]


def random_weights(*, experts: bool) -> Weights:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    out: Weights = {
        "token_embd.weight": normal(VOCAB, HIDDEN) * 8,
        "output_norm.weight": np.ones(HIDDEN, np.float32),
        "output.weight": normal(VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        sizes: dict[str, tuple[int, ...]] = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
        }
        if experts:
            sizes |= {
                "ffn_gate_inp": (EXPERTS, HIDDEN),
                "ffn_gate_exps": (EXPERTS, FF, HIDDEN),
                "ffn_up_exps": (EXPERTS, FF, HIDDEN),
                "ffn_down_exps": (EXPERTS, HIDDEN, FF),
            }
        else:
            sizes |= {"ffn_gate": (FF, HIDDEN), "ffn_up": (FF, HIDDEN), "ffn_down": (HIDDEN, FF)}
        out |= {f"blk.{i}.{name}.weight": normal(*shape) for name, shape in sizes.items()}
        out |= {f"blk.{i}.{name}.weight": np.ones(HIDDEN, np.float32) for name in ("attn_norm", "ffn_norm")}
    return out


def write_model(path: Path, weights: Weights, *, experts: bool) -> Path:
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if experts:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in weights.items():
        quantised = GGMLQuantizationType.Q4_0 if values.dtype == np.uint8 else None
        writer.add_tensor(name, values, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """Write a small model after ``change`` has had its weights."""

    def make(change: Callable[[Weights], None] = lambda w: None, *, experts: bool = False) -> Path:
        weights = random_weights(experts=experts)
        change(weights)
        return write_model(tmp_path / "small.gguf", weights, experts=experts)

    return make


def fire_of(path: Path, **options: Any) -> Fire:
    arguments: dict[str, Any] = {"prompt": "tower", "max_tokens": 6, "options": OPTIONS, **options}
    result = trace(path, **arguments)
    assert result.num_callback_errors == 0, result.first_callback_error
    assert result.fire is not None
    return result.fire


@pytest.fixture(scope="module")
def smollm2() -> Path:
    from firetower.drills.hosts import smollm2_path

    return smollm2_path()


@pytest.fixture(scope="module")
def smollm2_with_nan(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose blk.12.ffn_down has NaN 7eb7 as scale of row 77, block 3."""
    from gguf import GGUFReader

    path = tmp_path_factory.mktemp("models") / "bad.gguf"
    shutil.copy(smollm2, path)
    tensor = next(t for t in GGUFReader(smollm2).tensors if t.name == "blk.12.ffn_down.weight")
    with path.open("r+b") as f:
        f.seek(int(tensor.data_offset) + 77 * tensor.data.shape[1] + 3 * 20)
        f.write(struct.pack("<H", 0x7EB7))
    return path


@pytest.mark.parametrize("level", ["filtered", "full"])
def test_a_nan_block_scale_in_smollm2_is_found(smollm2_with_nan: Path, level: Any) -> None:
    fire = fire_of(smollm2_with_nan, prompt="What is the capital of France?", level=level)
    origin, first = fire.origin, fire.first
    assert (origin.layer, origin.stage, origin.module, origin.op) == (
        12,
        "down",
        "blk.12.ffn_down",
        "MUL_MAT",
    )
    assert (first.row, first.column, first.bits_hex, first.kind) == (0, 77, "7fd6e000", Kind.NAN)
    assert (fire.phase, fire.step, first.position) == (Phase.PREFILL, 0, 0)
    assert fire.notes[0].endswith("blk.12.ffn_down.weight row 77: 32 of 1536 non-finite, columns 96-127")
    assert fire.weights[0].num_nan == 32
    assert fire.extra["src1"] == "activation ffn_swiglu-12 f32: clean"


@pytest.mark.parametrize("level", ["filtered", "full"])
def test_smollm2_itself_is_silent_and_answers(smollm2: Path, level: Any) -> None:
    result = trace(smollm2, prompt="What is the capital of France?", level=level, options=OPTIONS)
    assert result.fire is None
    assert result.text == "The capital of France is Paris."
    assert (result.num_callback_errors, result.not_covered, result.raw_prompt) == (0, {}, False)
    assert result.num_checked == result.num_steps * (61 if level == "filtered" else 576)


def test_watching_does_not_change_the_tokens(smollm2: Path) -> None:
    from firetower.attach.llama.run import LlamaRun

    watched = trace(smollm2, prompt="Count to ten.", max_tokens=16, level="full", options=OPTIONS)
    with LlamaSession(smollm2, OPTIONS) as session:
        bare = LlamaRun(session, None, watched.prompt_ids)
        bare.generate(16, OPTIONS.ubatch_size)
    assert tuple(bare.token_ids) == watched.token_ids


@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_small_clean_models_are_silent_with_every_tensor_watched(
    small: Callable[..., Path], experts: bool, flash_attention: str
) -> None:
    options = LlamaOptions(num_threads=1, flash_attention=flash_attention, ubatch_size=4)
    result = trace(
        small(experts=experts),
        prompt="the tower keeps watch over a valley and the sea",
        max_tokens=40,
        level="full",
        options=options,
    )
    assert result.fire is None
    assert (result.num_callback_errors, result.raw_prompt) == (0, True)
    assert result.num_checked > 1000


def test_a_token_that_is_only_generated_burns_in_decode(small: Callable[..., Path]) -> None:
    clean = trace(small(), prompt="tower", max_tokens=3, options=OPTIONS)
    token = next(t for t in clean.token_ids[:2] if t not in clean.prompt_ids)
    step = clean.token_ids.index(token) + 1

    def change(weights: Weights) -> None:
        weights["token_embd.weight"][token, 5] = np.inf

    fire = fire_of(small(change))
    assert (fire.origin.stage, fire.origin.layer, fire.origin.op) == ("input", None, "GET_ROWS")
    assert (fire.phase, fire.step, fire.first.position) == (
        Phase.DECODE,
        step,
        len(clean.prompt_ids) + step - 1,
    )
    assert (fire.first.column, fire.first.bits_hex, fire.first.kind) == (5, "7f800000", Kind.POS_INF)
    assert fire.notes[0].endswith(f"token_embd.weight row {token}: 1 of {HIDDEN} non-finite, column 5")


def test_an_expert_burns_only_the_token_routed_to_it_and_is_named(small: Callable[..., Path]) -> None:
    def change(weights: Weights) -> None:
        weights["blk.1.ffn_up_exps.weight"][2, 17, 40] = np.nan

    fire = fire_of(small(change, experts=True))
    assert (fire.origin.layer, fire.origin.stage, fire.origin.op) == (1, "up", "MUL_MAT_ID")
    assert fire.first.column == 17
    assert "blk.1.ffn_up_exps.weight expert 2 row 17: 1 of 64 non-finite, column 40" in fire.notes[0]


@pytest.mark.parametrize("level", ["filtered", "full"])
def test_a_minus_inf_router_logit_is_seen_although_top_k_hides_it(
    small: Callable[..., Path], level: Any
) -> None:
    def change(weights: Weights) -> None:
        # a -Inf logit (its sign follows the input's) is never chosen and never reaches the layer's output
        weights["blk.1.ffn_gate_inp.weight"][0, 43] = -np.inf

    fire = fire_of(small(change, experts=True), level=level)
    assert (fire.origin.layer, fire.origin.stage, fire.first.column) == (1, "router", 0)
    assert "blk.1.ffn_gate_inp.weight row 0: 1 of 64 non-finite, column 43" in fire.notes[0]


def test_a_norm_weight_is_the_origin_not_the_layer_output(small: Callable[..., Path]) -> None:
    def change(weights: Weights) -> None:
        weights["blk.2.ffn_norm.weight"][33] = np.nan

    fire = fire_of(small(change))
    assert (fire.origin.layer, fire.origin.module, fire.origin.op) == (2, "blk.2.ffn_norm", "MUL")
    assert fire.first.column == 33
    assert "blk.2.ffn_norm.weight whole tensor: 1 of 64 non-finite, column 33" in fire.notes[0]


def test_an_overflow_is_blamed_on_the_op_not_on_its_finite_weights(small: Callable[..., Path]) -> None:
    def change(weights: Weights) -> None:
        # gate and up products of about 1e20 are finite, their product is not
        weights["blk.1.ffn_gate.weight"] *= np.float32(3e20)
        weights["blk.1.ffn_up.weight"] *= np.float32(3e20)

    fire = fire_of(small(change))
    assert (fire.origin.layer, fire.origin.stage, fire.origin.op) == (1, "swiglu", "SWIGLU")
    assert fire.first.kind in (Kind.POS_INF, Kind.NEG_INF)
    assert fire.notes[0] == "every source of SWIGLU is finite: this op made the bad value"
    assert all(t.num_nonfinite == 0 for t in fire.inputs)


@pytest.mark.parametrize("repack", [True, False], ids=["repacked", "plain"])
def test_a_quantised_weight_is_read_whatever_layout_llama_cpp_gave_it(
    small: Callable[..., Path], repack: bool
) -> None:
    from gguf.quants import GGMLQuantizationType, quantize

    def change(weights: Weights) -> None:
        raw = quantize(weights["blk.1.attn_q.weight"], GGMLQuantizationType.Q4_0)
        raw[21].view("<u2")[9] = 0x7C00  # +Inf as scale of the second block
        weights["blk.1.attn_q.weight"] = raw

    fire = fire_of(small(change), options=LlamaOptions(num_threads=1, repack=repack))
    assert (fire.origin.module, fire.origin.op, fire.first.column) == ("blk.1.attn_q", "MUL_MAT", 21)
    assert "the weight itself is non-finite: blk.1.attn_q.weight row 21: 32 of 64 non-finite" in fire.notes[0]


def test_prefill_in_small_batches_gives_absolute_positions(small: Callable[..., Path]) -> None:
    prompt = "abcdefgh"
    token = 3 + ord("g")

    def change(weights: Weights) -> None:
        weights["token_embd.weight"][token, 0] = np.nan

    fire = fire_of(small(change), prompt=prompt, raw=True, options=LlamaOptions(num_threads=1, ubatch_size=3))
    assert fire.token_ids is not None
    position = fire.token_ids.index(token)
    assert (fire.step, fire.first.token, fire.first.position) == (position // 3, position % 3, position)


def test_on_tensor_sees_llama_cpps_names(small: Callable[..., Path]) -> None:
    seen: list[CheckedTensor] = []
    trace(small(), prompt="x", max_tokens=1, level="full", options=OPTIONS, on_tensor=seen.append)
    names = {c.name for c in seen}
    assert {"embd", "attn_norm-0", "ffn_swiglu-2", "l_out-2", "result_output"} <= names
    assert {c.place.layer for c in seen} == {None, 0, 1, 2}
    assert {c.place.stage for c in seen} <= {
        *("input", "attention", "kv", "gate", "up", "swiglu", "down", "output", "logits"),
    }


def test_a_truncated_file_is_refused_with_llama_cpps_reason(small: Callable[..., Path]) -> None:
    path = small()
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size // 2)
    with pytest.raises(TraceError, match=r"llama\.cpp refuses it: .*not within the file bounds"):
        trace(path, prompt="x", options=OPTIONS)


def test_mutated_files_are_refused_or_run_never_a_traceback(
    small: Callable[..., Path], tmp_path: Path
) -> None:
    from firetower.attach.llama.worker import trace_in_child
    from firetower.core.errors import FiretowerError

    raw = small().read_bytes()
    rng = np.random.default_rng(1)
    outcomes: dict[str, int] = {}
    for _ in range(12):
        data = bytearray(raw)
        for position in rng.integers(4, 3000, 3):
            data[position] ^= 1 << int(rng.integers(8))
        path = tmp_path / "mutated.gguf"
        path.write_bytes(data)
        try:
            trace_in_child(path, options=OPTIONS, prompt="x", max_tokens=2)
            outcome = "ran"
        except FiretowerError as e:
            outcome = "many lines" if "\n" in str(e) else "refused"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes.keys() <= {"ran", "refused"}
    assert outcomes["refused"]


def test_the_command_line_end_to_end(small: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    from firetower.cli.main import main
    from firetower.fires.store import Store

    def change(weights: Weights) -> None:
        weights["blk.1.ffn_down.weight"][7, 9] = np.nan

    assert main(["trace", str(small(change)), "--json", "--threads", "1"]) == 3
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["fire"]["origin"]["module"] == "blk.1.ffn_down"
    assert Store().get(data["fire"]["id"]).first.column == 7
    assert "llama_" not in err, "llama.cpp's log is silenced"
    assert main(["trace", str(small()), "-n", "2", "--threads", "1"]) == 0
