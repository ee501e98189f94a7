"""What a live engine saves is restored into an engine built alike, whatever its configuration."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.deepspeed import restoring
from tests.sampling import thorough

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

CHOSEN = [*restoring.ALSO, *restoring.draws(2400 if thorough() else 200)]
REFUSED = (
    r"holds states that cannot be re-partitioned",  # Adafactor's rows and columns, for example
    r"holds .*, but the engine's optimizer keeps",  # the engine's differs, such as torch's Adagrad without offload
    r"has states of parameters that DeepSpeed has replaced by masters",
    r"DeepSpeed has built the optimizer of \d groups anew",
    r"no other layout can restore _extra_state, own, count of the model",
)
"""Why a save may not be restored on other ranks or at another stage."""
DEEPSPEED_ALSO = {"loaded": "deepspeed restored", "restored": "deepspeed restored", "trained": "deepspeed trained"}
"""Differences that DeepSpeed's own load leaves too: torch adds options, or casts a state to the type of its weights."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: TempPathFactory) -> dict[str, dict[str, Any]]:
    return restoring.run(CHOSEN, tmp_path_factory.mktemp("restoring"))


def _trained(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that DeepSpeed itself can train and save."""
    return {name: one for name, one in found.items() if not one.get("deepspeed", "").startswith("cannot train")}


def test_most_configurations_are_ones_that_deepspeed_can_train(found: dict[str, dict[str, Any]]) -> None:
    assert found.keys() == {draw.id for draw in CHOSEN}
    reasons = Counter(str(one["deepspeed"])[:90] for one in found.values() if one.get("deepspeed"))
    print(f"{len(found)} configurations, {len(_trained(found))} of which DeepSpeed trains; else: {reasons}")  # noqa: T201
    assert len(_trained(found)) > 0.7 * len(found)


def test_each_is_saved_and_sound(found: dict[str, dict[str, Any]]) -> None:
    for name, one in _trained(found).items():
        if (
            "it could not be restored: elastic_checkpoint " in one["save"]
        ):  # DeepSpeed saves a part of a state: nothing could restore it
            assert any(kind in name for kind in ("Muon", "Unusual", *restoring.RARE))
            continue
        if why := [
            reason for kind, reason in restoring.REFUSED.items() if all(part in name for part in kind.split("-"))
        ]:
            assert re.search(why[0], one["save"]), (name, one["save"])
            continue
        assert (one["save"], one["kept"]) == ("", []), name
        for report in (one["verify ours"], one["verify theirs"]):
            assert not report or "infinite values" in report, (name, report)


def test_what_deepspeed_cannot_save_is_refused_with_the_reason(found: dict[str, dict[str, Any]]) -> None:
    refused = {name: one["save"] for name, one in found.items() if "cannot save" in one.get("deepspeed", "")}
    assert refused
    for name, why in refused.items():
        assert "has states of parameters that DeepSpeed has replaced by masters" in why, (name, why)


def test_each_is_restored_on_the_same_ranks_and_trains_on_as_before(found: dict[str, dict[str, Any]]) -> None:
    saved = {name: one for name, one in _trained(found).items() if not one["save"]}
    for name, one in saved.items():
        assert (one["load"], one["restore"]) == ("", ""), (name, one["load"], one["restore"])
        assert (one["client_state"], one["trains"]) == ("", ""), name
        for key, theirs in DEEPSPEED_ALSO.items():
            assert set(one[key]) <= set(one.get(theirs, ())), (name, key, one[key])


def test_each_is_restored_elsewhere_or_refused_before_the_engine_changes(found: dict[str, dict[str, Any]]) -> None:
    counts: Counter[str] = Counter()
    for name, one in found.items():
        if "other" not in one:
            continue
        if one["other"]:
            counts["refused"] += 1
            assert any(re.search(pattern, one["other"]) for pattern in REFUSED), (name, one["other"])
            assert one["other touched"] == [], name
        else:
            counts["restored"] += 1
            assert "torch_Shared" not in name, f"{name}: a state of no parameter is dropped"
            assert one["other differs"] == [], name
    print(f"on other ranks or at another stage: {dict(counts)}")  # noqa: T201
    assert counts["restored"] > 4 * counts["refused"]
