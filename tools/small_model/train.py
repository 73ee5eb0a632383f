"""Second step, on a CUDA device or for a trial on the CPU: train within a budget of seconds and write a checkpoint.

    python -m small_model.train --data FOLDER --out OUT --seconds 300

FOLDER is the work folder of ``prepare``. The budget counts from the start of the program, compiling included. OUT gets
a checkpoint that Transformers loads (weights in bfloat16), written at 40, 60 and 80 % of the budget and at its end, so
that a run cut short leaves one too, and training.json with the loss curve. The learning rate follows the clock: how
many steps a run makes depends on the machine, the rows it reads do not.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from small_model.chat import END_OF_TEXT, IM_END
from small_model.checkpoint import weights_sha256
from small_model.mixture import conversation_rows
from small_model.net import CONFIG, SmallModel
from small_model.tokens import UNSUPERVISED

SEED = 20
PEAK_RATE, LAST_RATE = 3e-3, 3e-5
WARMUP_FRAC = 0.03
BALANCE, Z_LOSS = 0.01, 1e-4
SHARD_ROWS = 256


@contextmanager
def chat_shards(args: argparse.Namespace) -> Iterator[Iterator[np.ndarray]]:
    """Shards [SHARD_ROWS, length + 1] of fresh conversations in a fixed order, made by worker processes ahead of use.

    To be entered before the first use of CUDA: the workers are forks.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        yield pool.imap(partial(_shard, args.data, args.length + 1), range(args.chat_shards))


def _shard(work: Path, length: int, index: int) -> np.ndarray:
    return conversation_rows(work, seed=SEED + index, length=length, num_rows=SHARD_ROWS)


