"""C2b: pad rows of a workspace were never written; a scale over all rows spreads their NaN to the others."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.core.records import Kind
from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Origin, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from firetower.lab.subject import Rows, Switch

_PLACES = {
    "gate": "{decoder}.self_attn.o_proj",
    "up": "{decoder}.self_attn.o_proj",
    "down": "{mlp}.up_proj",
}
"""Quantised stage -> the projection before it that leaves pad rows unwritten."""


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"unwritten-pads/{seed}")
    pure = [_pure(rng.randrange(1 << 30), dtype) for dtype in rng.sample(("fp32", "fp16", "bf16"), 2)]
    first, second, third = rng.sample(list(_PLACES), 3)
    return [
        *pure,
        _host("qwen35moe", rng.randrange(1 << 30), first),
        _host("qwen35moe", rng.randrange(1 << 30), second),
        _host("smollm2", rng.randrange(1 << 30), third),
    ]


def _pure(seed: int, dtype: str) -> Variant:
    rng = Random(seed)
    tokens, pads, width = rng.randint(1, 8), rng.randint(1, 8), rng.choice((48, 63))

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import DTYPES, generator
        from firetower.drills.pure import Bucket

        x = torch.randn(tokens, width, generator=generator(seed)).to(DTYPES[dtype])
        scratch = torch.full((tokens + pads, width), float("nan"), dtype=DTYPES[dtype])
        # the twin's workspace is as dirty; it only does not read what it did not write
        module = Bucket(scratch, read_pads=fault)
        # the first op that reads what nobody wrote
        origin = Origin(module="", op="aten.abs.default", row=tokens, column=0, kind=Kind.NAN, bad_weight=True)
        is_real = torch.arange(tokens + pads) < tokens
        return Case(
            model=module,
            args=(x,),
            expected=origin if fault else None,
            switches=_fills(scratch, ~is_real, lambda: module(x)),
            parts={"valid_rows": (_rows("the bucket's workspace", is_real, read_pads=fault),)},
        )

    id = f"bucket-{tokens}of{tokens + pads}x{width}-{dtype}"
    return Variant(id=id, host="pure", level="ops", build=build)


def _host(host: Host, seed: int, stage: str) -> Variant:
    """A left-padded batch: one projection leaves pad rows unwritten, a later one scales over all rows."""
    rng = Random(seed)
    lengths = [rng.randint(3, 6), rng.randint(7, 9)]
    rng.shuffle(lengths)

    def build(fault: bool) -> Case:
        import torch

        from firetower.drills.placing import load, prompt, site
        from firetower.drills.truth import with_truth

        model = load(host, "fp32", seed)
        ids = prompt(model, Random(seed), max(lengths), batch=2)
        mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - n for n in lengths])
        # after the last attention a pad row cannot reach a real one by itself
        layer = len(model.model.layers) - 1
        where = site(model, stage, layer)
        mlp = where.module.rpartition(".")[0]
        dirty = _PLACES[stage].format(decoder=f"model.layers.{layer}", mlp=mlp)
        is_real = mask.flatten()
        workspace = _leave_pads_unwritten(model.get_submodule(dirty), is_real)
        _quantise(model.get_submodule(where.module), is_real, over_pads=fault)
        args, kwargs = (ids.masked_fill(~mask, 0),), {"attention_mask": mask.long()}

        def serve(_: int = 0) -> Tensor:
            logits: Tensor = model(*args, **kwargs).logits[mask]  # pads get no answer
            return logits

        case = Case(
            model=model,
            args=args,
            kwargs=kwargs,
            serve=serve,
            switches=_fills(workspace, ~is_real, serve),
            # what pads hold decides which experts they go to, and so how many rows a product has
            parts={
                "valid_rows": (_rows("the workspace", is_real, read_pads=fault),),
                "clean_twin_bit_stable": False,
            },
            real_rows=is_real,
        )
        return with_truth(case, where, row_mask=mask, pad_before_real=True) if fault else case

    name = f"lengths{'-'.join(map(str, lengths))}-{stage}"
    return Variant(id=name, host=host, level="layers", build=build)


def _rows(name: str, is_real: Tensor, *, read_pads: bool) -> Rows:
    from firetower.lab.subject import Rows

    valid = tuple(is_real.tolist())
    return Rows(
        name=name,
        step=1,
        is_valid=valid,
        written_at=tuple(1 if v else None for v in valid),
        is_read=() if read_pads else valid,
    )


def _fills(memory: Tensor, is_pad: Tensor, run: Callable[[], Any]) -> dict[Switch, Callable[[int], Any]]:
    """Runs with the pads of a memory [rows, ...] filled; afterwards it is as dirty as before."""
    from firetower.drills.placing import fills

    def filled(value: float, run: Callable[[], Any]) -> Any:
        dirt = memory[is_pad].clone()
        memory[is_pad] = value
        try:
            return run()
        finally:
            memory[is_pad] = dirt

    return fills(filled, run)


def _leave_pads_unwritten(projection: Any, is_real: Tensor) -> Tensor:
    """Only real rows are written; the others hold what was in memory, [rows, out]. The twin is as dirty."""
    import torch

    from firetower.drills.placing import replace_forward

    native = projection.forward
    workspace = torch.full((len(is_real), projection.out_features), float("nan"))

    def forward(x: Tensor) -> Tensor:
        y: Tensor = native(x)
        workspace[is_real] = y.flatten(0, -2)[is_real]
        return workspace.reshape(y.shape)

    replace_forward(projection, forward)
    return workspace


def _quantise(projection: Any, is_real: Tensor, *, over_pads: bool) -> None:
    """int8 activations with one scale for the tensor, over all rows or over the real ones."""
    import torch
    import torch.nn.functional as F

    from firetower.drills.placing import replace_forward

    def forward(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2) if over_pads else x.flatten(0, -2)[is_real]
        scale = rows.abs().amax() / 127
        return F.linear(torch.round(x / scale) * scale, projection.weight)

    replace_forward(projection, forward)


DRILL = Drill(
    name="unwritten-pads",
    family="C",
    case="C2b",
    title="a scale over unwritten pad rows turns every real row into NaN",
    verdict="C/PADS_IN_SHARED_SCALE",
    refuter=refuters.FILLS_ALIKE,
    stages=frozenset({"gate", "up", "down"}),
    variants=_variants,
)
