"""The log that a trainer's callback shows where the program has configured none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ckpttool.integrations.live.folders import show_log

if TYPE_CHECKING:
    import pytest


def _bare(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The logger, as in a program that has configured nothing; pytest adds handlers of its own before a test."""
    log = logging.getLogger("ckpttool")
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.delenv("RANK", raising=False)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    return log


def test_the_first_rank_shows_saves_and_restores(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _bare(monkeypatch)
    show_log()
    show_log()  # by a second callback
    logging.getLogger("ckpttool.integrations").info("saved %s", "step 3")
    logging.getLogger("ckpttool.integrations").debug("a request")
    assert capsys.readouterr().err == "ckpttool: saved step 3\n"


def test_other_ranks_show_warnings_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _bare(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    show_log()
    logging.getLogger("ckpttool.integrations").info("saved")
    logging.getLogger("ckpttool.integrations").warning("skipped")
    assert capsys.readouterr().err == "ckpttool: skipped\n"


def test_a_configured_log_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log = _bare(monkeypatch)
    handler = logging.NullHandler()
    log.addHandler(handler)
    show_log()
    assert (log.handlers, log.level) == ([handler], logging.NOTSET)
