"""The notices' rows on a real PostgreSQL: the same tests as on SQLite."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from sqlmodel import Session

from store.database import write_session
from tests.integration.test_store_postgres import engine, pytestmark
from tests.unit.notifications.test_store import (
    test_a_clock_that_was_set_back_does_not_keep_a_notice_waiting,
    test_each_hook_gets_a_key_once_and_new_hooks_only_later_notices,
    test_messages_name_the_subject_and_the_next_command,
    test_tries_are_counted_before_delivery_and_the_result_is_stored,
)

__all__ = [
    "engine",
    "pytestmark",
    "test_a_clock_that_was_set_back_does_not_keep_a_notice_waiting",
    "test_each_hook_gets_a_key_once_and_new_hooks_only_later_notices",
    "test_messages_name_the_subject_and_the_next_command",
    "test_tries_are_counted_before_delivery_and_the_result_is_stored",
]


@pytest.fixture
def db(engine: Engine) -> Iterator[Session]:
    with write_session(engine) as session:
        yield session
