"""Across fires: what is the same in all of them, what varies, and which causes that leaves."""

from __future__ import annotations

from collections.abc import Sequence

from firetower.core.analysis import Analysis
from firetower.core.errors import RecordError
from firetower.core.records import Fire
from firetower.lab.incident import Incident, analyse, case_of_fires, case_of_incident


def across(fires: Sequence[Fire], *, title: str = "") -> Analysis:
    """Hold stored fires against each other and against the families of causes.

    Args:
        fires: of one model and engine, or whatever one suspects to be one fault. A merged fire counts once.
        title: what to call them; by default their number and model.

    Raises:
        RecordError: no fire.
    """
    if not fires:
        raise RecordError("fires=0: must be at least one to compare")
    models = sorted({f.model for f in fires})
    named = models[0] if len(models) == 1 else f"{len(models)} models"
    return analyse(case_of_fires(fires, title or f"{len(fires)} fire{'s' * (len(fires) != 1)} of {named}"))


def across_incident(incident: Incident) -> Analysis:
    """The same for an incident file.

    Raises:
        StatsError: tries that no rate can be made of.
    """
    return analyse(case_of_incident(incident))
