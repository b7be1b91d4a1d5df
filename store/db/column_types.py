"""Types of columns for both back ends, shorthands for constraints, and the root of the models.

Times, JSON, enumerations and large numbers are each stored in one way, and constraints are named by
one rule, so that migrations can name them too.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Enum,
    Integer,
    MetaData,
    TypeDecorator,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase

from trappm.profiler.measuring.canary import CanaryDecision
from trappm.profiler.records import Outcome, Provenance
from trappm.store.records import AssignmentState, CampaignState, Purpose, Role, RoundState


class UtcTime(TypeDecorator[str]):
    """A point in time: a timestamp for the database, an ISO 8601 string in UTC for Python."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        time = datetime.fromisoformat(value)
        if time.tzinfo is None:
            raise ValueError(f"the time {value!r} names no time zone; give it in UTC")
        return time.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        time = value.replace(tzinfo=UTC) if value.tzinfo is None else value  # SQLite keeps no zone
        return time.astimezone(UTC).isoformat()


def _values(kind: type[enum.Enum]) -> list[str]:
    return [member.value for member in kind]


def _enum(kind: type[enum.Enum]) -> Enum:
    """Text with a CHECK: a further member is a small migration on every back end."""
    return Enum(kind, native_enum=False, create_constraint=True, length=16, values_callable=_values)


JSON_ = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
BIG = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows only by INTEGER

_ENUMS = (
    Outcome, Provenance, CampaignState, RoundState, Purpose, AssignmentState, Role, CanaryDecision,
)  # fmt: skip


class Base(DeclarativeBase):
    """Root of the models."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {dict[str, Any]: JSON_} | {e: _enum(e) for e in _ENUMS}


def together(name: str, first: str, *others: str) -> CheckConstraint:
    """All of these columns are NULL, or none of them is."""
    rule = " AND ".join(f"({first} IS NULL) = ({other} IS NULL)" for other in others)
    return CheckConstraint(rule, name=name)


def positive(*columns: str) -> tuple[CheckConstraint, ...]:
    """Nothing that a step costs can be 0; what is not known is NULL."""
    return tuple(CheckConstraint(f"{column} > 0", name=f"{column}_positive") for column in columns)
