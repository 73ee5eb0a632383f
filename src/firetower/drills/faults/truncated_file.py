"""M2: a weight file is shorter than its header says, and a loader fills the rest with zeros."""

from __future__ import annotations

from random import Random
from typing import Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant, distinct


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"truncated-file/{seed}")
    hosts: tuple[Host, ...] = ("pure", "pure", "qwen35moe", "qwen35moe", "smollm2")
    return distinct([_variant(host, rng.randrange(1 << 30)) for host in hosts])


def _variant(host: Host, seed: int) -> Variant:
    rng = Random(seed)
    layer, num_tokens = rng.randrange(30 if host == "smollm2" else 4), rng.randint(3, 9)
    kept_frac = rng.uniform(0.2, 0.9)

    def build(fault: bool) -> Case:
        import torch
        from torch import nn

        from firetower.drills.placing import generator, load, prompt, site
        from firetower.drills.pure import linear

        if host == "pure":
            model: Any = nn.Sequential(linear(40, 32, seed), linear(24, 40, seed + 1))
            args: Any = (torch.randn(num_tokens, 32, generator=generator(seed)),)
            name = "1.weight"
        else:
            model = load(host, "fp32", seed)
            args = (prompt(model, Random(seed), num_tokens),)
            name = f"{site(model, 'down', layer).module}.weight"
        weight = model.get_parameter(name).data
        right = Case(model=model, args=args).call()
        declared, found = _through_file(name, weight, kept_frac if fault else 1.0)
        text = f"header declares {declared:,} bytes, the file has {found:,}"
        return Case(
            model=model,
            args=args,
            right=lambda: right,
            places=(name, text) if fault else (),
            parts={"weights": lambda: (_record(name, weight, declared, found),)},
        )

    id = f"{kept_frac:.0%}" if host == "pure" else f"layer{layer}-{kept_frac:.0%}"
    return Variant(id=id, host=host, level="finite", build=build)


def _through_file(name: str, weight: Any, kept_frac: float) -> tuple[int, int]:
    """Write a weight to a safetensors file, cut it, and read it back as far as it goes; bytes declared and found."""
    import json
    import tempfile
    from pathlib import Path

    import numpy as np
    import torch
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({name: weight.contiguous()}, file)
        whole = file.read_bytes()
        head = 8 + int.from_bytes(whole[:8], "little")
        end = head + int((len(whole) - head) * kept_frac) // 4 * 4
        file.write_bytes(whole[:end])
        read = file.read_bytes()
    start, stop = json.loads(read[8:head])[name]["data_offsets"]
    data = read[head:].ljust(stop - start, b"\0")
    weight.copy_(torch.from_numpy(np.frombuffer(data, np.float32).copy()).view(weight.shape))
    return stop - start, len(read) - head


def _record(name: str, weight: Any, declared: int, found: int) -> Any:
    from firetower.drills.arrays import tensor_hash, to_array
    from firetower.lab.subject import Weight

    # the file was short when it was loaded: nothing has changed since
    seen = tensor_hash(weight)
    return Weight(
        name=name,
        now=to_array(name, weight),
        hash_now=seen,
        hash_at_load=seen,
        num_bytes=declared,
        num_bytes_found=found,
    )


DRILL = Drill(
    name="truncated-file",
    family="M",
    case="M2",
    title="a weight file is cut short, the rest is read as zeros",
    verdict="M/TRUNCATED",
    refuter=refuters.FILE_WHOLE,
    variants=_variants,
)
