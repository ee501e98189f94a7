"""Contents of an installation."""

from __future__ import annotations

import re
from importlib.metadata import requires


def test_the_base_install_is_light() -> None:
    base = [r for r in requires("ckpttool") or [] if "extra ==" not in r]
    names = {re.split(r"[<>=!~ ;]", r)[0].replace("-", "_") for r in base}
    assert names == {"click", "isal", "ml_dtypes", "numpy", "rich"}
