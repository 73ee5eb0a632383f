"""D3: a drafter reads the hidden states of one prefill chunk after the next chunk has written over them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct

if TYPE_CHECKING:
    from torch import Tensor

    from firetower.lab.subject import Event


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"overwritten-chunk/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    chunk = rng.randint(3, 6)
    length = chunk + rng.randint(2, chunk)

    def build(fault: bool) -> Case:
        from firetower.drills.placing import fixed
        from firetower.drills.serving import stateful, tokens

        model = stateful(host, seed)
        prefill = _Prefill(model, tokens(model, seed, length), chunk, in_time=not fault)
        return Case(
            model=model,
            serve=fixed(prefill.run, not fault),
            right=lambda: prefill.run(True),
            places=(f"hidden[0:{chunk}]", "wanted version 0 and found 1") if fault else (),
            parts={"events": prefill.events},
        )

    return Variant(id=f"{length}tokens-chunk{chunk}", host=host, level="finite", build=build)


class _Prefill:
    """Prefill in chunks through one buffer of hidden states; a drafter wants those of the first chunk."""

    def __init__(self, model: Any, ids: Tensor, chunk: int, *, in_time: bool) -> None:
        self.model, self.ids, self.chunk, self.in_time = model, ids, chunk, in_time
        self.log: list[Event] = []

    def run(self, in_time: bool) -> Tensor:
        """The drafter's logits; ``in_time``: it reads before the next chunk runs."""
        from firetower.drills.serving import fresh, step
        from firetower.lab.subject import Event

        cache, log, drafted = fresh(self.model), [], None
        buffer = self.ids.new_zeros((self.chunk, self.model.lm_head.in_features)).float()
        name = f"hidden[0:{self.chunk}]"

        def keep(_: Any, args: tuple[Tensor, ...]) -> None:
            hidden = args[0][0].float()
            buffer[: len(hidden)] = hidden

        hook = self.model.lm_head.register_forward_pre_hook(keep)
        for number, start in enumerate(range(0, self.ids.shape[1], self.chunk)):
            step(self.model, self.ids[:, start : start + self.chunk], cache)
            log.append(Event(kind="write", what=name, version=number, by=f"chunk {number}"))
            if in_time and number == 0:
                drafted = buffer.clone()
                log.append(Event(kind="read", what=name, version=0, by="the drafter"))
        if drafted is None:
            drafted = buffer.clone()
            log.append(Event(kind="read", what=name, version=0, by="the drafter"))
        hook.remove()
        if in_time is self.in_time:
            self.log = log
        logits: Tensor = drafted @ self.model.lm_head.weight.float().T
        return logits

    def events(self) -> tuple[Event, ...]:
        """Writes and reads of the run as served."""
        if not self.log:
            self.run(self.in_time)
        return tuple(self.log)


DRILL = Drill(
    name="overwritten-chunk",
    family="D",
    case="D3",
    title="hidden states are overwritten by the next chunk before their reader ran",
    verdict="D/BUFFER_OVERWRITTEN_BEFORE_USE",
    refuter=refuters.READ_IN_TIME,
    variants=_variants,
)
