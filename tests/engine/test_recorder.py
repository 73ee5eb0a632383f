"""The flight recorder: what the ring holds, what a dump holds, and that nothing changes with it."""

from __future__ import annotations

import stat

import pytest
import torch

from firetower.capture.files import opened
from firetower.capture.tensors import read_tensors
from firetower.core.errors import CaptureError, ConfigError
from firetower.core.records import Status
from firetower.engine.drafts import DraftConfig
from firetower.engine.dump import DOCUMENT, TENSORS, read_dump, read_signals
from firetower.engine.evidence import raw_tensor
from firetower.engine.inject import Place
from firetower.engine.recorder import most_tokens, signal_shapes, wanted_signals
from firetower.engine.request import FinishReason, Sampling
from firetower.models.state import snapshot

NAN = 0x7FC00000
EAGER = DraftConfig(longest=2, shortest=1, least_accepted_frac=0.0)
WAYS = {
    "plain": {"max_window": 1},
    "overlap": {"max_window": 1, "overlap": True},
    "drafts": {"max_window": 4, "drafts": EAGER},
}


class Watching:
    """Stands before a recorder and keeps copies of its own of everything that it is handed."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.seen = []
        self.now = {}
        keep, begin = recorder.keep, recorder.begin_window

        def watching(index, tensor):
            self.now[index] = tensor.clone()
            keep(index, tensor)

        def beginning():
            self.now = {}
            self.seen.append(self.now)
            begin()

        recorder.keep, recorder.begin_window = watching, beginning


def recorder_of(engine):
    return engine._parts.loop.runner.recorder


def run(engine, prompts, sampling=None):
    return [c.token_ids for c in engine.generate(prompts, sampling or Sampling(max_tokens=12))]


@pytest.fixture
def prompts(prompt):
    return [prompt(n, n) for n in (3, 7, 20, 65, 9)]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("sampling", [Sampling(max_tokens=12), Sampling(max_tokens=12, temperature=1.5, seed=3)],
                         ids=["greedy", "sampled"])  # fmt: skip
def test_tokens_are_the_same_with_it_and_without(engine, prompts, way, sampling):
    assert run(engine(record_windows=3, **way), prompts, sampling) == run(engine(**way), prompts, sampling)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_ring_holds_the_last_windows_bit_for_bit(engine, prompts, way):
    one = engine(record_windows=3, **way)
    recorder = recorder_of(one)
    watching = Watching(recorder)
    run(one, prompts)
    assert len(watching.seen) > 6
    assert len(recorder.windows) == recorder.num_windows == 3 + bool(way.get("overlap"))
    numbers = [w.flight.number for w in recorder.windows]
    assert numbers == sorted(numbers)
    for window, copies in zip(recorder.windows, watching.seen[-recorder.num_windows :], strict=True):
        held = recorder.read(window)
        assert held.keys() == copies.keys() == set(one.model.kept_signals)
        for index, x in held.items():
            assert torch.equal(x.view(torch.uint8), copies[index].view(torch.uint8)), one.model.signals[index].name


def test_what_it_holds_is_what_a_second_run_of_the_window_computes(engine, prompts):
    one = engine(record_windows=1, max_window=1)
    sequences = [one.submit(p, Sampling(max_tokens=8)) for p in prompts]
    while any(s.stage in ("queued", "prefill") for s in sequences):
        one.step()
    runner, recorder = one._parts.loop.runner, recorder_of(one)
    copies = {}
    states = {}
    launch = runner._window

    def before(buffers, *args, **kwargs):
        states.update({name: x.clone() for name, x in runner.state.slots.items()})
        states["conv"], states["side"] = runner.state.conv_storage.clone(), runner.state.side.clone()
        return launch(buffers, *args, **kwargs)

    runner._window = before
    one.step()
    runner._window = launch
    [window] = recorder.windows
    # back to the state before the step, and the same window again, into a recorder of the test's own
    for name, x in runner.state.slots.items():
        x.copy_(states[name])
    runner.state.conv_storage.copy_(states["conv"])
    runner.state.side.copy_(states["side"])

    class Copies:
        def keep(self, index, tensor):
            copies[index] = tensor.clone()

    buffers = runner.buffers(window.flight.shape)
    with torch.inference_mode():
        one.model.window(buffers.batch, runner.state, panel=buffers.panel.clone(), keep=Copies())
    real = len(prompts)
    for index, x in recorder.read(window).items():
        per = recorder.shapes[index].rows_per_token
        assert torch.equal(x[: real * per], copies[index][: real * per]), one.model.signals[index].name
        assert x[: real * per].abs().sum() > 0


def test_memory_is_known_before_and_shown(engine, model):
    one = engine(record_windows=4, max_batch=3, max_window=4, max_window_rows=8)
    recorder = recorder_of(one)
    allocated = sum(x.nbytes for x in recorder._rings.values())
    assert one.status().recorder_bytes == recorder.num_bytes == allocated > 0
    assert one.status().recorded_windows == 4
    assert engine().status().recorder_bytes == 0
    # rows of a bucket times the longest window that so many sequences may have
    assert most_tokens(3, 4, 8) == max(1 * 4, 2 * 4, 3 * 2) == recorder.num_tokens
    assert most_tokens(32, 8, 64) == 112, "nine sequences sit in the bucket of sixteen, with windows of seven"


def test_stages_can_be_chosen(engine, model, prompts):
    one = engine(record_windows=2, record_stages=("hidden", "logits"))
    assert run(one, prompts) == run(engine(), prompts)
    names = {model.signals[i].stage for i in recorder_of(one).read(recorder_of(one).windows[-1])}
    assert names == {"hidden", "logits"}
    with pytest.raises(ConfigError, match="record_stages='recurrent_state': cannot be recorded; known: input"):
        engine(record_windows=2, record_stages=("recurrent_state",))
    with pytest.raises(ConfigError, match="record_windows=-1: must be from 0"):
        engine(record_windows=-1)


def test_a_window_whose_launch_fails_costs_the_oldest_alone(engine, prompts):
    one = engine(record_windows=3, max_window=1)
    run(one, prompts)
    recorder = recorder_of(one)
    before = [w.flight.number for w in recorder.windows]
    # its turn may be half written over when the launch breaks off
    recorder.begin_window()
    assert [w.flight.number for w in recorder.windows] == before[1:]
    recorder.begin_window()
    recorder.launched(recorder.windows[-1].flight, recorder.windows[-1].slots)
    assert len({w.turn for w in recorder.windows}) == len(recorder.windows) == 3


def test_a_signal_of_another_shape_is_refused(model, engine):
    recorder = recorder_of(engine(record_windows=1, max_batch=2, max_window=1))
    index = next(iter(wanted_signals(model, ("hidden",))))
    width = signal_shapes(model, [index])[index].width
    with pytest.raises(ConfigError, match="must be at most 2 x"):
        recorder.keep(index, torch.zeros(3, width))


def burn(faults, tmp_path, prompts, **options):
    """One burned request of five: (Faults, completions, folder of the dump, (row of the fault, signal))."""
    options = {"record_windows": 3, "dumps": tmp_path / "dumps", "max_window": 1} | options
    one = faults(**options)
    sequences = one.submit(prompts, Sampling(max_tokens=12, temperature=1.0, seed=11))
    one.until_decoding(sequences, extra_steps=3)
    signal = one.signal("attention", 1)
    one.step_with(Place(signal=signal, row=2, column=5, bits=NAN))
    done = one.finish(sequences)
    return one, done, signal


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_a_fire_is_dumped_with_all_that_it_needs(faults, tmp_path, prompts, overlap):
    one, done, signal = burn(faults, tmp_path, prompts, overlap=overlap)
    [fire] = one.engine.fires
    folder = tmp_path / "dumps" / fire.id
    assert fire.extra["dump"] == str(folder)
    dump = read_dump(folder)
    assert dump.fire == fire.id
    assert dump.step.number == fire.step == dump.reading.step
    assert dump.reading.burned == fire.burned
    assert dump.environment.versions["torch"] == torch.__version__
    [burned] = [row for row in dump.step.rows if row.is_burned]
    assert burned.request == fire.request == done[2].request
    assert burned.position == fire.first.position
    assert (burned.seed, burned.num_real, burned.accepted) == (11, 1, 1)
    assert len(burned.pages) == 1
    assert burned.token_ids is None
    assert len({row.slot for row in dump.step.rows}) == 5
    numbers = [w.number for w in dump.windows]
    assert numbers == list(range(numbers[0], numbers[0] + 3 + overlap))
    assert dump.step.number == numbers[-1 - overlap]
    last = dump.windows[-1 - overlap]
    names = [s.name for s in last.signals]
    assert names == [one.engine.model.signals[i].name for i in one.engine.model.kept_signals]
    found = list(read_signals(folder, dump))
    assert [f.signal for f in found] == [s for w in dump.windows for s in w.signals]
    bad = [f for f in found if f.figures.first_bad is not None]
    assert {f.step.number for f in bad} == {dump.step.number}
    # launched before the fire was read: the row is a pad in it
    assert [[r.request for r in w.rows if r.is_dead] for w in dump.windows[3:]] == [[fire.request]] * overlap
    first = bad[0]
    assert (first.signal.index, first.figures.first_bad) == (signal, (2, 5))
    assert (first.figures.bits, first.figures.num_nan) == ("7fc00000", 1)
    assert {(f.request, f.position) for f in bad} == {(fire.request, fire.first.position)}
    assert [f.signal for f in bad if f.signal.stage == "logits"]
    assert {s.request for s in dump.states} == {fire.request}


def test_files_are_private_and_have_no_text(faults, tmp_path, prompts):
    one, _, _ = burn(faults, tmp_path, prompts)
    folder = tmp_path / "dumps" / one.engine.fires[0].id
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert sorted(p.name for p in folder.iterdir()) == [DOCUMENT, TENSORS]
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    assert all(row.token_ids is None for w in read_dump(folder).windows for row in w.rows)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_token_ids_are_there_when_asked_for(faults, tmp_path, prompts, overlap):
    one, done, _ = burn(faults, tmp_path, prompts, record_content=True, overlap=overlap)
    dump = read_dump(tmp_path / "dumps" / one.engine.fires[0].id)
    assert dump.has_content
    for row in dump.step.rows:
        place = next(i for i, c in enumerate(done) if c.request == row.request)
        known = (*prompts[place], *done[place].token_ids)
        assert row.token_ids == (known[row.position],)


def test_dumped_states_are_those_before_and_after_the_step(faults, tmp_path, prompts):
    one = faults(record_windows=1, dumps=tmp_path / "dumps", max_window=1)
    sequences = one.submit(prompts, Sampling(max_tokens=12))
    one.until_decoding(sequences, extra_steps=2)
    state = one.engine._parts.state
    slot = sequences[2].slot
    before = snapshot(state, slot)
    one.step_with(Place(signal=one.signal("attention", 1), row=2, column=5, bits=NAN))
    one.finish(sequences)
    folder = tmp_path / "dumps" / one.engine.fires[0].id
    dump = read_dump(folder)
    with opened(folder, TENSORS) as (file, size):
        tensors = read_tensors(file, size)
    by_part = {s.part: s for s in dump.states}
    kept = by_part["recurrent state"]
    held = torch.from_numpy(tensors[kept.tensor].to_array().copy())
    assert torch.equal(held[:, kept.side], before.recurrent)
    assert not torch.equal(held[:, 1 - kept.side], before.recurrent)
    conv = torch.from_numpy(tensors[by_part["conv"].tensor].to_array().copy())
    assert torch.equal(conv[:, kept.side, : before.conv.shape[1]], before.conv)


def test_safetensors_itself_reads_it(faults, tmp_path, prompts):
    safetensors = pytest.importorskip("safetensors.torch")
    one, _, signal = burn(faults, tmp_path, prompts)
    folder = tmp_path / "dumps" / one.engine.fires[0].id
    tensors = safetensors.load_file(folder / TENSORS)
    name = next(s.tensor for s in read_dump(folder).windows[-1].signals if s.index == signal)
    assert torch.isnan(tensors[name][2, 5])


def test_a_prompt_that_burns_is_dumped_without_its_signals(faults, tmp_path, prompts):
    one = faults(record_windows=2, dumps=tmp_path / "dumps")
    [sequence] = one.submit(prompts[:1], Sampling(max_tokens=4))
    one.step_with(Place(signal=one.signal("residual", 1), row=1, column=0, bits=NAN))
    one.finish([sequence])
    dump = read_dump(tmp_path / "dumps" / one.engine.fires[0].id)
    assert dump.windows == ()
    assert dump.step.rows[0].is_burned
    assert any("a prompt is not recorded" in why for why in dump.left_out)


def test_one_dump_an_origin_and_none_over_the_quota(faults, tmp_path, prompts):
    one, _, signal = burn(faults, tmp_path, prompts)
    sequences = one.submit(prompts, Sampling(max_tokens=6))
    one.until_decoding(sequences)
    one.step_with(Place(signal=signal, row=1, column=5, bits=NAN))
    ended = one.finish(sequences)
    burned = [c for c in ended if c.finish_reason is FinishReason.BURNED]
    assert burned[0].error.fire.extra["no_dump"] == "a fire of this origin has a dump already"
    assert (one.engine.status().num_dumps, len(list((tmp_path / "dumps").iterdir()))) == (1, 1)


def test_a_full_quota_leaves_out_windows_first_and_then_says_so(faults, tmp_path, prompts):
    one, done, _ = burn(faults, tmp_path, prompts, dump_bytes=100)
    [fire] = one.engine.fires
    assert "of 100 left" in fire.extra["no_dump"]
    assert one.engine.status().num_dump_failures == 1
    assert not (tmp_path / "dumps").exists()
    assert [c.finish_reason for c in done].count(FinishReason.BURNED) == 1
    few = 400_000
    two, _, _ = burn(faults, tmp_path, prompts, dump_bytes=few, dumps=tmp_path / "few", record_windows=40)
    assert recorder_of(two.engine).num_bytes > few
    dump = read_dump(tmp_path / "few" / two.engine.fires[0].id)
    assert any("no room" in why for why in dump.left_out)
    assert dump.windows[-1].number == dump.step.number, "the newest are kept"
    assert sum(p.stat().st_size for p in (tmp_path / "few").rglob("*") if p.is_file()) <= few


def test_a_folder_that_cannot_be_written_stops_nothing(faults, tmp_path, prompts):
    (tmp_path / "dumps").write_text("a file")
    one, done, _ = burn(faults, tmp_path, prompts)
    status = one.engine.status()
    assert (status.num_dumps, status.num_dump_failures, status.num_fires) == (0, 1, 1)
    assert "dumps" in status.evidence_error
    clean = [c for c in done if c.finish_reason is FinishReason.LENGTH]
    assert len(clean) == 4


def test_a_healed_window_is_not_recorded_over_the_others(faults, tmp_path, prompts):
    one = faults(record_windows=3, dumps=tmp_path / "dumps", max_window=1, on_fire="heal")
    watching = Watching(recorder_of(one.engine))
    sequences = one.submit(prompts, Sampling(max_tokens=12))
    one.until_decoding(sequences, extra_steps=3)
    one.step_with(Place(signal=one.signal("attention", 1), row=2, column=5, bits=NAN))
    steps = one.engine._parts.loop.runner.num_steps
    assert {c.finish_reason for c in one.finish(sequences)} == {FinishReason.LENGTH}
    [fire] = one.engine.fires
    assert (fire.extra["result"], fire.step) == ("transient", steps - 1)
    status = one.engine.status()
    assert len(watching.seen) == status.num_windows
    assert status.evidence_s > 0
    assert read_dump(tmp_path / "dumps" / fire.id).audit[0].status is Status.CLEAN


def test_a_fire_of_a_request_that_has_ended_keeps_nothing(faults, tmp_path, prompts):
    one = faults(record_windows=3, dumps=tmp_path / "dumps", max_window=1, overlap=True)
    [sequence] = one.submit(prompts[:1], Sampling(max_tokens=12))
    one.until_decoding([sequence], extra_steps=2)
    one.step_with(Place(signal=one.signal("attention", 1), row=0, column=5, bits=NAN))
    one.engine.cancel(sequence)
    one.finish([sequence])
    status = one.engine.status()
    assert (status.num_bad_steps > 0, status.num_fires, status.evidence_s) == (True, 0, 0.0)
    assert not (tmp_path / "dumps").exists()


def test_a_damaged_dump_is_named(faults, tmp_path, prompts):
    one, _, _ = burn(faults, tmp_path, prompts)
    folder = tmp_path / "dumps" / one.engine.fires[0].id
    dump = read_dump(folder)
    with pytest.raises(CaptureError, match="is no folder"):
        read_dump(folder / "nothing")
    text = (folder / DOCUMENT).read_text()
    (folder / DOCUMENT).write_text(text.replace("firetower-dump-1", "firetower-dump-9"))
    with pytest.raises(CaptureError, match="schema='firetower-dump-9'"):
        read_dump(folder)
    (folder / DOCUMENT).write_text(text.replace('"num_rows": 8', '"num_rows": "8"'))
    with pytest.raises(CaptureError, match="num_rows='8'"):
        read_dump(folder)
    raw = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(raw[:-4])
    with pytest.raises(CaptureError, match="the data ends at"):
        list(read_signals(folder, dump))


def test_bits_survive(tmp_path):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        x = torch.randint(-(2**31), 2**31 - 1, (5, 8), dtype=torch.int32).view(dtype)
        raw = raw_tensor(x)
        assert raw.data == bytes(x.view(torch.uint8).reshape(-1).tolist())
        assert raw.shape == tuple(x.shape)


def rows_held(engine):
    """{(request, position): {signal: its rows}} of everything that the ring holds."""
    recorder = recorder_of(engine)
    held = {}
    for window in recorder.windows:
        flight, signals = window.flight, recorder.read(window)
        for row, sequence in enumerate(flight.sequences):
            for token in range(int(flight.num_real[row])):
                at = row * flight.shape.window + token
                held[sequence.number, int(flight.position[row]) + token, int(flight.fed[row, token])] = {
                    index: x[at * per : (at + 1) * per]
                    for index, x in signals.items()
                    for per in (recorder.shapes[index].rows_per_token,)
                }
    return held


def check_rows_do_not_depend_on_how_a_window_ran(device, dtype):
    """By graph, chained, with drafts: a row of the ring has the bits of one that a plain engine ran by itself."""
    from firetower.engine.engine import Engine
    from firetower.models.config import FULL, LINEAR, HybridConfig
    from firetower.models.hybrid import HybridModel
    from firetower.models.weights import random_weights

    config = HybridConfig(
        family="qwen3_5_moe", vocab_size=512, hidden_size=128, num_layers=3, layer_types=(LINEAR, FULL, LINEAR),
        num_heads=4, num_kv_heads=2, head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, num_k_heads=2,
        num_v_heads=4, head_k_dim=64, head_v_dim=64, num_experts=16, top_k=4, moe_width=64, shared_width=64,
        max_position_embeddings=1024,
    )  # fmt: skip
    weights = random_weights(config, dtype, device, 0)
    for _, x in weights.named_tensors():
        if x.ndim >= 2:
            x.mul_(6.0)
    model = HybridModel(config, weights)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in (1, 2, 63, 64, 65, 130, 300, 7)]
    common = {"max_batch": 8, "max_model_len": 512, "prefill_chunk": 128, "store": False, "num_pages": 96}
    plain = {"max_window": 1, "graphs": False, "overlap": False}
    with Engine(model, **(common | plain)) as one:
        expected = run(one, prompts, Sampling(max_tokens=16))
    with Engine(model, **(common | plain), record_windows=200) as one:
        assert run(one, prompts, Sampling(max_tokens=16)) == expected
        # what a chained row ran is not known to its flight: the answer has it
        alone = {key[:2]: signals for key, signals in rows_held(one).items()}
    assert len(alone) >= len(prompts) * 15
    for options in (
        {"max_window": 1, "graphs": True, "overlap": True},
        {"max_window": 4, "graphs": True, "overlap": False, "drafts": EAGER},
    ):
        with Engine(model, **(common | options), record_windows=200) as one:
            assert run(one, prompts, Sampling(max_tokens=16)) == expected
            windows = recorder_of(one).windows
            assert {w.flight.is_graphed for w in windows} == {device == "cuda"}
            num_same = 0
            for (number, position, fed), signals in rows_held(one).items():
                known = (*prompts[number], *expected[number])
                if (number, position) not in alone or (options["max_window"] > 1 and fed != known[position]):
                    # a draft that was wrong
                    continue
                num_same += 1
                for index, x in signals.items():
                    assert torch.equal(x, alone[number, position][index]), (model.signals[index].name, number, position)
            assert num_same >= len(prompts) * 15


def test_rows_do_not_depend_on_how_a_window_ran():
    check_rows_do_not_depend_on_how_a_window_ran("cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_device_the_ring_is_filled_inside_the_graph(dtype):
    check_rows_do_not_depend_on_how_a_window_ran("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_device_more_than_there_is_free_is_refused_before_it_is_taken():
    from firetower.engine.recorder import FlightRecorder, SignalShape

    shapes = {0: SignalShape(rows_per_token=1, width=1 << 20, dtype=torch.float32)}
    before = torch.cuda.memory_allocated()
    with pytest.raises(ConfigError, match=r"record_windows: 1000 windows of 256 tokens take .* are free"):
        FlightRecorder(shapes, num_windows=1000, num_tokens=256, device=torch.device("cuda"))
    assert torch.cuda.memory_allocated() == before
