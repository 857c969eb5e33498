"""Settings of the cluster as part of the state: replaced by a change, taken back by a trial, and stored."""

from __future__ import annotations

from dataclasses import fields

from resource_manager.core.changes import ClusterSettingsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.manager.cluster_file.sections import KEYS, ClusterSection
from resource_manager.storage.codec import snapshot_from_dict, snapshot_to_dict
from tests.builders import nodes

OTHER = ClusterSettings("fgd", order="fifo", prices={"A100": 2.5})


def test_a_change_replaces_them_and_a_trial_takes_that_back() -> None:
    cluster = ClusterState(nodes("a"))
    before = cluster.settings
    with cluster.trial():
        cluster.apply(ClusterSettingsChanged(OTHER, 1.0))
        assert cluster.settings is OTHER
    assert cluster.settings is before
    cluster.apply(ClusterSettingsChanged(OTHER, 1.0))
    stored = snapshot_to_dict(cluster.snapshot())
    assert ClusterState.from_snapshot(snapshot_from_dict(stored)).settings == OTHER


def test_every_setting_is_a_key_of_the_file_with_the_same_default() -> None:
    assert set(KEYS) == set(ClusterSection.model_fields)
    beside = {"policy_package", "health", "sign_on", "notices"}  # found at `apply`, and sections of their own
    assert set(KEYS.values()) == {field.name for field in fields(ClusterSettings)} - beside
    assert ClusterSection().settings() == ClusterSettings()
