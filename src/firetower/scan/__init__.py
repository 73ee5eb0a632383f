"""Weight files read as they stand: GGUF, safetensors, PyTorch. Torch-free but for PyTorch files."""

from firetower.scan.records import FileReport, Finding, Problem, Progress, ScanReport, Severity
from firetower.scan.run import scan

__all__ = ["FileReport", "Finding", "Problem", "Progress", "ScanReport", "Severity", "scan"]
