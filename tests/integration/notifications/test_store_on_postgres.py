"""The notices' rows on a real PostgreSQL: the same tests as on SQLite."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from sqlmodel import Session

from store.database import write_session
from tests.integration.test_store_postgres import engine, pytestmark
from tests.unit.notifications.test_store import (
    test_a_clock_that_was_set_back_does_not_keep_a_notice_waiting,
    test_a_key_is_told_once_to_each_hook_and_later_hooks_are_told_of_later_things,
    test_messages_name_the_thing_and_the_next_command,
    test_tries_are_counted_before_they_are_made_and_an_end_is_kept,
)

__all__ = [
    "engine",
    "pytestmark",
    "test_a_clock_that_was_set_back_does_not_keep_a_notice_waiting",
    "test_a_key_is_told_once_to_each_hook_and_later_hooks_are_told_of_later_things",
    "test_messages_name_the_thing_and_the_next_command",
    "test_tries_are_counted_before_they_are_made_and_an_end_is_kept",
]


@pytest.fixture
def db(engine: Engine) -> Iterator[Session]:
    with write_session(engine) as opened:
        yield opened
