"""On a CUDA device in bfloat16: nearness to Transformers, graphs, row invariance, sensors, no host sync."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from firetower.core.words import NOT_RUN
from firetower.models.batch import new_window_batch
from firetower.models.checkpoint import read_weights
from firetower.models.config import read_config
from firetower.models.gates import gates_torch
from firetower.models.hybrid import HybridModel
from firetower.models.small import SMALL_MODEL
from firetower.models.state import clear_pages, clear_slots, commit, pages_clean, restore, slots_clean, snapshot
from firetower.models.weights import assemble, content_hashes, random_weights
from firetower.sensors.panel import decode_panel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

SIZES = {"hidden_size": 256, "vocab_size": 512, "num_experts": 32, "num_layers": 8, "max_position_embeddings": 8192}
NUM_TOKENS = 4096
KL_LIMIT = 1e-3
"""Nats a token, the mean over all tokens, of a trained model."""

NOISE = 1.5
"""Of random weights, how often the distance that the class itself has between bfloat16 and float32: their routers are
nearly undecided, so that a rounding picks other experts."""


@pytest.fixture
def model(saved):
    """Our model and the class it came from, both in bfloat16 on the device."""
    made = saved("qwen3_5_moe", **SIZES)
    return to_device(made.load(), torch.bfloat16)


def to_device(model, dtype):
    tensors = {name: x.to("cuda", dtype if x.ndim > 1 else torch.float32) for name, x in model.weights.named_tensors()}
    return HybridModel(model.config, assemble(model.config, tensors))


def kl(reference, logits):
    """Mean KL divergence a token, in nats, of [T, V] in float64."""
    log_p, log_q = (F.log_softmax(x.double(), dim=-1) for x in (reference, logits))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def host_logits(saved_model, text, dtype):
    host = saved_model.host.to("cuda", dtype)
    try:
        with torch.inference_mode():
            return host(torch.tensor([text], device="cuda"), use_cache=False).logits[0].float()
    finally:
        saved_model.host.to("cpu", torch.float32)


def forced(driver, model, text):
    """Logits of a text: in one call, in parts, and its second half in windows."""
    pages, half = len(text) // 64 + 2, len(text) // 2 // 64 * 64
    whole = driver(model, sequences=1, pages=pages).prefill({0: text})
    run = driver(model, sequences=1, pages=pages)
    parts = torch.cat([run.prefill({0: text[at : at + 512]}) for at in range(0, len(text), 512)])
    run = driver(model, sequences=1, pages=pages)
    run.prefill({0: text[:half]})
    stepped = torch.cat([run.step([(0, text[at : at + 8])])[0] for at in range(half, len(text), 8)])
    return {"whole": (0, whole), "parts": (0, parts), "windows": (half, stepped)}


def distances(reference, found):
    return {name: kl(reference[at:], logits) for name, (at, logits) in found.items()}


def test_kl_of_the_trained_model(driver):
    """4,096 tokens of the project's pages, in contexts as long as it was trained for, against the class in float32."""
    transformers = pytest.importorskip("transformers")
    host = transformers.AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32).to("cuda")
    rounded_host = copy.deepcopy(host).bfloat16()
    pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMALL_MODEL)
    ids = tokenizer("\n".join(page.read_text() for page in pages)).input_ids[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    config = read_config(SMALL_MODEL)
    model = HybridModel(config, read_weights(SMALL_MODEL, config, dtype=torch.bfloat16, device="cuda"))
    ours: dict[str, list[float]] = {}
    theirs = []
    for at in range(0, NUM_TOKENS, 1024):
        text = ids[at : at + 1024]
        with torch.inference_mode():
            tokens = torch.tensor([text], device="cuda")
            reference, rounded = (m(tokens, use_cache=False).logits[0].float() for m in (host, rounded_host))
        theirs.append(kl(reference, rounded))
        for name, distance in distances(reference, forced(driver, model, text)).items():
            ours.setdefault(name, []).append(distance)
    found = {name: sum(values) / len(values) for name, values in ours.items()}
    print("KL a token in nats from the class in float32:", found, "the class in bfloat16:", sum(theirs) / len(theirs))
    assert max(found.values()) < KL_LIMIT, found


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_kl_of_random_weights(saved, driver, tokens, family):
    """No farther from the class in float32 than the class itself is in bfloat16, by `NOISE`."""
    made, text = saved(family, **SIZES), tokens(NUM_TOKENS, vocab=512)
    model = to_device(made.load(), torch.bfloat16)
    reference, rounded = (host_logits(made, text, dtype) for dtype in (torch.float32, torch.bfloat16))
    found, theirs = distances(reference, forced(driver, model, text)), kl(reference, rounded)
    print(family, "KL a token in nats", found, "the class:", theirs)
    assert max(found.values()) < NOISE * theirs


def test_float32_is_near_the_class_in_float32(saved, driver, tokens):
    made, text = saved("qwen3_5_moe", **SIZES), tokens(300, vocab=512)
    model = to_device(made.load(), torch.float32)
    reference = host_logits(made, text, torch.float32)
    run = driver(model, pages=8)
    out = [run.prefill({0: text[:256]})] + [run.step([(0, text[at : at + 4])])[0] for at in range(256, 300, 4)]
    # the scan multiplies in three products of TF32, the class in float32
    torch.testing.assert_close(torch.cat(out), reference, rtol=1e-3, atol=1e-3)


def ready(driver, model, tokens, *, sequences=6):
    run, draw = driver(model, sequences=sequences, pages=8), random.Random(1)
    for i in range(sequences):
        run.prefill({i: tokens(draw.randint(1, 300), seed=i, vocab=512)})
    return run


def rows_of(tokens, sequences, window, seed):
    draw = random.Random(seed)
    return [(i, tokens(draw.randint(1, window), seed=100 * seed + i, vocab=512)) for i in range(sequences)] + [None]


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_captured_window_has_the_bits_of_an_eager_one(model, driver, tokens, window):
    eager, graphed = ready(driver, model, tokens), ready(driver, model, tokens)
    static = new_window_batch(7, window, 8, max_seq_len=512, device="cuda")
    num_rows = 7 * window
    panel = model.new_panel(num_rows)

    def step():
        panel.fill_(NOT_RUN)
        out = model.window(static, graphed.state, panel)
        commit(graphed.state, static.state_slots)
        return out

    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # all pads: warms up every kernel and changes no state
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
    for seed in range(5):
        rows = rows_of(tokens, 6, window, seed)
        batch = graphed.batch(rows, window)
        for name in ("token_ids", "positions", "row_ids", "block_table", "seq_lens", "slot_mapping", "state_slots",
                     "num_accepted"):  # fmt: skip
            getattr(static, name).copy_(getattr(batch, name))
        graph.replay()
        expected = eager.step(rows, window)
        got = logits.view(7, window, -1)
        for n, (i, new) in enumerate(rows[:-1]):
            assert torch.equal(got[n, : len(new)], expected[n])
            graphed.lengths[i] += len(new)
            graphed.accepted[i] = len(new)
        reading = decode_panel(panel.tolist(), len(model.signals), num_rows)
        assert reading.is_clean
        assert reading.ran == (True,) * len(model.signals)


def test_a_row_alone_and_among_others(model, driver, tokens):
    together, alone = ready(driver, model, tokens), ready(driver, model, tokens)
    for seed in range(4):
        rows = rows_of(tokens, 6, 5, seed)
        out = together.step(rows, 8 - seed)
        for n, row in enumerate(rows[:-1]):
            assert torch.equal(alone.step([row])[0], out[n])


def test_sensors_change_no_bit_and_nothing_waits(model, driver, tokens):
    bare, watched = ready(driver, model, tokens), ready(driver, model, tokens)
    panel = model.new_panel(7 * 5)
    first = rows_of(tokens, 6, 5, 0)
    bare.step(first, 5)
    watched.step(first, 5, panel=panel)
    rows = rows_of(tokens, 6, 5, 1)
    plain, batch = bare.batch(rows, 5), watched.batch(rows, 5)
    with torch.inference_mode():
        a = model.window(plain, bare.state)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            b = model.window(batch, watched.state, panel)
            commit(watched.state, batch.state_slots, torch.zeros_like(batch.state_slots, dtype=torch.bool))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    real = batch.row_ids >= 0
    assert torch.equal(a[real], b[real])


def test_a_recorder_changes_no_bit(model, driver, tokens):
    class Keeper:
        def __init__(self):
            self.kept = {}

        def keep(self, signal_index, tensor):
            self.kept[signal_index] = tensor.clone()

    answers = []
    for keeper in (None, Keeper()):
        run = ready(driver, model, tokens)
        answers.append(torch.cat(run.step(rows_of(tokens, 6, 5, 1), 5, keep=keeper)))
    assert torch.equal(*answers)
    assert tuple(sorted(keeper.kept)) == model.kept_signals


def test_a_bad_weight_and_a_bad_state_are_found(model, driver, tokens):
    run, panel = ready(driver, model, tokens), model.new_panel(64)
    weight = model.weights.layers[5].mixer.out_proj
    before = weight[17, 3].item()
    weight[17, 3] = float("nan")
    run.step(rows_of(tokens, 6, 4, 0), 4, panel=panel)
    weight[17, 3] = before
    origin = decode_panel(panel.tolist(), len(model.signals), 64).origin
    assert model.signals[origin.slot].name == "layer 5 attention"
    assert origin.flat_index % origin.shape[-1] == 17
    run, panel = ready(driver, model, tokens), model.new_panel(64)
    run.state.slots["state"][1, :, 3, 0, 2, 5] = float("nan")
    run.step(rows_of(tokens, 6, 4, 0), 4, panel=panel)
    reading = decode_panel(panel.tolist(), len(model.signals), 64)
    # linear layer 1 is decoder layer 1; slot 3 holds sequence 2
    assert model.signals[reading.origin.slot].name == "layer 1 recurrent_state"
    assert {b.sequence // 4 for b in reading.burned} == {2}


def test_slots_pages_and_snapshots(model, driver, tokens):
    run, new = ready(driver, model, tokens), tokens(4, seed=9, vocab=512)
    kept = snapshot(run.state, 2)
    reference = run.step([(1, new)])[0]
    run.state.slots["state"][:, :, 2] = float("nan")
    restore(run.state, 2, kept)
    run.lengths[1] -= 4
    run.accepted[1] = 0
    assert torch.equal(run.step([(1, new)])[0], reference)
    slots, pages = torch.tensor([2, 4], device="cuda"), torch.tensor(run.pages(1), device="cuda")
    assert not slots_clean(run.state, slots).any()
    clear_slots(run.state, slots)
    clear_pages(run.state, pages)
    assert slots_clean(run.state, slots).all()
    assert pages_clean(run.state, pages).all()
    assert not slots_clean(run.state, slots - 1).any()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_pages(model, driver, tokens, kv_dtype):
    text = tokens(200, vocab=512)
    exact, near = driver(model, pages=8), driver(model, pages=8, kv_dtype=kv_dtype)
    both = []
    for run in (exact, near):
        both.append(torch.cat([run.prefill({0: text[:192]}), run.step([(0, text[192:])])[0]]).float())
    share = (both[1] - both[0]).norm() / both[0].norm()
    assert 0 < share < 0.06, share


def test_the_kernel_of_the_gates(model):
    from firetower.models.gates_kernels import gates

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        proj = (torch.randn(37, 2 * 32 + 5, device="cuda") * 5).to(dtype)
        b, a = proj[:, 5:37], proj[:, 37:]
        rate, bias = -torch.rand(32, device="cuda") * 16, torch.randn(32, device="cuda")
        outs = [[torch.empty(37, 32, device="cuda") for _ in range(2)] for _ in range(2)]
        for run, out in zip((gates, gates_torch), outs, strict=True):
            run(b, a, rate, bias, *out, None)
        for have, want in zip(*outs, strict=True):
            torch.testing.assert_close(have, want, rtol=2e-6, atol=1e-12)


def test_weights_made_on_the_device_and_their_checksums(model):
    weights = random_weights(model.config, torch.bfloat16, "cuda", seed=5)
    assert weights.device.type == "cuda"
    again = content_hashes(random_weights(model.config, torch.bfloat16, "cuda", seed=5))
    hashes = content_hashes(weights)
    assert hashes == again
    on_cpu = {name: x.cpu() for name, x in weights.named_tensors()}
    assert content_hashes(assemble(model.config, on_cpu)) == hashes
    raw = weights.layers[3].moe.down_proj.view(-1).view(torch.int16)
    raw[12345] ^= 1
    assert {n for n, h in content_hashes(weights).items() if h != hashes[n]} == {"layers.3.moe.down_proj"}
