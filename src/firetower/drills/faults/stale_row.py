"""D1: a padded bucket reads rows of its static buffer that an earlier, larger step wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant, distinct, level_in

if TYPE_CHECKING:
    from torch import Tensor

    from firetower.lab.subject import Rows


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"stale-row/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    bucket = rng.choice((3, 5, 7))
    batch = rng.randint(1, bucket - 2)
    burned = rng.randrange(batch, bucket)
    layer = rng.randrange(30 if host == "smollm2" else 4)

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import fills, fixed, generator, load, prompt, replace_forward, site
        from firetower.drills.pure import linear
        from firetower.drills.truth import with_truth
        from firetower.lab.subject import Switch

        if host == "pure":
            model: Any = nn.Sequential(linear(40, 24, seed), linear(16, 40, seed + 1))
            rows = torch.randn(bucket, 24, generator=generator(seed))
            projection, path = model[1], "1"
        else:
            model = load(host, "fp32", seed)
            rows = prompt(model, Random(seed), 1, batch=bucket)  # decode: one token a sequence
            path = site(model, "gate", layer).module
            projection = model.get_submodule(path)
        kernel = _Bucket(projection, bucket, read_all=fault)
        replace_forward(projection, kernel)
        _burn_one(model, projection, kernel, rows, burned)
        case = Case(model=model, args=(rows[:batch],))
        case = dataclasses.replace(
            case,
            switches={
                **fills(kernel.filled, case.call),
                Switch.EAGER: fixed(kernel.exact, case.call),
                Switch.EXACT_BUCKET: fixed(kernel.exact, case.call),
            },
            parts={"valid_rows": lambda: kernel.rows(batch)},
        )
        if not fault:
            return case
        if host == "pure":
            origin = Origin(module="1", op="aten.abs.default", row=burned, column=0, kind=Kind.NAN)
            return dataclasses.replace(case, expected=origin)
        return with_truth(case, site(model, "gate", layer))

    return Variant(id=f"layer{layer}-{batch}of{bucket}-burned{burned}", host=host, level=level_in(host), build=build)


def _burn_one(model: Any, projection: Any, kernel: _Bucket, rows: Tensor, burned: int) -> None:
    """Step 1: the bucket is full, and one of its requests burns upstream of the projection."""
    import torch

    def poison(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x.view(-1, x.shape[-1])[burned] = float("nan")
        return (x,)

    hook = projection.register_forward_pre_hook(poison)
    with torch.no_grad():
        model(rows)
    hook.remove()
    assert kernel.step == 1


class _Bucket:
    """Quantises to int8 with one scale for the whole static buffer; the twin scales over this step's rows."""

    def __init__(self, projection: Any, bucket: int, *, read_all: bool) -> None:
        import torch

        self.projection, self.read_all = projection, read_all
        self.static = torch.zeros(bucket, projection.in_features)
        self.written_at: list[int | None] = [None] * bucket
        self.step = 0

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        import torch
        import torch.nn.functional as F

        rows = x.flatten(0, -2)
        self.step += 1
        self.static[: len(rows)] = rows
        self.written_at[: len(rows)] = [self.step] * len(rows)
        scaled = self.static if self.read_all else self.static[: len(rows)]
        scale = scaled.abs().amax() / 127
        y = F.linear(torch.round(self.static[: len(rows)] / scale) * scale, self.projection.weight)
        return y.reshape(*x.shape[:-1], -1)

    def rows(self, batch: int) -> tuple[Rows, ...]:
        """When each row was written, as it is at the latest step that ran."""
        from firetower.lab.subject import Rows

        valid = tuple(i < batch for i in range(len(self.static)))
        # asked before the step that burned ran: it is the next one
        step = self.step if self.step > 1 else 2
        written = tuple(step if v else w for v, w in zip(valid, self.written_at, strict=True))
        is_read = () if self.read_all else valid
        return (Rows(name="the static buffer", step=step, is_valid=valid, written_at=written, is_read=is_read),)

    def filled(self, number: float, run: Callable[[], Any]) -> Any:
        """Run with a number in the rows that this step does not write; afterwards they are as before."""
        stale = [i for i, w in enumerate(self.written_at) if w == 1]
        before = self.static[stale].clone()
        self.static[stale] = number
        try:
            return run()
        finally:
            self.static[stale] = before

    def exact(self, run: Callable[[], Any]) -> Any:
        """Run without the rows beyond the batch."""
        was, self.read_all = self.read_all, False
        try:
            return run()
        finally:
            self.read_all = was


DRILL = Drill(
    name="stale-row",
    family="D",
    case="D1",
    title="a padded bucket scales over rows of an earlier step",
    verdict="D/STALE_GRAPH_ROW",
    refuter=refuters.UNZEROED,
    stages=frozenset({"gate"}),
    variants=_variants,
)
