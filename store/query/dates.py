"""Points in time as people write them: `2026-11-21`, `2026-11-21T08:30+01:00`, `7d` ago."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta

from trappm.profiler.errors import InputError

_AGE = re.compile(r"([0-9]{1,6})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def point_in_time(text: str, *, end_of_day: bool = False) -> str:
    """The point in time in ISO 8601 with its zone, which is UTC unless the text names another.

    Args:
        text: an ISO 8601 date or time, or an age such as `7d` (minutes, hours, days, weeks).
        end_of_day: what a date alone means: its end, not its beginning.

    Raises:
        InputError: it is neither.
    """
    age = _AGE.fullmatch(text)
    try:
        if age:
            return (datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})).isoformat()
        if re.fullmatch(r"[0-9-]{8,10}", text):
            day = time.max if end_of_day else time.min
            return datetime.combine(date.fromisoformat(text), day, UTC).isoformat()
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        return moment.astimezone(UTC).isoformat()
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{text!r} is no time; give an ISO date such as 2026-11-21, or an age such as 7d"
        ) from error
