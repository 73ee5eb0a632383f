"""A bad value at each stage that a watch declares: whatever the stage, it must be named as the origin."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

from firetower.drills import refuters
from firetower.drills.spec import Case, Drill, Host, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from firetower.drills.truth import Site

_PARAMETERS = {
    "input": "model.embed_tokens.weight",
    "ple": "{layer}.ple.ple_embedding.ngram_embedding.weight",
    "conv_state": "{layer}.linear_attn.in_proj_qkv.weight",
    "recurrent_state": "{layer}.linear_attn.A_log",
    "query": "{layer}.self_attn.q_norm.weight",
    "kv": "{layer}.self_attn.v_proj.weight",
    "attention": "{layer}.linear_attn.out_proj.weight",
    "gate": "{layer}.mlp.shared_expert.gate_proj.weight",
    "up": "{layer}.mlp.shared_expert.up_proj.weight",
    "down": "{layer}.mlp.shared_expert.down_proj.weight",
    "router": "{layer}.mlp.gate.weight",
    "routed": "{layer}.mlp.experts.down_proj",
    "logits": "lm_head.weight",
}
"""The parameter that a stage is computed from."""

_MODULES = {
    "swiglu": "{layer}.mlp.shared_expert.act_fn",
    "shared": "{layer}.mlp.shared_expert",
    "output": "{layer}.mlp",
}
"""Stages that no parameter of their own feeds: the module whose result is written wrong."""

_LAYERS = {"input": (0,), "ple": (0,), "conv_state": (0, 1, 2), "recurrent_state": (0, 1, 2), "query": (3,), "kv": (3,)}
_LARGE = 64.0


def _variants(seed: int) -> list[Variant]:
    rng = Random(f"every-stage/{seed}")
    return [_variant(stage, rng.randrange(1 << 30)) for stage in (*_PARAMETERS, *_MODULES)]


def _variant(stage: str, seed: int) -> Variant:
    rng = Random(seed)
    host: Host = "qwen4exp" if stage == "ple" else "qwen35moe"
    layer = rng.choice((0, 1, 2) if stage == "attention" else _LAYERS.get(stage, range(4)))
    # a state's gate takes NaN only: -exp(Inf) is an honest "forget everything"
    value = "nan" if stage == "recurrent_state" else rng.choice(("nan", "inf", "-inf"))

    def build(fault: bool) -> Case:
        from firetower.drills.placing import load, prompt, site
        from firetower.drills.truth import with_truth

        pick = Random(seed)
        model = load(host, "fp32", seed)
        ids = prompt(model, pick, pick.randint(4, 9))
        number = float(value) if fault else _LARGE
        if stage in _PARAMETERS:
            name = _PARAMETERS[stage].format(layer=f"model.layers.{layer}")
            _element(model.get_parameter(name).data, stage, ids, pick).fill_(number)
        else:
            path = _MODULES[stage].format(layer=f"model.layers.{layer}")
            return _kernel_case(model, ids, path, pick, number, site(model, stage, layer), fault)
        case = Case(model=model, args=(ids,))
        where = site(model, stage, None if stage == "logits" else layer)
        return with_truth(case, where) if fault else case

    name = stage if stage == "logits" else f"layer{layer}-{stage}"
    by_kernel = stage in _MODULES
    return Variant(
        id=f"{name}-{value}",
        host=host,
        level="layers",
        build=build,
        verdict="P/KERNEL_WRONG" if by_kernel else None,
        refuter=refuters.OTHER_BACKEND if by_kernel else None,
    )


def _kernel_case(model: Any, ids: Tensor, path: str, rng: Random, number: float, where: Site, fault: bool) -> Case:
    """The module is a kernel that writes one element wrong; another backend for it writes it right."""
    from firetower.drills.placing import alike, replace_forward
    from firetower.drills.truth import with_truth
    from firetower.lab.subject import Switch

    module = model.get_submodule(path)
    model.set_experts_implementation("eager")  # runs in float64 too
    broken = _write_wrong(module, rng.randrange(ids.numel()), rng.randrange(64), number)
    case = Case(model=model, args=(ids,), kernels={path: path.rpartition(".")[2]})

    def other_backend(_: int) -> Any:
        replace_forward(module, type(module).forward.__get__(module))
        try:
            return case.call()
        finally:
            replace_forward(module, broken)

    same = alike(case.call, Switch.EAGER, Switch.FILL_A, Switch.FILL_B)
    case = dataclasses.replace(case, switches={**same, Switch.OTHER_BACKEND: other_backend})
    return with_truth(case, where) if fault else case


def _element(parameter: Tensor, stage: str, ids: Tensor, rng: Random) -> Tensor:
    """A view of the one element to poison, placed where this prompt reads it."""
    if stage == "input":
        return parameter[ids.flatten()[rng.randrange(ids.numel())], rng.randrange(parameter.shape[1])]
    # which expert or hashed row is read is the model's affair: every one gets the same bad element
    every = (slice(None),) if stage in ("ple", "routed") else ()
    return parameter[(*every, *(rng.randrange(n) for n in parameter.shape[len(every) :]))]


def _write_wrong(module: Any, token: int, column: int, number: float) -> Any:
    from firetower.drills.placing import replace_forward

    native = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = native(*args, **kwargs)
        written = output[0] if isinstance(output, tuple) else output
        written.reshape(-1, written.shape[-1])[token, column] = number
        return output

    replace_forward(module, forward)
    return forward


DRILL = Drill(
    name="every-stage",
    family="M",
    title="a bad value at each stage in turn",
    verdict="M/BAD_WEIGHT",
    refuter=refuters.FINITE_FOR_ZEROS,
    stages=frozenset({*_PARAMETERS, *_MODULES}),
    variants=_variants,
)
