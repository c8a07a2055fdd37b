"""Chooses the process that forks a worker: a template, which has loaded the run's declaration, or the fork server.

A run's declaration, and all that it imports, is loaded once for all workers of a node with the same environment.
Where a template cannot be used (`ensemble.executors.template_main`), each worker loads the declaration itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable
from typing import Any

from ensemble.events import Report
from ensemble.executors.spawn import Forks, WorkerProcess

_MOST = 8  # on a node: each holds what its modules have made in memory
_SAID_S = 1.0  # of CPU time to load a declaration: from here on it is worth a warning that each worker does

log = logging.getLogger(__name__)

_Request = tuple[WorkerProcess, socket.socket, dict[str, str]]


class Template(Forks):
    """A template, and the workers that wait until it has loaded the declaration.

    Attributes:
        number: of the request to the fork server.
        pidfd: of its process; None until it has started.
        is_ready: whether it forks workers.
        refusal: why it never will; None: it may, or does.
        waiting: requests to make when it is ready, by the worker's number.
    """

    def __init__(self, number: int, control: socket.socket) -> None:
        super().__init__(control)
        self.number = number
        self.pidfd: int | None = None
        self.is_ready = False
        self.refusal: str | None = None
        self.waiting: dict[int, _Request] = {}

    def close(self) -> None:
        """End it and all workers that it forked."""
        is_over = self.is_ready and self.shut_down()
        if self.pidfd is not None:
            if not is_over:  # it hangs, or a module that it imports does
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
            self.pidfd = None
        self.control.close()
        for _, theirs, _ in self.waiting.values():
            theirs.close()
        self.waiting.clear()


class Templates:
    """The templates of a node.

    Args:
        node: its name in the log.
        selector: where their sockets are registered.
        count: makes the numbers of requests.
        fork: makes a request to a template, or (None) to the fork server; raises OSError where there is none.
        read: called when a template has sent a message.
        finish: called with a worker that could not be started, and the number of the error.
    """

    def __init__(
        self,
        node: str,
        selector: selectors.BaseSelector,
        count: Callable[[], int],
        fork: Callable[[Callable[[Forks], None], Template | None], object],
        read: Callable[[Template], None],
        finish: Callable[[WorkerProcess, int | None], None],
    ) -> None:
        self._node, self._selector, self._count = node, selector, count
        self._fork, self._read, self._finish = fork, read, finish
        self._templates: dict[str, Template] = {}

    def list_started(self) -> list[Template]:
        """Those that have a process."""
        return [template for template in self._templates.values() if template.pid is not None]

    def find(self, number: int) -> Template | None:
        """That of a request to the fork server."""
        return next((made for made in self._templates.values() if made.number == number), None)

    def find_ready(self) -> Template | None:
        """One that forks; None: there is none."""
        return next((made for made in self._templates.values() if made.is_ready), None)

    def fork(self, worker: WorkerProcess, theirs: socket.socket, environment: dict[str, str]) -> None:
        """Have a worker forked, now or as soon as its template has loaded the declaration.

        Raises:
            OSError: nothing can be forked now.
        """
        key = json.dumps([worker.job.run_dir, environment])
        if key not in self._templates and len(self._templates) < _MOST:
            self._templates[key] = self._start(worker, environment)
        template = self._templates.get(key)
        if template is not None and template.refusal is None and not template.is_ready:
            template.waiting[worker.number] = worker, theirs.dup(), environment
            return

        def request(forks: Forks) -> None:
            forks.fork(worker, theirs, None if forks is template else environment)

        self._fork(request, template if template is not None and template.is_ready else None)

    def _start(self, worker: WorkerProcess, environment: dict[str, str]) -> Template:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        template = Template(self._count(), ours)
        with theirs:
            try:
                self._fork(lambda forks: forks.fork_template(template.number, worker, theirs, environment), None)
            except OSError:
                ours.close()
                raise
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read(template))
        return template

    def settle(self, template: Template, refusal: str | None) -> None:
        """Have the workers forked that wait for a template, which is ready, or will never be for that reason."""
        template.is_ready, template.refusal = refusal is None, refusal
        if refusal is not None and template.used_s >= _SAID_S:
            text = "each member on node %s loads the declaration itself, %.1f s of CPU time: %s"
            log.warning(text, self._node, template.used_s, refusal)
        requests = list(template.waiting.values())
        template.waiting.clear()
        for worker, theirs, environment in requests:
            with theirs:
                try:
                    self.fork(worker, theirs, environment)
                except OSError as error:
                    self._finish(worker, error.errno)

    def lose(self, template: Template) -> None:
        """Take note that a template is gone."""
        if template.pid is not None:
            template.usage(self._node)
        if template.refusal is None:
            self.settle(template, "the process that had loaded it for all of them has died")
        template.close()

    def drop(self, worker: WorkerProcess) -> bool:
        """Forget a worker that waits for a template; returns whether it did."""
        for template in self._templates.values():
            request: Any = template.waiting.pop(worker.number, None)
            if request is not None:
                request[1].close()
                return True
        return False

    def close(self) -> list[Report]:
        """End all, and their workers; returns `usage` events of what they used."""
        reports = []
        for template in self._templates.values():
            if template.control.fileno() >= 0:
                self._selector.unregister(template.control)
                started = template.pid is not None
                if started:
                    template.usage(self._node)
                template.close()
                if started:
                    reports.append(template.usage(self._node))
        self._templates.clear()
        return reports
