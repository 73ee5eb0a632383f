"""Tokens from logits: one call for all rows, and one more for each row whose scores depend on its own past."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from firetower.engine.sequence import Sequence
from firetower.ops.sample import Sampled, SampleParams, pack_mask, sample


class OwnPast:
    """What penalties and biases of one request need on the device; such a request runs without drafts.

    Attributes:
        params: of the sampler, for one row.
    """

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device) -> None:
        sampling = sequence.request.sampling

        def one(value: float) -> Tensor:
            return torch.tensor([value], dtype=torch.float32, device=device)

        bias = None
        if sampling.logit_bias:
            bias = torch.zeros(1, vocab_size, dtype=torch.float32, device=device)
            ids = torch.tensor(list(sampling.logit_bias), device=device)
            bias[0, ids] = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        seen = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
        seen[0, torch.tensor(sequence.prompt, device=device)] = True
        self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        self.params = SampleParams(
            temperature=one(sampling.temperature),
            top_k=torch.tensor([sampling.top_k], dtype=torch.int32, device=device),
            top_p=one(sampling.top_p),
            min_p=one(sampling.min_p),
            repetition_penalty=one(sampling.repetition_penalty),
            frequency_penalty=one(sampling.frequency_penalty),
            presence_penalty=one(sampling.presence_penalty),
            token_counts=self._counts,
            prompt_mask=pack_mask(seen),
            logit_bias=bias,
        )
        self._seed = torch.tensor([sequence.seed], dtype=torch.int64, device=device)
        self.count(sequence.answer)

    def count(self, tokens: list[int]) -> None:
        """The answer went on by these tokens."""
        if tokens:
            ids = torch.tensor(tokens, device=self._counts.device)
            self._counts[0].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def choose(self, logits: Tensor, position: int, num_logprobs: int | None) -> Sampled:
        """The token of one row of logits [1, V], which is to stand at ``position``."""
        positions = torch.full_like(self._seed, position)
        return sample(logits, self.params, seeds=self._seed, positions=positions, num_logprobs=num_logprobs)


def choose(
    logits: Tensor,
    params: SampleParams,
    *,
    seeds: Tensor,
    positions: Tensor,
    row_ids: Tensor | None,
    own_pasts: dict[int, tuple[OwnPast, int]],
    num_logprobs: int | None,
) -> Sampled:
    """Choose a token for each row.

    Args:
        logits: [rows, V].
        params: of all rows.
        seeds, positions: int64 [rows]; positions of the tokens to come.
        row_ids: int32 [rows], negative for pads.
        own_pasts: by row: what its request needs, and the position of the token to come.
        num_logprobs: the most that a row asks for.
    """
    found = sample(logits, params, seeds=seeds, positions=positions, row_ids=row_ids, num_logprobs=num_logprobs)
    for row, (own, position) in own_pasts.items():
        one = own.choose(logits[row : row + 1], position, num_logprobs)
        for field in dataclasses.fields(Sampled):
            values, value = getattr(found, field.name), getattr(one, field.name)
            if values is not None and value is not None:
                values[row] = value[0]
    return found
