"""Freezing what a fire needs to be run again, and reading it back. Torch-free; a capture never names code to run."""

from firetower.capture.archive import pack, unpack
from firetower.capture.environment import collect_environment, hash_files, hash_model
from firetower.capture.folder import VerifyReport, read_capture, verify, write_capture
from firetower.capture.freeze import freeze_call, freeze_request
from firetower.capture.records import (
    Capture,
    Environment,
    FileHash,
    ModelInfo,
    Output,
    Redaction,
    Request,
)
from firetower.capture.redaction import record_measurement, redact, with_measurement
from firetower.capture.store import AddOutcome, AddResult, CaptureFolder, CaptureLimits, StoredCapture
from firetower.capture.tensors import RawTensor

__all__ = [
    "AddOutcome",
    "AddResult",
    "Capture",
    "CaptureFolder",
    "CaptureLimits",
    "Environment",
    "FileHash",
    "ModelInfo",
    "Output",
    "RawTensor",
    "Redaction",
    "Request",
    "StoredCapture",
    "VerifyReport",
    "collect_environment",
    "freeze_call",
    "freeze_request",
    "hash_files",
    "hash_model",
    "pack",
    "read_capture",
    "record_measurement",
    "redact",
    "unpack",
    "verify",
    "with_measurement",
    "write_capture",
]
