"""Between processes: groups, collectives over nested structures, random streams."""

from __future__ import annotations
