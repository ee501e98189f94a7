"""The log that a trainer's callback shows where the program has configured none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from ckpttool.integrations.deepspeed.folders import show_log

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger, as in a program that has configured nothing."""
    log = logging.getLogger("ckpttool")
    monkeypatch.setattr(log, "propagate", False)  # pytest has a handler at the root
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.delenv("RANK", raising=False)
    yield log
    log.setLevel(logging.NOTSET)


def test_the_first_rank_shows_saves_and_restores(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    show_log()
    show_log()  # by a second callback
    logging.getLogger("ckpttool.integrations").info("saved %s", "step 3")
    logging.getLogger("ckpttool.integrations").debug("a request")
    assert capsys.readouterr().err == "ckpttool: saved step 3\n"


def test_other_ranks_show_warnings_alone(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    show_log()
    logging.getLogger("ckpttool.integrations").info("saved")
    logging.getLogger("ckpttool.integrations").warning("skipped")
    assert capsys.readouterr().err == "ckpttool: skipped\n"


def test_a_configured_log_is_left_alone(log: logging.Logger) -> None:
    handler = logging.NullHandler()
    log.addHandler(handler)
    show_log()
    assert (log.handlers, log.level) == ([handler], logging.NOTSET)
