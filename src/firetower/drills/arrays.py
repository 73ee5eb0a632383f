"""Tensors as the lab takes them: numpy arrays of the stored values, with the stored type's name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from firetower.lab.subject import Array, array

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_array(name: str, x: Tensor) -> Array:
    """The values of a tensor; bfloat16 is widened to float32, which holds all of them."""
    x = x.detach()
    dtype = str(x.dtype).removeprefix("torch.")
    if x.dtype is torch.bfloat16 or (x.element_size() == 1 and x.is_floating_point()):
        x = x.float()
    return array(name, x.numpy(), dtype)


def arrays_of(result: Any) -> tuple[Array, ...]:
    """What a call returned, as arrays: the logits of a model's output, else every tensor in order."""
    logits = getattr(result, "logits", None)
    tensors = [logits] if isinstance(logits, Tensor) else list(_tensors(result))
    return tuple(to_array(f"output {i}", x) for i, x in enumerate(tensors))


def tensor_hash(x: Tensor) -> str:
    """Hash of a tensor's type, shape and bits."""
    x = x.detach().contiguous()
    head = f"{x.dtype}{tuple(x.shape)}".encode()
    bits = x.reshape(-1).view(_BITS[x.element_size()]).numpy()
    return hashlib.blake2b(head + bits.tobytes(), digest_size=16).hexdigest()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
