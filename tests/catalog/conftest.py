"""Fixtures of the tests of old checkpoints: the bucket of the tests of saving, and a save beside a removal."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.saving.coordination import Alone
from ckpttool.saving.files import write_files
from ckpttool.storage import LOCAL
from tests.catalog.decisions import set_step
from tests.saving.checkpoints import Intercepted, save_version
from tests.saving.conftest import bucket as bucket
from tests.saving.conftest import small_parts as small_parts

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def rewound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[str, list[str]]]:
    """Checkpoints of which a run saves the second again while another process removes the first."""

    def make(remover: str, moment: str) -> tuple[str, list[str]]:
        root = str(tmp_path / "run")
        trainer = remover == "rotate"
        for n in (1, 2, 3, 4):
            save_version(LOCAL, f"{root}/checkpoint-{n}" if trainer else root, Alone(), f"step{n}", 0)
            manifest = f"{root}/checkpoint-{n}/step{n}" if trainer else f"{root}/step{n}"
            set_step(Path(manifest), n, number=n)
        second = f"{root}/checkpoint-2" if trainer else root
        latest = Path(second, "latest")
        began, go_on = threading.Event(), threading.Event()

        def write(storage: Any, *given: Any) -> Any:
            began.set()
            go_on.wait(60)
            return write_files(storage, *given)

        def save() -> None:
            save_version(Intercepted(LOCAL, write), second, Alone(), "step2", 7, overwrite=True)

        saving = threading.Thread(target=save)
        removed = LOCAL.remove_tree

        def slow(_: object, path: str, **options: Any) -> None:
            removed(path, **options)
            if path in {f"{root}/step1", f"{root}/checkpoint-1"} and not saving.ident:
                before = latest.read_text()
                saving.start()
                began.wait(60)
                if moment == "between its commit and latest":
                    go_on.set()
                    saving.join()
                    latest.write_text(before)

        monkeypatch.setattr(type(LOCAL), "remove_tree", slow)
        return root, [second, go_on, saving]  # type: ignore[list-item]

    return make
