"""Every module has tests, and the table that names them is not out of date."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import of_module
from tests.of_module import DIRECTORIES, ROOT


@pytest.mark.slow
def test_every_module_has_tests() -> None:
    for module in of_module.modules():
        found = of_module.tests_of(module)
        assert found, module
        assert [test for test in found if not (ROOT / test).exists()] == [], module


def test_packages_of_the_table_exist() -> None:
    assert [package for package in DIRECTORIES if not (ROOT / package / "__init__.py").exists()] == []


def test_names_and_imports_are_found() -> None:
    assert "tests/commit/test_manifest.py" in of_module.tests_of("ckpttool/commit/manifest.py")
    assert "tests/execution/test_copy.py" in of_module.tests_of("ckpttool/execution/copy.py")
    assert of_module.tests_of("ckpttool/integrations/deepspeed/load_native.py") == ["tests/deepspeed"]
    assert "tests/faults/test_convert.py" in of_module.tests_of("ckpttool/api/convert.py")
    assert "tests/under_ray/test_ray_train.py" in of_module.tests_of("ckpttool/integrations/ray_train.py")


def test_a_path_that_is_no_module_is_refused() -> None:
    command = [sys.executable, "-m", "tests.of_module", "ckpttool/nothing.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "ckpttool/nothing.py: not a module, such as ckpttool/plan/split.py\n"
