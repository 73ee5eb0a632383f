"""A value that is not finite: which outputs it reaches, which token it is put down to, and what the panel says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.core.words import CLEAN, NOT_RUN, unpack_row_word, unpack_word
from firetower.ops.gated_delta_rule.cases import with_gates
from firetower.sensors.marks import Mark, mark_rows, new_panel

NAN, INF = float("nan"), float("inf")

# numpy, not the kernel, complains of Inf * 0 and of an overflow in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def planted(x, name, token, value, head=0):
    tensor = getattr(x, name).clone()
    at = (0, token, head) + (3,) * (tensor.ndim - 3)
    tensor[at] = value
    return dataclasses.replace(x, **{name: tensor})


def shape_of_the_burn(x, name, token):
    """bool masks of the output and the state that one bad element at [0, token, 0(, 3)] must burn."""
    out, state = torch.zeros(x.v.shape, dtype=torch.bool), torch.zeros(x.initial_state.shape, dtype=torch.bool)
    group = x.v.shape[2] // x.k.shape[2]
    if name == "v":
        out[0, token:, 0, 3], state[0, 0, :, 3] = True, True
    elif name == "q":
        out[0, token, :group] = True
    else:
        heads = slice(0, group if name == "k" else 1)
        out[0, token:, heads], state[0, heads] = True, True
    return out, state


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_what_a_bad_value_reaches(prefill, assert_close, name, value):
    if name == "g" and value == -INF:
        pytest.skip("a gate that forgets everything")
    prefill.only_where_quick(value is NAN or (name in ("k", "v") and value == INF))
    x = with_gates(prefill.inputs(1), -0.05)
    token = 70 if prefill.is_interpreted else 100
    clean, clean_state = prefill(x)
    out, state = prefill(planted(x, name, token, value))
    is_burned, is_state_burned = (m.to(out.device) for m in shape_of_the_burn(x, name, token))
    assert torch.equal(~out.isfinite(), is_burned)
    assert torch.equal(~state.isfinite(), is_state_burned)
    kept = torch.where(is_burned, 0.0, out), torch.where(is_state_burned, 0.0, state)
    assert_close("out", torch.where(is_burned, 0.0, clean), kept[0], prefill.rtol())
    assert_close("state", torch.where(is_state_burned, 0.0, clean_state), kept[1], prefill.rtol())


def marks(x, *, rows=True):
    num_tokens, sequences = x.q.shape[0] * x.q.shape[1], x.initial_state.shape[0]
    panel = new_panel(2, max(num_tokens, sequences), x.q.device)

    def mark(slot, ids):
        return Mark(panel=panel, slot=slot, num_signals=2, num_rows=max(num_tokens, sequences), row_ids=ids)

    tokens = torch.arange(num_tokens, device=x.q.device) if rows else None
    return panel, mark(0, tokens), mark(1, torch.arange(sequences, device=x.q.device) if rows else None)


@pytest.mark.parametrize(("name", "token"), [("v", 0), ("v", 63), ("k", 64), ("g", 66), ("beta", 30), ("q", 69)])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "no rows"])
def test_the_panel_names_the_token(prefill, name, token, rows):
    prefill.only_where_quick(rows or name == "v")
    x = planted(prefill.inputs(2, length=70), name, token, NAN)
    panel, mark, state_mark = marks(x, rows=rows)
    out, state = prefill(x, mark=mark, state_mark=state_mark)
    width = out.shape[2] * out.shape[3]
    word = unpack_word(int(panel[0]))
    assert word.flat_index // width == token
    if rows:
        assert unpack_row_word(int(panel[4 + token])).execution_index == 0
        assert (panel[4 : 4 + token] == NOT_RUN).sum() >= token - 1
    expected, again, state_again = marks(x, rows=rows)
    mark_rows(out.flatten(0, 1).flatten(1), again)
    mark_rows(state.flatten(1), state_again)
    assert torch.equal(panel, expected)


def test_pads_have_words_of_their_own(prefill):
    x = planted(planted(prefill.inputs(3, length=70), "q", 5, NAN), "q", 40, INF)
    panel, mark, _ = marks(x)
    mark.row_ids[:10] = -1
    out, _ = prefill(x, mark=mark)
    expected, again, _ = marks(x)
    again.row_ids[:10] = -1
    mark_rows(out.flatten(0, 1).flatten(1), again)
    assert torch.equal(panel, expected)
    width = out.shape[2] * out.shape[3]
    assert (unpack_word(int(panel[0])).flat_index // width, unpack_word(int(panel[2])).flat_index // width) == (40, 5)


@pytest.mark.parametrize("is_bad", [False, True], ids=["clean", "burned"])
def test_sensors_change_no_bits(prefill, is_bad):
    x = prefill.inputs(4, length=70)
    x = planted(x, "v", 20, NAN) if is_bad else x
    panel, mark, state_mark = marks(x)
    with_marks, without = prefill(x, mark=mark, state_mark=state_mark), prefill(x)
    for a, b in zip(with_marks, without, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    if not is_bad:
        assert panel[:2].tolist() == [CLEAN, CLEAN]
        assert (panel[2:-3] == NOT_RUN).all()


def test_only_the_burned_sequence_is_burned(prefill):
    x = prefill.inputs(5, length=70, batch=2)
    clean, clean_state = prefill(x)
    out, state = prefill(planted(x, "k", 10, NAN))
    assert torch.equal(out[1], clean[1])
    assert torch.equal(state[1], clean_state[1])


def test_an_output_that_only_its_type_overflows_is_marked_as_stored(prefill):
    x = prefill.inputs(6, length=70, dtype=torch.float16)
    state = x.initial_state.clone()
    state[0, 0] *= 1e6
    x = with_gates(dataclasses.replace(x, initial_state=state), 0.0)
    panel, mark, state_mark = marks(x)
    out, final = prefill(x, mark=mark, state_mark=state_mark)
    assert out.isinf().any()
    assert final.isfinite().all()
    expected, again, state_again = marks(x)
    mark_rows(out.flatten(0, 1).flatten(1), again)
    mark_rows(final.flatten(1), state_again)
    assert torch.equal(panel, expected)
