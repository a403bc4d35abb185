"""Stored answers of the responses form: whole, of one key, for a time."""

from datetime import timedelta

from sqlalchemy import Engine

from store.database import read_session, write_session
from store.records import StoredResponse
from store.repositories.responses import delete_response, delete_responses_before, get_response, save_responses
from tests.unit.store.chain import T0


def response(name: str, key_id: str, text: str = "é \ud800") -> StoredResponse:
    items = [{"role": "user", "content": text}]
    return StoredResponse(name, key_id, T0, items, {"id": name, "output": [{"content": text}]})


def test_a_response_is_kept_as_it_was_and_belongs_to_its_key(engine: Engine) -> None:
    ann, bob = response("resp_1", "ann"), response("resp_1", "bob", "other")
    with write_session(engine) as session:
        save_responses(session, [ann, bob])
        save_responses(session, [response("resp_1", "ann", "later")])
    with read_session(engine) as session:
        assert get_response(session, "resp_1", "ann") == ann
        assert get_response(session, "resp_1", "bob") == bob
        assert get_response(session, "resp_1", "") is None
    with write_session(engine) as session:
        delete_response(session, "resp_1", "ann")
        delete_response(session, "resp_2", "ann")
    with read_session(engine) as session:
        assert get_response(session, "resp_1", "ann") is None
        assert get_response(session, "resp_1", "bob") == bob


def test_old_responses_are_deleted(engine: Engine) -> None:
    with write_session(engine) as session:
        save_responses(session, [response(f"resp_{number}", "ann") for number in range(3)])
        assert delete_responses_before(session, T0, limit=2) == 0
        assert delete_responses_before(session, T0 + timedelta(seconds=1), limit=2) == 2
        assert delete_responses_before(session, T0 + timedelta(seconds=1), limit=2) == 1
        assert get_response(session, "resp_1", "ann") is None
