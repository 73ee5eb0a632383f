"""Replaying one op from a capture's tensors: as stored, in float32 and in float64.

The capture names the op by a word, which is looked up in the list here: a capture never brings code. It is
described in ``engine_settings["op"]``::

    {"name": "aten.mul.Tensor", "args": [{"tensor": "gate"}, {"tensor": "up"}], "kwargs": {}, "output": "product"}

``args`` are tensors of the capture by name, numbers, booleans, null, or lists of those; ``output`` names what the op
stored when it was captured, where that was kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from firetower.capture import Capture, RawTensor
from firetower.core.errors import MissingExtraError, ReplayError

_PLAIN = (
    "abs add addcmul addmm amax amin baddbmm bmm clamp cos cumprod cumsum div exp exp2 expm1 index_select log log1p "
    "log2 logsumexp masked_fill matmul max maximum mean min minimum mm mul nan_to_num neg outer pow prod reciprocal "
    "rsqrt sigmoid sin sqrt square sub sum tanh var where"
)
_FUNCTIONAL = "gelu layer_norm linear log_softmax normalize relu rms_norm silu softmax softplus"

OPS: Mapping[str, str] = {name: name for name in _PLAIN.split()} | {
    name: f"nn.functional.{name}" for name in _FUNCTIONAL.split()
}
"""Ops that can be replayed, and where torch has them."""

_ALIASES = {"_softmax": "softmax", "_log_softmax": "log_softmax"}
_WIDE = ("float32", "float64")
_KEYWORD_NAMES = (
    "alpha approximate beta bias descending dim dtype eps exponent keepdim max min nan neginf normalized_shape other "
    "p posinf rounding_mode value weight"
)
_KEYWORDS = frozenset(_KEYWORD_NAMES.split())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpRun:
    """One way to run the op, and what came out.

    ``dtype``: ``stored``, ``float32`` or ``float64``: what floating inputs were cast to. ``first_index`` is the
    row-major index of the first non-finite element, ``first_bits`` its bits in ``output_dtype``. ``absmax`` is over
    finite elements. ``error``: what torch said instead of an answer.
    """

    dtype: str
    output_dtype: str = ""
    shape: tuple[int, ...] = ()
    num_nan: int = 0
    num_pos_inf: int = 0
    num_neg_inf: int = 0
    first_index: int | None = None
    first_bits: str | None = None
    absmax: float | None = None
    error: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it gave NaN or Inf."""
        return self.first_index is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpReplay:
    """An op replayed.

    Attributes:
        op: its name in torch. capture: id. device: where it ran.
        bad_inputs: names of tensors that hold NaN or Inf before the op.
        runs: as stored first, then wider.
        tries: how often it ran as stored; num_different: how many of those gave other bits than the first.
        equals_captured: whether its bits are those that were captured; None where none were.
        sentences: what follows, most important first.
    """

    op: str
    capture: str
    device: str
    bad_inputs: tuple[str, ...]
    runs: tuple[OpRun, ...]
    tries: int
    num_different: int
    equals_captured: bool | None
    sentences: tuple[str, ...] = ()

    @property
    def is_bad(self) -> bool:
        """Whether it burns as stored."""
        return self.runs[0].is_bad


