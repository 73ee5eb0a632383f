"""The tokenizer of a Transformers folder, behind the two calls that an engine makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firetower.core.errors import ConfigError, MissingExtraError


class FolderTokenizer:
    """Wraps a tokenizer of Transformers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model's own settings ask for."""
        return list(self.inner.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self.inner.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation by the model's template, ready for its answer.

        Raises:
            ConfigError: the folder has no template.
        """
        if not getattr(self.inner, "chat_template", None):
            raise ConfigError("chat: the tokenizer has no chat template; give the prompt as text")
        text = self.inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(self.inner.encode(text, add_special_tokens=False))


def load_tokenizer(folder: Path) -> FolderTokenizer | None:
    """The tokenizer of a folder; None where it has none.

    Raises:
        MissingExtraError: Transformers is not installed.
        ConfigError: files that Transformers cannot read.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise MissingExtraError("reading a tokenizer", "transformers") from e
    try:
        return FolderTokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"tokenizer={folder}: cannot be read: {e}") from e
