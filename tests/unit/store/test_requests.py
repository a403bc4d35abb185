"""Idempotency keys: one request each, for a limited time."""

from datetime import timedelta

import pytest
from sqlmodel import Session

from store.errors import StoreConflict
from store.repositories.requests import LIFETIME, begin_request, end_request, find_response
from tests.unit.store.chain import T0


def test_a_key_has_the_first_response_until_it_expires(db: Session) -> None:
    assert find_response(db, "k", "a") is None
    assert begin_request(db, "k", "a", at=T0) is None
    end_request(db, "k", {"message": "done"})
    assert begin_request(db, "k", "a", at=T0 + LIFETIME) == find_response(db, "k", "a") == {"message": "done"}
    assert begin_request(db, "k", "b", at=T0 + LIFETIME + timedelta(seconds=1)) is None


def test_a_key_of_another_request_is_refused(db: Session) -> None:
    begin_request(db, "k", "a", at=T0)
    end_request(db, "k", {"message": "done"})
    for function in (lambda: begin_request(db, "k", "b", at=T0), lambda: find_response(db, "k", "b")):
        with pytest.raises(StoreConflict, match="was used for another request"):
            function()
    # A command makes the request that it has sent to the service before.
    assert begin_request(db, "k", None, at=T0) == {"message": "done"}