def replay_op(capture: Capture, *, tries: int = 3, device: str = "cpu") -> OpReplay:
    """Run the op of a capture again.

    Args:
        capture: read with its tensors.
        tries: runs in the stored types, compared bit for bit.
        device: of torch.

    Raises:
        ReplayError: the capture describes no op, one that is not in `OPS`, or tensors that it does not hold.
        MissingExtraError: torch is missing.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("replay of an op", "torch") from None
    call = _Call(capture, torch, device)
    first, output = call.run("stored")
    others = [call.run("stored")[1] for _ in range(max(1, tries) - 1)]
    num_different = sum(not _same_bits(torch, output, other) for other in others)
    runs = (first, *(call.run(dtype)[0] for dtype in _WIDE))
    captured = call.captured_output()
    result = OpReplay(
        op=call.name,
        capture=capture.id,
        device=device,
        bad_inputs=call.bad_inputs(),
        runs=runs,
        tries=max(1, tries),
        num_different=num_different,
        equals_captured=None if captured is None or output is None else _same_bits(torch, output, captured),
    )
    return dataclasses.replace(result, sentences=tuple(_sentences(result, call)))


class _Call:
    """The described call, checked, with its tensors."""

    def __init__(self, capture: Capture, torch: Any, device: str) -> None:
        described = capture.engine_settings.get("op")
        if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
            raise ReplayError(
                f"capture={capture.id!r}: describes no op (engine_settings.op); see docs/reference/replay.md"
            )
        self.name = _plain_name(described["name"])
        self._torch, self._device = torch, device
        self._function = _function(torch, self.name)
        self._tensors = capture.tensors
        self.args = self._list(described.get("args", []), "args")
        self.kwargs = {k: self._value(v, f"kwargs.{k}") for k, v in self._keywords(described.get("kwargs", {})).items()}
        self._output = described.get("output")

    def run(self, dtype: str) -> tuple[OpRun, Any]:
        """(what came out, the output tensor or None)."""
        torch = self._torch
        to = None if dtype == "stored" else getattr(torch, dtype)
        cast = self._caster(to)
        try:
            with torch.no_grad():
                output = self._function(*map(cast, self.args), **{k: cast(v) for k, v in self.kwargs.items()})
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as e:
            return OpRun(dtype=dtype, error=f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"), None
        if not isinstance(output, torch.Tensor):
            output = output[0]
        return _look(torch, dtype, output), output

    def bad_inputs(self) -> tuple[str, ...]:
        """Names of the tensors that are not finite before the op."""
        return tuple(name for name, t in self._named() if t.is_floating_point() and not self._is_finite(t))

    def stored_types(self) -> tuple[str, ...]:
        """Floating types of the inputs, as stored."""
        return tuple(dict.fromkeys(_name(t.dtype) for _, t in self._named() if t.is_floating_point()))

    def captured_output(self) -> Any:
        """What the op had stored, or None."""
        return None if self._output is None else self._tensor(self._output, "output")

    def _is_finite(self, tensor: Any) -> bool:
        return bool(self._torch.isfinite(tensor.double()).all())

    def _named(self) -> Iterator[tuple[str, Any]]:
        found: list[Any] = [*self.args, *self.kwargs.values()]
        while found:
            value = found.pop(0)
            if isinstance(value, list):
                found += value
            elif isinstance(value, tuple):
                yield value

    def _caster(self, dtype: Any) -> Callable[[Any], Any]:
        def cast(value: Any) -> Any:
            if isinstance(value, list):
                return [cast(v) for v in value]
            if not isinstance(value, tuple):
                return value
            tensor = value[1]
            return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

        return cast

    def _keywords(self, kwargs: Any) -> Mapping[str, Any]:
        if not isinstance(kwargs, Mapping):
            raise ReplayError("op.kwargs: must be an object")
        unknown = sorted(set(kwargs) - _KEYWORDS)
        if unknown:
            raise ReplayError(f"op.kwargs: {unknown[0][:80]!r} is not allowed; known: {', '.join(sorted(_KEYWORDS))}")
        return kwargs

    def _list(self, values: Any, where: str) -> list[Any]:
        if not isinstance(values, list | tuple):
            raise ReplayError(f"op.{where}: must be a list")
        return [self._value(v, f"{where}[{i}]") for i, v in enumerate(values)]

    def _value(self, value: Any, where: str) -> Any:
        """A number as it is; a tensor as (name, tensor)."""
        if isinstance(value, Mapping) and value.keys() == {"tensor"}:
            return (str(value["tensor"]), self._tensor(value["tensor"], where))
        if isinstance(value, Mapping) and value.keys() == {"dtype"}:
            return self._dtype(value["dtype"], where)
        if isinstance(value, list | tuple):
            return self._list(value, where)
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ReplayError(f"op.{where}: must be a number, a boolean, null, a list or {{'tensor': NAME}}")

    def _dtype(self, name: Any, where: str) -> Any:
        if name not in ("float64", "float32", "float16", "bfloat16"):
            raise ReplayError(f"op.{where}: dtype={str(name)[:40]!r}: must be float64, float32, float16 or bfloat16")
        return getattr(self._torch, name)

    def _tensor(self, name: Any, where: str) -> Any:
        raw = self._tensors.get(name) if isinstance(name, str) else None
        if raw is None:
            held = ", ".join(sorted(self._tensors)[:8]) or "none"
            raise ReplayError(f"op.{where}: tensor={str(name)[:80]!r}: is not in the capture; it holds {held}")
        return _to_torch(self._torch, raw).to(self._device)


def _plain_name(name: str) -> str:
    """``aten.mul.Tensor`` and ``aten::mul`` to ``mul``."""
    plain = name.replace("::", ".").removeprefix("torch.").removeprefix("aten.").split(".")[0].removesuffix("_")
    plain = _ALIASES.get(plain, plain)
    if plain not in OPS:
        raise ReplayError(f"op={name[:80]!r}: cannot be replayed; known: {', '.join(sorted(OPS))}")
    return plain


def _function(torch: Any, name: str) -> Callable[..., Any]:
    found = torch
    for part in OPS[name].split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _to_torch(torch: Any, raw: RawTensor) -> Any:
    if not raw.data:
        return torch.empty(raw.shape, dtype=getattr(torch, raw.dtype))
    return torch.frombuffer(bytearray(raw.data), dtype=getattr(torch, raw.dtype)).reshape(raw.shape)


def _look(torch: Any, dtype: str, output: Any) -> OpRun:
    wide = output.double() if output.is_floating_point() else output
    bad = ~torch.isfinite(wide)
    index = int(bad.flatten().to(torch.uint8).argmax()) if bool(bad.any()) else None
    finite = wide[~bad].abs()
    return OpRun(
        dtype=dtype,
        output_dtype=_name(output.dtype),
        shape=tuple(output.shape),
        num_nan=int(torch.isnan(wide).sum()),
        num_pos_inf=int((wide == math.inf).sum()),
        num_neg_inf=int((wide == -math.inf).sum()),
        first_index=index,
        first_bits=None if index is None else _bits(torch, output, index),
        absmax=float(finite.max()) if finite.numel() else None,
    )


def _bits(torch: Any, tensor: Any, index: int) -> str:
    size = tensor.element_size()
    raw = tensor.contiguous().flatten()[index : index + 1].view(torch.uint8).cpu().numpy().tobytes()
    return f"{int.from_bytes(raw, 'little'):0{2 * size}x}"


def _same_bits(torch: Any, a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return bool(torch.equal(first, second))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _sentences(result: OpReplay, call: _Call) -> Iterator[str]:
    stored, single, double = result.runs
    types = " and ".join(call.stored_types()) or "its types"
    if stored.error:
        yield f"{result.op} does not run as stored ({types}): {stored.error}"
    elif result.bad_inputs:
        yield f"The inputs are bad before the op ({', '.join(result.bad_inputs)}): look upstream of {result.op}."
    elif not stored.is_bad:
        yield f"{result.op} is finite as stored ({types}) on {result.device}."
        if call.captured_output() is not None and result.equals_captured is False:
            yield "Its bits are not the captured ones: another kernel, device or order, or memory that changed."
    elif not single.error and not single.is_bad:
        size = "" if double.absmax is None else f", where its largest magnitude is {double.absmax:.6g}"
        yield f"{result.op} burns as stored ({types}) and is finite in float32{size}: the range of {types} is to blame."
    elif not double.error and not double.is_bad:
        size = "" if double.absmax is None else f", where its largest magnitude is {double.absmax:.6g}"
        yield f"{result.op} burns in float32 and is finite in float64{size}: the range of float32 is to blame."
    else:
        yield f"{result.op} burns in float64 too, from finite inputs: the operation has no finite answer there."
    if result.tries > 1:
        same = "all gave the same bits" if not result.num_different else f"{result.num_different} gave other bits"
        yield f"{result.tries} runs as stored: {same}."
    if result.equals_captured:
        yield "The bits are exactly the captured ones."
