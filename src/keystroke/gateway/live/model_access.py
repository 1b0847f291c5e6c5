"""A served model together with the caller on whose budget it is used."""

from __future__ import annotations

from dataclasses import dataclass

from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import Permit
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service
from keystroke.gateway.work.work import Work


@dataclass(frozen=True, slots=True)
class ModelAccess:
    service: Service
    entry: ServedModel
    caller: Caller

    def submit(
        self, job: Job | RemoteJob, priority: Priority, *, buffer: str, permit: Permit | None = None
    ) -> Work:
        """Queue work of a live buffer. Raises KeystrokeError where it is refused."""
        return self.service.submit(
            self.entry, job, self.caller, priority=priority, buffer=buffer, live=True, permit=permit
        )
