"""Many fires of one engine: read from an incident file or from log lines, compared, and held against hypotheses."""

from firetower.lab.incident.analyse import analyse
from firetower.lab.incident.case import Case, case_of_fires, case_of_incident
from firetower.lab.incident.records import Incident, IncidentFire
from firetower.lab.incident.schema import incident_from_dict, read_incident

__all__ = [
    "Case",
    "Incident",
    "IncidentFire",
    "analyse",
    "case_of_fires",
    "case_of_incident",
    "incident_from_dict",
    "read_incident",
]
