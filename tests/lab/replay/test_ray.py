"""Scale-out over a Ray cluster of two local nodes; a node that dies loses no finished try."""

from __future__ import annotations

import os
import sys
import textwrap
import threading

import pytest

from firetower.core.errors import MissingExtraError
from firetower.lab.replay.campaign import open_campaign
from firetower.lab.replay.records import CampaignEnd, Isolation, SeedMode, TryEnd

TARGETS = """
import os, random, time
import ray

def seeded(request):
    time.sleep(0.05)
    return not request["is_canary"] and random.Random(request["seed"]).random() < 0.3

def node(request):
    if not request["is_canary"]:
        with open(os.environ["NODE_FILE"], "a") as f:
            f.write(ray.get_runtime_context().get_node_id() + "\\n")
    time.sleep(0.2)
    return False
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Callables that every node finds."""
    (tmp_path / "ray_targets.py").write_text(textwrap.dedent(TARGETS))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("NODE_FILE", str(tmp_path / "nodes"))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return tmp_path


@pytest.fixture
def cluster(module):
    """A head without room for tries, and two nodes with room for one each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    store = 100 << 20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": store})
    cluster.workers = [cluster.add_node(num_cpus=1, object_store_memory=store) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_two_nodes_make_the_tries_and_a_lost_one_loses_none(cluster, capture, settings, module):
    how = {"ray": cluster.address, "concurrency": 2}
    opened = open_campaign(capture, settings("ray_targets:node", 24, **how))
    killed = threading.Event()
    before = []

    def kill(campaign, in_flight):
        if len(campaign.state.counted) >= 6 and in_flight == 2 and not killed.is_set():
            killed.set()
            before.extend(campaign.state.counted.values())
            cluster.remove_node(cluster.workers[0], allow_graceful=False)

    campaign = opened.run(tick=kill)
    opened.close()
    assert len(set((module / "nodes").read_text().split())) == 2
    assert campaign.ended is CampaignEnd.PLANNED
    assert campaign.arms[0].rate.tries == 24
    lost = [t for t in campaign.tries if t.end is TryEnd.LOST]
    assert [t.detail for t in lost] == ["the worker was lost"]
    assert sorted(t.number for t in campaign.tries if t.counts) == list(range(24))
    assert all(t in campaign.tries for t in before)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_seeds_burn_on_workers_as_they_do_here(cluster, capture, settings, module, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(module), *sys.path])
    ends = []
    for how in ({"ray": cluster.address, "concurrency": 2}, {"isolation": Isolation.NONE, "confidence": 0.9}):
        opened = open_campaign(capture, settings("ray_targets:seeded", 8, seed_mode=SeedMode.FRESH, **how))
        campaign = opened.run()
        opened.close()
        ends.append({t.number: t.end for t in campaign.tries})
    assert ends[0] == ends[1]
    assert set(ends[0].values()) == {TryEnd.CLEAN, TryEnd.FIRE}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_workers_send_to_a_server_that_stays_one_process(cluster, burning_server, capture, settings):
    with burning_server("poison", 1.0) as server:
        opened = open_campaign(capture, settings(server.url, 4, ray=cluster.address, concurrency=2))
        campaign = opened.run()
        opened.close()
    assert campaign.ended is CampaignEnd.POISONED
    assert campaign.tries[0].end is TryEnd.FIRE
    assert campaign.arms[0].rate.fires == 1


def test_without_ray_the_extra_is_named(capture, settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    opened = open_campaign(capture, settings("http://127.0.0.1:9", 1, ray="auto"))
    with pytest.raises(MissingExtraError, match=r"firetower\[ray\]"):
        opened.run()
    opened.close()
