"""A thin session over llama-cpp-python's C bindings: load, tokenise, decode, greedy choice.

The C functions are used rather than the ``Llama`` class because the callback has to be in the context's
parameters before the context is made, and because the tracer must know which tokens each decode computes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from firetower.attach.llama.ggml import GgmlBase
from firetower.core.errors import ConfigError, MissingExtraError, TraceError

_ERROR_LEVEL, _CONTINUED = 4, 5
_CONTEXT_ROUNDING = 256
FLASH_ATTENTION = {"auto": -1, "on": 1, "off": 0}
"""llama.cpp's ``llama_flash_attn_type``, by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaOptions:
    """How llama.cpp runs.

    ``num_threads`` None: the CPUs this process may use, at most 8. ``ubatch_size`` is the largest number of
    prompt tokens computed at once. ``num_gpu_layers`` 0 keeps everything on the CPU. ``repack`` False keeps
    weights in ggml's plain layout (llama.cpp's ``--no-repack``): slower kernels, and a test of the fast ones.
    ``flash_attention`` ``off`` makes scores and softmax ops of their own. ``debug`` lets llama.cpp's log
    through to stderr.
    """

    num_threads: int | None = None
    ubatch_size: int = 512
    num_gpu_layers: int = 0
    repack: bool = True
    flash_attention: str = "auto"
    debug: bool = False

    def __post_init__(self) -> None:
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(
                f"num_threads={self.num_threads}: must be at least 1; leave it out for all usable CPUs"
            )
        if self.ubatch_size < 1:
            raise ConfigError(
                f"ubatch_size={self.ubatch_size}: must be at least 1; 512 is llama.cpp's default"
            )
        if self.num_gpu_layers < 0:
            raise ConfigError(
                f"num_gpu_layers={self.num_gpu_layers}: must not be negative; 0 is the CPU only"
            )
        if self.flash_attention not in FLASH_ATTENTION:
            raise ConfigError(f"flash_attention={self.flash_attention!r}: must be auto, on or off")


def require_llama_cpp() -> None:
    """Check, without importing it, that llama-cpp-python is there.

    Raises:
        MissingExtraError: it is not installed.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise MissingExtraError("firetower trace --runtime llama", "llama")


def import_llama_cpp() -> ModuleType:
    """Import llama-cpp-python.

    Raises:
        MissingExtraError: it is not installed.
        TraceError: it is installed but cannot be loaded.
    """
    require_llama_cpp()
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as e:
        raise TraceError(f"llama_cpp: installed but cannot be loaded: {e}") from e
    module: ModuleType = llama_cpp
    return module


def check_model_file(path: Path) -> None:
    """Refuse early, and in plain words, what llama.cpp would refuse in its log only.

    Raises:
        TraceError: not there, not a file, not readable, or not a GGUF.
    """
    if not path.exists():
        raise TraceError(f"model={path}: no such file")
    if not path.is_file():
        raise TraceError(f"model={path}: not a file; give the .gguf itself")
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise TraceError(f"model={path}: cannot be read: {e.strerror}") from e
    if magic != b"GGUF":
        raise TraceError(f"model={path}: not a GGUF file (starts with {magic!r}); llama.cpp reads GGUF only")


class LlamaSession:
    """One loaded model; a context manager. Contexts are made and freed by `context`.

    Args:
        path: the GGUF file.
        options: how to run.

    Raises:
        MissingExtraError: llama-cpp-python is not installed.
        TraceError: the file is refused; the message ends with llama.cpp's own reason.
    """

    def __init__(self, path: Path, options: LlamaOptions) -> None:
        check_model_file(path)
        self._lib = lib = import_llama_cpp()
        self.path, self._options = path, options
        self.runtime = f"llama-cpp-python {lib.__version__}"
        self.ggml = GgmlBase.load(Path(str(lib.__file__)).parent / "lib")
        self._log = _Log(lib, show=options.debug)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = options.num_gpu_layers
        params.use_extra_bufts = options.repack
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise TraceError(f"model={path}: llama.cpp refuses it: {self._log.reason}")
        if not lib.llama_model_has_decoder(self._model) or lib.llama_model_has_encoder(self._model):
            self.close()
            raise TraceError(f"model={path}: not a decoder-only model; only those can be traced")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.num_vocab: int = lib.llama_vocab_n_tokens(self._vocab)

    def __enter__(self) -> LlamaSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model. llama.cpp's log stays with firetower until the process ends."""
        if self._model:
            self._lib.llama_model_free(self._model)
            self._model = None

    def context(self, num_tokens: int, callback: Callable[[int, bool, object], bool] | None) -> LlamaContext:
        """Make a context for ``num_tokens`` tokens, with ``callback`` as ``cb_eval`` or without any."""
        return LlamaContext(self._lib, self._model, self._options, num_tokens, callback, self._log)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, with the model's own opening token."""
        raw = text.encode()
        room = len(raw) + 16
        for _ in range(2):
            out = (self._lib.llama_token * room)()
            count = self._lib.llama_tokenize(self._vocab, raw, len(raw), out, room, True, True)
            if count >= 0:
                return tuple(out[:count])
            room = -count  # a byte vocabulary spells one space in three tokens
        raise TraceError(f"prompt: llama.cpp cannot tokenise it ({count})")

    def chat_prompt(self, prompt: str) -> str | None:
        """``prompt`` as a user's turn in the model's chat template; None without one that llama.cpp knows."""
        template = self._lib.llama_model_chat_template(self._model, None)
        if not template:
            return None
        message = (self._lib.llama_chat_message * 1)()
        message[0].role, message[0].content = b"user", prompt.encode()
        for size in (4096 + 2 * len(prompt.encode()), 1 << 20):
            out = ctypes.create_string_buffer(size)
            length = self._lib.llama_chat_apply_template(template, message, 1, True, out, size)
            if 0 < length <= size:
                return out.raw[:length].decode("utf-8", "replace")
        return None

    def piece(self, token: int) -> bytes:
        """The bytes of one token; special tokens have none."""
        out = ctypes.create_string_buffer(512)
        count = self._lib.llama_token_to_piece(self._vocab, token, out, len(out), 0, False)
        return out.raw[: max(count, 0)]

    def is_end(self, token: int) -> bool:
        """True for a token that ends generation."""
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))


