"""Large packages are imported faster, and nothing of it is left afterwards."""

import gc
import importlib
import importlib.util
import subprocess
import sys

import pytest

from traced.core.imports import quick_imports

PACKAGE = "wsgiref"  # of the standard library; nothing here needs it


def test_a_package_is_absent_within_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    with quick_imports(PACKAGE):
        assert not gc.isenabled()
        assert importlib.util.find_spec(PACKAGE) is None
        with pytest.raises(ImportError):
            importlib.import_module(PACKAGE)
    assert gc.isenabled()
    assert importlib.import_module(PACKAGE)


def test_a_package_that_is_imported_already_stays() -> None:
    with quick_imports("gc"):
        assert sys.modules["gc"] is gc
    assert sys.modules["gc"] is gc


def test_after_an_error_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    with pytest.raises(ValueError, match="broken"), quick_imports(PACKAGE):
        raise ValueError("broken")
    assert gc.isenabled()
    assert PACKAGE not in sys.modules


@pytest.mark.slow
def test_the_engine_starts_without_scikit_learn() -> None:
    code = (
        "import sys, traced.inference.embedded.__main__; print('sklearn' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]
