"""One decode step of a request whose attention runs by a rule of an engine, inside a host or alone."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from firetower.drills.attention import PagedAttention, Rule, replace_attention
from firetower.drills.placing import generator, site
from firetower.drills.serving import after, stateful, step, tokens
from firetower.drills.spec import Case, Host
from firetower.drills.truth import with_truth


def attending(host: Host, seed: int, length: int, rule: Rule, number: int, *, fault: bool) -> Case:
    """A context of ``length`` tokens whose last one is decoded with ``rule`` in the ``number``-th attention layer.

    In a host the origin is that layer's attention, as a plain run shows it.
    """
    if host == "pure":
        module = PagedAttention(32, seed, rule)
        case = Case(model=module, args=(torch.randn(length, 32, generator=generator(seed)),))
        case.call()  # what the rule keeps over its calls is there before anybody watches
        return case
    model = stateful(host, seed)
    ids = tokens(model, seed, length)
    context = after(model, ids[:, :-1])
    layer = replace_attention(model, rule, number)

    def serve(_: int = 0) -> Any:
        return step(model, ids[:, -1:], copy.deepcopy(context))

    case = dataclasses.replace(Case(model=model), serve=serve)
    case.call()
    return with_truth(case, site(model, "attention", layer)) if fault else case