class Batches:
    """Batches of tokens: the first rows text, the others conversations.

    Args:
        text: tokens of all training documents, [num_tokens].
        shards: shards of conversation rows; once they end, those seen come again in order.
        args: rows, length and share.
        device: where batches go.
    """

    def __init__(self, text: np.ndarray, shards: Iterator[np.ndarray], args: argparse.Namespace, device: str) -> None:
        self.text = torch.from_numpy(text.astype(np.int32)).to(device)
        self.shards, self.next_kept = shards, 0
        self.kept: list[np.ndarray] = []
        self.num_text = round(args.rows * args.text_share)
        self.num_chat = args.rows - self.num_text
        self.length, self.device = args.length, device
        self.generator = torch.Generator().manual_seed(SEED)
        self.columns = torch.arange(args.length + 1, device=device)
        self.pending = torch.empty(0, args.length + 1, dtype=torch.int32, device=device)

    def _shard(self) -> Tensor:
        rows = next(self.shards, None)
        if rows is not None:
            self.kept.append(rows)
        else:
            rows = self.kept[self.next_kept % len(self.kept)]
            self.next_kept += 1
        return torch.from_numpy(rows.astype(np.int32)).to(self.device)

    def __next__(self) -> Tensor:
        """Stored tokens [rows, length + 1], int32 on the device."""
        starts = torch.randint(len(self.text) - self.length - 1, (self.num_text, 1), generator=self.generator)
        text = self.text[starts.to(self.device) + self.columns]
        while len(self.pending) < self.num_chat:
            self.pending = torch.cat((self.pending, self._shard()))
        chat, self.pending = self.pending[: self.num_chat], self.pending[self.num_chat :]
        return torch.cat((text, chat))


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, learned: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed by row, in nats, and the mean square of the normaliser.

    Args:
        hidden: [B, T, D].
        weight: the head's [vocab, D], float32.
        targets: next tokens [B, T], int64.
        learned: which positions count, float32 [B, T].
    """
    logits = (hidden @ weight.to(hidden.dtype).T).float()
    normaliser = logits.logsumexp(-1)
    nats = normaliser - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (nats * learned).sum(-1), (normaliser.square() * learned).sum() / learned.sum()


class Trainer:
    """The model, its optimiser and its compiled parts."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.device = device
        torch.manual_seed(SEED)
        # products in float32 are few on CUDA (the gated delta rule) and need no more than TF32
        torch.set_float32_matmul_precision("high")
        self.net = SmallModel(torch.bfloat16 if device == "cuda" else torch.float32).to(device)
        decayed = [p for p in self.net.parameters() if p.ndim >= 2]
        others = [p for p in self.net.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=device == "cuda")
        self.head: Callable[..., tuple[Tensor, Tensor]] = head_loss
        if args.compile:
            # one graph for each kind of layer, used by all of its kind
            for layer in self.net.model.layers:
                layer.compile()
            self.head = torch.compile(head_loss)

    def losses(self, stored: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Nats by row, learned tokens by row, balance and normaliser losses of stored tokens [B, T + 1]."""
        tokens = (stored & (UNSUPERVISED - 1)).long()
        learned = (stored[:, 1:] < UNSUPERVISED).float()
        hidden, balance = self.net(tokens[:, :-1])
        nats, z_loss = self.head(hidden, self.net.model.embed_tokens.weight, tokens[:, 1:], learned)
        return nats, learned.sum(-1), balance, z_loss

    def step(self, stored: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One step of the optimiser; mean nats and the balance loss, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        nats, counts, balance, z_loss = self.losses(stored)
        mean = nats.sum() / counts.sum()
        (mean + BALANCE * balance + Z_LOSS * z_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return mean.detach(), balance.detach()

    def held_out(self, stored: Tensor, rows: int) -> float:
        """Mean nats a learned token over stored rows [n * rows, T + 1]."""
        nats = counts = 0.0
        for part in stored.split(rows):
            # the graph with gradients is compiled already; another one for this would cost its time again
            row_nats, row_counts, *_ = self.losses(part)
            nats += float(row_nats.detach().sum())
            counts += float(row_counts.sum())
        return nats / counts


def rate_at(progress: float) -> float:
    """Learning rate at a share of the budget: linear warm-up, then a cosine."""
    if progress < WARMUP_FRAC:
        return PEAK_RATE * progress / WARMUP_FRAC
    turn = (progress - WARMUP_FRAC) / (1 - WARMUP_FRAC)
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(turn, 1.0)))


def save_checkpoint(net: SmallModel, data: Path, out: Path) -> None:
    """Write the checkpoint; the weights appear whole or not at all."""
    weights = {name: p.detach().to(torch.bfloat16).contiguous().cpu() for name, p in net.state_dict().items()}
    save_file(weights, out / "partial.safetensors", metadata={"format": "pt"})
    # the writer of safetensors keeps files to their owner; a package is for all
    (out / "partial.safetensors").chmod(0o644)
    (out / "partial.safetensors").rename(out / "model.safetensors")
    tokenizer = json.loads((data / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    ends = {"eos_token_id": [ids[IM_END], ids[END_OF_TEXT]], "pad_token_id": ids[END_OF_TEXT]}
    config = {**CONFIG, **ends}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (out / "generation_config.json").write_text(json.dumps({**ends, "do_sample": False}) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / name, out / name)


def held_out_rows(args: argparse.Namespace, device: str) -> tuple[Tensor, Tensor]:
    """Fixed held-out rows of text and of conversations, as many as two batches each."""
    text = np.load(args.data / "text_held_out.npy").astype(np.int32)
    starts = np.linspace(0, len(text) - args.length - 1, 2 * args.rows).astype(int)
    rows = np.stack([text[s : s + args.length + 1] for s in starts])
    chat = conversation_rows(
        args.data, seed=SEED, length=args.length + 1, num_rows=2 * args.rows, held_out=True
    ).astype(np.int32)
    return torch.from_numpy(rows).to(device), torch.from_numpy(chat).to(device)


def first_step(args: argparse.Namespace, batches: Batches, device: str) -> Trainer:
    """A trainer that has made one step at rate zero; without compiling where compiling fails, saying why."""
    batch = next(batches)
    trainer = Trainer(args, device)
    try:
        trainer.step(batch, 0.0)
    # whatever a compiler throws: a run without it is worth more than none
    except Exception as error:
        if not args.compile or isinstance(error, torch.OutOfMemoryError):
            raise
        print(f"compiling failed, going on without: {type(error).__name__}: {error}", flush=True)
        args.compile = False
        trainer = Trainer(args, device)
        trainer.step(batch, 0.0)
    return trainer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="work folder of small_model.prepare")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seconds", type=float, default=300.0, help="budget from the start of the program")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--text-share", type=float, default=0.6, help="share of rows that are text")
    parser.add_argument("--chat-shards", type=int, default=480, help=f"shards of {SHARD_ROWS} rows of conversations")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--every", type=float, default=20.0, help="seconds between looks at the held-out rows")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


def train(args: argparse.Namespace, shards: Iterator[np.ndarray], begin: float) -> dict[str, Any]:
    """Run the budget down; the contents of training.json."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = Batches(np.load(args.data / "text_train.npy"), shards, args, device)
    trainer = first_step(args, batches, device)
    held_out = held_out_rows(args, device)
    record = describe(args, trainer, device)
    start = last = time.perf_counter()
    print(f"first step after {start - begin:.0f} s", flush=True)
    saves = [0.4, 0.6, 0.8, 1.0]
    step, progress = 0, 0.0
    while progress < 1.0:
        loss, balance = trainer.step(next(batches), rate_at(progress))
        step += 1
        # a look at the loss waits for the device: without it the clock would run ahead of the steps
        if (step % 20 == 0 or device == "cpu") and not math.isfinite(float(loss)):
            raise SystemExit(f"loss={float(loss)} in step {step}: the last checkpoint stands")
        now = time.perf_counter()
        progress = (now - start) / max(begin + args.seconds - start, 1e-9)
        if now - last >= args.every or progress >= 1.0:
            last = now
            point = {"seconds": round(now - start, 1), "step": step, "tokens": step * args.rows * args.length}
            point |= {"train_nats": round(float(loss), 4), "balance": round(float(balance), 3)}
            point |= look(args, trainer, held_out)
            record["curve"].append(point)
            print(json.dumps(point), flush=True)
        if progress >= saves[0]:
            saves = [s for s in saves if s > progress]
            save_checkpoint(trainer.net, args.data, args.out)
            record["weights_sha256"] = weights_sha256(args.out)
            (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def describe(args: argparse.Namespace, trainer: Trainer, device: str) -> dict[str, Any]:
    """What training.json says beside the curve."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in trainer.net.parameters()),
        "arguments": {k: v for k, v in vars(args).items() if k not in ("data", "out")},
        "rates": {"peak": PEAK_RATE, "last": LAST_RATE, "warmup_frac": WARMUP_FRAC, "seed": SEED},
        "corpus": json.loads((args.data / "corpus.json").read_text(encoding="utf-8")),
        "curve": [],
    }


def look(args: argparse.Namespace, trainer: Trainer, held_out: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Held-out losses for the curve; bits a byte by the mean length of a token, ends of documents counted in."""
    note = json.loads((args.data / "corpus.json").read_text(encoding="utf-8"))
    tokens_a_byte = len(np.load(args.data / "text_held_out.npy", mmap_mode="r")) / note["held_out_bytes"]
    text, chat = (trainer.held_out(rows, args.rows) for rows in held_out)
    return {
        "held_out_text_nats": round(text, 4),
        "held_out_text_bits_a_byte": round(text / math.log(2) * tokens_a_byte, 4),
        "held_out_chat_nats": round(chat, 4),
    }


def main() -> None:
    begin = time.perf_counter()
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    with chat_shards(args) as shards:
        record = train(args, shards, begin)
    print(f"Wrote {args.out} ({record['parameters']} parameters, {len(record['curve'])} points on the curve)")


if __name__ == "__main__":
    main()