class LlamaContext:
    """One context: decodes tokens in order, positions counted by llama.cpp. A context manager."""

    def __init__(
        self,
        lib: ModuleType,
        model: Any,
        options: LlamaOptions,
        num_tokens: int,
        callback: Callable[[int, bool, object], bool] | None,
        log: _Log,
    ) -> None:
        self._lib = lib
        self._log = log
        params = lib.llama_context_default_params()
        params.n_ctx = -(-num_tokens // _CONTEXT_ROUNDING) * _CONTEXT_ROUNDING
        params.n_batch = params.n_ubatch = options.ubatch_size
        params.n_threads = params.n_threads_batch = options.num_threads or default_num_threads()
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        # the C side keeps a bare pointer: this reference must outlive the context
        self._callback = None if callback is None else lib.ggml_backend_sched_eval_callback(callback)
        if self._callback is not None:
            params.cb_eval, params.cb_eval_user_data = self._callback, None
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise TraceError(f"num_tokens={num_tokens}: llama.cpp makes no context: {log.reason}")

    def __enter__(self) -> LlamaContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lib.llama_free(self._context)
        self._context = None

    def decode(self, tokens: Sequence[int]) -> None:
        """Compute ``tokens``; logits are kept for the last one only.

        Raises:
            TraceError: llama.cpp returns an error.
        """
        array = (self._lib.llama_token * len(tokens))(*tokens)
        code = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(array, len(tokens)))
        if code != 0:
            raise TraceError(f"llama_decode returned {code}: {self._log.reason}")
        self._lib.llama_synchronize(self._context)

    def greedy(self, num_vocab: int) -> int:
        """The likeliest token. Never asked of bad logits: their argmax is a made-up token."""
        logits = np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, -1), (num_vocab,))
        return int(logits.argmax())


class _Log:
    """Takes llama.cpp's log: keeps the last error line, shows everything on debug only."""

    def __init__(self, lib: ModuleType, *, show: bool) -> None:
        self._last: str = ""
        self._level = 0
        self._show = show
        _callbacks.append(lib.llama_log_callback(self._take))
        lib.llama_log_set(_callbacks[-1], ctypes.c_void_p(0))

    @property
    def reason(self) -> str:
        """The last error that llama.cpp logged."""
        return self._last or "no reason given (see --debug)"

    def _take(self, level: int, text: bytes, user_data: object) -> None:
        if level != _CONTINUED:
            self._level = level
        line = text.decode("utf-8", "replace")
        if self._show:
            sys.stderr.write(line)
        # the first error of a chain names the cause; "failed to load model" and the like only repeat it
        if self._level == _ERROR_LEVEL and line.strip() and not self._last:
            self._last = line.strip().replace("\n", " ")


_callbacks: list[Any] = []
"""Log callbacks handed to C; it may log until the process ends, so they are never freed."""


def default_num_threads() -> int:
    """CPUs that this process may use, at most 8: decoding is bound by memory well before that."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, 8)
