"""Fires of an engine in its store: kept, merged, and a store that fails does not stop a step."""

from __future__ import annotations

from firetower.engine.inject import Place
from firetower.engine.request import Sampling
from firetower.fires.store import Store

NAN = 0x7FC00000


def burn_once(run, prompt, stage="residual", count=1):
    for i in range(count):
        [sequence] = run.submit([prompt(5, i)], Sampling(max_tokens=6))
        run.until_decoding([sequence], 1)
        run.step_with(Place(signal=run.signal(stage, 0), row=0, column=1, bits=NAN))
        run.finish([sequence])


def test_fires_of_one_origin_are_one_record_with_a_count(faults, prompt, tmp_path):
    path = tmp_path / "fires.sqlite"
    run = faults(store=path, name="tiny")
    burn_once(run, prompt, count=3)
    burn_once(run, prompt, stage="output")
    assert [(f.origin.stage, f.count) for f in run.engine.fires] == [("residual", 3), ("output", 1)]
    assert run.engine.status().num_fires == 4
    run.engine.close()
    with Store(path, readonly=True) as store:
        kept = {f.origin.stage: f for f in store.list()}
    assert {stage: f.count for stage, f in kept.items()} == {"residual": 3, "output": 1}
    fire = kept["residual"]
    assert (fire.model, fire.source, fire.first.bits, fire.request) == ("tiny", "engine", NAN, "0")
    assert fire.coverage == (len(run.engine.model.signals),) * 2


def test_a_store_that_cannot_be_written_is_counted_and_requests_go_on(faults, prompt, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no store")
    run = faults(store=blocked)
    burn_once(run, prompt)
    status = run.engine.status()
    assert (status.num_fires, status.num_store_failures) == (1, 1)
    assert status.store_error
    assert run.engine.generate(prompt(5), Sampling(max_tokens=3))[0].error is None
