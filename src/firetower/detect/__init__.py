"""Detectors over an answer as it streams: events in, findings out, no I/O. Torch-free."""

from firetower.detect.bodies import SseReader, detect_response, detect_sse, events_of
from firetower.detect.detector import Detector
from firetower.detect.records import DetectConfig, Finding, FindingKind, Severity, StreamEvent, Usage

__all__ = [
    "DetectConfig",
    "Detector",
    "Finding",
    "FindingKind",
    "Severity",
    "SseReader",
    "StreamEvent",
    "Usage",
    "detect_response",
    "detect_sse",
    "events_of",
]
