"""The incident file: every wrong field is named, nothing is read that is not there."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.errors import RecordError
from firetower.lab.incident import incident_from_dict, read_incident
from firetower.lab.incident.to_fires import incident_fires

DATA = Path(__file__).parent / "data"
FIRE: dict[str, Any] = {
    "id": "A",
    "first_layer": {"hit": 3, "miss": None},
    "first_hit": {"bits": "7fffffff", "row": 2, "col": 5},
}


def incident(**fields: Any) -> Any:
    return incident_from_dict({"what": "x", "fires_total": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"fire_total": 1}, "incident.fire_total: unknown field"),
        ({"fires_total": -1}, "fires_total=-1: must be a whole number"),
        ({"fires_total": True}, "fires_total=True"),
        ({"fires_total": 1.5}, "fires_total=1.5"),
        ({"fires_with_layer_trace": 3}, "fires_total=2: must be at least the 3"),
        ({"first_poisoned_in_traced_fires": {"hit": 3}}, "adds up to 3"),
        ({"fires": [{"id": 3}]}, "fires[0].id=3: must be a string"),
        ({"fires": [{"position": "9"}]}, "fires[0].position='9'"),
        ({"fires": [{"colour": 1}]}, "fires[0].colour: unknown field"),
        ({"fires": [{"first_hit": {"bits": "7ff"}}]}, "fires[0].first_hit.dtype: missing"),
        ({"fires": [{"first_hit": {"bits": "zz"}}]}, "fires[0].first_hit.bits"),
        ({"fires": [{"first_hit": {"bits": "7fffffff", "dtype": "float16"}}]}, "must fit the 16 bits"),
        ({"fires": [{"first_hit": {"bits": 5}}]}, "hexadecimal digits"),
        ({"fires": [{"first_layer": {"hit": -1}}]}, "fires[0].first_layer.hit=-1"),
        ({"bits": {"gpu_side": {"7fff": 1}}}, "bits.dtype: missing"),
        ({"bits": {"gpu_side": 3}}, "bits.gpu_side: must be an object"),
        ({"rounds_of_40_tries_first_fire_at": [41]}, "no round is longer"),
        ({"rounds_of_40_tries_first_fire_at": [0]}, "first_fire_at[0]=0"),
        ({"tries": {"fires": 3, "tries": 2}}, "must not exceed"),
        ({"after_a_fire": "fine"}, "after_a_fire='fine'"),
        ({"ruled_out_by_its_reporter": {"a": {"how": "b", "against": ["Z"]}}}, "must be a family A to U"),
        ({"ruled_out_by_its_reporter": {"a": 3}}, "must be a sentence"),
        ({"clean_in_every_fire": [3]}, "must be a list of strings"),
        ({"positions": {"long": 3}}, "positions.long: unknown field"),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),
)
def test_a_wrong_field_is_named(fields, complaint):
    with pytest.raises(RecordError) as e:
        incident(**fields)
    assert complaint in str(e.value)


def test_null_stands_for_not_published():
    read = incident(
        fires_with_layer_trace=None,
        bits=None,
        positions=None,
        fires=[{"id": "A", "try": None, "position": None, "first_hit": None, "mapped_miss_values": None}],
    )
    assert read.fires[0].position is None
    assert read.fires[0].first == {}


def test_the_type_of_a_short_pattern_is_named_in_the_key():
    read = incident(bits={"gpu_side": {"7e00 float16": 2}}, fires_with_layer_trace=0)
    assert read.bits == {"gpu_side": {"7e00 float16": 2}}


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "nan", '"x"', "[" * 100_000], ids=["empty", "list", "cut", "nan", "str", "deep"]
)
def test_what_is_no_incident_file_is_refused(tmp_path, text):
    path = tmp_path / "i.json"
    path.write_text(text)
    with pytest.raises(RecordError):
        read_incident(path)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(RecordError, match=r"no\.json: cannot be read"):
        read_incident(tmp_path / "no.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(sorted(json.loads((DATA / "hybrid-moe-offload.json").read_text())))


@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_any_json_is_read_or_refused_by_name(data):
    with contextlib.suppress(RecordError):
        incident_from_dict(data)


def test_only_fires_with_a_place_become_fires_of_the_store():
    read = read_incident(DATA / "hybrid-moe-offload.json")
    fires, missing = incident_fires(read, "incident.json")
    assert [(f.origin.layer, f.origin.stage, f.first.bits_hex, f.first.row, f.first.column) for f in fires] == [
        (13, "hit", "7fffffff", 26, 2092),
        (37, "miss", "ffc00000", 17, 2144),
    ]
    assert fires[0].first.flat_index == 26 * 2560 + 2092
    assert fires[0].device == "RTX 5090 D 32 GB, sm_120, no ECC"
    assert fires[1].device.startswith("Ryzen")
    assert dict(missing)["A"] == "the first bad signal"
    assert dict(missing)["E"] == "the first bad value of attention"
    assert [f.id for f in fires] == [f.id for f in incident_fires(read, "incident.json").fires]


def test_no_width_is_invented():
    read = incident(fires=[FIRE])
    fires, [(_, lack)] = incident_fires(read, "i")
    assert not fires
    assert "hidden_size" in lack
    assert incident_fires(incident(fires=[FIRE], engine={"hidden_size": 8}), "i").fires[0].first.flat_index == 21


def test_a_finite_pattern_is_no_fire():
    finite = FIRE | {"first_hit": {"bits": "3f800000", "row": 0, "col": 5}}
    _, [(_, lack)] = incident_fires(incident(fires=[finite]), "i")
    assert "3f800000 is finite in float32" in lack


def test_the_documented_example_is_read():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "incident-schema.md").read_text(encoding="utf-8")
    read = incident_from_dict(json.loads(page.split("```json\n")[1].split("```")[0]))
    assert read.rounds == (6, 18, None)
    assert read.fires[0].first["hit"].bits_hex == "7fffffff"
