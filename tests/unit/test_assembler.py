"""Which ptxas assembles the kernels for Hopper."""

import importlib.machinery
import importlib.util

import pytest

from harts_titan.ops import assembler


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A triton package whose tools answer with the releases a test asks for."""
    folder = tmp_path / "triton" / "backends" / "nvidia" / "bin"
    folder.mkdir(parents=True)
    spec = importlib.machinery.ModuleSpec("triton", None, origin=str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    # Set first, so that what the function writes is taken back after the test.
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    assembler.require_sound_ptxas.cache_clear()
    yield lambda name, release: _tool(folder / name, release)
    assembler.require_sound_ptxas.cache_clear()


def _tool(path, release):
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return str(path)


def test_a_sound_ptxas_stays(tools, monkeypatch):
    tools("ptxas", "12.9")
    tools("ptxas-blackwell", "13.1")
    assembler.require_sound_ptxas()
    assert "TRITON_PTXAS_PATH" not in assembler.os.environ


def test_the_newer_one_replaces_an_unsound_one(tools):
    tools("ptxas", "12.8")
    newer = tools("ptxas-blackwell", "12.9")
    assembler.require_sound_ptxas()
    assert assembler.os.environ["TRITON_PTXAS_PATH"] == newer


@pytest.mark.parametrize("other", ["12.8", None])
def test_without_a_sound_one_it_says_so(tools, other):
    tools("ptxas", "12.8")
    if other:
        tools("ptxas-blackwell", other)
    with pytest.raises(RuntimeError, match=r"release 12\.8.*TRITON_PTXAS_PATH"):
        assembler.require_sound_ptxas()


def test_a_path_of_the_user_is_not_replaced(tools, monkeypatch, tmp_path):
    tools("ptxas-blackwell", "12.9")
    monkeypatch.setenv("TRITON_PTXAS_PATH", _tool(tmp_path / "mine", "12.8"))
    with pytest.raises(RuntimeError, match="mine"):
        assembler.require_sound_ptxas()
