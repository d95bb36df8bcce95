"""Whoever stands in one checkout does not run another's code unawares."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.errors import OUR_PACKAGES, UsageError
from launch.run.standing import RUNNING, one_tree
from native.wheel_layout import lay_out


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another checkout, as far as this matters."""
    for package in OUR_PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("# other")
    return tmp_path


def test_the_error_names_both_folders(other: Path) -> None:
    with pytest.raises(UsageError) as error:
        one_tree(other)
    assert str(other) in error.value.message
    assert str(RUNNING) in error.value.message
    assert "actors/__init__.py differs" in error.value.message
    assert f"pip install -e {other}" in str(error.value.remedy)


def test_a_copy_of_the_same_code_may_stand_anywhere(tmp_path: Path) -> None:
    """The upload of a job that was submitted from the checkout that is installed."""
    for package in OUR_PACKAGES:
        shutil.copytree(RUNNING / package, tmp_path / package)
    one_tree(tmp_path)
    (tmp_path / "policies/more.py").touch()
    with pytest.raises(UsageError, match=r"policies/more\.py differs"):
        one_tree(tmp_path)


def test_a_wheel_of_the_same_code_may_run_in_its_checkout(tmp_path: Path) -> None:
    lay_out(RUNNING, tmp_path)
    one_tree(RUNNING, running=tmp_path / "paceline")
    (tmp_path / "paceline/policies/options.py").write_text("# other")
    with pytest.raises(UsageError, match=r"policies/options\.py differs"):
        one_tree(RUNNING, running=tmp_path / "paceline")


def test_the_own_checkout_and_any_other_folder_are_fine(other: Path, tmp_path: Path) -> None:
    one_tree(RUNNING)
    one_tree(other, running=other)
    shutil.rmtree(other / "coordinator")
    one_tree(other)
    (tmp_path / "link").symlink_to(RUNNING)
    one_tree(tmp_path / "link")


@pytest.mark.parametrize("command", ["console script", "-m"])
def test_both_ways_to_start_refuse(other: Path, command: str) -> None:
    """The installed package wins over an uploaded or current directory in a path entry of its own."""
    code = f"import sys; sys.path.insert(0, {str(RUNNING)!r}); sys.argv = ['paceline', '--help']\n"
    code += "import runpy; runpy.run_module('launch', run_name='__main__')" if command == "-m" else ""
    code += "from launch.commands.cli import main; main()" if command != "-m" else ""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=other, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "is a checkout of Paceline" in " ".join(done.stderr.split())
